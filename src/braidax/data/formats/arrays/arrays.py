"""Arrays that lie row by row in memory, or in a file that is mapped."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.record_layout import RecordLayout, read_boxes
from braidax.data.leaves import Integers
from braidax.data.source import Box, Indices, Sliced, Source, check_indices, gather, loader_dtype
from braidax.data.storage.files import stamp_of_files
from braidax.data.storage.mapped import Mapped
from braidax.errors import ArgumentError, FormatError


class ArraySource(Source, Sliced):
    """Samples that are the rows of arrays, in memory or memory-mapped.

    **Arguments:** `leaves`: name → `[num_samples, *sample_shape]`. `where`: the file or object, for errors. `facts`:
    what `describe` shows besides the samples and the sizes. `mapped`: the file that leaves are views of, if any.
    `classes`: of leaves of class numbers, the name of each, from 0 on.

    **Raises:** `FormatError` for leaves without a dim of samples, of different lengths, empty, or of no JAX dtype.
    """

    def __init__(
        self,
        leaves: Mapping[str, NDArray[Any]],
        *,
        where: str,
        facts: Mapping[str, str],
        mapped: Mapped | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._leaves = dict(leaves)
        self._classes = dict(classes or {})
        self._integers: Integers = "loaded"
        self._narrow: Source | None = None  # whose files go when nothing holds it
        self._mapped = mapped
        self._places = {name: mapped.place_of(array) if mapped else None for name, array in self._leaves.items()}
        self._where = where
        self._facts = dict(facts)
        lengths = {name: len(array) if array.ndim else None for name, array in self._leaves.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            found = ", ".join(f"{name!r} {array.shape}" for name, array in self._leaves.items()) or "no array at all"
            raise FormatError(
                f"{where}: expected arrays with one and the same number of samples as their first dim; found {found}: "
                "store arrays of equal length, and scalars elsewhere"
            )
        self._num_samples = len(next(iter(self._leaves.values())))
        if self._num_samples == 0:
            raise FormatError(f"{where}: it holds 0 samples; expected at least one")
        self._spec = {
            name: jax.ShapeDtypeStruct(array.shape[1:], loader_dtype(array.dtype, where=where, leaf=name))
            for name, array in self._leaves.items()
        }
        self._layouts = {
            name: RecordLayout(self._leaves[name].shape[1:], self._leaves[name].dtype) for name in sorted(self._leaves)
        }
        self._whole = {name: layout.whole for name, layout in self._layouts.items()}

    @property
    def sample_spec(self) -> Any:
        """A dict of `jax.ShapeDtypeStruct`, one per leaf."""
        return dict(self._spec)

    @property
    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Of leaves of class numbers, the name of each, from 0 on, where the format has them."""
        return self._classes

    def widened(self) -> "ArraySource":
        """Returns the same with integers of 64 bits as they are stored."""
        found = copy.copy(self)
        found._integers, found._narrow = "stored", self
        found._spec = {
            name: jax.ShapeDtypeStruct(spec.shape, self._leaves[name].dtype.newbyteorder("="))
            if self._leaves[name].dtype.kind in "iu"
            else spec
            for name, spec in self._spec.items()
        }
        return found

    def __len__(self) -> int:
        return self._num_samples

    @property
    def cut_dims(self) -> Sequence[int]:
        """All dims of each leaf."""
        return [layout.cut_dims(gap_bytes=0) for layout in self._layouts.values()]

    @property
    def is_at_hand(self) -> bool:
        """Whether reads are mere copies now, and wait for no disk."""
        return self._mapped is None or not self._mapped.is_cold

    def read(self, indices: Indices, out: Any) -> None:
        """Copies rows into place: one vectorized copy per leaf."""
        self.read_slices(indices, list(self._whole.values()), [out[name] for name in self._layouts])

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Copies parts of rows into place: one vectorized copy per leaf, which touches nothing else of the array."""
        check_indices(indices, self._num_samples, where=self._where)
        wanted = [
            (name, box, target)
            for name, box, target in zip(self._layouts, boxes, out, strict=True)
            if box is not None and target is not None
        ]
        gathered = [part for part in wanted if self._is_gathered(part[0], part[1])]
        with self._reading([name for name, _, _ in gathered], indices):
            for name, box, target in gathered:
                array = self._leaves[name]
                if box != self._whole[name]:
                    array = array[(slice(None), *(slice(start, stop) for start, stop in box))]
                gather(array, indices, target, where=self._where, leaf=name)
        for name, box, target in wanted:
            if not self._is_gathered(name, box):
                self._read_box(name, indices, box, target)
            if target.dtype == np.bool_:  # a damaged file may hold other bytes than 0 and 1
                np.not_equal(target.view(np.uint8), 0, out=target)

    def prepare(self, indices: Indices) -> None:
        """Asks the kernel ahead for the bytes of these samples, while the disk is what reads wait for."""
        if self._mapped is None or not self._mapped.is_cold:
            return
        for name in self._leaves:
            places, row_bytes = self._rows(name, indices)
            if len(places):
                self._mapped.prepare(places, np.full(len(places), row_bytes))

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        if self._mapped is None:
            return None
        return stamp_of_files(self._mapped, type(self).__name__, self.sample_spec, len(self), self._facts)

    def describe(self) -> Mapping[str, str]:
        """Returns format, files, samples and bytes."""
        num_bytes = sum(array.nbytes for array in self._leaves.values())
        return {**self._facts, "samples": f"{self._num_samples:,}", "bytes": f"{num_bytes:,}"}

    def __reduce__(self) -> tuple[Callable[..., "ArraySource"], tuple[Any, ...]]:
        if self._mapped is None:
            return _source_again, (self._leaves, {}, self._where, self._facts, None, self._classes, self._integers)
        kept = {name: array for name, array in self._leaves.items() if self._places[name] is None}
        views = {
            name: (int(place - self._mapped.origins[0]), array.dtype, array.shape, array.strides)
            for name, array in self._leaves.items()
            if (place := self._places[name]) is not None
        }
        return _source_again, (kept, views, self._where, self._facts, self._mapped, self._classes, self._integers)

    def _is_gathered(self, name: str, box: Box) -> bool:
        """Says whether NumPy takes the rows of a leaf; parts of them are found by their bytes where they can be."""
        return box == self._whole[name] or not self._leaves[name].flags.c_contiguous

    def _read_box(self, name: str, indices: Indices, box: Box, target: NDArray[Any]) -> None:
        from braidax.data.storage.taken import take_bytes

        array, place, layout = self._leaves[name], self._places[name], self._layouts[name]
        if self._mapped is None or place is None:
            take, first = functools.partial(take_bytes, array.reshape(-1).view(np.uint8)), 0
        else:
            take, first = self._mapped.gather, place
        starts = first + indices * layout.num_bytes
        read_boxes(take, starts, box, target, layout=layout, records=indices, where=self._where, leaf=name)

    def _reading(self, names: Sequence[str], indices: Indices) -> AbstractContextManager[None]:
        if self._mapped is None or not names:
            return nullcontext()
        num_ranges = len(indices) * sum(self._is_mapped_by_row(name) for name in names)
        return self._mapped.reading_found(num_ranges, lambda: [self._rows(name, indices) for name in names])

    def _is_mapped_by_row(self, name: str) -> bool:
        return self._places[name] is not None and self._leaves[name].flags.c_contiguous

    def _rows(self, name: str, indices: Indices) -> tuple[Indices, np.int64]:
        """Returns the places of some samples of a leaf, and their bytes: none where they are not mapped row by row."""
        array, place = self._leaves[name], self._places[name]
        if place is None or not self._is_mapped_by_row(name):
            return indices[:0], np.int64(0)
        return place + indices * array[0].nbytes, np.int64(array[0].nbytes)


def _source_again(
    kept: dict[str, NDArray[Any]],
    views: dict[str, tuple[int, Any, Any, Any]],
    where: str,
    facts: Mapping[str, str],
    mapped: Mapped | None,
    classes: Mapping[str, Sequence[str]],
    integers: Integers,
) -> ArraySource:
    """Makes a source in another process: what is mapped is not copied there, but mapped again."""
    leaves = dict(kept)
    for name, (offset, dtype, shape, strides) in views.items():
        assert mapped is not None
        leaves[name] = np.ndarray(shape, dtype, mapped.array(0), offset, strides)
    found = ArraySource(leaves, where=where, facts=facts, mapped=mapped, classes=classes)
    return found if integers == "loaded" else found.widened()


def from_arrays(arrays: Mapping[str, Any]) -> ArraySource:
    """Returns a source over arrays in memory, which are not copied.

    **Arguments:** `arrays`: name → NumPy or JAX array `[num_samples, ...]`.

    **Raises:** `ArgumentError` for a value that is no array; `FormatError` as `ArraySource`.
    """
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray | jax.Array):
            raise ArgumentError(
                f"path_or_object: the dict's entry {name!r} is a {type(value).__name__}; expected an array "
                "[num_samples, ...]: np.asarray() it first, or open this entry alone"
            )
    leaves = {name: np.asarray(value) for name, value in arrays.items()}
    return ArraySource(leaves, where="arrays in memory", facts={"format": "arrays in memory"})
