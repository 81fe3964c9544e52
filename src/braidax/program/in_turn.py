"""Computing some results of a function before the others, and sending messages under products that can wait."""

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import dot_general_p

from .bodies import Equation, Path, aval_of, bind
from .costs import cost_of
from .rewrite import Replacement, evaluate
from .split import parted

_LEAST_PART = 0.05  # of the largest product that can wait: a smaller one hides little

Turns = Generator[tuple[Any, Any], Any, Any]
"""Yields what a message is made of and the message, PyTrees of arrays; is sent the message; returns a result."""


def in_turn(
    fn: Callable[..., tuple[Any, Any]], args: Sequence[Any], between: Callable[[Any], Turns], *, num_turns: int
) -> tuple[Any, Any, Any]:
    """Computes `fn(*args) -> (first, others)`: first what `first` needs, and the last products under messages.

    A compiler that hides messages needs products that neither need what is sent nor are needed for it. Those of `fn`
    that `first` does not need would be computed as soon as they can be; here each of the last of them waits for what a
    message is made of, and whoever reads the message waits for the product.

    **Arguments:** `between(first)`: a generator of messages. `num_turns`: of how many; for want of products the last
    one is cut, or messages go without.

    **Returns:** `first`, `others`, and what `between` returns.
    """
    leaves, structure = jax.tree.flatten(tuple(args))
    closed, shapes = jax.make_jaxpr(lambda *leaves: fn(*structure.unflatten(leaves)), return_shape=True)(*leaves)
    num_first = len(jax.tree.leaves(shapes[0]))
    before, behind = parted(closed, num_first)
    found = evaluate(before, {}, leaves)[0]
    first, carried = jax.tree.structure(shapes[0]).unflatten(found[:num_first]), found[num_first:]
    messages = _Messages(between(first))
    others = evaluate(behind, _rules(behind, messages, num_turns), [*leaves, *carried])[0]
    return first, jax.tree.structure(shapes[1]).unflatten(others), messages.result()


def in_full(turns: Turns) -> Any:
    """Returns what a generator of messages returns, all of which cross under nothing."""
    return _Messages(turns).result()


class _Messages:
    """Messages, of which one is there to be sent."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._result = turns, None
        self._coming: tuple[Any, Any] | None = None
        self._advance(None)

    def under(self, compute: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Computes something while the message crosses, if there is one."""
        if self._coming is None:
            return compute(inputs)
        made_of, message = self._coming
        inputs, _ = jax.lax.optimization_barrier((inputs, made_of))
        message, result = jax.lax.optimization_barrier((message, compute(inputs)))
        self._advance(message)
        return result

    def result(self) -> Any:
        """Sends what is left, under nothing."""
        while self._coming is not None:
            self._advance(self._coming[1])
        return self._result

    def _advance(self, message: Any) -> None:
        try:
            self._coming = self._turns.send(message)
        except StopIteration as end:
            self._coming, self._result = None, end.value


def _rules(closed: ClosedJaxpr, messages: _Messages, num_turns: int) -> dict[Path, Replacement]:
    """Returns rules by which the last products are computed under messages; of too few the last that can be is cut."""
    products = _last_products(closed, num_turns)
    dots = [at for at in products if closed.jaxpr.eqns[at].primitive is dot_general_p]
    num_pieces = {dots[-1]: 1 + num_turns - len(products)} if dots else {}
    return {(at,): partial(_in_pieces, messages, num_pieces.get(at, 1)) for at in products}


def _in_pieces(messages: _Messages, count: int, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
    """Computes an equation, a `dot_general` in several pieces, each under a message."""
    if count == 1:
        return messages.under(partial(bind, equation), inputs)
    numbers, result = equation.params["dimension_numbers"], aval_of(equation.outvars[0])
    free = [
        (operand, dim)
        for operand in (0, 1)
        for dim in range(inputs[operand].ndim)
        if dim not in (*numbers[0][operand], *numbers[1][operand])
    ]
    first = result.ndim - len(free)  # behind the dims of the batch
    at = max(range(len(free)), key=lambda at: result.shape[first + at])
    operand, dim = free[at]

    def piece(start: int, stop: int, inputs: list[Any]) -> Any:
        cut = jax.lax.slice_in_dim(inputs[operand], start, stop, axis=dim)
        return dot_general_p.bind(
            *(cut if which == operand else one for which, one in enumerate(inputs)), **equation.params
        )

    bounds = [result.shape[first + at] * number // count for number in range(count + 1)]
    pieces = [messages.under(partial(piece, *pair), inputs) for pair in itertools.pairwise(bounds)]
    return [jnp.concatenate(pieces, axis=first + at)]


def _last_products(closed: ClosedJaxpr, count: int) -> list[int]:
    """Returns the numbers of the last large equations that hold products, in their order."""
    flops = [cost_of(one).flops * _num_devices(one) for one in closed.jaxpr.eqns]
    large = [at for at, one in enumerate(flops) if one and one >= _LEAST_PART * max(flops)]
    return large[-count:]


def _num_devices(equation: Equation) -> int:
    """Returns how many devices do what is written once."""
    if equation.primitive.name != "shard_map":
        return 1
    mesh, axes = equation.params["mesh"], equation.params["newly_manual_axes"]
    return math.prod(mesh.shape[axis] for axis in axes)
