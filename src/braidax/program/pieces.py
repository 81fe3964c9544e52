"""Weights in pieces: where a program takes apart what it makes of a weight, the weight itself is taken apart before.

One weight makes queries, keys and values side by side, or the gates of a unit. The dim that holds them cannot be
divided evenly: a device would have queries, and another one keys. A program that has a weight for each of them can be.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, primitives
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import closed_call_p, cond_p, jit_p, remat_p, scan_p
from jax.extend.source_info_util import current_name_stack, user_context

from .batch_dims import batch_dim_of_result
from .bodies import aval_of, bind, bodies
from .dim_rules import factors
from .dims import Cut, Dims, Group, find_dims
from .flow import carried
from .kinds import ELEMENTWISE, REDUCTIONS
from .trace import Program, trace


def find_dims_in_pieces(program: Program, argument: int = 0) -> Dims:
    """Groups dims as `find_dims` does, of a program whose weights are in pieces where that lets them be divided.

    Groups tell of whole leaves.
    """
    whole = found = find_dims(program, argument)
    specs, opened = jax.tree.leaves(program.in_specs[argument]), program
    cuts, owners = dict[int, Cut](), [(leaf, 0) for leaf in range(len(specs))]
    while (more := _cut_further(found, cuts, owners, specs)) != cuts:  # what is taken apart may be again
        cuts, opened = more, in_pieces(program, more, argument)
        sizes = [cuts[leaf].sizes if leaf in cuts else (0,) for leaf in range(len(specs))]
        owners = [(leaf, at) for leaf, pieces in enumerate(sizes) for at in range(len(pieces))]
        found = find_dims(opened, argument)
    if not cuts:
        return whole
    alike = [
        [(at, dim) for at, (owner, _) in enumerate(owners) if owner == leaf]
        for leaf in cuts
        for dim in range(len(specs[leaf].shape))
    ]
    found = find_dims(opened, argument, alike=alike)
    reasons = {place: group.blocked for group in whole.groups.values() if group.borders for place in group.leaves}
    groups: dict[int, Group] = {}
    for root, group in found.groups.items():
        leaves = tuple(dict.fromkeys((owners[leaf][0], dim) for leaf, dim in group.leaves))
        told = [reasons[place] for place in leaves if place in reasons] if group.blocked else []
        groups[root] = replace(group, leaves=leaves, blocked=told[0] if told else group.blocked)
    return replace(found, groups=groups, cuts=cuts)


def _cut_further(
    found: Dims, cuts: Mapping[int, Cut], owners: Sequence[tuple[int, int]], specs: Sequence[Any]
) -> dict[int, Cut]:
    """Returns cuts at more places, where a program takes apart what it makes of pieces.

    **Arguments:** `found`: of the program that takes pieces. `owners`: of each of its leaves, the whole leaf, and which
    piece of it that is.
    """
    more = dict(cuts)
    pieces = [(place, group.borders) for group in found.groups.values() for place in group.leaves if group.borders]
    for (at, dim), borders in pieces:
        leaf, piece = owners[at]
        old = cuts.get(leaf, Cut(dim, (specs[leaf].shape[dim],)))
        begin, size = sum(old.sizes[:piece]), old.sizes[piece]
        ends = {begin + border * size for border in borders}
        if old.dim == dim == more.get(leaf, old).dim and all(end == int(end) for end in ends):
            every = sorted({0, *map(int, ends), *accumulate(more.get(leaf, old).sizes)})
            if len(every) > 2:
                more[leaf] = Cut(dim, tuple(two - one for one, two in pairwise(every)))
    return more


def in_pieces(program: Program, cuts: Mapping[int, Cut], argument: int = 0) -> Program:
    """Returns a program that takes the pieces of some leaves, a tuple in place of each, and means the same.

    What is made of pieces stays in pieces as far as rules know, and is put together behind that.

    **Arguments:** `cuts`: by the number of the leaf.
    """

    def run(*args: Any) -> Any:
        given: list[Any] = []
        for number, (arg, spec) in enumerate(zip(args, program.in_specs, strict=True)):
            if number != argument:
                given += jax.tree.leaves(arg)
                continue
            for leaf, one in enumerate(jax.tree.structure(spec).flatten_up_to(arg)):
                given.append(_Pieces(cuts[leaf].dim, tuple(one)) if leaf in cuts else one)
        outputs = _run(program.closed.jaxpr, program.closed.consts, given)
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), _whole(outputs))

    leaves, structure = jax.tree.flatten(program.in_specs[argument])
    specs = structure.unflatten([_specs(spec, cuts[at]) if at in cuts else spec for at, spec in enumerate(leaves)])
    return trace(run, *program.in_specs[:argument], specs, *program.in_specs[argument + 1 :])


def _specs(spec: Any, cut: Cut) -> tuple[Any, ...]:
    return tuple(
        jax.ShapeDtypeStruct((*spec.shape[: cut.dim], size, *spec.shape[cut.dim + 1 :]), spec.dtype)
        for size in cut.sizes
    )


class _Pieces(NamedTuple):
    """An array in pieces along a dim."""

    dim: int
    parts: tuple[Any, ...]

    @property
    def sizes(self) -> list[int]:
        return [part.shape[self.dim] for part in self.parts]


def _whole(values: Sequence[Any]) -> list[Any]:
    return [jnp.concatenate(one.parts, one.dim) if isinstance(one, _Pieces) else one for one in values]


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr on arrays, of which some are in pieces, and so may be its results."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Constant) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        names = current_name_stack() + equation.source_info.name_stack
        with user_context(equation.source_info.traceback, name_stack=names), equation.ctx.manager:
            outputs = None
            if any(isinstance(one, _Pieces) for one in inputs):
                rule = _RULES.get(equation.primitive) or _RULES_BY_NAME.get(equation.primitive.name)
                outputs = rule(equation, inputs) if rule else None
            values.update(zip(equation.outvars, outputs or bind(equation, _whole(inputs)), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


Rule = Callable[[JaxprEqn, list[Any]], list[Any] | None]
"""Gives the results, or None where it does not know."""


def _elementwise(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    shape = aval_of(equation.outvars[0]).shape
    dim, parts = next(one for one in inputs if isinstance(one, _Pieces))
    sizes = [part.shape[dim] for part in parts]
    ends = [0, *accumulate(sizes)]
    if sum(sizes) != shape[dim]:
        return None

    def piece(value: Any, at: int) -> Any:
        if isinstance(value, _Pieces):
            return value.parts[at]
        if jnp.ndim(value) < len(shape) or value.shape[dim] == 1 != shape[dim]:
            return value
        return jax.lax.slice_in_dim(value, ends[at], ends[at + 1], axis=dim)

    inputs = [
        one if not isinstance(one, _Pieces) or (one.dim, one.sizes) == (dim, sizes) else _whole([one])[0]
        for one in inputs
    ]
    found = [bind(equation, [piece(one, at) for one in inputs]) for at in range(len(sizes))]
    return [_Pieces(dim, tuple(results)) for results in zip(*found, strict=True)]


def _dot(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    if sum(isinstance(one, _Pieces) for one in inputs) > 1:
        return None
    side = next(at for at, one in enumerate(inputs) if isinstance(one, _Pieces))
    dim, parts = inputs[side]
    to = batch_dim_of_result(equation, side, dim)
    if to is None:
        return None
    results = [bind(equation, [part if at == side else one for at, one in enumerate(inputs)])[0] for part in parts]
    return [_Pieces(to, tuple(results))]


def _each(held: _Pieces, to: int, make: Callable[[Any], Any]) -> list[Any]:
    """What is made of each piece, in pieces along another dim."""
    return [_Pieces(to, tuple(make(part) for part in held.parts))]


def _broadcast(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    (held,), shape, dims = inputs, equation.params["shape"], equation.params["broadcast_dimensions"]
    to = dims[held.dim]
    if sum(held.sizes) != shape[to]:
        return None
    return _each(held, to, lambda x: jax.lax.broadcast_in_dim(x, _with(shape, to, x.shape[held.dim]), dims))


def _transpose(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    (held,), order = inputs, equation.params["permutation"]
    return _each(held, list(order).index(held.dim), lambda x: jax.lax.transpose(x, order))


def _squeeze(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    (held,), gone = inputs, equation.params["dimensions"]
    return _each(held, held.dim - sum(dim < held.dim for dim in gone), lambda x: jax.lax.squeeze(x, gone))


def _reshape(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Where the dim is the outermost that is merged, and pieces end where steps of the outermost new one do."""
    (held,), after = inputs, aval_of(equation.outvars[0]).shape
    before = aval_of(equation.invars[0]).shape
    if equation.params["dimensions"] is not None or 0 in before:
        return None
    olds, news = next(pair for pair in factors(before, after) if held.dim in pair[0])
    to = next((dim for dim in news if after[dim] > 1), None)
    if to is None or any(before[dim] > 1 for dim in olds if dim < held.dim):
        return None
    inner = math.prod(before[dim] for dim in olds if dim > held.dim)
    unit = math.prod(after[dim] for dim in news if dim > to)
    if any(size * inner % unit for size in held.sizes):
        return None
    return _each(held, to, lambda x: jnp.reshape(x, _with(after, to, x.shape[held.dim] * inner // unit)))


def _reduce(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    (held,), axes, join = inputs, equation.params["axes"], _JOINS.get(equation.primitive)
    if held.dim not in axes:
        return _each(held, held.dim - sum(dim < held.dim for dim in axes), lambda x: bind(equation, [x])[0])
    results = [bind(equation, [part])[0] for part in held.parts]
    return [functools.reduce(join, results)] if join else None


def _slice(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    (held,), params = inputs, equation.params
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    strides = params["strides"] or (1,) * len(starts)
    if strides[held.dim] != 1:
        return None
    begin, end = starts[held.dim], limits[held.dim]
    starts[held.dim], limits[held.dim] = 0, None

    def others(part: Any) -> Any:
        ends = _with(limits, held.dim, part.shape[held.dim])
        return jax.lax.slice(part, starts, ends, strides)

    return [_between(_Pieces(held.dim, tuple(map(others, held.parts))), begin, end)]


def _split(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    (held,), axis, sizes = inputs, equation.params["axis"], [int(size) for size in equation.params["sizes"]]
    if axis == held.dim:
        return [_between(held, *ends) for ends in pairwise([0, *accumulate(sizes)])]
    parts = [jax.lax.split(part, sizes, axis) for part in held.parts]
    return [_Pieces(held.dim, tuple(results)) for results in zip(*parts, strict=True)]


def _between(held: _Pieces, begin: int, end: int) -> Any:
    """Those elements along the dim: a piece, several, or parts of them."""
    found: list[Any] = []
    for part, start in zip(held.parts, accumulate(held.sizes, initial=0), strict=False):
        low, high = max(begin - start, 0), min(end - start, part.shape[held.dim])
        if low < high:
            every = (low, high) == (0, part.shape[held.dim])
            found.append(part if every else jax.lax.slice_in_dim(part, low, high, axis=held.dim))
    return found[0] if len(found) == 1 else _Pieces(held.dim, tuple(found))


def _with(sizes: Sequence[Any], dim: int, size: int) -> list[Any]:
    return [size if at == dim else one for at, one in enumerate(sizes)]


# Equations that hold jaxprs: pieces go in, and come out of what is computed once.


def _parted(values: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """Takes values for arrays and tuples of arrays, and along which dim each is in pieces."""
    pieces = [one if isinstance(one, _Pieces) else None for one in values]
    held = [one if cut is None else cut.parts for one, cut in zip(values, pieces, strict=True)]
    return held, [None if one is None else one.dim for one in pieces]


def _joined(held: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    return [one if dim is None else _Pieces(dim, tuple(one)) for one, dim in zip(held, dims, strict=True)]


def _called(equation: JaxprEqn, inputs: list[Any], wrap: Callable[[Any], Any]) -> list[Any]:
    (body,), (held, dims), out = bodies(equation), _parted(inputs), list[int | None]()

    def call(held: list[Any]) -> list[Any]:
        results, out[:] = _parted(_run(body.jaxpr, body.consts, _joined(held, dims)))
        return results

    return _joined(wrap(call)(held), out)


def _jit(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    params = equation.params

    def wrap(call: Any) -> Any:
        call.__name__ = call.__qualname__ = params["name"]
        return jax.jit(call, inline=params["inline"], keep_unused=params["keep_unused"])

    told = any(isinstance(one, jax.sharding.Sharding) for one in (*params["in_shardings"], *params["out_shardings"]))
    return None if told else _called(equation, inputs, wrap)


def _remat(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    guards, policy = equation.params["prevent_cse"], equation.params["policy"]
    guard = guards if isinstance(guards, bool) else any(guards)
    return _called(equation, inputs, lambda call: jax.checkpoint(call, prevent_cse=guard, policy=policy))


def _scan(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    params, (body,), (first, num_carry) = equation.params, bodies(equation), carried(equation)
    last = first + num_carry
    carry, xs = _whole(inputs[first:last]), [one if _is_stacked(one) else _whole([one])[0] for one in inputs[last:]]
    held, dims = _parted(xs)
    dims = [None if dim is None else dim - 1 for dim in dims]

    def step(carry: list[Any], held: list[Any]) -> Any:
        results = _whole(_run(body.jaxpr, body.consts, [*inputs[:first], *carry, *_joined(held, dims)]))
        return results[:num_carry], results[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(step, carry, held, **options)
    return [*carry, *stacked]


def _is_stacked(one: Any) -> bool:
    return not isinstance(one, _Pieces) or one.dim > 0


def _cond(equation: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    index, *given = inputs
    if isinstance(index, _Pieces):
        return None
    branches = [lambda body=body: _whole(_run(body.jaxpr, body.consts, given)) for body in bodies(equation)]
    return jax.lax.switch(index, branches)


_JOINS: dict[Any, Any] = {
    primitives.reduce_sum_p: jnp.add,
    primitives.reduce_max_p: jnp.maximum,
    primitives.reduce_min_p: jnp.minimum,
}
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduce),
    primitives.dot_general_p: _dot,
    primitives.broadcast_in_dim_p: _broadcast,
    primitives.transpose_p: _transpose,
    primitives.squeeze_p: _squeeze,
    primitives.reshape_p: _reshape,
    primitives.slice_p: _slice,
    jit_p: _jit,
    closed_call_p: lambda equation, inputs: _called(equation, inputs, lambda call: call),
    remat_p: _remat,
    scan_p: _scan,
    cond_p: _cond,
}
_RULES_BY_NAME: dict[str, Rule] = {"split": _split}
