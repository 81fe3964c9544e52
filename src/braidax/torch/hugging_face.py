"""A Hugging Face `Dataset` of numbers: batches straight from its Arrow table, without a Python object per sample."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from braidax.torch.items import Items
from braidax.torch.library import torch_library

_FORMATS = ("numpy", "torch")
_NUMBERS = {f"{kind}{bits}Array" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)} | {
    "FloatArray",
    "DoubleArray",
}
_FIXED = "FixedSizeListArray"
_LISTS = {"ListArray", "LargeListArray", _FIXED}
_BLOCK = 1 << 20  # offsets looked at in one go


class _Table(NamedTuple):
    """What of a data set is needed: its columns, and where its rows lie in them (None: as they are numbered)."""

    columns: dict[str, "_Column"]
    rows: "_Column | None"
    num_rows: int


class TableItems(Items):
    """A data set whose default batches are gathered from its table.

    They are the very ones that the data set and torch's `default_collate` make. That is tried with the first batch: its
    keys, dtypes, shapes and values have to be equal, or all batches are made the long way. A batch of chunks in which
    lists differ in length, or hold nulls, is made the long way too.

    **Arguments:** as of `Items`, and `table`.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], *, pin: Callable[[Any], Any] | None, table: _Table
    ) -> None:
        super().__init__(dataset, collate_fn, batched=True, pin=pin)
        self._long_way = self.many
        self.many = self._gathered
        self.splits = False
        self._table = table
        self._expected: dict[str, Any] | None = None  # a batch made the long way, for its dtypes

    def batch(self, samples: Any, indices: Any) -> Any:
        if not isinstance(samples, _Ready):
            batch = super().batch(samples, indices)
            if self._expected is None:
                self._compare(batch, indices)
            return batch
        return samples.batch if self._pin is None else self._pin(samples.batch)

    def _gathered(self, indices: Any) -> Any:
        assert self._long_way is not None
        batch = self._gather(indices, self._expected) if self._expected else None
        return self._long_way(indices) if batch is None else _Ready(batch)

    def _compare(self, batch: Any, indices: Any) -> None:
        torch = torch_library()
        plain = isinstance(batch, dict) and all(isinstance(leaf, torch.Tensor) for leaf in batch.values())
        mine = self._gather(indices, batch) if plain else None
        same = mine is not None and all(
            torch.equal(torch.nan_to_num(mine[key]), torch.nan_to_num(leaf)) for key, leaf in batch.items()
        )
        self._expected = dict(batch) if same else {}
        if not same:
            self.many, self.splits = self._long_way, None

    def _gather(self, indices: Any, like: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns a batch with the keys, dtypes and shapes of samples of another one, or None if it cannot."""
        torch, columns = torch_library(), self._table.columns
        rows = np.asarray(indices)
        if like.keys() != columns.keys() or rows.dtype != np.int64 or not len(rows):
            return None
        if rows.min() < 0 or rows.max() >= self._table.num_rows:
            return None
        if self._table.rows is not None:
            rows = cast(NDArray[np.int64], self._table.rows.gather(rows, np.empty(len(rows), np.int64)))
        batch: dict[str, Any] = {}
        for key, leaf in like.items():
            out = torch.empty((len(rows), *leaf.shape[1:]), dtype=leaf.dtype)
            if columns[key].gather(rows, out.numpy()) is None:
                return None
            batch[key] = out
        return batch


class _Ready(NamedTuple):
    """A batch that needs no collating."""

    batch: dict[str, Any]


class _Column:
    """A column of numbers, or of lists of as many numbers, in the chunks that it is stored in."""

    def __init__(self, column: Any) -> None:
        self._column = column
        lengths = [len(chunk) for chunk in column.iterchunks()]
        self._starts = np.cumsum([0, *lengths], dtype=np.int64)
        self._views: dict[int, NDArray[Any] | None] = {}

    def gather(self, rows: NDArray[np.int64], out: NDArray[Any]) -> NDArray[Any] | None:
        """Copies rows into `out` and returns it, or None if they do not all have its shape."""
        chunks = np.searchsorted(self._starts, rows, "right") - 1
        numbers, within = chunks.tolist(), rows - self._starts[chunks]
        for number in set(numbers):
            view = self._view(number)
            if view is None or view.shape[1:] != out.shape[1:]:
                return None
        if len(self._starts) == 2:
            out[...] = cast(NDArray[Any], self._views[numbers[0]])[within]
        else:
            views = cast("dict[int, NDArray[Any]]", self._views)
            for place, (number, row) in enumerate(zip(numbers, within.tolist(), strict=True)):
                out[place] = views[number][row]
        return out

    def _view(self, number: int) -> NDArray[Any] | None:
        if number not in self._views:
            self._views[number] = _viewed(self._column.chunk(number))
        return self._views[number]


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
    first = rows.gather(np.zeros(1, np.int64), np.zeros(1, np.int64)) if rows is not None else np.zeros(1, np.int64)
    return _Table(columns, rows, len(dataset)) if first is not None else None


def _viewed(chunk: Any) -> NDArray[Any] | None:
    """Returns the memory of a chunk as `[rows]` or, of lists of one length, `[rows, length]`; None of anything else."""
    kind = type(chunk).__name__
    if chunk.null_count or not len(chunk):
        return None
    if kind in _NUMBERS:
        return chunk.to_numpy(zero_copy_only=True)
    if kind not in _LISTS or type(chunk.values).__name__ not in _NUMBERS or chunk.values.null_count:
        return None
    found = _fixed_lists(chunk) if kind == _FIXED else _lists(chunk)
    if found is None:
        return None
    first, length = found
    values = chunk.values.to_numpy(zero_copy_only=True)
    return values[first : first + len(chunk) * length].reshape(len(chunk), length)


def _fixed_lists(chunk: Any) -> tuple[int, int]:
    """Returns the first value of a chunk's lists, and their length."""
    length = int(chunk.type.list_size)
    return int(chunk.offset) * length, length


def _lists(chunk: Any) -> tuple[int, int] | None:
    """The same of lists that may differ in length: None if they do."""
    offsets = chunk.offsets.to_numpy(zero_copy_only=True)
    length = int(offsets[1] - offsets[0])
    for start in range(0, len(chunk), _BLOCK):
        if (np.diff(offsets[start : start + _BLOCK + 1]) != length).any():
            return None
    return int(offsets[0]), length
