"""Axes that code for `jax.pmap` names: in the global view each has one member, and that one holds the whole batch."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from braidax.errors import ArgumentError

from .bodies import Path, bodies, equations_of, every_equation
from .lines import line_of
from .marks import kept_p
from .rewrite import evaluate

Rule = Callable[[JaxprEqn, list[Any]], list[Any]]
_UNBOUND = re.compile(r"unbound axis name: (\S+?)\.?(\s|$)")


def unbound_axis(error: NameError) -> str | None:
    """Returns the axis whose name JAX found to be nobody's; None for an error about another kind of name."""
    found = _UNBOUND.search(str(error))
    return found[1] if found else None


def without_axes(closed: ClosedJaxpr, axes: Collection[str]) -> ClosedJaxpr:
    """Computes collectives over axes of one member without them: a sum or a mean is the value itself.

    **Arguments:** `closed`: traced with these axes, each of size 1.

    **Returns:** the same program, in which nothing names one of them. **Raises:** `ArgumentError` for a collective that
    speaks of other members, or that stands where it cannot be replaced.
    """
    rules = dict(_collectives(closed.jaxpr, axes))
    if not rules:
        return closed
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluate(closed, rules, args)[0])(*inputs)


def _collectives(jaxpr: Jaxpr, axes: Collection[str]) -> Iterator[tuple[Path, Rule]]:
    """The path of each collective over one of the axes, and what stands in its place."""
    for path, equation in equations_of(jaxpr):
        if _names(equation) & {*axes}:
            if equation.primitive.name not in _RULES:
                raise ArgumentError(f"{_told(equation)} has no rule: leave it out, since the loss sees the whole batch")
            yield path, _RULES[equation.primitive.name]
        elif equation.primitive is kept_p:
            if _holds(equation.params["jaxpr"].jaxpr, axes):
                yield path, partial(_kept, axes)
        elif not bodies(equation) and any(_holds(body, axes) for body in jaxprs_in_params(equation.params)):
            raise ArgumentError(
                f"a collective over one of the axes {sorted(axes)} stands inside "
                f"{equation.primitive.name.removesuffix('_call')}, which is not entered, lest its own derivative be "
                f"lost: leave the collective out, since the loss sees the whole batch"
            )


def _names(equation: JaxprEqn) -> set[Any]:
    """The axes that a collective is over; of other equations nothing that is the name of one."""
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    return {*names} if isinstance(names, tuple | list) else {names}


def _holds(jaxpr: Jaxpr, axes: Collection[str]) -> bool:
    return any(_names(equation) & {*axes} for equation in every_equation(jaxpr))


def _told(equation: JaxprEqn) -> str:
    names = ", ".join(map(repr, sorted(_names(equation))))
    return f"{equation.primitive.name} over the axis {names} at {line_of(equation.source_info)}"


def _permuted(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
    pairs = {tuple(pair) for pair in equation.params["perm"]}
    if others := pairs - {(0, 0)}:
        raise ArgumentError(
            f"{_told(equation)} sends from member {min(others)[0]} to member {min(others)[1]}, and the axis has one, "
            f"which has the whole batch: make the pairs from jax.lax.axis_size, or leave it out"
        )
    return inputs if pairs else [jnp.zeros_like(inputs[0])]


def _kept(axes: Collection[str], equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
    params = {**equation.params, "jaxpr": without_axes(equation.params["jaxpr"], axes)}
    return equation.primitive.bind(*inputs, **params)


def _gathered(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
    tiled, dim = equation.params["tiled"], equation.params["all_gather_dimension"]
    return inputs if tiled else [jnp.expand_dims(inputs[0], dim)]


def _scattered(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
    tiled, dim = equation.params["tiled"], equation.params["scatter_dimension"]
    return inputs if tiled else [jnp.squeeze(inputs[0], dim)]


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("psum", "pmax", "pmin", "all_to_all"), lambda _, inputs: inputs),
    "axis_index": lambda *_: [jnp.zeros((), jnp.int32)],
    "ppermute": _permuted,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
}
