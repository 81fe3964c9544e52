"""Which dim of a value descends from the batch: a hint on how to split it, never needed for a result to be right."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.extend.core import JaxprEqn, primitives
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p

from .bodies import Path, aval_of, equation_at
from .flow import Place, flow, is_slice, is_stack
from .kinds import ARGUMENTS, CUMULATIVE, ELEMENTWISE, REDUCTIONS, SCATTERS, SLICES
from .marks import kept_p
from .trace import Program

Dim = int | None


def find_batch_dims(
    program: Program, paths: Collection[Path], divided: Mapping[int, Sequence[Dim] | int]
) -> dict[Path, tuple[Dim, ...]]:
    """Follows the dim of the batch through a program.

    Where a reshape merges the batch with the dims behind it, the merged dim counts as the batch: its samples still lie
    one after another. What no rule covers has none.

    **Arguments:** `paths`: of the equations that are asked for. `divided`: by number, an argument whose leaves have a
    dim of the batch, and which: of all, or of each.

    **Returns:** for each path the batch dim of every operand of its equation, or None.
    """
    jaxpr = program.closed.jaxpr
    dims = BatchDims({path: (None,) * len(equation_at(jaxpr, path).invars) for path in paths})
    flow(jaxpr, batch_seeds(program, divided), dims)
    return dims.found


def batch_dims_of_results(
    program: Program, divided: Mapping[int, Sequence[Dim] | int], *, islands: bool = False
) -> list[Dim]:
    """Returns the batch dim of every output of a program, or None.

    **Arguments:** as of `find_batch_dims`; `islands`: whether what an island gives, split as it takes the batch, counts
    as descending from that.
    """
    return flow(program.closed.jaxpr, batch_seeds(program, divided), BatchDims({}, islands=islands))


def batch_seeds(program: Program, divided: Mapping[int, Sequence[Dim] | int]) -> list[Dim]:
    """Returns the batch dim of every input of a program, or None. **Arguments:** as of `find_batch_dims`."""
    seeds: list[Dim] = []
    for index, argument in enumerate(program.in_specs):
        leaves, told = jax.tree.leaves(argument), divided.get(index)
        dims = [told] * len(leaves) if told is None or isinstance(told, int) else list(told)
        seeds += [dim if dim is not None and dim < leaf.ndim else None for dim, leaf in zip(dims, leaves, strict=True)]
    return seeds


def batch_dim_of_result(equation: JaxprEqn, operand: int, dim: Dim) -> Dim:
    """Returns the dim of the result along which one operand alone is divided as along `dim`; None where there is none.

    **Arguments:** `equation`: a product, a convolution (of its images), a gather (by its ids), or an elementwise
    operation with something that has one element along that dim.
    """
    ndim = aval_of(equation.invars[operand]).ndim
    if dim is None or not 0 <= dim < ndim:
        return None
    params, dims = equation.params, [dim if at == operand else None for at in range(len(equation.invars))]
    if equation.primitive is primitives.dot_general_p:
        _, batched = params["dimension_numbers"]
        return None if dim in batched[operand] else _dot(equation, dims)
    if equation.primitive is primitives.conv_general_dilated_p:
        return _conv(equation, dims) if operand == 0 and params["batch_group_count"] == 1 else None
    if equation.primitive is primitives.gather_p and operand == 1 and dim < ndim - 1:
        return _gather(equation, dims)
    if equation.primitive in ELEMENTWISE and len(equation.invars) == 2:
        one, out = aval_of(equation.invars[1 - operand]), aval_of(equation.outvars[0])
        spread = one.ndim == ndim == out.ndim and one.shape[dim] == 1 and out.shape[dim] > 1
        return dim if spread else None
    return None


class BatchDims:
    """Follows the dim of the batch as facts of `flow`.

    **Arguments:** `found`: holds the operands' dims of the equations that are asked for. `islands`: as of
    `batch_dims_of_results`.
    """

    def __init__(self, found: dict[Path, tuple[Dim, ...]], *, islands: bool = False) -> None:
        self.found, self._islands = found, islands

    def through(self, equation: JaxprEqn, facts: Sequence[Dim], place: Place) -> Sequence[Dim]:
        """Returns the batch dims of the results of an equation, of those of its operands."""
        dims = list(facts)
        if place.path in self.found:
            self.found[place.path] = tuple(dims)
        primitive = equation.primitive
        if primitive in (custom_jvp_call_p, custom_vjp_call_p):
            return flow(equation.params["call_jaxpr"].jaxpr, dims, BatchDims({}, islands=self._islands))
        if primitive is kept_p:
            found = flow(equation.params["jaxpr"].jaxpr, dims, BatchDims({}))
            return [*found, *[None] * equation.params["num_gradients"]]
        if self._islands and primitive.name == "shard_map":
            return _island(equation, dims)
        rule = _RULES.get(primitive) or _RULES_BY_NAME.get(primitive.name)
        found = rule(equation, dims) if rule else None
        return found if isinstance(found, list) else [found] * len(equation.outvars)  # pyright: ignore

    def into(self, equation: JaxprEqn, operand: int, fact: int, place: Place) -> Dim:
        """Returns the batch dim of an operand as a body has it."""
        if place.path in self.found:
            dims = list(self.found[place.path])
            dims[operand] = fact
            self.found[place.path] = tuple(dims)
        return fact if not is_slice(equation, operand) else fact - 1 if fact else None

    def out_of(self, equation: JaxprEqn, result: int, fact: int, place: Place) -> Dim:
        """Returns the batch dim of a result, of that of what a body gives for it."""
        return fact + 1 if is_stack(equation, result) else fact

    def join(self, one: Dim, other: Dim) -> Dim:
        """Returns the batch dim of what is one of two values."""
        return other if one is None else one


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
    return None if dims[0] is None else int(equation.params["broadcast_dimensions"][dims[0]])  # vmap's are NumPy's


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
    return _without(dims[0], [int(axis) for axis in equation.params["axes"]])  # vmap makes NumPy's of them


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


def _along_many(name: str) -> Rule:
    """The same, of several dims."""
    return lambda equation, dims: None if dims[0] in equation.params[name] else dims[0]


def _island(equation: JaxprEqn, dims: list[Dim]) -> list[Dim]:
    specs = zip(equation.params["in_specs"], dims, strict=True)
    axes = next((spec[dim] for spec, dim in specs if dim is not None and dim < len(spec) and spec[dim]), None)
    found = [[*spec].index(axes) if axes in spec else None for spec in equation.params["out_specs"]]
    return found if axes else [None] * len(found)


def _same_dim(equation: JaxprEqn, dims: list[Dim]) -> Dim:
    """What changes other elements of the first operand only."""
    return dims[0]


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _same_shape),
    **dict.fromkeys(SLICES, _same_size),
    **dict.fromkeys(REDUCTIONS | ARGUMENTS, _reduce),
    **dict.fromkeys(CUMULATIVE, _along("axis")),
    **dict.fromkeys(
        [primitives.reduce_window_sum_p, primitives.reduce_window_max_p, primitives.reduce_window_min_p], _same_size
    ),
    **dict.fromkeys(SCATTERS, _same_dim),
    primitives.sort_p: _along("dimension"),
    primitives.rev_p: _along_many("dimensions"),
    primitives.broadcast_in_dim_p: _broadcast,
    primitives.transpose_p: _transpose,
    primitives.reshape_p: _reshape,
    primitives.squeeze_p: _squeeze,
    primitives.dot_general_p: _dot,
    primitives.conv_general_dilated_p: _conv,
    primitives.gather_p: _gather,
    primitives.concatenate_p: _concatenate,
}  # fmt: skip
_RULES_BY_NAME: dict[str, Rule] = {
    "optimization_barrier": lambda equation, dims: dims, "sharding_constraint": _same_dim, "split": _along("axis"),
    "top_k": _along("axis"),
}  # fmt: skip
