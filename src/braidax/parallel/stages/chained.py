"""Stages one behind the other on whatever device: what a pipeline computes, without its order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from braidax.program import Stage, named_leaves


def forward(stages: Sequence[Stage], out_specs: Any, *args: Any) -> Any:
    """Returns what the uncut loss gives: the stages run one behind the other.

    **Arguments:** `out_specs`: of the loss. `args`: of the loss.
    """
    incoming: tuple[Any, ...] = ()
    results = dict[int, Any]()
    for stage in stages:
        incoming, own = stage.program(*stage.take(*args), incoming)
        results.update(zip(stage.results, own, strict=True))
    return _in_order(out_specs, results)


def value_and_gradients(
    stages: Sequence[Stage], out_specs: Any, *args: Any, params: int = 0, loss: int = 0
) -> tuple[Any, Any]:
    """Returns what the loss gives, and its gradient, from stages that are differentiated separately.

    Each stage is given the gradient of what it sends, and gives that of what it was sent; gradients of parameters that
    several stages read add up.

    **Arguments:** as `forward`; `params`: the number of the argument that is trained; `loss`: of the output.
    """
    incoming: tuple[Any, ...] = ()
    results = dict[int, Any]()
    pulls: list[Callable[..., Any]] = []
    for stage in stages:
        incoming, own, pull = pulled(stage, params, stage.take(*args), incoming)
        results.update(zip(stage.results, own, strict=True))
        pulls.append(pull)
    sent: list[Any] = []
    gradients: list[Any] = []
    for stage, pull in zip(reversed(stages), reversed(pulls), strict=True):
        own, sent = pull(sent, [jnp.ones_like(results[at]) if at == loss else None for at in stage.results])
        gradients.append(own)
    total = joined(stages[::-1], gradients, args[params], params)
    return _in_order(out_specs, results), total


def pulled(stage: Stage, params: int, taken: Sequence[Any], incoming: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Runs a stage, to be differentiated.

    **Arguments:** `taken`: what it has of the arguments of the loss.

    **Returns:** its outgoing values and its results; and a function of the gradients of both, None for what has none,
    that gives those of its parameters and of its incoming values, None for what is no float.
    """
    floats = [at for at, one in enumerate(incoming) if is_float(one)]

    def run(own: Any, moved: Sequence[Any]) -> Any:
        args, given = list(taken), list(incoming)
        args[params] = own
        for at, one in zip(floats, moved, strict=True):
            given[at] = one
        outgoing, results = stage.program(*args, tuple(given))
        return [one for one in (*outgoing, *results) if is_float(one)], (outgoing, results)

    made, pull, (outgoing, results) = jax.vjp(run, taken[params], [incoming[at] for at in floats], has_aux=True)

    def back(of_outgoing: Sequence[Any], of_results: Sequence[Any]) -> tuple[Any, list[Any]]:
        pairs = zip((*outgoing, *results), (*of_outgoing, *of_results), strict=True)
        given = [one for value, one in pairs if is_float(value)]
        whole = [jnp.zeros_like(value) if one is None else one for value, one in zip(made, given, strict=True)]
        own, moved = pull(whole)
        sent: list[Any] = [None] * len(incoming)
        for at, one in zip(floats, moved, strict=True):
            sent[at] = one
        return own, sent

    return outgoing, results, back


def joined(stages: Sequence[Stage], trees: Sequence[Any], whole: Any, params: int = 0) -> Any:
    """Adds up what stages have for leaves of the parameters, such as gradients, each at the rows that it reads.

    **Arguments:** `trees`: of each stage, as it takes the parameters. `whole`: the parameters, or like them.

    **Returns:** a PyTree like `whole`, zeros where no stage has anything.
    """
    parts: dict[str, list[tuple[Any, Any]]] = {}
    for stage, tree in zip(stages, trees, strict=True):
        own = [leaf for leaf in stage.leaves if leaf.argument == params]
        for leaf, value in zip(own, jax.tree.leaves(tree), strict=True):
            parts.setdefault(leaf.name, []).append((leaf.rows, value))
    found = [_sum(leaf, parts.get(name, [])) for name, leaf in named_leaves(whole)]
    return jax.tree.unflatten(jax.tree.structure(whole), found)


def is_float(value: Any) -> bool:
    """Whether something has a gradient."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _sum(like: Any, parts: Sequence[tuple[Any, Any]]) -> Any:
    whole = [value for rows, value in parts if rows is None]
    total: Any = sum(whole[1:], whole[0]) if whole else jnp.zeros(like.shape, like.dtype)
    for rows, value in parts:
        if rows is not None:
            total = total.at[slice(*rows)].add(value)
    return total


def _in_order(out_specs: Any, results: Mapping[int, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(out_specs), [results[at] for at in range(len(results))])
