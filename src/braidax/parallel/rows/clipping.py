"""Clipping by the global norm, taken out of an optimizer, so that what is left of it is elementwise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from braidax.errors import ArgumentError
from braidax.program import evaluate, trace

from .elementwise import SHAPE

_TOLERANCE = 2e-5
_GRADIENT = frozenset({"gradient"})
_SIZES = (0.5, 3.0, 0.0, 0.99, 1e3, 1.01, 0.01)  # of norms, in units of the limit


class Clipping(NamedTuple):
    """An optimizer as a factor, the same for all gradients, and an optimizer of what has been multiplied by it.

    **Fields:** `factor(squared_norm) -> factor`, scalars; `squared_norm` is the sum of the squares of all gradients.
    `inner`: has the states of the optimizer, and does not clip.
    """

    factor: Callable[[jax.Array], jax.Array]
    inner: optax.GradientTransformation


def split_clipping(optimizer: optax.GradientTransformation) -> Clipping | None:
    """Splits an optimizer that first clips its gradients by their global norm, as `optax.clip_by_global_norm` does.

    Its update is traced for one array. There the squared norm is the one sum over all elements; the clipped gradient
    is the first value that is made of the gradient and that sum alone, and through which they reach the results. What
    is found is compared with the optimizer on made-up gradients of several arrays, below the limit and above.

    **Arguments:** `optimizer`: from optax.

    **Returns:** the `Clipping`, or None where there is none of this kind: the norm is that of each array, or of the
    moves, or is taken in another way. Whether `inner` is elementwise is for `row_optimizer` to say.
    """
    table = jnp.zeros(SHAPE)
    try:
        traced: Any = trace(optimizer.update, table, optimizer.init(table), table).closed
    except Exception:  # noqa: BLE001  it cannot be applied to one array: `row_optimizer` says why
        return None
    gradient, *others = traced.jaxpr.invars
    found = _sums(traced.jaxpr, [gradient], others)
    if len(found) != 1:
        return None
    (total,) = traced.jaxpr.eqns[found[0]].outvars
    clipped = _clipped(traced.jaxpr, gradient, total, others)
    if clipped is None:
        return None
    squares, scaled = _part(traced, [gradient], total), _part(traced, [gradient, total], clipped)

    def factor(squared_norm: jax.Array) -> jax.Array:
        return evaluate(scaled, {}, [jnp.ones(SHAPE), squared_norm.astype(jnp.float32)])[0][0][0, 0]

    clipping = Clipping(factor, optax.GradientTransformation(optimizer.init, _unclipped(optimizer)))
    with jax.ensure_compile_time_eval(), jax.debug_nans(False):
        try:
            return clipping if _is_linear(squares, scaled, factor) and _agree(optimizer, clipping) else None
        except ArgumentError:  # some of the arrays are not clipped
            return None


def _unclipped(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """The update as it is where the norm of all gradients is 0: far below the limit."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        program = trace(optimizer.update, updates, state, params)
        jaxpr: Any = program.closed.jaxpr
        num_gradients = len(jax.tree.leaves(updates))
        sums = _sums(jaxpr, jaxpr.invars[:num_gradients], jaxpr.invars[num_gradients:])
        if len(sums) != num_gradients:
            raise ArgumentError(
                f"optimizer clips by the norm of {len(sums)} of the {num_gradients} gradients beside the tables, "
                f"expected that of all: use optax.clip_by_global_norm without a mask, or keep the tables dense"
            )
        rules = {(index,): _nothing for index in sums}
        leaves, _ = evaluate(program.closed, rules, jax.tree.leaves((updates, state, params)))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), leaves)

    return update


def _nothing(equation: Any, inputs: Any) -> list[jax.Array]:
    return [jnp.zeros_like(inputs[0], shape=())]


def _sums(jaxpr: Any, gradients: Sequence[Any], others: Sequence[Any]) -> list[int]:
    """The equations that sum all elements of something that is made of gradients alone."""
    origins = _origins(jaxpr, dict.fromkeys(gradients, "gradient") | dict.fromkeys(others, "other"))
    return [
        index
        for index, equation in enumerate(jaxpr.eqns)
        if equation.primitive.name == "reduce_sum"
        and equation.outvars[0].aval.shape == ()
        and origins[equation.outvars[0]] == _GRADIENT
    ]


def _clipped(jaxpr: Any, gradient: Any, total: Any, others: Sequence[Any]) -> Any:
    """The first value made of gradient and total through which all that comes of these goes, if there is one."""
    inputs = dict.fromkeys(others, "other") | {gradient: "gradient"}
    before = _origins(jaxpr, inputs | {total: "total"})
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            if variable.aval.shape == SHAPE and before[variable] == _GRADIENT | {"total"}:
                behind = _origins(jaxpr, inputs | {variable: "clipped"})
                if not any("gradient" in _origin(behind, atom) for atom in jaxpr.outvars):
                    return variable
    return None


