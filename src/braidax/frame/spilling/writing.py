"""Tables that are written as they are computed."""

import io
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import IO, Any, Literal

from braidax.extras import import_pyarrow_ipc, import_pyarrow_parquet
from braidax.frame.plan.supplying import lazy_of, schema_of, wanted
from braidax.frame.polars import pl
from braidax.frame.running import Table
from braidax.frame.spilling.running import Spilling
from braidax.frame.spilling.store import blocks

_PURPOSE = "files that are written in bounded memory"


def write_stream(spilling: Spilling, table: Table, file: IO[bytes], format: Literal["arrow", "parquet"]) -> int:
    """Writes the rows of a table here into an open file. **Returns:** how many.

    **Raises:** what Polars does; `OSError` for a disk that is full.
    """
    found = blocks(spilling.stream(table), spilling.spill.budget.bucket_bytes)
    first = next(found, None)
    if first is None:
        first = pl.DataFrame(schema=schema_of(table.node))
    counted = _Counted(chain([first], found))
    # Polars' own sinks keep many groups of rows in memory, however short these are; some dtypes they alone can write.
    if _is_the_same(first.clear(), format):
        with closing(_writer(first, file, format)) as writer:
            for frame in counted:
                for batch in _arrow(frame).combine_chunks().to_batches():
                    writer.write_batch(batch)
    else:
        _sink(spilling, first, counted, file, format)
    file.flush()
    return counted.num_rows


class _Counted:
    """Tables one after the other, and how many rows they had."""

    def __init__(self, frames: Iterator["pl.DataFrame"]) -> None:
        self.num_rows = 0
        self._frames = frames

    def __iter__(self) -> Iterator["pl.DataFrame"]:
        for frame in self._frames:
            self.num_rows += frame.height
            yield frame


def _arrow(frame: "pl.DataFrame") -> Any:
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def _writer(frame: "pl.DataFrame", file: Any, format: str) -> Any:
    """Returns a writer of tables like this one."""
    schema = _arrow(frame.clear()).schema
    if format == "arrow":
        return import_pyarrow_ipc(purpose=_PURPOSE).new_file(file, schema)
    return import_pyarrow_parquet(purpose=_PURPOSE).ParquetWriter(file, schema, compression="zstd")


def _is_the_same(empty: "pl.DataFrame", format: str) -> bool:
    """Returns whether a table that Arrow writes is read as it was; dictionaries may differ from batch to batch."""
    file = io.BytesIO()
    try:
        if "dictionary<" in str(_arrow(empty).schema):
            return False
        with closing(_writer(empty, file, format)):
            pass
        file.seek(0)
        read = pl.read_ipc(file) if format == "arrow" else pl.read_parquet(file)
    except (ValueError, TypeError, NotImplementedError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return False  # pyarrow's errors are of these
    return read.schema == empty.schema


def _sink(spilling: Spilling, first: "pl.DataFrame", counted: _Counted, file: IO[bytes], format: str) -> None:
    def every(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
        for frame in counted:
            yield wanted(frame, columns, predicate)

    source = spilling.streamed(every, first.schema)
    lazy, rows = lazy_of(source.node, source.buckets[0]), max(1, first.height)
    if format == "arrow":
        lazy.sink_ipc(file, record_batch_size=rows, compat_level=pl.CompatLevel.oldest(), engine="streaming")
    else:
        lazy.sink_parquet(file, row_group_size=rows, engine="streaming")
