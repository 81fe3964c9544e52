"""What each operation says of the dims of its operands and results: which are the same, and which cannot be divided."""

import math
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.extend.core import JaxprEqn, primitives

from .bodies import aval_of
from .flow import Place
from .kinds import ARGUMENTS, CUMULATIVE, ELEMENTWISE, REDUCTIONS, SCATTERS, SLICES
from .lines import line_of

Labels = Sequence[int | None]
"""For each dim of a value the number of what belongs together; None where nothing is known."""


@runtime_checkable
class Groups(Protocol):
    """What rules write to."""

    def unite(self, one: int | None, other: int | None) -> int | None:
        """Says that two labels are of the same group. **Returns:** a label of it, None where both are unknown."""
        ...

    def block(self, label: int | None, why: str) -> None:
        """Says that a dim cannot be divided."""
        ...

    def cut(self, label: int | None, borders: Collection[Fraction], why: str) -> None:
        """Says that a dim is taken apart, and at which parts of its length."""
        ...

    def shrink(self, label: int | None, size: int) -> None:
        """Says that a dim has, in a value, another size."""
        ...

    def sums(self, label: int | None, place: Place, num_bytes: int) -> None:
        """Says that bytes are summed over devices where a dim is divided."""
        ...


class At(NamedTuple):
    """An equation where it stands, and what is written of it."""

    found: Groups
    equation: JaxprEqn
    place: Place

    def block(self, label: int | None, why: str = "") -> None:
        """A dim cannot be divided. **Arguments:** `why`: the primitive is told unless given."""
        name = self.equation.primitive.name
        self.found.block(label, f"{why or f'used by {name}'} at {line_at(self.equation, self.place)}")

    def cut(self, label: int | None, borders: Collection[Fraction]) -> None:
        """A dim is taken apart. **Arguments:** `borders`: where, as parts of its length; nothing if nobody knows."""
        name = self.equation.primitive.name
        self.found.cut(label, borders, f"taken in parts by {name} at {line_at(self.equation, self.place)}")

    def sums(self, label: int | None) -> None:
        """What stands here is summed over devices where the dim is divided."""
        self.found.sums(label, self.place, sum(num_bytes(atom) for atom in self.equation.outvars))


Rule = Callable[[At, Sequence[Labels]], list[Labels]]


def _unknown(at: At, dims: Sequence[Labels]) -> list[Labels]:
    for labels in dims:
        for label in labels:
            at.block(label)
    return [(None,) * len(_shape(atom)) for atom in at.equation.outvars]


def _elementwise(at: At, dims: Sequence[Labels]) -> list[Labels]:
    shape = _shape(at.equation.outvars[0])
    result: list[int | None] = [None] * len(shape)
    for labels, atom in zip(dims, at.equation.invars, strict=True):
        if len(labels) == len(shape):
            for dim, label in enumerate(labels):
                if _shape(atom)[dim] == shape[dim]:
                    result[dim] = at.found.unite(result[dim], label)
    return [result] * len(at.equation.outvars)


def _broadcast(at: At, dims: Sequence[Labels]) -> list[Labels]:
    shape, before = _shape(at.equation.outvars[0]), _shape(at.equation.invars[0])
    result: list[int | None] = [None] * len(shape)
    for dim, to in enumerate(at.equation.params["broadcast_dimensions"]):
        if before[dim] == shape[to]:
            result[to] = dims[0][dim]
    return [result]


def _transpose(at: At, dims: Sequence[Labels]) -> list[Labels]:
    return [[dims[0][dim] for dim in at.equation.params["permutation"]]]


def _squeeze(at: At, dims: Sequence[Labels]) -> list[Labels]:
    return [[label for dim, label in enumerate(dims[0]) if dim not in at.equation.params["dimensions"]]]


def _reshape(at: At, dims: Sequence[Labels]) -> list[Labels]:
    """Of dims that are merged or taken apart the outermost go on: their parts stay one behind another."""
    before, after = _shape(at.equation.invars[0]), _shape(at.equation.outvars[0])
    result: list[int | None] = [None] * len(after)
    if at.equation.params["dimensions"] is not None or 0 in before:
        return _unknown(at, dims)
    for olds, news in factors(before, after):
        lead = next((dim for dim in olds if before[dim] > 1), None)
        to = next((dim for dim in news if after[dim] > 1), None)
        for dim in olds:
            if before[dim] > 1 and dim != lead:
                at.block(dims[0][dim], "merged behind another dim by reshape")
        if lead is not None and to is not None:
            result[to] = dims[0][lead]
            at.found.shrink(dims[0][lead], after[to])
    return [result]


