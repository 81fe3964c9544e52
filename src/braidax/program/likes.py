"""Which values lie as a leaf lies: the leaf itself, and all that has an element for each of its elements."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, primitives
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p

from .bodies import Path, aval_of
from .flow import Place, flow, is_slice, is_stack
from .kinds import ELEMENTWISE
from .marks import kept_p

_SAME = (
    primitives.convert_element_type_p, primitives.reduce_precision_p, primitives.copy_p, primitives.name_p,
    primitives.sharding_constraint_p, primitives.stop_gradient_p, primitives.device_put_p,
)  # fmt: skip


@dataclass(frozen=True)
class Like:
    """A value of the shape of a leaf, computed element by element. `itself`: it is the leaf, but for its type."""

    leaf: int
    itself: bool = True


def find_likes(
    closed: ClosedJaxpr, inputs: Sequence[Like | None]
) -> tuple[list[Like | None], dict[Path, tuple[Like | None, ...]]]:
    """Follows leaves through a jaxpr, up to where gradients are taken by them, and their gradients from there on.

    Where a value is made of several, it counts as the first, or as the one that it is itself.

    **Returns:** what the outputs are like; and by path what the operands of kept gradients are like.
    """
    found = _Likes({})
    return flow(closed.jaxpr, inputs, found), found.kept


@dataclass(frozen=True)
class _Likes:
    kept: dict[Path, tuple[Like | None, ...]]

    def through(self, equation: JaxprEqn, facts: Sequence[Any], place: Place) -> Sequence[Any]:
        likes, primitive = list(facts), equation.primitive
        if primitive is kept_p:
            self.kept[place.path] = tuple(likes)
            by = likes[: equation.params["num_gradients"]]
            computed = [None] * (len(equation.outvars) - len(by))
            return [*computed, *(None if one is None else replace(one, itself=False) for one in by)]
        if primitive in (custom_jvp_call_p, custom_vjp_call_p):
            return flow(equation.params["call_jaxpr"].jaxpr, likes, _Likes({}))
        if primitive in _SAME and _is_float(equation.outvars[0]):
            return likes
        if primitive.name == "optimization_barrier":
            return likes
        if primitive not in ELEMENTWISE:
            return [None] * len(equation.outvars)
        shape = aval_of(equation.outvars[0]).shape
        known = [
            one
            for one, atom in zip(likes, equation.invars, strict=True)
            if one is not None and aval_of(atom).shape == shape
        ]
        best = next((one for one in known if one.itself), known[0] if known else None)
        return [None if best is None else replace(best, itself=False)]

    def into(self, equation: JaxprEqn, operand: int, fact: Any, place: Place) -> Any:
        return None if is_slice(equation, operand) else fact

    def out_of(self, equation: JaxprEqn, result: int, fact: Any, place: Place) -> Any:
        return None if is_stack(equation, result) else fact

    def join(self, one: Any, other: Any) -> Any:
        return other if one is None else one


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(aval_of(atom).dtype, jnp.floating)
