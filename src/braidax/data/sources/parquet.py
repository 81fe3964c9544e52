"""Parquet files: numeric columns, row groups decoded when a record of theirs is asked for."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.sources.source import Indices, Source, check_indices, gather, listed, loader_dtype
from braidax.errors import ArgumentError, FormatError, RecordError, WaitTimeout, import_extra
from braidax.spans import span

WAIT_SECONDS = 600.0

Group = dict[str, NDArray[Any]]


class ParquetSource(Source):
    """Rows of one or several Parquet files, read at random through a cache of decoded row groups.

    Scalars become leaves `[]`, lists of one length leaves `[length]`, lists of such lists `[length, length]`. A list's
    length is that of the first record.

    **Arguments:** `files`: in order. `columns`: top-level columns to read, all when None. `cache_bytes`: of decoded row
    groups kept in memory; each reading thread holds at most one more.

    **Raises:** `FormatError` for files that are damaged, differ in their columns, or have columns that are no numbers;
    `ArgumentError` for columns that are not there or a cache smaller than one row group.
    """

    def __init__(self, files: Sequence[Path], *, columns: Sequence[str] | None, cache_bytes: int) -> None:
        self._arrow: Any = import_extra("pyarrow", "parquet", purpose="reading Parquet")
        self._parquet: Any = import_extra("pyarrow.parquet", "parquet", purpose="reading Parquet")
        self._files = list(files)
        self._metadata = [self._footer(path) for path in files]
        if not any(metadata.num_rows for metadata in self._metadata):
            raise FormatError(f"{files[0]}: holds 0 records in {len(files)} file(s); expected at least one")
        self._columns = self._choose(columns)
        self._groups: list[_RowGroup] = _row_groups(self._metadata)
        self._starts = np.cumsum([0, *(group.num_rows for group in self._groups)])
        self._check_schemas()
        self._shapes = self._list_shapes()
        self._spec = {
            name: jax.ShapeDtypeStruct(self._shapes[name], loader_dtype(dtype, where=str(files[0]), leaf=name))
            for name, dtype in self._columns.items()
        }
        row_bytes = sum(math.prod(self._shapes[name]) * dtype.itemsize for name, dtype in self._columns.items())
        largest = max(group.num_rows for group in self._groups) * row_bytes
        if cache_bytes < largest:
            raise ArgumentError(
                f"cache_bytes={cache_bytes:,}: the largest row group takes {largest:,} bytes when decoded and would be "
                "decoded anew for every read; give at least that, or write the files with smaller row groups"
            )
        self._cache = _GroupCache(self._decode, cache_bytes)

    @property
    def sample_spec(self) -> Any:
        """A dict of `jax.ShapeDtypeStruct`, one per column."""
        return dict(self._spec)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Indices, out: Any) -> None:
        """Reads records row group by row group: one vectorised copy for each group that they touch."""
        check_indices(indices, len(self), where=f"{self._files[0]} ({len(self._files)} file(s))")
        group_of = np.searchsorted(self._starts, indices, side="right") - 1
        touched: list[int] = np.unique(group_of).tolist()
        for group in touched:
            arrays = self._cache.get(group)
            rows = np.flatnonzero(group_of == group)
            local = indices[rows] - self._starts[group]
            place = self._groups[group]
            where = str(self._files[place.file])
            for name, array in arrays.items():
                whole = len(rows) == len(indices)
                part = out[name] if whole else np.empty((len(rows), *array.shape[1:]), out[name].dtype)
                gather(array, local, part, where=where, leaf=name, first_record=place.first_record)
                if not whole:
                    out[name][rows] = part

    def describe(self) -> Mapping[str, str]:
        """Returns format, files, samples, columns and row groups."""
        return {
            "format": "Parquet",
            "files": listed([path.name for path in self._files]),
            "samples": f"{len(self):,}",
            "columns": ", ".join(self._columns),
            "row groups": f"{len(self._groups):,} of at most {max(group.num_rows for group in self._groups):,} records",
            "bytes": f"{sum(path.stat().st_size for path in self._files):,}",
        }

    def _footer(self, path: Path) -> Any:
        try:
            return self._parquet.read_metadata(path)
        except (self._arrow.ArrowException, OSError) as error:
            raise FormatError(
                f"{path}: {path.stat().st_size:,} bytes that are no Parquet file, or a truncated one ({error}); write "
                "or copy it again"
            ) from error

    def _choose(self, columns: Sequence[str] | None) -> dict[str, np.dtype[Any]]:
        """Returns the stored dtype of the numbers in each column that is read."""
        schema = self._metadata[0].schema.to_arrow_schema()
        dtypes = {field.name: self._number_dtype(field.type) for field in schema}
        missing = [name for name in columns or () if name not in dtypes]
        if missing or (columns is not None and not columns):
            raise ArgumentError(
                f"columns={columns!r}: expected names of columns of {self._files[0]}, which has {list(dtypes)}"
                + (f" and no {missing}" if missing else "")
            )
        chosen: dict[str, np.dtype[Any]] = {}
        for name in dtypes if columns is None else columns:
            dtype = dtypes[name]
            if dtype is None:
                usable = [column for column, found in dtypes.items() if found is not None]
                raise FormatError(
                    f"{self._files[0]}: column {name!r} has the type {schema.field(name).type}; expected numbers, "
                    f"bools or lists of them: convert it, or read the others with columns={usable}"
                )
            chosen[name] = dtype
        return chosen

    def _number_dtype(self, kind: Any) -> np.dtype[Any] | None:
        types = self._arrow.types
        while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            kind = kind.value_type
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            return np.dtype(kind.to_pandas_dtype())
        return None

    def _check_schemas(self) -> None:
        first = self._metadata[0].schema.to_arrow_schema()
        for path, metadata in zip(self._files, self._metadata, strict=True):
            schema = metadata.schema.to_arrow_schema()
            for name in self._columns:
                found = schema.field(name).type if name in schema.names else "missing"
                if found != first.field(name).type:
                    raise FormatError(
                        f"{path}: column {name!r} is {found}, expected {first.field(name).type} as in "
                        f"{self._files[0]}; write the files with one schema"
                    )

    def _list_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of one sample of each column, as the first record has it."""
        with self._reader(self._groups[0].file) as reader:
            batches = reader.iter_batches(
                1, row_groups=[self._groups[0].group], columns=list(self._columns), use_threads=False
            )
            try:
                record = next(batches)
            except (self._arrow.ArrowException, OSError) as error:
                raise self._damaged(self._groups[0], error) from error
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self._columns:
            values = record.column(name)
            shape: list[int] = []
            while not self._is_number(values.type):
                self._check_nulls(values, 1, self._groups[0], name)
                values = values.flatten()
                shape.append(len(values) // max(1, math.prod(shape)))
            shapes[name] = tuple(shape)
        return shapes

    def _is_number(self, kind: Any) -> bool:
        return not self._arrow.types.is_nested(kind)

    def _reader(self, file: int) -> Any:
        return self._parquet.ParquetFile(self._files[file], metadata=self._metadata[file])

    def _damaged(self, group: "_RowGroup", error: Exception) -> FormatError:
        return FormatError(
            f"{self._files[group.file]}: row group {group.group} (records {group.first_record} to "
            f"{group.first_record + group.num_rows - 1}) is corrupt ({error}); write or copy the file again"
        )

    def _decode(self, index: int) -> Group:
        group = self._groups[index]
        num_bytes = self._metadata[group.file].row_group(group.group).total_byte_size
        with span("decode", "row group", num_bytes=num_bytes), self._reader(group.file) as reader:
            try:
                table = reader.read_row_group(group.group, columns=list(self._columns), use_threads=False)
            except (self._arrow.ArrowException, OSError) as error:
                raise self._damaged(group, error) from error
            return {name: self._dense(table.column(name), group, name) for name in self._columns}

    def _dense(self, column: Any, group: "_RowGroup", name: str) -> NDArray[Any]:
        """Turns a column of a row group into one array `[num_rows, *lengths]`."""
        values = column.combine_chunks()
        shape = self._shapes[name]
        for depth, length in enumerate(shape):
            per_record = math.prod(shape[:depth])
            self._check_nulls(values, per_record, group, name)
            if not self._arrow.types.is_fixed_size_list(values.type):
                self._check_lengths(np.diff(values.offsets.to_numpy()), length, per_record, group, name)
            values = values.flatten()
        self._check_nulls(values, math.prod(shape), group, name)
        return values.to_numpy(zero_copy_only=False).reshape(group.num_rows, *shape)

    def _check_lengths(
        self, lengths: NDArray[Any], expected: int, per_record: int, group: "_RowGroup", name: str
    ) -> None:
        wrong = np.flatnonzero(lengths != expected)
        if wrong.size:
            record = group.first_record + int(wrong[0]) // per_record
            raise RecordError(
                f"{self._files[group.file]}, record {record}: column {name!r} has a list of length "
                f"{lengths[wrong[0]]}, expected {expected} as in record {self._groups[0].first_record} of "
                f"{self._files[self._groups[0].file].name}; pad or cut the lists to one length, or leave the column "
                "out with columns="
            )

    def _check_nulls(self, values: Any, per_record: int, group: "_RowGroup", name: str) -> None:
        if values.null_count:
            row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise RecordError(
                f"{self._files[group.file]}, record {group.first_record + row // max(1, per_record)}: column {name!r} "
                f"is null ({values.null_count:,} nulls in row group {group.group}), expected a value in every record; "
                "fill or drop the nulls, or leave the column out with columns="
            )


def parquet_files(path: Path) -> list[Path]:
    """Returns the Parquet files of a folder, sorted by name."""
    return sorted(child for child in path.glob("*.parquet") if child.name[0] not in "._")


def open_parquet(path: Path, *, columns: Sequence[str] | None = None, cache_bytes: int = 1 << 30) -> ParquetSource:
    """Opens a Parquet file, or a folder of them in the order of their names; see `ParquetSource`."""
    files = parquet_files(path) if path.is_dir() else [path]
    return ParquetSource(files, columns=columns, cache_bytes=cache_bytes)


@dataclass(frozen=True)
class _RowGroup:
    """Where a row group lies: number of its file, its number in the file, and the file's records that it holds."""

    file: int
    group: int
    first_record: int
    num_rows: int


def _row_groups(metadata: Sequence[Any]) -> list[_RowGroup]:
    groups: list[_RowGroup] = []
    for file, footer in enumerate(metadata):
        first_record = 0
        for group in range(footer.num_row_groups):
            num_rows = footer.row_group(group).num_rows
            if num_rows:
                groups.append(_RowGroup(file, group, first_record, num_rows))
            first_record += num_rows
    return groups


class _GroupCache:
    """The most recently used row groups, bounded in bytes; a group asked for by several threads is decoded once."""

    def __init__(self, decode: Callable[[int], Group], capacity_bytes: int) -> None:
        self._decode = decode
        self._capacity_bytes = capacity_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, Group] = OrderedDict()
        self._pending: dict[int, Future[Group]] = {}

    def get(self, index: int) -> Group:
        """Returns a decoded row group, decoding it on this thread if no other does."""
        while True:
            with self._lock:
                if index in self._groups:
                    self._groups.move_to_end(index)
                    return self._groups[index]
                mine = Future[Group]()
                pending = self._pending.setdefault(index, mine)
            if pending is mine:
                return self._fill(index, mine)
            try:
                return pending.result(WAIT_SECONDS)
            except CancelledError:
                continue  # the other thread failed: decoding it here raises the same error on this thread
            except FutureTimeout as error:
                raise WaitTimeout(
                    f"row group {index} was not decoded by another thread within {WAIT_SECONDS:.0f} s; is the disk "
                    "stuck?"
                ) from error

    def _fill(self, index: int, future: Future[Group]) -> Group:
        try:
            group = self._decode(index)
            self._keep(index, group)
            future.set_result(group)
            return group
        finally:
            future.cancel()
            with self._lock:
                del self._pending[index]

    def _keep(self, index: int, group: Group) -> None:
        with self._lock:
            self._groups[index] = group
            self._num_bytes += sum(array.nbytes for array in group.values())
            while self._num_bytes > self._capacity_bytes:
                _, old = self._groups.popitem(last=False)
                self._num_bytes -= sum(array.nbytes for array in old.values())