def factors(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The least runs of dims on both sides that have the same number of elements."""
    found: list[tuple[list[int], list[int]]] = []
    old = new = 0
    while old < len(before) and new < len(after):
        olds, news = [old], [new]
        while (left := math.prod(before[d] for d in olds)) != (right := math.prod(after[d] for d in news)):
            side = olds if left < right else news
            side.append(side[-1] + 1)
        found.append((olds, news))
        old, new = olds[-1] + 1, news[-1] + 1
    return found


def _reduce(at: At, dims: Sequence[Labels]) -> list[Labels]:
    axes = at.equation.params["axes"]
    for axis in axes:
        at.sums(dims[0][axis])
    return [[label for dim, label in enumerate(dims[0]) if dim not in axes]] * len(at.equation.outvars)


def _dot(at: At, dims: Sequence[Labels]) -> list[Labels]:
    contracted, batched = at.equation.params["dimension_numbers"]
    for pair in zip(*contracted, strict=True):
        labels = [dims[side][dim] for side, dim in enumerate(pair)]
        if at.found.unite(*labels) is not None and None in labels:
            at.block(at.found.unite(*labels), "multiplied by what no rule divides")
    result = [
        at.found.unite(*(dims[side][dim] for side, dim in enumerate(pair))) for pair in zip(*batched, strict=True)
    ]
    for side in range(2):
        gone = {*contracted[side], *batched[side]}
        result += [label for dim, label in enumerate(dims[side]) if dim not in gone]
    return [result]


def _conv(at: At, dims: Sequence[Labels]) -> list[Labels]:
    numbers, params = at.equation.params["dimension_numbers"], at.equation.params
    (image, kernel), out = dims, numbers.out_spec
    for labels, spec in ((image, numbers.lhs_spec), (kernel, numbers.rhs_spec)):
        for dim in spec[2:]:
            at.block(labels[dim], "slid over by a convolution")
    result: list[int | None] = [None] * len(out)
    result[out[0]], result[out[1]] = image[numbers.lhs_spec[0]], kernel[numbers.rhs_spec[0]]
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        for label in (image[numbers.lhs_spec[1]], *(kernel[dim] for dim in numbers.rhs_spec[:2])):
            at.block(label, "grouped by a convolution")
    at.sums(at.found.unite(image[numbers.lhs_spec[1]], kernel[numbers.rhs_spec[1]]))
    at.found.sums(kernel[numbers.rhs_spec[0]], at.place, num_bytes(at.equation.invars[0]))  # the image's gradient
    return [result]


def _gather(at: At, dims: Sequence[Labels]) -> list[Labels]:
    numbers, sizes = at.equation.params["dimension_numbers"], at.equation.params["slice_sizes"]
    shape, (table, ids, *_) = _shape(at.equation.invars[0]), dims
    result: list[int | None] = [None] * len(_shape(at.equation.outvars[0]))
    of_ids = [dim for dim in range(len(result)) if dim not in numbers.offset_dims]
    for dim, to in enumerate(of_ids):
        result[to] = ids[dim]
    for dim, one in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        result[of_ids[one]] = at.found.unite(result[of_ids[one]], table[dim])
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    for dim, to in zip(kept, numbers.offset_dims, strict=True):
        if sizes[dim] == shape[dim]:
            result[to] = table[dim]
        else:
            at.block(table[dim], "sliced by a gather")
    for dim in numbers.collapsed_slice_dims:
        at.sums(table[dim])
    return [result]


def _scatter(at: At, dims: Sequence[Labels]) -> list[Labels]:
    numbers = at.equation.params["dimension_numbers"]
    moved = {*numbers.inserted_window_dims, *numbers.operand_batching_dims, *numbers.scatter_dims_to_operand_dims}
    for labels in (*(label for dim, label in enumerate(dims[0]) if dim in moved), *dims[1], *dims[2]):
        at.block(labels)
    return [dims[0]]


def _concatenate(at: At, dims: Sequence[Labels]) -> list[Labels]:
    along = at.equation.params["dimension"]
    for labels in dims:
        at.block(labels[along], "put together with others by concatenate")
    others = [[None if dim == along else label for dim, label in enumerate(labels)] for labels in dims]
    return [[_united(at, [labels[dim] for labels in others]) for dim in range(len(dims[0]))]]


def _united(at: At, labels: Labels) -> int | None:
    result: int | None = None
    for label in labels:
        result = at.found.unite(result, label)
    return result


def _kept(at: At, dims: Sequence[Labels]) -> list[Labels]:
    """Slices, pads and updates: dims of which all is kept."""
    before, results = _shape(at.equation.invars[0]), []
    for atom in at.equation.outvars:
        same = [size == now for size, now in zip(before, _shape(atom), strict=True)]
        if at.equation.primitive is primitives.dynamic_update_slice_p:
            same = [size == now for size, now in zip(before, _shape(at.equation.invars[1]), strict=True)]
            for dim, label in enumerate(dims[1]):
                at.found.unite(dims[0][dim] if same[dim] else None, label)
        for dim, label in enumerate(dims[0]):
            if not same[dim]:
                at.cut(label, _borders(at.equation, dim))
        results.append([label if kept else None for label, kept in zip(dims[0], same, strict=True)])
    return results


def _borders(equation: JaxprEqn, dim: int) -> set[Fraction]:
    """Between what elements a slice begins and ends, as parts of the length; nothing where that cannot be said."""
    params, size = equation.params, _shape(equation.invars[0])[dim]
    if equation.primitive is not primitives.slice_p or {*(params["strides"] or ())} - {1} or not size:
        return set()
    return {Fraction(int(params[name][dim]), size) for name in ("start_indices", "limit_indices")}


def _split(at: At, dims: Sequence[Labels]) -> list[Labels]:
    axis, sizes = at.equation.params["axis"], at.equation.params["sizes"]
    size = _shape(at.equation.invars[0])[axis]
    at.cut(dims[0][axis], {Fraction(int(sum(sizes[:end])), size) for end in range(len(sizes)) if size})
    return [[None if dim == axis else label for dim, label in enumerate(dims[0])]] * len(sizes)


def _window(at: At, dims: Sequence[Labels]) -> list[Labels]:
    """Pooling: dims along which a window has one element."""
    params, (labels, *_) = at.equation.params, dims
    result = [label if size == 1 else None for label, size in zip(labels, params["window_dimensions"], strict=True)]
    for dim, label in enumerate(labels):
        if _shape(at.equation.outvars[0])[dim] != _shape(at.equation.invars[0])[dim]:
            result[dim] = None
        if result[dim] is None:
            at.block(label)
    return [result] * len(at.equation.outvars)


def _along(name: str) -> Rule:
    """A primitive that mixes along the dim of one parameter and keeps the others."""

    def rule(at: At, dims: Sequence[Labels]) -> list[Labels]:
        axis = at.equation.params[name] % len(dims[0])
        for labels in dims:
            at.block(labels[axis])
        kept = [_united(at, [labels[dim] for labels in dims]) for dim in range(len(dims[0]))]
        kept[axis] = None
        return [kept] * len(at.equation.outvars)

    return rule


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(aval_of(atom).shape)


def num_bytes(atom: Any) -> int:
    """Returns the bytes of a value; of keys nothing, for they are never divided."""
    aval = aval_of(atom)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):  # pyright: ignore[reportPrivateImportUsage]
        return 0
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def line_at(equation: JaxprEqn, place: Place) -> str:
    """Returns `file:line` of an equation, the file without its folder."""
    return line_of(place.source or equation.source_info).replace("\\", "/").rpartition("/")[2]


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(SLICES, _kept),
    **dict.fromkeys(REDUCTIONS | ARGUMENTS, _reduce),
    **dict.fromkeys(CUMULATIVE, _along("axis")),
    **dict.fromkeys(SCATTERS, _scatter),
    primitives.sort_p: _along("dimension"),
    primitives.broadcast_in_dim_p: _broadcast,
    primitives.transpose_p: _transpose,
    primitives.reshape_p: _reshape,
    primitives.squeeze_p: _squeeze,
    primitives.dot_general_p: _dot,
    primitives.conv_general_dilated_p: _conv,
    primitives.gather_p: _gather,
    primitives.concatenate_p: _concatenate,
    primitives.reduce_window_max_p: _window,
    primitives.reduce_window_min_p: _window,
    primitives.reduce_window_sum_p: _window,
}  # fmt: skip
_RULES_BY_NAME: dict[str, Rule] = {"split": _split, "top_k": _along("axis")}


def rule_of(equation: JaxprEqn) -> Rule:
    """Returns the rule of an equation; of one that has none, that nothing of it can be divided."""
    return _RULES.get(equation.primitive) or _RULES_BY_NAME.get(equation.primitive.name) or _unknown
