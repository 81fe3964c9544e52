"""Several sources as one, the samples of each behind those of the one before."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.rows import Rows
from braidax.data.leaves import Flat, flat_of
from braidax.data.source import (
    Box,
    Indices,
    Sliced,
    Source,
    allocate,
    check_indices,
    prepare,
    prepare_slices,
    source_at,
    stamp_of,
    widened,
)
from braidax.data.transforms.mixture import check_alike
from braidax.errors import ArgumentError


def concat(sources: Sequence[Source]) -> Source:
    """Returns a source of all samples of several others, one behind the other; `mix` takes them in proportions.

    **Raises:** `ArgumentError` when there is none, or their samples differ in structure, shape or dtype.
    """
    given = list(sources)
    if not given:
        raise ArgumentError("sources= is empty; give at least one source")
    for number, source in enumerate(cast("list[Any]", given)):
        if not isinstance(source, Source):
            raise ArgumentError(
                f"sources=: source {number} is {source!r:.80}; expected a source: give braidax.open(...) of it"
            )
    check_alike(given, [f"source {number}" for number in range(len(given))])
    return _SlicedConcatenation(given) if all(isinstance(one, Sliced) for one in given) else _Concatenation(given)


class _Concatenation(Source):
    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._ends = np.cumsum([len(source) for source in self.sources])

    @property
    def sample_spec(self) -> Any:
        return self.sources[0].sample_spec

    def __len__(self) -> int:
        return int(self._ends[-1])

    def at(self, seed: int | None, epoch: int) -> Source:
        moved = [source_at(source, seed, epoch) for source in self.sources]
        same = all(one is other for one, other in zip(moved, self.sources, strict=True))
        return self if same else type(self)(moved)

    def widened(self) -> Source:
        """Returns the same of the sources with their integers of 64 bits as they are stored."""
        return type(self)([widened(source) for source in self.sources])

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns how all of the sources hold the values of a leaf; None where they differ."""
        found = [flat_of(source, leaf) for source in self.sources]
        return found[0] if found.count(found[0]) == len(found) else None

    def read(self, indices: Indices, out: Any) -> None:
        leaves, structure = jax.tree.flatten(out)
        for source, inside, rows in self._parts(indices):
            if len(inside) == len(indices):
                source.read(inside, out)
                return
            window = structure.flatten_up_to(allocate(source.sample_spec, len(inside)))
            parts = [
                target[rows] if isinstance(target, Rows) else leaf for target, leaf in zip(leaves, window, strict=True)
            ]
            source.read(inside, structure.unflatten(parts))
            for target, leaf in zip(leaves, parts, strict=True):
                if not isinstance(target, Rows):
                    target[rows] = leaf

    def prepare(self, indices: Indices) -> None:
        for source, inside, _ in self._parts(indices):
            prepare(source, inside)

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        stamps = [stamp_of(source) for source in self.sources]
        return None if None in stamps else f"concatenation {stamps}"

    def describe(self) -> Mapping[str, str]:
        parts = {
            f"source {number}": f"{len(source):,} samples; {source.describe().get('format', type(source).__name__)}"
            for number, source in enumerate(self.sources)
        }
        return {"format": f"concatenation of {len(self.sources)}", "samples": f"{len(self):,}", **parts}

    def _parts(self, indices: Indices) -> Iterator[tuple[Source, Indices, NDArray[np.int64]]]:
        """Yields what of a window comes from each source: it, its indices, and the rows of the window."""
        check_indices(indices, len(self), where=f"concatenation of {len(self.sources)} sources")
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            source = self.sources[number]
            yield source, indices[rows] - (self._ends[number] - len(source)), rows


class _SlicedConcatenation(_Concatenation, Sliced):
    """The same of sources all of which can be read in part."""

    @property
    def cut_dims(self) -> Sequence[int]:
        dims = [cast(Sliced, source).cut_dims for source in self.sources]
        return [min(of_leaf) for of_leaf in zip(*dims, strict=True)]

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Reads parts of samples into place."""
        for source, inside, rows in self._parts(indices):
            if len(inside) == len(indices):
                cast(Sliced, source).read_slices(inside, boxes, out)
                return
            window = [None if leaf is None else np.empty((len(rows), *leaf.shape[1:]), leaf.dtype) for leaf in out]
            cast(Sliced, source).read_slices(inside, boxes, window)
            for target, leaf in zip(out, window, strict=True):
                if target is not None and leaf is not None:
                    target[rows] = leaf

    def prepare_slices(self, indices: Indices, boxes: Sequence[Box | None]) -> None:
        """Says that parts of samples will be read soon."""
        for source, inside, _ in self._parts(indices):
            prepare_slices(source, inside, boxes)
