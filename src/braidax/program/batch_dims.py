"""Which dim of a value descends from the batch: a hint on how to split it, never needed for a result to be right."""

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var, primitives
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import (
    custom_jvp_call_p,
    custom_vjp_call_p,
    scan_p,
    while_p,
)

from .bodies import Path, aval_of, bodies
from .elementwise import ELEMENTWISE
from .trace import Program

Dim = int | None


def find_batch_dims(
    program: Program, paths: Collection[Path], *, arguments: Collection[int] = (1,)
) -> dict[Path, tuple[Dim, ...]]:
    """Follows dim 0 of the leaves of the batch through a program.

    Where a reshape merges the batch with the dims behind it, the merged dim counts as the batch: its samples still lie
    one after another. What no rule covers has none.

    **Arguments:** `paths`: of the equations that are asked for. `arguments`: which arguments of the program are batch.

    **Returns:** for each path the batch dim of every operand of its equation, or None.
    """
    seeds: list[Dim] = []
    for index, argument in enumerate(program.in_specs):
        seeds += [0 if index in arguments and leaf.shape else None for leaf in jax.tree.leaves(argument)]
    flow = _Flow(frozenset(paths))
    flow.walk(program.closed.jaxpr, seeds, ())
    return flow.found


class _Flow:
    """One walk; `found` holds the operands' dims of the equations that are asked for."""

    def __init__(self, paths: frozenset[Path]) -> None:
        self._paths = paths
        self.found: dict[Path, tuple[Dim, ...]] = {}

    def walk(self, jaxpr: Jaxpr, inputs: Sequence[Dim], place: Path) -> list[Dim]:
        known: dict[Var, Dim] = dict(zip(jaxpr.invars, inputs, strict=True))
        for index, equation in enumerate(jaxpr.eqns):
            dims = [None if isinstance(atom, Constant) else known.get(atom) for atom in equation.invars]
            here = (*place, index)
            if here in self._paths:
                self.found[here] = tuple(dims)
            known.update(zip(equation.outvars, self._through(equation, dims, here), strict=True))
        return [None if isinstance(atom, Constant) else known.get(atom) for atom in jaxpr.outvars]

    def _through(self, equation: JaxprEqn, dims: list[Dim], here: Path) -> Sequence[Dim]:
        primitive = equation.primitive
        if primitive is scan_p or primitive is while_p:
            return self._loop(equation, dims, here)
        if primitive in (custom_jvp_call_p, custom_vjp_call_p):
            return self.walk(equation.params["call_jaxpr"].jaxpr, dims, (*here, 0))
        if inner := bodies(equation):
            results = [
                self.walk(body.jaxpr, [dims[at] for at in body.operands], (*here, which))
                for which, body in enumerate(inner)
            ]
            return [next((dim for dim in every if dim is not None), None) for every in zip(*results, strict=True)]
        if all(dim is None for dim in dims):
            return [None] * len(equation.outvars)
        rule = _RULES.get(primitive) or _RULES_BY_NAME.get(primitive.name)
        found = rule(equation, dims) if rule else None
        if isinstance(found, list):
            return found
        return [found] * len(equation.outvars)

    def _loop(self, equation: JaxprEqn, dims: list[Dim], here: Path) -> Sequence[Dim]:
        """Walked until nothing changes: a carry that starts as zeros has the batch dim that a step gives it."""
        params, inner = equation.params, bodies(equation)
        scan = equation.primitive is scan_p
        first = params["num_consts"] if scan else params["cond_nconsts"] + params["body_nconsts"]
        num_carry = params["num_carry"] if scan else len(dims) - first
        dims = list(dims)
        for at in range(first + num_carry, len(dims)):
            dim = dims[at]
            dims[at] = dim - 1 if dim else None
        if not inner:
            return [None] * len(equation.outvars)
        results: list[Dim] = []
        while True:
            for which, body in enumerate(inner):
                results = self.walk(body.jaxpr, [dims[at] for at in body.operands], (*here, which))
            changed = False
            for at, dim in enumerate(results[:num_carry], first):
                if dims[at] is None and dim is not None:
                    dims[at], changed = dim, True
            if not changed:
                stacked = [None if dim is None else dim + 1 for dim in results[num_carry:]]
                return [*dims[first : first + num_carry], *stacked]


Rule = Callable[[JaxprEqn, list[Dim]], Any]


