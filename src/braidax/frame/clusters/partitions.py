"""Partitions of other libraries' tables as those of a frame: converted where they lie, of one schema."""

import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from braidax.comm import Communicator
from braidax.errors import ArgumentError, CallFailed
from braidax.frame.collecting import Partition, keep
from braidax.frame.frame import Frame, of_kept
from braidax.frame.polars import Schema, pl
from braidax.gang.cluster import ClusterGang

Numbered = list[tuple[int, Any]]  # tables, by the number of their partition


def take(gang: ClusterGang, references: Sequence[Any], numbers: Sequence[Sequence[int]]) -> Frame:
    """Returns a frame of partitions that ranks take over from their cluster.

    **Arguments:** `references`: of the partitions, in order. `numbers`: for each rank those that it takes.

    **Raises:** `ArgumentError` naming partition, column and dtype for what Polars cannot represent, and partitions that
    have other columns than others.
    """
    raw, name = (f"{kind}-{secrets.token_hex(8)}" for kind in ("partitions", "frame"))
    with _as_here(), gang.handing([[references[number] for number in own] for own in numbers]) as handed:
        gang.run(_converted, handed, per_rank=[list(own) for own in numbers], keep=raw)
    try:
        schema = _agreed([one for told in gang.run(_told, gang.kept(raw)) for one in told])
        gang.run(_joined, gang.kept(raw), schema, keep=name)
    finally:
        gang.delete(raw)
    return of_kept(name, schema, gang)


def give(frame: Frame, gang: ClusterGang, convert: Callable[[Partition], Any]) -> tuple[list[Any], Schema]:
    """Computes a frame, and has the cluster keep each rank's rows.

    **Returns:** the references, by rank, and the columns. **Raises:** as `Frame.collect`; `ArgumentError` for columns
    that Arrow cannot represent.
    """
    for name, dtype in frame.collect_schema().items():
        if not _is_arrows(dtype):
            raise ArgumentError(
                f"the column {name!r} has {dtype}, which Arrow cannot represent: expected another dtype; cast it before"
            )
    name = f"given-{secrets.token_hex(8)}"
    schema = keep(frame.lazy_frame, gang, name)
    try:
        return gang.results(convert, name), schema
    finally:
        gang.delete(name)


def as_arrow(part: Partition) -> Any:
    """Returns the rows of a rank as a `pyarrow.Table`."""
    return part.frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def as_pandas(part: Partition) -> Any:
    """Returns the rows of a rank as a `pandas.DataFrame` whose columns are Arrow's."""
    return part.frame.to_pandas(use_pyarrow_extension_array=True)


@contextmanager
def _as_here() -> Generator[None]:
    """Raises here what was found wrong with a partition on a rank."""
    try:
        yield
    except CallFailed as failed:
        if isinstance(failed.__cause__, ArgumentError):
            raise failed.__cause__ from None
        raise


def _converted(comm: Communicator, values: Sequence[Any], numbers: Sequence[int]) -> Numbered:
    del comm
    return [(number, _frame_of(value, number)) for number, value in zip(numbers, values, strict=True)]


def _told(comm: Communicator, tables: Numbered) -> list[tuple[int, Schema, list[str]]]:
    """Returns of each partition its number, its columns, and those of them that hold nothing but nulls."""
    del comm
    return [
        (number, table.schema, [column.name for column in table if column.null_count() == table.height])
        for number, table in tables
    ]


def _agreed(told: Sequence[tuple[int, Schema, Sequence[str]]]) -> Schema:
    """Returns the columns of all partitions; one that holds nothing but nulls takes any dtype.

    **Raises:** `ArgumentError` naming two partitions that differ, or no columns at all.
    """
    told = sorted(told, key=lambda one: one[0])
    first, names, _ = told[0]
    if not names:
        raise ArgumentError(f"partition {first} has no columns; expected a table of one or more")
    found: dict[str, tuple[int, Any]] = {}
    for number, schema, nulls in told:
        if list(schema) != list(names):
            raise ArgumentError(
                f"partition {number} has the columns {list(schema)}, and partition {first} {list(names)}; expected the "
                "same in all, in the same order: select them before"
            )
        for name, dtype in schema.items():
            other, known = found.setdefault(name, (number, dtype)) if name not in nulls else (number, dtype)
            if known != dtype:
                raise ArgumentError(
                    f"partition {number} has {dtype} in the column {name!r}, and partition {other} {known}; expected "
                    "one dtype in all: cast it before"
                )
    return pl.Schema([(name, found[name][1] if name in found else dtype) for name, dtype in names.items()])


