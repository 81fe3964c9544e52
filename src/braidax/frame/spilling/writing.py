"""Tables that are written as they are computed."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Literal

from braidax.frame.plan.supplying import lazy_of, schema_of
from braidax.frame.polars import pl
from braidax.frame.running import Table
from braidax.frame.spilling.running import SpillingRunner
from braidax.frame.spilling.store import blocks
from braidax.frame.spilling.streaming import Streamed, wanted


def write_stream(runner: SpillingRunner, table: Table, file: IO[bytes], format: Literal["arrow", "parquet"]) -> int:
    """Writes the rows of a table here into an open file. **Returns:** how many.

    **Raises:** what Polars does; `OSError` for a disk that is full.
    """
    batches = blocks(runner.stream(table), runner.spill.budget.bucket_bytes)
    first = next(batches, None)
    if first is None:
        first = pl.DataFrame(schema=schema_of(table.node))
    rows = max(1, first.height)  # of a group: what is written at once

    def every(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
        for batch in chain([first], batches):
            yield wanted(batch, columns, predicate)

    source = runner.read(Streamed(first.schema, every), first.schema)
    lazy = lazy_of(source.node, source.readings)
    if format == "arrow":
        lazy.sink_ipc(file, record_batch_size=rows, compat_level=pl.CompatLevel.oldest(), engine="streaming")
    else:
        lazy.sink_parquet(file, row_group_size=rows, engine="streaming")
    file.flush()
    path = Path(file.name)
    written = pl.scan_ipc(path) if format == "arrow" else pl.scan_parquet(path)
    return int(written.select(pl.len()).collect().item())
