"""The door to pyarrow: schemas become leaves, Arrow arrays become columns of NumPy arrays."""

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.tables.columns import FINE, NULL, RAGGED, Column, Leaf, Level, Value
from braidax.data.formats.tables.nulls import mask_of
from braidax.errors import ArgumentError, BraidaxError, DataError, FormatError
from braidax.extras import import_pyarrow, import_pyarrow_ipc, import_pyarrow_parquet


def arrow() -> Any:
    """Returns pyarrow. **Raises:** `MissingExtra`."""
    return import_pyarrow(purpose="reading Arrow and Parquet")


def arrow_ipc() -> Any:
    """Returns pyarrow's reader and writer of Arrow IPC. **Raises:** `MissingExtra`."""
    return import_pyarrow_ipc(purpose="reading Arrow")


def arrow_parquet() -> Any:
    """Returns pyarrow's reader of Parquet. **Raises:** `MissingExtra`."""
    return import_pyarrow_parquet(purpose="reading Parquet")


@contextlib.contextmanager
def refusing(message: Callable[[Exception], str]) -> Generator[None]:
    """Raises `FormatError` for what pyarrow raises when bytes are damaged.

    Where memory is short, that need not be the file's fault: this is a `DataError`, of which no record is accused.

    **Arguments:** `message`: says what is damaged.
    """
    try:
        yield
    except BraidaxError:  # of the storage that pyarrow reads from
        raise
    except MemoryError as error:
        raise DataError(f"{message(error)}, unless it is whole and this host has too little memory for it") from error
    except (arrow().ArrowException, OSError, ValueError) as error:
        raise FormatError(message(error)) from error


class Counts(NamedTuple):
    """What each record batch of a schema has.

    **Fields:** `columns`: the number of each column's node. `nodes`, `buffers`: how many; any number of the latter
    (None) where there are views.
    """

    columns: list[int]
    nodes: int
    buffers: int | None


def counts_of(schema: Any) -> Counts:
    """Returns how many nodes and buffers a record batch has, and which nodes are columns."""
    walk, columns = _Walk(arrow().types), list[int]()
    for field in schema:
        columns.append(walk.num_nodes)
        for _ in walk.leaves(field.name, 0, field.type, ()):
            pass
    return Counts(columns, walk.num_nodes, None if walk.has_views else walk.num_buffers)


def validated(batch: Any) -> Any:
    """Returns a record batch of which all is checked that pyarrow can check, but whether text is UTF-8: `fill` does.

    **Raises:** `ArrowException`, for offsets, indices and lengths that lead elsewhere.
    """
    batch.validate()
    for column in batch.columns:
        _validate(column)
    return batch


def leaves_of(schema: Any, columns: Sequence[str] | None, *, where: str) -> list[Leaf]:
    """Returns the leaves of a table; their lists have no lengths yet.

    A struct's fields become leaves of their own, named `"struct.field"`; a struct `{bytes, path}`, as Hugging Face
    stores images and sound, becomes its bytes. `"leaf.is_valid"` among the columns is the mask of a leaf.

    **Arguments:** `schema`: of pyarrow. `columns`: names of columns, or of leaves, in the order of the leaves; all when
    None. `where`: the file, for errors.

    **Raises:** `ArgumentError` for columns that are not there; `FormatError` for those that hold no numbers, text or
    bytes.
    """
    walk = _Walk(arrow().types)
    found = [leaf for number, field in enumerate(schema) for leaf in walk.leaves(field.name, number, field.type, ())]
    known = list(dict.fromkeys(schema.names))
    picked: list[Leaf | _Unusable] = []
    missing: list[str] = []
    for name in known if columns is None else columns:
        chosen = [leaf for leaf in found if leaf.name == name or leaf.name.startswith(f"{name}.")]
        chosen = chosen or [mask for mask in map(mask_of, _usable(found)) if mask.name == name]
        picked += [leaf for leaf in chosen if leaf not in picked]
        missing += [] if chosen else [name]
    if missing or not picked:
        raise ArgumentError(
            f"columns={columns!r}: expected names of columns of {where}, which has {known}"
            + (f" and no {missing}" if missing else "")
        )
    for leaf in picked:
        if isinstance(leaf, _Unusable):
            usable = [leaf.name for leaf in _usable(found)]
            raise FormatError(
                f"{where}: column {leaf.name!r} has the type {leaf.kind}; expected numbers, bools, text, bytes or "
                f"lists of numbers: convert it, or read the others with columns={usable}"
            )
    twice = [name for name, count in Counter(leaf.name for leaf in picked).items() if count > 1]
    if twice:
        raise FormatError(f"{where}: has several columns of the names {twice}; name each once, or leave them out")
    direct = not walk.has_views
    return [replace(leaf, is_direct=leaf.is_direct and direct) for leaf in _usable(picked)]


