"""The contract of a source: a number of samples that can be read in any order from any thread.

Below it is what wraps a source, and what all sources are cut by: some of the samples of another one, which is what a
slice gives.
"""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsIndex, cast, overload, runtime_checkable

import jax
import numpy as np
import xxhash
from jaxtyping import Int64
from numpy.typing import NDArray

from braidax.data.leaves import VARYING as VARYING
from braidax.data.leaves import Indices as Indices
from braidax.data.leaves import Which, WrappingFlat, cut_places
from braidax.data.leaves import WrappingIntegers as WrappingIntegers
from braidax.data.leaves import allocate as allocate
from braidax.data.leaves import batch_spec as batch_spec
from braidax.data.leaves import check_indices as check_indices
from braidax.data.leaves import gather as gather
from braidax.data.leaves import is_at_hand as is_at_hand
from braidax.data.leaves import is_varying as is_varying
from braidax.data.leaves import listed as listed
from braidax.data.leaves import loader_dtype as loader_dtype
from braidax.data.leaves import narrow as narrow
from braidax.data.leaves import samples_of as samples_of
from braidax.data.leaves import told_leaves as told_leaves
from braidax.data.leaves import widened as widened
from braidax.data.outages import is_outage as is_outage
from braidax.data.outages import naming_records
from braidax.data.sampling.permutation import Permutation
from braidax.errors import ArgumentError

_LOOK_SAMPLES, _LOOK_BYTES = 256, 1 << 22  # of a window that going through a source reads at once


@runtime_checkable
class Readable(Protocol):
    """What a class needs for `braidax.open` to make a source of its objects: as `Source` says."""

    @property
    def sample_spec(self) -> Any:
        """The shape and dtype of every leaf."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Any, out: Any) -> None:
        """Reads samples into place."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Returns facts for people."""
        ...


