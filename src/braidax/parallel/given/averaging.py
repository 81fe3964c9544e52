"""Averages of parameters over the latest steps, kept by the optimizer, to be evaluated in their place."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from braidax.errors import ArgumentError
from braidax.parallel.state import State
from braidax.program import named_leaves


class Averages(NamedTuple):
    """The state of `averaging`. `average`: a PyTree like the parameters, float32 or wider. `inner`: the optimizer's."""

    average: Any
    inner: Any


def averaging(optimizer: Any, *, decay: float) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that also keeps an exponential moving average of the parameters (EMA, Polyak averaging).

    Parameters move as without it. Behind each update the average becomes `decay · average + (1 - decay) · params`; it
    begins as the first parameters. It is part of the optimizer's state: it lies as the parameters do, is in every
    checkpoint, and costs as much memory and time as Adam's momentum. Of what is no float it is the value itself.

    **Arguments:** `optimizer`: of optax, all of it: what is chained around this one would change moves that it has
    counted. `decay`: 0 to less than 1; parameters fade that are more than `1 / (1 - decay)` updates old.

    **Returns:** the optimizer, for `parallelize`, or for optax alone; its state is `Averages`.

    **Raises:** `ArgumentError` for another decay, or for what is no optimizer.
    """
    if not 0 <= decay < 1:
        raise ArgumentError(f"decay={decay!r} must be at least 0 and less than 1, such as 0.999")
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise ArgumentError(f"optimizer is {optimizer!r}, expected one from optax, such as optax.adamw(1e-3)")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Averages:
        return Averages(jax.tree.map(_wide, params), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Averages]:
        moves, kept = inner.update(updates, state.inner, params, **more)

        def moved(old: Any, new: Any) -> Any:
            new = _wide(new)
            return decay * old + (1 - decay) * new if jnp.issubdtype(new.dtype, jnp.inexact) else new

        return moves, Averages(jax.tree.map(moved, state.average, optax.apply_updates(params, moves)), kept)

    return optax.GradientTransformationExtraArgs(init, update)


def averaged(state: State) -> State:
    """Returns a state that has the average of `averaging` in place of the parameters, to be evaluated or exported.

    **Arguments:** `state`: of a step whose optimizer is of `averaging`; it stays valid. **Returns:** a state that
    shares arrays with the one given: only the one given may be trained on. Variables that are frozen are as they are.

    **Raises:** `ArgumentError` where there is no average, and where tables lie by rows, whose averages lag behind as
    they do: give `step.to_dense(state)`.
    """
    nodes = jax.tree.leaves(state.opt_state, is_leaf=_is_averages)
    found = [node.average for node in nodes if _is_averages(node)]
    if len(found) != 1:
        raise ArgumentError(
            f"state has {len(found)} averages of parameters, expected one: give parallelize the optimizer "
            "bx.parallel.averaging(optimizer, decay=0.999)"
        )
    if isinstance(state.opt_state, dict) and set(state.opt_state) == {"dense", "rows"}:
        raise ArgumentError(
            f"state has tables by rows, {[*state.opt_state['rows']]}, whose averages may lag behind: give averaged the "
            "state of single-device training, step.to_dense(state)"
        )
    averages, named = dict(named_leaves(found[0])), named_leaves(state.params)
    leaves = [averages[name].astype(leaf.dtype) if name in averages else leaf for name, leaf in named]
    return replace(state, params=jax.tree.unflatten(jax.tree.structure(state.params), leaves))


def _is_averages(node: Any) -> bool:
    return isinstance(node, Averages)


def _wide(leaf: Any) -> jax.Array:
    """Returns a parameter in the dtype that its average has."""
    array = jnp.asarray(leaf)
    is_float = jnp.issubdtype(array.dtype, jnp.inexact)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32)) if is_float else array