def column_of(array: Any, leaf: Leaf) -> Column:
    """Turns a column's Arrow array into NumPy arrays, and marks the records that are null or have another shape.

    **Arguments:** `array`: of pyarrow, possibly chunked. `leaf`: with known lengths.
    """
    values = _whole(array)
    records = _Records(len(values))
    lengths = iter(leaf.lengths)
    for level in leaf.levels:
        records.mark_nulls(values)
        if level.kind == "struct":
            values = values.field(level.child)
        elif level.kind == "fixed":
            values = values.values.slice(values.offset * level.length, len(values) * level.length)
            records.multiply(level.length)
        else:
            values = _list_values(values, next(lengths), records)
    if leaf.kind != "valid" or arrow().types.is_dictionary(values.type):
        values = _plain(values)
    records.mark_nulls(values)
    if leaf.kind == "valid":
        faults = records.faults
        return Column(np.ones(len(array), np.bool_) if faults is None else faults != NULL, None, None)
    if leaf.kind in ("text", "bytes"):
        data, offsets = text_of(values)
        return Column(data, offsets, records.faults)
    numbers = _numbers(values, leaf)
    if records.bounds is None:
        return Column(numbers.reshape(records.num_records, *leaf.shape), None, records.faults)
    return Column(numbers.reshape(-1, *leaf.shape), records.bounds, records.faults)


def list_lengths(array: Any, leaf: Leaf) -> list[int]:
    """Returns the length that the lists of each level have in these records, nulls aside, or `RAGGED`."""
    values, found = _whole(array), list[int]()
    for level in leaf.levels:
        if level.kind == "struct":
            values = values.field(level.child)
        elif level.kind == "fixed":
            values = values.values.slice(values.offset * level.length, len(values) * level.length)
        else:
            lengths = np.unique(np.diff(values.offsets.to_numpy())[~_nulls(values)])
            found.append(int(lengths[0]) if len(lengths) == 1 else RAGGED if len(lengths) else 0)
            values = values.flatten()
    return found


def plain_table(table: Any) -> Any:
    """Returns a table or record batch as a table whose columns are neither dictionaries nor views, at the top level."""
    pa = arrow()
    table = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    for number, field in enumerate(table.schema):
        column = _plain(table.column(number))
        if column.type != field.type:
            table = table.set_column(number, field.name, column)
    return table


@dataclass(frozen=True)
class _Unusable:
    name: str
    kind: str


def _usable(found: Sequence[Leaf | _Unusable]) -> list[Leaf]:
    return [leaf for leaf in found if isinstance(leaf, Leaf)]