def _same_shape(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    out = aval_of(equation.outvars[0])
    for dim, atom in zip(dims, equation.invars, strict=True):
        if dim is not None and aval_of(atom).ndim == out.ndim and aval_of(atom).shape[dim] == out.shape[dim]:
            return dim
    return None


def _same_size(equation: JaxprEqn, dims: list[Dim]) -> list[Dim]:
    """Slices, pads and updates: a dim of which all is kept."""
    dim = dims[0] if dims[0] is not None or equation.primitive is not primitives.dynamic_update_slice_p else dims[1]
    size = None if dim is None else aval_of(equation.invars[0]).shape[dim]
    return [dim if dim is not None and aval_of(v).shape[dim] == size else None for v in equation.outvars]


def _broadcast(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    return None if dims[0] is None else equation.params["broadcast_dimensions"][dims[0]]


def _transpose(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    return None if dims[0] is None else equation.params["permutation"].index(dims[0])


def _reshape(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    before, after, dim = aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape, dims[0]
    if dim is None or equation.params["dimensions"] is not None:
        return None
    for at, size in enumerate(after):
        whole = size and before[dim] and (size % before[dim] == 0 or before[dim] % size == 0)
        if whole and prod(after[:at]) == prod(before[:dim]) and (size > 1 or before[dim] == 1):
            return at
    return None


def _squeeze(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    return _without(dims[0], equation.params["dimensions"])


def _reduce(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    return _without(dims[0], equation.params["axes"])


def _without(dim: Dim, gone: Sequence[int]) -> Dim:
    return None if dim is None or dim in gone else dim - sum(other < dim for other in gone)


def _dot(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    contracted, batched = equation.params["dimension_numbers"]
    offset = len(batched[0])
    for side in range(2):
        dim, gone = dims[side], (*contracted[side], *batched[side])
        if dim is not None and dim in batched[side]:
            return list(batched[side]).index(dim)
        free = [at for at in range(aval_of(equation.invars[side]).ndim) if at not in gone]
        if dim is not None and dim in free:
            return offset + free.index(dim)
        offset += len(free)
    return None


def _conv(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    numbers = equation.params["dimension_numbers"]
    return numbers.out_spec[0] if dims[0] == numbers.lhs_spec[0] else None


def _gather(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    operand, ids = dims[0], dims[1]
    of_ids = [at for at in range(aval_of(equation.outvars[0]).ndim) if at not in numbers.offset_dims]
    if ids is not None and ids < len(of_ids):
        return of_ids[ids]
    if operand is None:
        return None
    if operand in numbers.operand_batching_dims:
        return of_ids[numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand)]]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if operand in gone or sizes[operand] != aval_of(equation.invars[0]).shape[operand]:
        return None
    place = _without(operand, gone)
    return None if place is None else numbers.offset_dims[place]


def _concatenate(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    return next((dim for dim in dims if dim is not None and dim != equation.params["dimension"]), None)


def _along(name: str) -> Rule:
    """A primitive that mixes along the dim of one parameter and keeps the others."""

    def rule(equation: JaxprEqn, dims: list[Dim]) -> Dim:
        dim = next((dim for dim in dims if dim is not None), None)
        return None if dim == equation.params[name] else dim

    return rule


def _same_dim(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    """What changes other elements of the first operand only."""
    return dims[0]


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _same_shape),
    **dict.fromkeys(
        [primitives.slice_p, primitives.dynamic_slice_p, primitives.dynamic_update_slice_p, primitives.pad_p],
        _same_size,
    ),
    **dict.fromkeys(
        [
            primitives.reduce_sum_p, primitives.reduce_max_p, primitives.reduce_min_p, primitives.reduce_prod_p,
            primitives.reduce_and_p, primitives.reduce_or_p, primitives.argmax_p, primitives.argmin_p,
        ],
        _reduce,
    ),
    **dict.fromkeys(
        [primitives.cumsum_p, primitives.cummax_p, primitives.cummin_p, primitives.cumprod_p,
         primitives.cumlogsumexp_p], _along("axis"),
    ),
    **dict.fromkeys(
        [primitives.reduce_window_sum_p, primitives.reduce_window_max_p, primitives.reduce_window_min_p], _same_size
    ),
    **dict.fromkeys([primitives.scatter_p, primitives.scatter_add_p, primitives.scatter_mul_p], _same_dim),
    primitives.sort_p: _along("dimension"),
    primitives.rev_p: _same_dim,
    primitives.broadcast_in_dim_p: _broadcast,
    primitives.transpose_p: _transpose,
    primitives.reshape_p: _reshape,
    primitives.squeeze_p: _squeeze,
    primitives.dot_general_p: _dot,
    primitives.conv_general_dilated_p: _conv,
    primitives.gather_p: _gather,
    primitives.concatenate_p: _concatenate,
}  # fmt: skip
_RULES_BY_NAME: dict[str, Rule] = {"split": _along("axis"), "top_k": _along("axis")}
