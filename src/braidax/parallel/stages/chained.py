"""Stages one behind the other on whatever device: what a pipeline computes, without its order."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from braidax.program import Stage, named_leaves

from .passes import Passes


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
    stages: Sequence[Stage], out_specs: Any, *args: Any, params: int = 0, loss: int = 0, recompute: bool = False
) -> tuple[Any, Any]:
    """Returns what the loss gives, and its gradient, from stages that are differentiated separately.

    Each stage is given the gradient of what it sends, and gives that of what it was sent; gradients of parameters that
    several stages read add up.

    **Arguments:** as `forward`; `params`: the number of the argument that is trained; `loss`: of the output.
    `recompute`: whether stages run again in the backward pass.
    """
    incoming: tuple[Any, ...] = ()
    results = dict[int, Any]()
    done: list[tuple[Passes, Any, Any, Any]] = []
    for stage in stages:
        passes, taken = Passes(stage, params=params, recompute=recompute), stage.take(*args)
        made = passes.forward(taken, incoming)
        results.update(zip(stage.results, made.results, strict=True))
        done.append((passes, taken, incoming, made.kept))
        incoming = made.outgoing
    sent: list[Any] = []
    gradients: list[Any] = []
    for passes, taken, given, kept in reversed(done):
        of_results = [jnp.ones_like(results[at]) if at == loss else None for at in passes.stage.results]
        own, sent = passes.backward(taken, given, kept, sent, of_results)
        gradients.append(own)
    total = joined(stages[::-1], gradients, args[params], params)
    return _in_order(out_specs, results), total


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


def _sum(like: Any, parts: Sequence[tuple[Any, Any]]) -> Any:
    whole = [value for rows, value in parts if rows is None]
    total: Any = sum(whole[1:], whole[0]) if whole else jnp.zeros(like.shape, like.dtype)
    for rows, value in parts:
        if rows is not None:
            total = total.at[slice(*rows)].add(value)
    return total


def _in_order(out_specs: Any, results: Mapping[int, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(out_specs), [results[at] for at in range(len(results))])