class _Walk:
    """Walks down the fields of a schema, and counts the nodes and buffers that a record batch has for them."""

    def __init__(self, types: Any) -> None:
        self._types = types
        self.num_nodes = 0
        self.num_buffers = 0
        self._number = -1
        self.has_views = False  # of which a batch has any number of buffers

    def leaves(self, name: str, column: int, kind: Any, levels: tuple[Level, ...]) -> Iterator[Leaf | _Unusable]:
        """Yields the leaves below a field, and what is none."""
        is_type = self._types
        while hasattr(kind, "storage_type"):
            kind = kind.storage_type
        if is_type.is_struct(kind):
            level = self._step("struct", buffers=1)
            names = [kind.field(number).name for number in range(kind.num_fields)]
            for number, child in enumerate(names):
                below = (*levels, replace(level, child=number))
                found = self.leaves(f"{name}.{child}", column, kind.field(number).type, below)
                for leaf in found:
                    if sorted(names) != ["bytes", "path"]:
                        yield leaf if not _in_list(levels) else _Unusable(name, str(kind))
                    elif child == "bytes":
                        yield replace(leaf, name=name) if isinstance(leaf, Leaf) else leaf
        elif is_type.is_list(kind) or is_type.is_large_list(kind):
            level = self._step("list", buffers=2, is_large=is_type.is_large_list(kind))
            yield from self.leaves(name, column, kind.value_type, (*levels, level))
        elif is_type.is_fixed_size_list(kind):
            level = self._step("fixed", buffers=1, length=kind.list_size)
            yield from self.leaves(name, column, kind.value_type, (*levels, level))
        else:
            yield self._value(name, column, kind, levels)

    def _value(self, name: str, column: int, kind: Any, levels: tuple[Level, ...]) -> Leaf | _Unusable:
        is_type = self._types
        is_direct = not is_type.is_dictionary(kind)
        stored = kind if is_direct else kind.value_type
        is_view = any(getattr(is_type, f"is_{one}_view")(stored) for one in ("string", "binary", "list", "large_list"))
        self.has_views |= is_view and is_direct
        is_large = is_type.is_large_string(stored) or is_type.is_large_binary(stored)
        is_text = is_type.is_string(stored) or is_type.is_large_string(stored) or is_type.is_string_view(stored)
        is_bytes = is_type.is_binary(stored) or is_type.is_large_binary(stored) or is_type.is_binary_view(stored)
        step = self._step("fixed", buffers=self._num_buffers(kind))
        if not self._skip_children(kind):
            self._number += 1
        number = self._number

        def leaf(kind: Any, dtype: Any, width: tuple[int, ...] = ()) -> Leaf:
            value = Value(kind, np.dtype(dtype), width, is_large, step.node, step.buffer)
            return Leaf(name, column, number, levels, value, is_direct)

        if (is_text or is_bytes) and not _in_list(levels):
            return leaf("text" if is_text else "bytes", np.uint8)
        if is_type.is_fixed_size_binary(stored) and not is_type.is_decimal(stored):
            return leaf("number", np.uint8, (stored.byte_width,))
        if is_type.is_boolean(stored):
            return leaf("bit", np.bool_)
        if is_type.is_integer(stored) or is_type.is_floating(stored):
            return leaf("number", stored.to_pandas_dtype())
        return _Unusable(name, str(kind))

    def _num_buffers(self, kind: Any) -> int:
        is_type = self._types
        if is_type.is_null(kind) or is_type.is_run_end_encoded(kind):
            return 0
        if is_type.is_union(kind):
            return 1 if kind.mode == "sparse" else 2
        sized = (is_type.is_string, is_type.is_binary, is_type.is_large_string, is_type.is_large_binary)
        return 3 if any(check(kind) for check in sized) else 2  # views have more, which has_views tells

    def _skip_children(self, kind: Any) -> bool:
        """Counts what lies below a type that is no leaf: a map, a union, a list view; returns whether it is one."""
        nested = not self._types.is_dictionary(kind) and self._types.is_nested(kind)
        for number in range(kind.num_fields if nested else 0):
            for _ in self.leaves("", 0, kind.field(number).type, ()):
                pass
        return nested

    def _step(self, kind: Any, *, buffers: int, length: int = 0, is_large: bool = False) -> Level:
        level = Level(kind, 0, length, is_large, self.num_nodes, self.num_buffers)
        self.num_nodes += 1
        self.num_buffers += buffers
        return level