def _joined(comm: Communicator, tables: Numbered, schema: Schema) -> Partition:
    del comm
    nulls = {name: pl.lit(None, dtype=dtype).alias(name) for name, dtype in schema.items()}
    parts = [
        table.with_columns([nulls[name] for name, dtype in schema.items() if table.schema[name] != dtype])
        for _, table in tables
    ]
    return Partition(pl.concat([pl.DataFrame(schema=schema), *parts]))


def _frame_of(value: Any, number: int) -> "pl.DataFrame":
    if isinstance(value, pl.DataFrame):
        frame = value
    elif isinstance(value, pl.LazyFrame):
        frame = value.collect()
    else:
        library = type(value).__module__.partition(".")[0]
        if library == "pandas" and hasattr(value, "columns"):
            columns = _pandas_columns(value, number)
        elif library == "pyarrow" and hasattr(value, "column_names"):
            columns = [(name, value.column(at)) for at, name in enumerate(value.column_names)]
        elif library == "pyarrow" and hasattr(value, "schema"):
            columns = list(zip(value.schema.names, value.columns, strict=True))
        else:
            raise ArgumentError(
                f"partition {number} is a {type(value).__module__}.{type(value).__qualname__}; expected a table of "
                "pandas, pyarrow or Polars"
            )
        frame = pl.DataFrame([_series(name, column, number) for name, column in _checked(columns, number)])
    for name, dtype in frame.schema.items():
        if dtype.base_type() in (pl.Object, pl.Extension):
            raise _unknown(number, name, dtype, "a dtype that no other process knows")
    return frame


def _pandas_columns(table: Any, number: int) -> list[tuple[Any, Any]]:
    """Returns columns with their names; levels of the index that have a name are columns."""
    levels = [level for level in table.index.names if level is not None]
    index = [(level, table.index.get_level_values(level).to_series().reset_index(drop=True)) for level in levels]
    return _checked([*index, *((name, table.iloc[:, at]) for at, name in enumerate(table.columns))], number)


def _checked(columns: "list[tuple[Any, Any]]", number: int) -> "list[tuple[str, Any]]":
    names = [name for name, _ in columns]
    for name in names:
        if not isinstance(name, str) or names.count(name) > 1:
            why = "is there twice" if isinstance(name, str) else "is no text"
            raise ArgumentError(f"partition {number}: the name of a column, {name!r}, {why}; rename it before")
    return columns


def _series(name: str, column: Any, number: int) -> "pl.Series":
    try:
        made: Any = pl.from_pandas(column) if hasattr(column, "iloc") else pl.from_arrow(column)
    except Exception as error:  # pyarrow and Polars each have errors of their own
        raise _unknown(number, name, getattr(column, "dtype", None) or column.type, str(error)) from error
    return made.alias(name)


def _unknown(number: int, name: str, dtype: Any, why: str) -> ArgumentError:
    return ArgumentError(
        f"partition {number}: the column {name!r} has {dtype}, which Polars cannot represent ({why}); convert it "
        "before, or leave it out"
    )


def _is_arrows(dtype: Any) -> bool:
    match dtype:
        case pl.Int128() | pl.UInt128() | pl.Object() | pl.Extension():
            return False
        case pl.List(inner=inner) | pl.Array(inner=inner):
            return _is_arrows(inner)
        case pl.Struct(fields=fields):
            return all(_is_arrows(field.dtype) for field in fields)
        case _:
            return True
