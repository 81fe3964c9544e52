"""Rows of a table into many parts: where each goes, and all columns in one pass over the rows each."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.bindings import import_binding
from braidax.extras import import_pyarrow
from braidax.frame.moving.threads import each
from braidax.frame.polars import pl

_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)
_FEW_PARTS = 2  # for which filters take no more time
MANY_ROWS = 1 << 31  # which the binding has no numbers for
_PLAIN = frozenset([*_INTEGERS, pl.Float32, pl.Float64, pl.Date, pl.Time, pl.Datetime, pl.Duration])
"""Dtypes of which a value is a number of 1, 2, 4 or 8 bytes."""


def places_of(hashes: "pl.Series", size: int, num_buckets: int, *, num_threads: int = 1) -> NDArray[np.uint16]:
    """Returns the place of each hash, `[rows]`: `rank * num_buckets + bucket`, the bucket being the same for any rank.

    **Arguments:** `hashes`: `[rows]` uint64. `size`: of the ranks. `num_buckets`: a power of two.
    """
    binding = compiled()
    if binding is not None:
        return _chunkwise(hashes, lambda mine, places: binding.places(mine, size, num_buckets, places), num_threads)
    mine = hashes.to_numpy()
    ranks = ((mine >> np.uint64(16) & np.uint64(0xFFFFFFFF)) * np.uint64(size)) >> np.uint64(32)
    buckets = mine >> np.uint64(48) & np.uint64(num_buckets - 1)
    return (ranks * np.uint64(num_buckets) + buckets).astype(np.uint16)


def places_between(values: "pl.Series", splitters: NDArray[np.int64], *, num_threads: int = 1) -> NDArray[np.uint16]:
    """Returns how many splitters do not follow each value, `[rows]`.

    **Arguments:** `values`: `[rows]` int64, without nulls. `splitters`: `[1 to 65535]`, ascending.
    """
    binding = compiled()
    if binding is not None:
        return _chunkwise(values, lambda mine, places: binding.ranges(mine, splitters, places), num_threads)
    return np.searchsorted(splitters, values.to_numpy(), side="right").astype(np.uint16)


def _chunkwise(
    series: "pl.Series", fill: Callable[[NDArray[Any], NDArray[np.uint16]], None], num_threads: int
) -> NDArray[np.uint16]:
    """Returns the places of all values, which a function fills in for those that lie behind one another in memory."""
    places = np.empty(len(series), np.uint16)
    chunks = [chunk.to_numpy(allow_copy=False) for chunk in series.get_chunks()]
    parts = [places[end - len(chunk) : end] for chunk, end in zip(chunks, _ends(chunks), strict=True)]
    each(lambda pair: fill(*pair), zip(chunks, parts, strict=True), num_threads)
    return places


def _ends(chunks: Sequence[NDArray[Any]]) -> Iterator[int]:
    return itertools.accumulate(map(len, chunks))


def split(
    frame: "pl.DataFrame", places: NDArray[np.uint16], num_parts: int, *, num_threads: int = 1
) -> "list[pl.DataFrame]":
    """Returns the parts of a table, the rows of each in their order.

    **Arguments:** `places`: `[rows]`, the part of each row, below `num_parts`.
    """
    if num_parts == 1:
        return [frame]
    if num_parts <= _FEW_PARTS:
        return [frame.filter(pl.Series(places == part)) for part in range(num_parts)]
    binding = compiled()
    if binding is None or len(places) >= MANY_ROWS:
        order = np.argsort(places.astype(np.uint8) if num_parts <= 256 else places, kind="stable")
        ends = np.cumsum(np.bincount(places, minlength=num_parts))
        ordered = frame[pl.Series(order)]
    else:
        ends = np.cumsum(counts_of(places, num_parts))
        positions = positions_of(places, np.concatenate([[0], ends[:-1]]))
        ordered = _scattered(frame, positions, num_threads)
    return [ordered[begin:end] for begin, end in itertools.pairwise([0, *ends.tolist()])]


def counts_of(places: NDArray[np.uint16], num_parts: int) -> NDArray[np.int64]:
    """Returns how many rows each part has, `[num_parts]`. It needs what is compiled, as does what follows."""
    counts = np.empty(num_parts, np.int64)
    _needed().counts(places, counts)
    return counts


def positions_of(places: NDArray[np.uint16], begins: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Returns where each row goes, `[rows]`, if those of a part follow one another in their order.

    **Arguments:** `begins`: `[parts]`, where the first row of each part goes.
    """
    positions = np.empty(len(places), np.uint32)
    _needed().positions(places, begins.astype(np.int64), positions)
    return positions


def scatter(
    chunks: Sequence[NDArray[Any]], positions: NDArray[np.uint32], out: NDArray[Any], rest: NDArray[Any]
) -> None:
    """Puts values to their positions.

    **Arguments:** `chunks`: `[rows]` in all. `positions`: of each, in `out`, or as far behind its end in `rest`.
    """
    for values, end in zip(chunks, _ends(chunks), strict=True):
        _needed().scatter(values, positions[end - len(values) : end], out, rest)


def numbers_of(series: "pl.Series") -> list[NDArray[Any]]:
    """Returns the numbers that a column is, as they lie in memory; none for nulls, and for what is no number."""
    if series.dtype.base_type() not in _PLAIN or series.null_count() or not len(series):
        return []
    return [chunk.to_physical().to_numpy(allow_copy=False) for chunk in series.get_chunks()]


def series_of(values: NDArray[Any], name: str, dtype: Any) -> "pl.Series":
    """Returns a column of numbers that lie in memory."""
    pa: Any = import_pyarrow(purpose="a frame")
    array = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
    found: Any = pl.from_arrow(array)
    return found.cast(dtype).alias(name)


def _scattered(frame: "pl.DataFrame", positions: NDArray[np.uint32], num_threads: int) -> "pl.DataFrame":
    """Returns the rows of a table at their positions, each of which there is once."""
    plain = {series.name: chunks for series in frame if (chunks := numbers_of(series))}
    others = frame.drop(list(plain))
    if others.width:
        order = np.empty_like(positions)
        scatter([np.arange(len(order), dtype=np.uint32)], positions, order, order[:0])
        others = others.rechunk()[pl.Series(order)]

    def moved(name: str) -> "pl.Series":
        out = np.empty(len(positions), plain[name][0].dtype)
        scatter(plain[name], positions, out, out[:0])
        return series_of(out, name, frame.schema[name])

    done = dict(zip(plain, each(moved, plain, num_threads), strict=True))
    return pl.DataFrame([done[name] if name in done else others[name] for name in frame.columns])


def _needed() -> ModuleType:
    found = compiled()
    assert found is not None
    return found


@cache
def compiled() -> ModuleType | None:
    """Returns what is compiled, or None where it is not: NumPy and Polars then do the same in more time."""
    return import_binding("braidax.frame.moving.scatter_binding")
