"""Sequence packing: documents of any length put together in rows of one length, which is a source like any other.

The rows are planned once, from nothing but the documents' lengths, and the plan is kept. So a packed source has an
exact length, its rows can be read at random, and a batch stays a pure function of seed, epoch and position; packing
whatever a loader just has at hand would give up all three.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Indices, Source, allocate, check_indices, prepare, source_at, stamp_of
from braidax.data.storage.derived import Derived
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.data.transforms.text.measuring import counting, differing, document_lengths, keep
from braidax.data.transforms.text.packing_plan import Plan, plan_in_memory, write_plan
from braidax.data.transforms.text.ragged import Ragged, lengths_of
from braidax.errors import ArgumentError, RecordError
from braidax.spans import span

_SEGMENTS, _POSITIONS = "segment_ids", "positions"
_INT32 = np.dtype(np.int32)
_WORTH_KEEPING = 1 << 17  # documents, whose plan takes a tenth of a second to make


def packed(
    source: Source,
    length: int,
    *,
    leaf: str = "tokens",
    along: Sequence[str] = (),
    pad: int = 0,
    cache: str | Path | None = None,
) -> Source:
    """Returns a source whose samples are rows of several documents each, put together so that little room is left.

    A sample has `leaf`, `[length]` (int32 where the ids fit), the documents one behind the other; `"segment_ids"`,
    int32 `[length]`, 1 for the first document of the row, 2 for the second, 0 behind the last; and `"positions"`, int32
    `[length]`, which counts from 0 in each. Every token of every document is in one row exactly; a document is cut only
    where it is longer than a row, and every piece is a segment of its own. Other leaves of the source are left out.

    Which documents share a row is planned when the source is made: best-fit decreasing in windows of at least 8192
    documents of a random order, about 1.2 s and 16 MB for a million of them. Lengths that the source does not know take
    a pass over all of it before, which shows its progress. A plan of many documents is kept in the cache folder
    (`$BRAIDAX_CACHE`, or else `~/.cache/braidax`); so are measured lengths, if the source can say what its samples
    depend on (see `Stamped`).

    **Arguments:** `source`: samples are mappings, with documents as a leaf of varying size that is the same in every
    epoch. `along`: further leaves, as long as `leaf` in each document, packed the same way: weights of a loss, for one.
    `pad`: what `leaf` holds behind the last document. `cache`: a folder to keep lengths and plan in,
    whatever the source; lengths of one without stamp are tried on a few documents before they are used again.

    **Raises:** `ArgumentError`; `RecordError` for a document that is no array, or not as long as it was planned.
    """
    if not 1 <= length < 2**31:
        raise ArgumentError(f"length={length}: expected between 1 and 2**31 - 1 tokens in a row")
    names = (leaf, *along)
    if len({*names, _SEGMENTS, _POSITIONS}) < len(names) + 2:
        raise ArgumentError(
            f"along={list(along)!r}: expected leaves besides leaf={leaf!r} and {_SEGMENTS!r}, {_POSITIONS!r}, each once"
        )
    leaves = [_narrowed(Ragged.of(source, name, needed_by="packed")) for name in names]
    if not -(2**31) <= pad < 2**31 or not _fits(pad, leaves[0].stored):
        raise ArgumentError(f"pad={pad!r} does not fit in {leaves[0].stored}, the dtype of leaf {leaf!r}")
    plan = _planned(source, length, leaf, None if cache is None else Path(cache))
    if not len(plan):
        raise ArgumentError(f"source holds no tokens at all in its {len(source)} documents; give one that has some")
    return _Packed(source, length, leaves, plan, pad)


class _Packed(Source):
    def __init__(self, source: Source, length: int, leaves: Sequence[Ragged], plan: Plan, pad: int) -> None:
        self.source = source
        self._length = length
        self._leaves = list(leaves)
        self._plan = plan
        self._pad = pad
        self._blanks = [np.zeros((length, *leaf.shape), leaf.stored) for leaf in leaves]
        self._blanks[0][...] = pad

    @property
    def sample_spec(self) -> Any:
        row = jax.ShapeDtypeStruct((self._length,), _INT32)
        packed = {leaf.leaf: jax.ShapeDtypeStruct((self._length, *leaf.shape), leaf.loaded) for leaf in self._leaves}
        return {**packed, _SEGMENTS: row, _POSITIONS: row}

    def __len__(self) -> int:
        return len(self._plan)

    def at(self, seed: int | None, epoch: int) -> Source:
        inner = source_at(self.source, seed, epoch)
        return self if inner is self.source else _Packed(inner, self._length, self._leaves, self._plan, self._pad)

    def prepare(self, indices: Indices) -> None:
        inside = indices[(indices >= 0) & (indices < len(self))]
        prepare(self.source, np.unique(self._plan.rows(inside).document))

    @property
    def stamp(self) -> str | None:
        """What becomes another when the rows do."""
        inner = stamp_of(self.source)
        return None if inner is None else f"{inner}/packed {self._length} {[leaf.leaf for leaf in self._leaves]}"

    def read(self, indices: Indices, out: Any) -> None:
        check_indices(indices, len(self), where="packed source")
        if not len(indices):
            return
        document, number, size, counts = self._plan.rows(indices)
        distinct, place = np.unique(document, return_inverse=True)
        window = allocate(self.source.sample_spec, len(distinct))
        self.source.read(distinct, window)
        with span("decode", "pack"):
            start = number * self._length
            self._check_lengths(window, distinct, place, start, size)
            ends = np.cumsum(counts)
            gaps = self._length - np.add.reduceat(size, ends - counts)
            bounds = list(zip(place.tolist(), start.tolist(), (start + size).tolist(), strict=True))
            rows = list(zip((ends - counts).tolist(), ends.tolist(), gaps.tolist(), strict=True))
            for leaf, blank in zip(self._leaves, self._blanks, strict=True):
                arrays = leaf.arrays(window[leaf.leaf], distinct)
                pieces = [arrays[found][first:stop] for found, first, stop in bounds]
                parts: list[NDArray[Any]] = []
                for first, stop, gap in rows:
                    parts += pieces[first:stop]
                    parts.append(blank[:gap])
                leaf.join(parts, out[leaf.leaf], indices)
            _number(size, counts, gaps, out)

    def describe(self) -> Mapping[str, str]:
        facts = self._plan.facts
        full = facts["tokens"] / (len(self) * self._length)
        where = "in memory" if self._plan.path is None else str(self._plan.path)
        return {
            **self.source.describe(),
            "samples": f"{len(self):,}",
            "packed": (
                f"{facts['documents']:,} documents ({facts['cut']:,} of them cut, {facts['empty']:,} empty) into "
                f"rows of {self._length:,}, {full:.2%} full"
            ),
            "plan": where,
        }

    def _check_lengths(
        self, window: Any, distinct: Indices, place: NDArray[Any], start: NDArray[Any], size: NDArray[Any]
    ) -> None:
        lengths = lengths_of(window[self._leaves[0].leaf])
        for leaf in self._leaves[1:]:
            other = lengths_of(window[leaf.leaf])
            if (other != lengths).any():
                wrong = int(np.flatnonzero(other != lengths)[0])
                raise RecordError(
                    f"record {distinct[wrong]}: leaf {leaf.leaf!r} has {other[wrong]} items, expected "
                    f"{lengths[wrong]}, as many as {self._leaves[0].leaf!r}; mend the record, or leave it out of along="
                )
        wrong = np.flatnonzero(np.minimum(lengths[place] - start, self._length) != size)
        if wrong.size:
            piece = int(wrong[0])
            kept = "" if self._plan.path is None else f", or delete {self._plan.path} if the data changed"
            raise RecordError(
                f"record {distinct[place[piece]]}: leaf {self._leaves[0].leaf!r} has {lengths[place[piece]]} tokens, "
                f"but {size[piece]} from token {start[piece]} on were planned; pack a source whose lengths stay the "
                f"same in all epochs (of a mixture, pack its parts){kept}"
            )


def _number(size: NDArray[np.int64], counts: NDArray[np.int64], gaps: NDArray[np.int64], out: Any) -> None:
    """Fills in segment ids and positions; the gap behind each row's documents is a segment with the number 0."""
    ends = np.cumsum(counts)
    sizes = np.insert(size, ends, gaps)
    numbers = np.arange(1, len(size) + 1) - np.repeat(ends - counts, counts)
    segments = np.repeat(np.insert(numbers, ends, 0), sizes)
    positions = np.arange(len(segments)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    out[_SEGMENTS].reshape(-1)[:] = segments
    np.multiply(positions, segments > 0, out=out[_POSITIONS].reshape(-1), casting="same_kind")


def _narrowed(ragged: Ragged) -> Ragged:
    """Token ids are int32 wherever that holds them, whatever they are stored as."""
    small = ragged.loaded.kind in "iu" and np.can_cast(ragged.loaded, _INT32, "safe")
    return Ragged(ragged.leaf, ragged.stored, _INT32, ragged.shape) if small else ragged


def _fits(value: int, dtype: np.dtype[Any]) -> bool:
    return dtype.kind not in "iu" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max


def _planned(source: Source, length: int, leaf: str, cache: Path | None) -> Plan:
    """Opens the plan that was kept, or makes one; it depends on nothing but the documents' lengths."""
    room = Room("packing", cache)
    lengths, digest = document_lengths(source, leaf, room, is_asked=cache is not None)
    _check_epochs(source, leaf, lengths)
    with Progress("packing", "", len(lengths), unit="documents") as work:
        if cache is not None or len(lengths) >= _WORTH_KEEPING:
            about = {"kind": "plan", "lengths": digest, "samples": len(lengths), "length": length}
            derived = Derived.named(room.folder, about)

            def write(file: IO[bytes]) -> Mapping[str, Any]:
                return write_plan(file.write, lengths, length, counting(work))

            if (kept := keep(derived, write, work, room)) is not None:
                return Plan(kept, derived, room)
        return plan_in_memory(lengths, length, counting(work))


def _check_epochs(source: Source, leaf: str, lengths: NDArray[np.int64]) -> None:
    later = source_at(source, 0, 1)
    if later is not source and (found := differing(later, leaf, lengths)) is not None:
        raise ArgumentError(
            f"packed: leaf={leaf!r} is not as long in the next epoch ({found}), so its rows cannot be planned; pack "
            "before what changes from epoch to epoch, and of a mixture pack the parts"
        )
