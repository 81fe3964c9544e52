"""Arrays that are stored in chunks, as columns of one table whose blocks are the rows of the largest chunks."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.tables.blocks import Block, Blocks, Group
from braidax.data.formats.tables.columns import RAGGED, Column, Leaf, Level, Value
from braidax.data.formats.tables.tables import arrow
from braidax.data.source import listed, loader_dtype
from braidax.data.storage.files import Named
from braidax.data.storage.limits import refuse_larger
from braidax.errors import ArgumentError, FormatError
from braidax.spans import span

_MOST_BLOCKS = 1 << 20  # of a file
Content = Literal["numbers", "text", "lists"]
"""What an element of an array is."""

_VALUE_BYTES = 16  # that the text or the list of a record is taken for, until it is decoded


@runtime_checkable
class StoredArray(Protocol):
    """An array of a file, a sample in each row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it: `[num_samples, *sample_shape]`."""
        ...

    @property
    def content(self) -> Content:
        """What an element is."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers, those of the lists too; uint8 of text."""
        ...

    @property
    def chunk_rows(self) -> int:
        """Rows that are decoded together."""
        ...

    @property
    def is_compressed(self) -> bool:
        """Whether fewer bytes may be stored than there are in memory."""
        ...

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Returns some rows: numbers of `dtype`, or objects `[n]`: `str` or `bytes`, or arrays.

        **Raises:** `FormatError` naming the file and the array.
        """
        ...

    def rows_into(self, pieces: Sequence[tuple[int, int]], outs: Sequence[NDArray[Any]]) -> None:
        """Puts rows of numbers into place.

        **Arguments:** `pieces`: start and stop of each. `outs`: of `dtype`, `[stop - start, *sample_shape]`, for each.
        **Raises:** as `rows`.
        """
        for (start, stop), out in zip(pieces, outs, strict=True):
            out[...] = self.rows(start, stop)


Arrays = Mapping[str, StoredArray]


class ChunkedTable(Blocks):
    """Arrays of one length, of one file or several, as the columns of a table.

    **Arguments:** `files`: names, sizes and stamps. `arrays`: of each file, by the names of the leaves. `again`: makes
    the table in another process, of nothing.

    **Raises:** `FormatError` for files whose arrays differ in more than their lengths, and for what no leaf can hold.
    """

    def __init__(self, files: Named, arrays: Sequence[Arrays], *, again: Callable[[], "ChunkedTable"]) -> None:
        self._files = files
        self._arrays = list(arrays)
        self._again = again
        first = self._arrays[0]
        self._leaves = [_leaf_of(name, array) for name, array in first.items()]
        for name, others in zip(files.names, self._arrays, strict=True):
            self._check_alike(name, others)
        self._blocks = [block for file in range(len(files.names)) for block in self._blocks_of(file)]
        self._starts = [0, *itertools.accumulate(block.num_rows for block in self._blocks)]

    def __reduce__(self) -> tuple[Callable[[], "ChunkedTable"], tuple[()]]:
        return self._again, ()

    @property
    def names(self) -> Sequence[str]:
        return self._files.names

    @property
    def sizes(self) -> Sequence[int]:
        return self._files.sizes

    @property
    def stamps(self) -> Sequence[str]:
        return self._files.stamps

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def leaves(self) -> Sequence[Leaf]:
        return self._leaves

    def load(self, index: int) -> Any:
        pa = arrow()
        group = self.decode(index)
        columns = {leaf.name: _arrow_of(pa, leaf, group[leaf.name]) for leaf in self._leaves}
        return pa.table(columns)

    def decode(self, index: int) -> Group:
        block = self._blocks[index]
        start, stop = block.first_record, block.first_record + block.num_rows
        with span("decode", "chunks", num_bytes=block.num_bytes):
            arrays = self._arrays[block.file]
            return {leaf.name: _column_of(leaf, arrays[leaf.name].rows(start, stop)) for leaf in self._leaves}

    def decode_into(self, indices: Sequence[int], leaves: Mapping[str, NDArray[Any]]) -> None:
        """Decodes blocks on this thread, to where their rows lie.

        **Arguments:** `indices`: of blocks, ascending. `leaves`: of all samples, `[num_samples, *sample_shape]`, by
        name, of the dtypes that are stored. **Raises:** as `decode`.
        """
        blocks = [(self._starts[index], self._blocks[index]) for index in indices]
        with span("decode", "chunks", num_bytes=sum(block.num_bytes for _, block in blocks)):
            for file, group in itertools.groupby(blocks, key=lambda found: found[1].file):
                held = list(group)
                pieces = [(block.first_record, block.first_record + block.num_rows) for _, block in held]
                for leaf in self._leaves:
                    whole = leaves[leaf.name]
                    outs = [whole[first : first + block.num_rows] for first, block in held]
                    self._arrays[file][leaf.name].rows_into(pieces, outs)
                    if whole.dtype == np.bool_:  # a damaged file may hold other bytes than 0 and 1
                        for out in outs:
                            np.not_equal(out.view(np.uint8), 0, out=out)

    def prepare(self, indices: Sequence[int]) -> None:
        """Does nothing: chunks are read when they are decoded."""

    def _check_alike(self, name: str, arrays: Arrays) -> None:
        for leaf in self._leaves:
            first, array = self._arrays[0][leaf.name], arrays[leaf.name]
            told, expected = ((one.content, one.dtype, one.shape[1:]) for one in (array, first))
            if told != expected:
                raise FormatError(
                    f"{name}: array {leaf.name!r} holds {_words(array)} in each row, expected {_words(first)} as in "
                    f"{self.names[0]}; open files of one kind together"
                )

    def _blocks_of(self, file: int) -> list[Block]:
        arrays = self._arrays[file]
        num_rows = next(iter(arrays.values())).shape[0]
        packed = sum(num_rows * _row_bytes(leaf) for leaf in self._leaves if arrays[leaf.name].is_compressed)
        refuse_larger(self.names[file], packed, self.sizes[file])
        chunk_rows = max(array.chunk_rows for array in arrays.values())
        rows = chunk_rows * -(-num_rows // (_MOST_BLOCKS * chunk_rows))
        found: list[Block] = []
        for number, start in enumerate(range(0, num_rows, max(1, rows))):
            count = min(rows, num_rows - start)
            found.append(Block(file, number, start, count, count * sum(map(_row_bytes, self._leaves))))
        return found


def one_length(arrays: Arrays, *, where: str, what: str) -> int:
    """Returns the number of samples of arrays. **Raises:** `FormatError` for lengths that differ, scalars, and 0."""
    lengths = {name: array.shape[0] if array.shape else None for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        told = listed([f"{name!r} {list(array.shape)}" for name, array in arrays.items()])
        raise FormatError(
            f"{where}: expected {what} with one and the same number of samples as their first dim; found {told}: "
            f"choose some with columns=, such as columns={[next(iter(arrays))]}"
        )
    (length,) = set(lengths.values())
    if not length:
        raise FormatError(f"{where}: its {what} hold 0 samples; expected at least one")
    return length


def chosen(names: Sequence[str], columns: Sequence[str] | None, *, where: str, what: str) -> list[str]:
    """Returns the names of the arrays to read. **Raises:** `ArgumentError` for those that are not there."""
    if not names:
        raise FormatError(f"{where}: holds no {what}; expected at least one")
    wanted = list(names if columns is None else dict.fromkeys(columns))
    missing = [name for name in wanted if name not in names]
    if missing or not wanted:
        raise ArgumentError(
            f"columns={columns!r}: expected names of {what} of {where}, which has {listed(names, limit=32)}"
            + (f" and no {missing}" if missing else "")
        )
    return wanted


def _leaf_of(name: str, array: StoredArray) -> Leaf:
    if array.content == "text":
        return Leaf(name, 0, 0, (), Value("text", np.dtype(np.uint8), (), False, 0, 0), False)
    if array.content == "lists":
        value = Value("number", array.dtype, (), False, 0, 0)
        return Leaf(name, 0, 0, (Level("list", 0, 0, False, 0, 0),), value, False, (RAGGED,))
    return Leaf(name, 0, 0, (), Value("number", array.dtype, tuple(array.shape[1:]), False, 0, 0), False)


def refuse_unloadable(array: StoredArray, name: str, *, where: str, what: str) -> None:
    """Raises `FormatError` for numbers that JAX lacks, and for text or lists that are no column."""
    if array.content == "numbers":
        loader_dtype(array.dtype, where=where, leaf=name)
    elif len(array.shape) != 1:
        raise FormatError(
            f"{where}: {what} {name!r} holds {array.content} of shape {list(array.shape)}; expected one for each "
            "sample: leave it out with columns="
        )
    elif array.content == "lists":
        loader_dtype(array.dtype, where=where, leaf=name)


def _row_bytes(leaf: Leaf) -> int:
    return _VALUE_BYTES if leaf.is_varying else leaf.value_bytes


def _words(array: StoredArray) -> str:
    return f"{array.dtype}{list(array.shape[1:])}" if array.content == "numbers" else f"{array.content}"


def _column_of(leaf: Leaf, rows: NDArray[Any]) -> Column:
    if not leaf.is_varying and rows.dtype == np.bool_:  # a damaged file may hold other bytes than 0 and 1
        return Column(np.ascontiguousarray(rows).view(np.uint8) != 0, None, None)
    if not leaf.is_varying:
        return Column(np.ascontiguousarray(rows), None, None)
    if leaf.kind == "text":
        texts = [text.encode() if isinstance(text, str) else bytes(text) for text in rows.tolist()]
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        return Column(np.frombuffer(b"".join(texts), np.uint8), offsets, None)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Column(np.concatenate([np.empty(0, leaf.stored), *rows]), offsets, None)


def _arrow_of(pa: Any, leaf: Leaf, column: Column) -> Any:
    """Returns a column as pyarrow has it: text, lists, or lists of fixed size for each dim of a sample."""
    if leaf.kind == "text":
        assert column.offsets is not None, "text has them"
        buffers = [None, pa.py_buffer(column.offsets), pa.py_buffer(column.values)]
        return pa.Array.from_buffers(pa.large_string(), len(column.offsets) - 1, buffers)
    values = pa.array(column.values.reshape(-1).astype(column.values.dtype.newbyteorder("="), copy=False))
    if column.offsets is not None:
        return pa.LargeListArray.from_arrays(pa.array(column.offsets), values)
    for size in reversed(leaf.shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values
