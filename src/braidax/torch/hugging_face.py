"""A Hugging Face `Dataset` of numbers: batches straight from its Arrow table, without a Python object per sample."""

import math
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_FORMATS = ("numpy", "torch")
_NUMBERS = {f"{kind}{bits}Array" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)} | {
    "FloatArray",
    "DoubleArray",
}
_FIXED = "FixedSizeListArray"
_LISTS = {"ListArray", "LargeListArray", _FIXED}
_BLOCK = 1 << 20  # offsets looked at in one go
_PIECE_BYTES = 1 << 18  # rows copied in one go: they stay in the processor's cache until they are converted
_MAX_SPAN_BYTES = 1 << 61  # of what NumPy takes for the size of an array
_UNKNOWN, _OTHER = -1, -2  # in place of an address


class _Table:
    """The columns of a data set, and where its rows lie in them (None: as they are numbered)."""

    def __init__(self, columns: dict[str, "_Column"], rows: "_Column | None", num_rows: int, signature: Any) -> None:
        self._columns = columns
        self._rows = rows
        self._num_rows = num_rows
        self.signature = signature

    def __len__(self) -> int:
        return self._num_rows

    def fill(self, rows: NDArray[np.int64], out: Any) -> bool:
        """As of `braidax.torch.gathering.Table`."""
        if not isinstance(out, dict):
            return False
        leaves = cast("dict[str, Any]", out)
        if leaves.keys() != self._columns.keys():
            return False
        if self._rows is not None:
            places = np.empty(len(rows), np.int64)
            if not self._rows.gather(rows, places):
                return False
            rows = places
        return all(self._columns[name].gather(rows, leaf.numpy()) for name, leaf in leaves.items())


class _Column:
    """A column of numbers, or of lists of as many numbers, in the chunks that it is stored in.

    Rows of many chunks are copied at once, by their addresses: a table on disk has a chunk for each thousand rows, so
    that a shuffled batch needs few rows of each.
    """

    def __init__(self, column: Any) -> None:
        self._column = column
        lengths = [len(chunk) for chunk in column.iterchunks()]
        self._starts = np.cumsum([0, *lengths], dtype=np.int64)
        self._addresses = np.full(len(lengths), _UNKNOWN, np.int64)  # of the first row of each chunk
        self._views: dict[int, NDArray[Any]] = {}  # which keep the memory
        self._dtype: np.dtype[Any] | None = None
        self._shape: tuple[int, ...] = ()

    def gather(self, rows: NDArray[np.int64], out: NDArray[Any]) -> bool:
        """Copies rows into `out`, `[n, *shape]`, or returns False if they do not all have that shape."""
        if rows.min() < 0 or rows.max() >= self._starts[-1]:  # which a data set's own choice of rows may have
            return False
        chunks = np.searchsorted(self._starts, rows, "right") - 1
        addresses = self._addresses[chunks]
        if (addresses == _UNKNOWN).any():
            for number in np.unique(chunks[addresses == _UNKNOWN]).tolist():
                self._look(number)
            addresses = self._addresses[chunks]
        if (addresses == _OTHER).any() or self._shape != out.shape[1:] or self._dtype is None:
            return False
        row_bytes = math.prod(self._shape) * self._dtype.itemsize
        if not row_bytes:
            return True
        first, last = int(addresses.argmin()), int(addresses.max())
        span = last - int(addresses[first]) + int(np.diff(self._starts).max()) * row_bytes
        if span > _MAX_SPAN_BYTES // row_bytes:
            return False
        places = addresses - addresses[first] + (rows - self._starts[chunks]) * row_bytes
        self._copy(self._views[int(chunks[first])], places, span, row_bytes, out)
        return True

    def _copy(
        self, lowest: NDArray[Any], places: NDArray[np.int64], span: int, row_bytes: int, out: NDArray[Any]
    ) -> None:
        """Copies rows that begin so many bytes behind the first one of the chunk at the lowest address.

        That chunk is looked at as an array that reaches over all chunks and what is between them, with a row at each
        byte; no other rows than those of chunks are read.
        """
        row = np.ndarray((1,), f"V{row_bytes}", buffer=lowest[:1])
        everywhere = np.lib.stride_tricks.as_strided(row, (span - row_bytes + 1,), (1,), writeable=False)
        step = max(1, _PIECE_BYTES // row_bytes)
        for start in range(0, len(places), step):
            piece = everywhere[places[start : start + step]]
            out[start : start + step] = piece.view(lowest.dtype).reshape(-1, *self._shape)

    def _look(self, number: int) -> None:
        """Finds where a chunk lies, unless it holds something else than the others."""
        view = viewed(self._column.chunk(number))
        if view is not None and self._dtype is None:
            self._dtype, self._shape = view.dtype, view.shape[1:]
        if view is None or (view.dtype, view.shape[1:]) != (self._dtype, self._shape):
            self._addresses[number] = _OTHER
            return
        self._views[number] = view
        self._addresses[number] = view.__array_interface__["data"][0]


def table_of(dataset: Any) -> _Table | None:
    """Returns the columns of a Hugging Face `Dataset` that gives NumPy arrays or tensors of numbers, else None."""
    kind = cast("type[Any]", type(dataset))
    if (kind.__module__, kind.__qualname__) != ("datasets.arrow_dataset", "Dataset"):
        return None
    chosen = dataset.format
    if chosen["type"] not in _FORMATS or chosen["output_all_columns"] or not len(dataset):
        return None
    columns = {name: _Column(dataset.data.column(name)) for name in chosen["columns"]}
    kept = getattr(dataset, "_indices", None)
    rows = None if kept is None else _Column(kept.column(0))
    if rows is not None and not rows.gather(np.zeros(1, np.int64), np.zeros(1, np.int64)):
        return None
    return _Table(columns, rows, len(dataset), (repr(chosen), repr(dataset.features)))


def viewed(chunk: Any) -> NDArray[Any] | None:
    """Returns the memory of a chunk as `[rows]` or, of lists of one length, `[rows, length]`, and so on for lists of
    lists; None of anything else.
    """
    values, first, num_rows = getattr(chunk, "storage", chunk), 0, len(chunk)
    shape, count = [num_rows], num_rows
    while type(values).__name__ in _LISTS:
        if values.null_count or not count:
            return None
        found = (_fixed_lists if type(values).__name__ == _FIXED else _lists)(values, first, count)
        if found is None:
            return None
        first, length = found
        shape.append(length)
        count *= length
        values = values.values
    if type(values).__name__ not in _NUMBERS or values.null_count or not num_rows:
        return None
    return values.to_numpy(zero_copy_only=True)[first : first + count].reshape(shape)


def _fixed_lists(lists: Any, first: int, count: int) -> tuple[int, int]:
    """Returns the first value of `count` lists, from number `first` on, and their length."""
    del count
    length = int(lists.type.list_size)
    return (int(lists.offset) + first) * length, length


def _lists(lists: Any, first: int, count: int) -> tuple[int, int] | None:
    """The same of lists that may differ in length: None if they do."""
    offsets = lists.offsets.to_numpy(zero_copy_only=True)[first : first + count + 1]
    length = int(offsets[1] - offsets[0])
    for start in range(0, count, _BLOCK):
        if (np.diff(offsets[start : start + _BLOCK + 1]) != length).any():
            return None
    return int(offsets[0]), length
