"""Weights that every step of a loop reads: their gradient is one product over all steps, behind the loop.

Differentiating a scan adds the gradient of what all steps share up in its carry, step by step. Where the batch is split
over devices, XLA's partitioner then sums that gradient over the devices in every step, because a carry is replicated or
split but never a partial sum. The gradient of a product `x @ w` with respect to `w` needs only what each step has put
in, `x`, and what it was given back, so the loop can leave these, stacked, and the sum over steps and devices is taken
once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import closed_call_p, conv_general_dilated_p, dot_general_p, jit_p, scan_p
from jax.tree_util import Partial

from .batch_dims import find_batch_dims
from .bodies import Path, aval_of, bind, bodies, equations_of
from .kinds import ELEMENTWISE
from .rewrite import Rule, evaluate
from .trace import Program, trace

_ENTERED = (jit_p, closed_call_p, scan_p)


def with_sums_behind_loops(
    program: Program, divided: Mapping[int, Sequence[int | None] | int] | None = None
) -> Program:
    """Returns a program of the same values whose gradient sums what loops share once, behind them.

    It is about products, convolutions and elementwise operations in the body of a `scan`, of an operand that is the
    same in all steps with one that is not. Where one is inside a `checkpoint`, a `cond` or a `while` within the body,
    nothing changes. The backward pass keeps what goes back through these operations, one slice a step, beside what it
    keeps of the forward pass anyway. The gradient is rounded otherwise. It has no forward mode.

    **Arguments:** `program`: to be differentiated in reverse. `divided`: as of `find_batch_dims`. What has a dim of the
    batch, as activations that all steps of a decoder attend to, is no weight and is left alone: each device sums its
    own samples' gradient in the loop.
    """
    loops = {path: loop for path, loop in equations_of(program.closed.jaxpr) if loop.primitive is scan_p}
    dims = find_batch_dims(program, loops, divided or {})
    rules: dict[Path, Any] = {}
    for path, loop in loops.items():
        inside = any(path[: len(outer)] == outer for outer in rules)
        if not inside and (products := _products_of(loop, dims[path])):
            rules[path] = partial(_loop, products)
    if not rules:
        return program

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs)


@dataclass(frozen=True, eq=False)
class _Shared:
    """A value that is the same in all steps of a loop: operand `index` of it, or what an equation makes of such."""

    index: int
    equation: JaxprEqn | None = None
    operands: tuple[Any, ...] = ()

    @property
    def of_loop(self) -> bool:
        """Whether it depends on an operand of the loop."""
        return self.equation is None or any(isinstance(one, _Shared) and one.of_loop for one in self.operands)

    def moves_with(self, moving: Collection[int]) -> bool:
        """Whether it depends on any of those operands of the loop."""
        if self.equation is None:
            return self.index in moving
        return any(isinstance(one, _Shared) and one.moves_with(moving) for one in self.operands)

    def compute(self, inputs: Sequence[Any], known: "dict[_Shared, Any]") -> Any:
        """Returns the value. **Arguments:** `inputs`: of the loop. `known`: what was computed before."""
        if self.equation is None:
            return inputs[self.index]
        if self not in known:
            values = [one.compute(inputs, known) if isinstance(one, _Shared) else one for one in self.operands]
            known[self] = bind(self.equation, values)[self.index]
        return known[self]


@dataclass(frozen=True)
class _Product:
    """An equation in the body of a loop: which of its operands are shared, and the lengths of the scans around it."""

    equation: JaxprEqn
    shared: Mapping[int, _Shared]
    lengths: tuple[int, ...]

    def tapped(self, _: JaxprEqn, inputs: list[Any], tap: Any) -> tuple[Sequence[Any], Any]:
        """Stands in place of it: no gradient goes to what is shared, that of the output goes to `tap` as well."""
        inputs = [jax.lax.stop_gradient(value) if at in self.shared else value for at, value in enumerate(inputs)]
        (output,) = bind(self.equation, inputs)
        return [_tapped(output, tap)], {at: value for at, value in enumerate(inputs) if at not in self.shared}

    def moves_with(self, moving: Collection[int]) -> bool:
        """Whether what is shared depends on any of those operands of the loop."""
        return any(one.moves_with(moving) for one in self.shared.values())

    @property
    def tap(self) -> jax.Array:
        """What it is fed: nothing reads its value."""
        aval = aval_of(self.equation.outvars[0])
        return jnp.zeros((*self.lengths, *aval.shape), aval.dtype)

    def gradients(self, shared: Sequence[Any], others: Mapping[int, Any], back: Any) -> Sequence[Any]:
        """Returns the gradients of the shared operands, of all steps. **Arguments:** `back`: of the outputs."""

        def whole(*shared: Any) -> Any:
            def one(others: Mapping[int, Any]) -> Any:
                values = {**dict(zip(self.shared, shared, strict=True)), **others}
                inputs = [values.get(at, getattr(atom, "val", None)) for at, atom in enumerate(self.equation.invars)]
                return bind(self.equation, inputs)[0]

            for _ in self.lengths:
                one = jax.vmap(one)
            return one(others)

        return jax.vjp(whole, *shared)[1](back)


class _Finder:
    """Looks through the body of a loop for products of what is shared with what is not."""

    def __init__(self) -> None:
        self.found: dict[Path, _Product] = {}

    def walk(
        self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], here: Path, lengths: tuple[int, ...]
    ) -> list[Any]:
        """**Arguments:** `inputs`: a `_Shared` or None each. **Returns:** the same of the outputs."""
        known: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for index, equation in enumerate(jaxpr.eqns):
            operands = tuple(read(atom) for atom in equation.invars)
            outputs: Sequence[Any] = [None] * len(equation.outvars)
            if all(one is not None for one in operands) and not equation.effects:
                outputs = [_Shared(at, equation, operands) for at in range(len(equation.outvars))]
            elif equation.primitive in _ENTERED:
                outputs = self.within(equation, operands, (*here, index), lengths)
            elif shared := _shared_operands(equation, operands):
                self.found[*here, index] = _Product(equation, shared, lengths)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def within(
        self, equation: JaxprEqn, operands: Sequence[Any], here: Path, lengths: tuple[int, ...]
    ) -> Sequence[Any]:
        """The same of an equation that is entered."""
        for which, body in enumerate(bodies(equation)):
            inputs = [operands[at] for at in body.operands]
            if equation.primitive is not scan_p:
                return self.walk(body.jaxpr, body.consts, inputs, (*here, which), lengths)
            num, more = equation.params["num_consts"], (equation.params["length"],)
            inputs = [one if at < num else None for at, one in enumerate(inputs)]  # others differ from step to step
            self.walk(body.jaxpr, body.consts, inputs, (*here, which), (*lengths, *more))
        return [None] * len(equation.outvars)


def _products_of(equation: JaxprEqn, dims: Sequence[int | None]) -> dict[Path, _Product]:
    """Returns the products in a loop, by their paths in a jaxpr of it alone. **Arguments:** `dims`: of its operands."""
    finder = _Finder()
    finder.within(equation, [_Shared(at) if dim is None else None for at, dim in enumerate(dims)], (0,), ())
    return finder.found


def _shared_operands(equation: JaxprEqn, operands: Sequence[Any]) -> dict[int, _Shared]:
    if len(equation.outvars) != 1:
        return {}
    size = aval_of(equation.outvars[0]).size
    product = equation.primitive in (dot_general_p, conv_general_dilated_p)
    return {
        at: one
        for at, one in enumerate(operands)
        if isinstance(one, _Shared)
        and one.of_loop
        and _is_float(equation.invars[at])
        and (product or (equation.primitive in ELEMENTWISE and aval_of(equation.invars[at]).size < size))
    }


def _loop(products: Mapping[Path, _Product], equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """Stands in place of a scan: forward it is the scan."""

    @jax.custom_vjp
    def loop(*inputs: Any) -> Any:
        return bind(equation, inputs)

    def forward(*given: Any) -> Any:
        moving = [at for at, one in enumerate(given) if one.perturbed and _is_float(equation.invars[at])]
        return _forward(products, equation, [one.value for one in given], moving)

    def backward(pull: Any, back: Any) -> Any:
        return pull([_zeros(one) if isinstance(one, SymbolicZero) else one for one in back])

    loop.defvjp(forward, backward, symbolic_zeros=True)
    return loop(*inputs)


def _forward(products: Mapping[Path, _Product], equation: JaxprEqn, inputs: list[Any], moving: list[int]) -> Any:
    """Runs a loop. **Returns:** its outputs, and the function from their gradients to those of its inputs."""
    products = {path: product for path, product in products.items() if product.moves_with(moving)}
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in map(jax.typeof, inputs)]
    alone = jax.make_jaxpr(lambda *inputs: bind(equation, inputs))(*specs)
    rules = {path: Rule(product.tapped) for path, product in products.items()}
    num_consts, first = equation.params["num_consts"], [at for at in moving if at < equation.params["num_consts"]]

    def run(moved: Sequence[Any], taps: dict[Path, Any]) -> Any:
        return evaluate(alone, rules, _put(inputs, moving, moved), taps)

    def pull(pull_loop: Any, others: dict[Path, Any], consts: Sequence[Any], back: Sequence[Any]) -> Any:
        moved, taps = pull_loop(back)

        def shared(moved: Sequence[Any]) -> Any:
            values, known = _put(consts, first, moved), dict[_Shared, Any]()
            return {
                path: [one.compute(values, known) for one in each.shared.values()] for path, each in products.items()
            }

        values, pull_shared = jax.vjp(shared, [consts[at] for at in first])
        sums = {path: list(each.gradients(values[path], others[path], taps[path])) for path, each in products.items()}
        result = _put([None] * len(inputs), moving, moved)
        for at, more in zip(first, pull_shared(sums)[0], strict=True):
            result[at] += more
        return tuple(result)

    taps = {path: product.tap for path, product in products.items()}
    outputs, pull_loop, others = jax.vjp(run, [inputs[at] for at in moving], taps, has_aux=True)
    return outputs, Partial(pull, pull_loop, others, inputs[:num_consts])


def _put(values: Sequence[Any], places: Sequence[int], these: Sequence[Any]) -> list[Any]:
    """Returns the values with these at their places."""
    values = list(values)
    for at, value in zip(places, these, strict=True):
        values[at] = value
    return values


@jax.custom_vjp
def _tapped(value: Any, tap: Any) -> Any:
    return value


_tapped.defvjp(lambda value, tap: (value, None), lambda _, back: (back, back))


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def _zeros(like: Any) -> Any:
    return np.zeros(like.shape, like.dtype) if like.dtype == jax.dtypes.float0 else jnp.zeros(like.shape, like.dtype)
