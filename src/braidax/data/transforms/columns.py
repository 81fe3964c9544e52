"""Some of the leaves of a source; the others are not read where the source can leave them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Int64

from braidax.data.leaves import WrappingFlat
from braidax.data.source import Box, Indices, Sliced, Source, Wrapping, WrappingIntegers, allocate, prepare_slices
from braidax.errors import ArgumentError


def select(source: Source, columns: str | Sequence[str]) -> Source:
    """Returns a source whose samples have some of the leaves of another's.

    Formats that keep leaves apart read only these; others read whole records and leave the rest out.

    **Arguments:** `source`: samples are mappings. `columns`: their keys, in any order; one may be given as it is.

    **Raises:** `ArgumentError` for samples that are no mappings, and for keys that they do not have.
    """
    names = [columns] if isinstance(columns, str) else list(columns)
    spec = source.sample_spec
    there = sorted(cast("Mapping[str, Any]", spec)) if isinstance(spec, Mapping) else []
    if not names or len(set(names)) < len(names) or not set(names) <= set(there):
        has = f"samples have {there}" if there else f"samples are no mappings, but {jax.tree.structure(spec)}"
        raise ArgumentError(f"columns={columns!r}: {has}; expected some of their keys, each once")
    kind = _SelectedSlices if isinstance(source, Sliced) else _Selected
    return kind(source, tuple(sorted(names)))


@dataclass(frozen=True, eq=False, repr=False)
class _Selected(Wrapping, WrappingIntegers, WrappingFlat):
    columns: tuple[str, ...]

    @property
    def sample_spec(self) -> Any:
        return {name: self.source.sample_spec[name] for name in self.columns}

    def read(self, indices: Int64[np.ndarray, " n"], out: Any) -> None:
        spec = self.source.sample_spec
        others = {name: leaf for name, leaf in spec.items() if name not in self.columns}
        self.source.read(indices, {**allocate(others, len(indices)), **out})

    @property
    def own_stamp(self) -> str | None:
        return f"columns {self.columns}"

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "leaves": ", ".join(self.columns)}


class _SelectedSlices(_Selected, Sliced):
    """The same of a source that can leave leaves out: they are not read."""

    @property
    def cut_dims(self) -> Sequence[int]:
        dims = cast(Sliced, self.source).cut_dims
        return [depth for depth, is_kept in zip(dims, self._kept(), strict=True) if is_kept]

    def read(self, indices: Int64[np.ndarray, " n"], out: Any) -> None:
        leaves = jax.tree.leaves(self.sample_spec)
        self.read_slices(indices, [tuple((0, size) for size in leaf.shape) for leaf in leaves], jax.tree.leaves(out))

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[Any]) -> None:
        """Reads the leaves that are left."""
        cast(Sliced, self.source).read_slices(indices, self._spread(boxes), self._spread(out))

    def prepare(self, indices: Indices) -> None:
        """Says that samples will be read soon, without the leaves that are left out."""
        leaves = jax.tree.leaves(self.sample_spec)
        self.prepare_slices(indices, [tuple((0, size) for size in leaf.shape) for leaf in leaves])

    def prepare_slices(self, indices: Indices, boxes: Sequence[Box | None]) -> None:
        """Says that parts of samples will be read soon."""
        prepare_slices(self.source, indices, self._spread(boxes))

    def _kept(self) -> list[bool]:
        """Says for each leaf of the source inside, in PyTree order, whether it is left."""
        spec: Mapping[str, Any] = self.source.sample_spec
        numbers = {name: len(jax.tree.leaves(leaves)) for name, leaves in spec.items()}
        return [name in self.columns for name in sorted(numbers) for _ in range(numbers[name])]

    def _spread(self, given: Sequence[Any]) -> list[Any]:
        values = iter(given)
        return [next(values) if is_kept else None for is_kept in self._kept()]