class _Records:
    """How the values of a level belong to records, and which records have a fault."""

    def __init__(self, num_records: int) -> None:
        self.num_records = num_records
        self.bounds: NDArray[np.int64] | None = None  # of a ragged column: where each record begins
        self.faults: NDArray[np.int64] | None = None
        self._per_record = 1  # values of a record, or of an element of a ragged record

    def multiply(self, length: int) -> None:
        self._per_record *= length

    def split(self, bounds: NDArray[np.int64]) -> None:
        self.bounds, self._per_record = bounds, 1

    def mark_nulls(self, values: Any) -> None:
        if values.null_count:
            self.mark(_nulls(values), np.full(len(values), NULL, np.int64))

    def mark(self, is_wrong: NDArray[np.bool_], faults: NDArray[np.int64]) -> None:
        """Takes the first fault of each record that has none yet."""
        values = np.flatnonzero(is_wrong)[::-1]
        elements = values // max(1, self._per_record)
        records = elements if self.bounds is None else np.searchsorted(self.bounds, elements, side="right") - 1
        if self.faults is None:
            self.faults = np.full(self.num_records, FINE, np.int64)
        found = np.full(self.num_records, FINE, np.int64)
        found[records] = faults[values]
        self.faults = np.where(self.faults == FINE, found, self.faults)


def _list_values(values: Any, length: int, records: _Records) -> Any:
    """Steps from lists to their values: as they lie, or `length` for each list, nulls where it has not so many."""
    offsets = values.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    start, num_values = int(offsets[0]), int(offsets[-1] - offsets[0])
    if length == RAGGED:
        records.split(offsets - start)
        return values.values.slice(start, num_values)
    fits = lengths == length
    if fits.all():
        found = values.values.slice(start, num_values)
    else:
        records.mark(~fits & ~_nulls(values), lengths)
        chosen = np.where(fits, offsets[:-1], 0)[:, None] + np.arange(length)
        found = values.values.take(arrow().array(chosen.ravel(), mask=np.repeat(~fits, length)))
    records.multiply(length)
    return found


def _numbers(values: Any, leaf: Leaf) -> NDArray[Any]:
    width = leaf.value.width
    if values.null_count:
        values = values.fill_null(b"\0" * width[0] if width else False if leaf.kind == "bit" else 0)
    if width:
        data = np.frombuffer(values.buffers()[1] or b"", np.uint8)
        return data[values.offset * width[0] : (values.offset + len(values)) * width[0]]
    return values.to_numpy(zero_copy_only=False)


def _plain(values: Any) -> Any:
    """Returns values that are no dictionary and no view, nested ones as they are."""
    pa = arrow()
    is_type = pa.types
    is_dictionary = is_type.is_dictionary(values.type)
    kind = values.type.value_type if is_dictionary else values.type
    kind = pa.large_string() if is_type.is_string_view(kind) else kind
    kind = pa.large_binary() if is_type.is_binary_view(kind) else kind
    if is_dictionary:  # its values first: pyarrow picks none out of views
        values = values.cast(pa.dictionary(values.type.index_type, kind, values.type.ordered))
    return values if kind == values.type else values.cast(kind)


def text_of(values: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns the bytes of an array of text or bytes, and int64 `[n + 1]`, where each value begins there."""
    pa = arrow()
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    is_text = is_text or pa.types.is_string_view(values.type)
    values = values.cast(pa.large_string() if is_text else pa.large_binary())
    _, offsets, data = values.buffers()
    if not len(values):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    stored = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return stored[bounds[0] : bounds[-1]], bounds - bounds[0]


def _validate(array: Any) -> None:
    pa = arrow()
    kind = array.type
    if hasattr(kind, "storage_type"):
        _validate(array.storage)
    elif pa.types.is_dictionary(kind):
        array.indices.validate(full=True)
        pa.DictionaryArray.from_arrays(array.indices, array.dictionary, safe=True)  # checks the bounds of the indices
        _validate(array.dictionary)
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            _validate(array.field(number))
    else:
        plain = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(kind)
        (array if plain is None else array.view(plain)).validate(full=True)


def _nulls(values: Any) -> NDArray[np.bool_]:
    return values.is_null().to_numpy(zero_copy_only=False)


def _whole(array: Any) -> Any:
    while hasattr(array.type, "storage_type"):
        array = array.cast(array.type.storage_type) if hasattr(array, "chunks") else array.storage
    return array.combine_chunks() if hasattr(array, "chunks") else array


def _in_list(levels: tuple[Level, ...]) -> bool:
    return any(level.kind != "struct" for level in levels)
