"""Rows of a table into many parts: where each goes, and all columns in one pass over the rows each."""

import importlib
import itertools
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.extras import import_pyarrow
from braidax.frame.polars import pl

_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)
_FEW_PARTS = 2  # for which filters take no more time
_MANY_ROWS = 1 << 32  # which the binding has no numbers for
_PLAIN = frozenset([*_INTEGERS, pl.Float32, pl.Float64, pl.Date, pl.Time, pl.Datetime, pl.Duration])
"""Dtypes of which a value is a number of 1, 2, 4 or 8 bytes."""


def places_of(hashes: "pl.Series", size: int, num_buckets: int) -> NDArray[np.uint16]:
    """Returns the place of each hash, `[rows]`: `rank * num_buckets + bucket`, the bucket being the same for any rank.

    **Arguments:** `hashes`: `[rows]` uint64. `size`: of the ranks. `num_buckets`: a power of two.
    """
    mine = hashes.to_numpy()
    binding = _binding()
    if binding is not None:
        places = np.empty(len(mine), np.uint16)
        binding.places(mine, size, num_buckets, places)
        return places
    ranks = ((mine >> np.uint64(16) & np.uint64(0xFFFFFFFF)) * np.uint64(size)) >> np.uint64(32)
    buckets = mine >> np.uint64(48) & np.uint64(num_buckets - 1)
    return (ranks * np.uint64(num_buckets) + buckets).astype(np.uint16)


def split(frame: "pl.DataFrame", places: NDArray[np.uint16], num_parts: int) -> "list[pl.DataFrame]":
    """Returns the parts of a table, the rows of each in their order.

    **Arguments:** `places`: `[rows]`, the part of each row, below `num_parts`.
    """
    if num_parts == 1:
        return [frame]
    if num_parts <= _FEW_PARTS:
        return [frame.filter(pl.Series(places == part)) for part in range(num_parts)]
    binding = _binding()
    frame = frame.rechunk()
    if binding is None or len(places) >= _MANY_ROWS:
        order = np.argsort(places.astype(np.uint8) if num_parts <= 256 else places, kind="stable")
        ends = np.cumsum(np.bincount(places, minlength=num_parts))
        ordered = frame[pl.Series(order)]
    else:
        ends, positions = np.empty(num_parts, np.int64), np.empty(len(places), np.uint32)
        binding.positions(places, ends, positions)
        ordered = _Scattering(binding, positions).all(frame)
    return [ordered[begin:end] for begin, end in itertools.pairwise([0, *ends.tolist()])]


class _Scattering:
    """Puts the values of columns to their positions. **Arguments:** `positions`: `[rows]`, each once."""

    def __init__(self, binding: ModuleType, positions: NDArray[np.uint32]) -> None:
        self._binding = binding
        self._positions = positions
        self._pyarrow: Any = import_pyarrow(purpose="a frame")

    def all(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        """Returns the rows at their positions."""
        plain = {series.name: values for series in frame if (values := _values(series)) is not None}
        others = frame.drop(list(plain))
        if others.width:
            order = np.empty_like(self._positions)
            self._binding.scatter(np.arange(len(order), dtype=np.uint32), self._positions, order)
            others = others[pl.Series(order)]
        columns = [
            self._scattered(plain[name], name, dtype) if name in plain else others[name]
            for name, dtype in frame.schema.items()
        ]
        return pl.DataFrame(columns)

    def _scattered(self, values: NDArray[Any], name: str, dtype: Any) -> "pl.Series":
        out = np.empty_like(values)
        self._binding.scatter(values, self._positions, out)
        pa = self._pyarrow
        array = pa.Array.from_buffers(pa.from_numpy_dtype(out.dtype), len(out), [None, pa.py_buffer(out)])
        moved: Any = pl.from_arrow(array)
        return moved.cast(dtype).alias(name)


def _values(series: "pl.Series") -> NDArray[Any] | None:
    """Returns the numbers that a column is, in memory; None for nulls, and for what is no number."""
    if series.dtype.base_type() not in _PLAIN or series.null_count() or not len(series):
        return None
    return series.to_physical().to_numpy(allow_copy=False)


@cache
def _binding() -> ModuleType | None:
    """Returns what is compiled, or None where it is not: NumPy and Polars then do the same in more time."""
    try:
        return importlib.import_module("braidax.frame.moving.scatter_binding")
    except ImportError:
        return None