def _origins(jaxpr: Any, named: Mapping[Any, str]) -> dict[Any, frozenset[str]]:
    """For each value the names of those that it is made of, as far back as the next one with a name."""
    origins = {variable: frozenset({name}) for variable, name in named.items()}
    origins |= dict.fromkeys(jaxpr.constvars, frozenset[str]())
    for equation in jaxpr.eqns:
        read = frozenset[str]().union(*(_origin(origins, atom) for atom in equation.invars))
        origins |= {variable: read for variable in equation.outvars if variable not in named}
    return origins


def _origin(origins: Mapping[Any, frozenset[str]], atom: Any) -> frozenset[str]:
    return frozenset() if hasattr(atom, "val") else origins[atom]


def _part(closed: Any, given: Sequence[Any], wanted: Any) -> Any:
    """The jaxpr that makes one value of others."""
    needed, equations = {wanted}, list[Any]()
    for equation in reversed(closed.jaxpr.eqns):
        if needed.intersection(equation.outvars) - set(given):
            equations.insert(0, equation)
            needed |= {atom for atom in equation.invars if not hasattr(atom, "val")}
    names = closed.jaxpr.debug_info.with_unknown_names()
    part = closed.jaxpr.replace(invars=list(given), outvars=[wanted], eqns=equations, debug_info=names)
    return closed.replace(jaxpr=part)


def _is_linear(squares: Any, scaled: Any, factor: Callable[[jax.Array], jax.Array]) -> bool:
    """Whether the total is the sum of squares, and clipping a multiplication, for gradients of all sizes."""
    gradients = (np.logspace(-15, 15, 15) * (-1.0) ** np.arange(15)).astype(np.float32)
    each, together = np.diag(gradients).reshape(-1, *SHAPE), gradients.reshape(SHAPE)
    totals = np.array([0.0, *np.logspace(-30, 30, 13)], np.float32)
    found = jax.jit(jax.vmap(lambda one: evaluate(squares, {}, [one])[0][0]))(each)
    got = jax.jit(jax.vmap(lambda total: evaluate(scaled, {}, [together, total])[0][0]))(totals)
    factors = np.asarray(jax.jit(jax.vmap(factor))(totals))
    return bool(
        factors[0] == 1
        and np.allclose(found, gradients**2, rtol=_TOLERANCE, atol=0)
        and np.allclose(got, factors[:, None, None] * together, rtol=_TOLERANCE, atol=0)
    )


def _agree(optimizer: optax.GradientTransformation, clipping: Clipping) -> bool:
    """Whether a table alone and all else together move as the optimizer moves them, with norms on both sides."""
    large = jnp.asarray(1e30, jnp.float32)
    limit = float(clipping.factor(large) * jnp.sqrt(large))
    if not 0 < limit < np.inf:
        return False
    params = {"table": jnp.linspace(-1.5, 2.0, 15).reshape(SHAPE), "vector": jnp.array([0.5, -0.3])}
    params["number"] = jnp.asarray(0.7)
    dense = {name: params[name] for name in ("vector", "number")}

    @jax.jit
    def step(number: Any, size: Any, states: Any) -> Any:
        directions = jax.tree.map(lambda leaf: jnp.cos(3.0 * number + leaf), params)
        norm = optax.tree.norm(directions)
        gradients = jax.tree.map(lambda leaf: leaf * (size / norm), directions)
        factor = clipping.factor(jnp.square(optax.tree.norm(gradients)))
        scaled = jax.tree.map(lambda leaf: leaf * factor, gradients)
        expected, state = optimizer.update(gradients, states[0], params)
        table, of_table = clipping.inner.update(scaled.pop("table"), states[1], params["table"])
        moves, of_dense = clipping.inner.update(scaled, states[2], dense)
        got: Any = moves
        differences = jax.tree.map(lambda one, other: jnp.abs(one - other).max(), expected, {**got, "table": table})
        limits = jax.tree.map(lambda one: _TOLERANCE * jnp.abs(one).max(), expected)
        return jax.tree.map(jnp.less_equal, differences, limits), (state, of_table, of_dense)

    states = tuple(clipping.inner.init(tree) for tree in (params, params["table"], dense))
    for number, size in enumerate(_SIZES):
        same, states = step(number, size * limit, states)
        if not all(jax.tree.leaves(same)):
            return False
    return True