@runtime_checkable
class Source(Protocol):
    """Samples on disk or in memory, readable at random.

    A source of your own inherits from this class and has `sample_spec`, `__len__`, `read` and `describe`; the rest
    follows from these. A path becomes a source through `braidax.open`, and so does any object that has these four, or
    `__len__` and `__getitem__`.
    """

    @property
    def sample_spec(self) -> Any:
        """A PyTree of `jax.ShapeDtypeStruct`: the shape and dtype of every leaf of **one** sample (no batch dim)."""
        ...

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def read(self, indices: Int64[np.ndarray, "n"], out: Any) -> None:
        """Reads samples into place.

        **Arguments:** `indices`: int64 `[n]`, in any order, repeats allowed. `out`: a PyTree like `sample_spec` of
        C-contiguous NumPy arrays `[n, *sample_shape]`; leaf `[i]` is filled with sample `indices[i]`. Called from many
        threads at once. Neither argument may be kept after the call.

        **Raises:** `RecordError` or `FormatError`, naming file, record, value and remedy.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Returns facts for people, in the order to show them, such as `{"format": …, "files": …}`."""
        ...

    def batch_spec(self, batch_size: int) -> Any:
        """Returns `sample_spec` with a leading batch dim, as `parallelize(batch=…)` takes it.

        **Arguments:** `batch_size`: samples in one global batch.
        """
        return batch_spec(self.sample_spec, batch_size)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: Which) -> "Source": ...
    def __getitem__(self, index: SupportsIndex | Which) -> Any:
        """Returns one sample, or a source of some of them, as NumPy does: nothing is read for a slice.

        **Arguments:** `index`: a number, negative ones from the end: a PyTree like `sample_spec` of arrays and NumPy
        scalars. A slice, indices or a mask of bools `[num_samples]`: a source. What is random in samples is as in epoch
        0 of seed 0.

        **Raises:** `IndexError` where there is no such sample; what `read` raises.
        """
        if isinstance(index, slice) or np.ndim(cast(Any, index)):
            return rows_of(self, cast("Which", index))
        try:
            number = operator.index(cast(SupportsIndex, index))
        except TypeError as error:
            raise ArgumentError(
                f"index={index!r:.80}: expected a number, a slice, integers or a mask; for one leaf of all samples use "
                "braidax.data.select"
            ) from error
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns samples by their numbers, read at once; PyTorch's loaders ask for whole batches by it."""
        return samples_of(to_numpy(rows_of(self, indices)), len(indices))

    def __iter__(self) -> Iterator[Any]:
        """Yields the samples in their order, each as `source[i]` is."""
        sample_bytes = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.sample_spec))
        step = max(1, min(_LOOK_SAMPLES, _LOOK_BYTES // max(sample_bytes, 1)))
        for start in range(0, len(self), step):
            window = to_numpy(rows_of(self, slice(start, start + step)))
            yield from samples_of(window, min(step, len(self) - start))

    def __repr__(self) -> str:
        leaves = ", ".join(f"{path} {kind}" for path, kind in told_leaves(self.sample_spec).items())
        return f"<{type(self).__name__.lstrip('_')}: {len(self):,} samples of {leaves}>"


@runtime_checkable
class Redrawn(Protocol):
    """A source whose samples differ from epoch to epoch, as augmented ones do, or one that wraps another source."""

    def at(self, seed: int | None, epoch: int) -> Source:
        """Returns the source as it is in an epoch: a pure function of seed and epoch, with the same spec and length.

        **Arguments:** `seed`, `epoch`: of the cursor; what is random in sample `i` depends on `(seed, epoch, i)` alone.
        """
        ...


@runtime_checkable
class Prepared(Protocol):
    """A source that can fetch samples ahead, or one that wraps another source."""

    def prepare(self, indices: Indices) -> None:
        """Says that these samples, int64 `[n]`, will be read soon; returns at once and raises nothing of theirs."""
        ...


Box = tuple[tuple[int, int], ...]
"""A part of a sample: `(start, stop)` of every dim."""


@runtime_checkable
class Sliced(Protocol):
    """A source that reads some leaves, or parts of them, for so much less work than whole samples."""

    @property
    def cut_dims(self) -> Sequence[int]:
        """For each leaf, in PyTree order: along how many dims of a sample parts can be read, from the first one on.

        0 means that the leaf is read whole, or left out.
        """
        ...

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Reads parts of samples into place.

        **Arguments:** `indices`: as those of `Source.read`. `boxes`: for each leaf, in PyTree order, which part of a
        sample; None for a leaf that is not wanted. `out`: for each leaf a C-contiguous array `[n, *sizes of the box]`,
        or None. **Raises:** as `Source.read`.
        """
        ...


@runtime_checkable
class PreparedSlices(Protocol):
    """A source that can fetch parts of samples ahead."""

    def prepare_slices(self, indices: Indices, boxes: Sequence[Box | None]) -> None:
        """Says that parts of samples will be read soon, as `Sliced.read_slices` is given them; returns at once."""
        ...


@runtime_checkable
class Stamped(Protocol):
    """A source that can say what its samples depend on."""

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, such as names, sizes and times of files; None: not known."""
        ...


def stamp_of(source: Source) -> str | None:
    """Returns what becomes another when the samples of a source do; None: not known."""
    return source.stamp if isinstance(source, Stamped) else None


def source_at(source: Source, seed: int | None, epoch: int) -> Source:
    """Returns a source as it is in an epoch: itself, unless it is redrawn in each."""
    return source.at(seed, epoch) if isinstance(source, Redrawn) else source


def prepare(source: Source, indices: Indices) -> None:
    """Tells a source that can fetch ahead which samples will be read soon."""
    if _offers(type(source), Prepared):
        cast(Prepared, source).prepare(indices)


def prepare_slices(source: Source, indices: Indices, boxes: Sequence[Box | None]) -> None:
    """Tells a source that can fetch parts ahead which ones will be read soon."""
    if _offers(type(source), PreparedSlices):
        cast(PreparedSlices, source).prepare_slices(indices, boxes)


@functools.cache
def _offers(kind: type[Any], wanted: type[Any]) -> bool:
    """Says whether a class of sources can do what a protocol has; asked for every batch, and slow to find out."""
    return issubclass(kind, wanted)


def read_samples(source: Source, indices: NDArray[np.int64], out: Any) -> None:
    """Reads samples into place; whatever a source raises becomes a braidax error that names the records."""
    with naming_records(source, indices):
        source.read(indices, out)


def read_slices(source: Source, indices: NDArray[np.int64], boxes: Sequence[Box | None], out: Sequence[Any]) -> None:
    """Reads parts of samples into place, as `read_samples`. **Arguments:** as of `Sliced.read_slices`."""
    with naming_records(source, indices):
        cast(Sliced, source).read_slices(indices, boxes, out)


@dataclass(frozen=True, eq=False, repr=False)
class Wrapping(Source):
    """A source with as many samples as the one inside, `source`, made into something else."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def at(self, seed: int | None, epoch: int) -> Source:
        """Returns itself around the source inside as that is in an epoch."""
        inside = source_at(self.source, seed, epoch)
        return self if inside is self.source else replace(self, source=inside)

    def prepare(self, indices: Indices) -> None:
        """Hands on to the source inside which samples will be read soon."""
        prepare(self.source, indices)

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        inside, own = stamp_of(self.source), self.own_stamp
        return None if inside is None or own is None else f"{inside}/{own}"

    @property
    def own_stamp(self) -> str | None:
        """What becomes another when something else is made of the same samples; None: not known."""
        return None


class WrappingSlices(Sliced):
    """What a source hands on whose source inside can be read in part."""

    source: Source

    @property
    def cut_dims(self) -> Sequence[int]:
        """Those of the source inside."""
        return cast(Sliced, self.source).cut_dims


@dataclass(frozen=True, eq=False, repr=False)
class ChosenRows(Wrapping, WrappingIntegers, WrappingFlat):
    """Some of the samples of the source inside, in another order.

    `places`: their indices in it or, with a `permutation`, their positions in that order of it. So neither a slice nor
    a random part needs memory for each sample.
    """

    places: range | NDArray[np.int64]
    permutation: Permutation | None = None

    @property
    def sample_spec(self) -> Any:
        return self.source.sample_spec

    def __len__(self) -> int:
        return len(self.places)

    @property
    def is_at_hand(self) -> bool:
        """Whether reads of the source inside are mere copies now."""
        return is_at_hand(self.source)

    def inside(self, indices: Indices) -> Indices:
        """Returns the indices that samples have in the source inside."""
        check_indices(indices, len(self), where=f"rows of {type(self.source).__name__}")
        if isinstance(self.places, range):
            found = indices * self.places.step + self.places.start
        else:
            found = self.places[indices]
        return found if self.permutation is None else self.permutation(found)

    def read(self, indices: Indices, out: Any) -> None:
        self.source.read(self.inside(indices), out)

    def prepare(self, indices: Indices) -> None:
        prepare(self.source, self.inside(indices))

    @property
    def own_stamp(self) -> str | None:
        return f"rows {self.digest()}"

    def describe(self) -> Mapping[str, str]:
        return {
            **self.source.describe(),
            "samples": f"{len(self):,}",
            "rows": f"{len(self):,} of {len(self.source):,} ({self.digest()})",
        }

    def digest(self) -> str:
        """Returns what becomes another when other samples are chosen."""
        if isinstance(self.places, range):
            told = f"{self.places.start}:{self.places.stop}:{self.places.step}"
        else:
            told = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.places).data)
        return told if self.permutation is None else f"{told} of {self.permutation.name}"


class _SlicedRows(ChosenRows, WrappingSlices):
    """Some of the samples of a source that can be read in part."""

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[Any]) -> None:
        """Reads parts of samples into place."""
        cast(Sliced, self.source).read_slices(self.inside(indices), boxes, out)

    def prepare_slices(self, indices: Indices, boxes: Sequence[Box | None]) -> None:
        """Says that parts of samples will be read soon."""
        prepare_slices(self.source, self.inside(indices), boxes)


def rows_of(source: Source, which: Which) -> Source:
    """Returns a source of some of the samples of another one. **Arguments**, **Raises:** as of `Source.__getitem__`."""
    if isinstance(source, ChosenRows):  # slices of slices stay as quick as one
        return replace(source, places=cut_places(source.places, which))
    return chosen_rows(source, cut_places(range(len(source)), which))


def chosen_rows(source: Source, places: range | NDArray[np.int64], permutation: Permutation | None = None) -> Source:
    """Returns a source of samples at places that are known to be there. **Arguments:** as of `ChosenRows`."""
    return (_SlicedRows if isinstance(source, Sliced) else ChosenRows)(source, places, permutation)


def told_rows(source: Source) -> str:
    """Returns in words which samples were chosen, in a source and in those inside it; empty where all are."""
    inside: list[Any] = [getattr(source, "source", None), *getattr(source, "sources", ())]
    found = [told_rows(one) for one in inside if isinstance(one, Source)]
    own = [source.digest()] if isinstance(source, ChosenRows) else []
    return "; ".join([*own, *filter(None, found)])


def to_numpy(source: Source) -> Any:
    """Reads all samples of a source, as `to_numpy(source[:16])`.

    **Returns:** a PyTree like `sample_spec` of arrays `[num_samples, *sample_shape]`. **Raises:** what reading does.
    """
    out = allocate(source.sample_spec, len(source))
    if len(source):
        read_samples(source, np.arange(len(source), dtype=np.int64), out)
    return out
