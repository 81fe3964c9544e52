"""Files: globs, lists of files, row indexes, slices; of all formats."""

from collections.abc import Callable
from typing import Any

import polars as pl

from tests.support.frame.queries.query import FLOATS, Build, queries

c = pl.col

# A file without rows says nothing, and NDJSON has no integers of 16 bits.
SCHEMA = {
    **{name: pl.Int64() for name in ("id", "i", "s")},
    **{name: pl.String() for name in ("g", "cat", "en", "name")},
    **{"h": pl.Int32(), "u": pl.UInt32(), "day": pl.Date(), "b": pl.Boolean(), "at": pl.Datetime("us")},
    **{"zoned": pl.String(), "f": pl.Float64(), "f32": pl.Float32()},
}
SCANS: dict[str, Callable[..., Any]] = {
    "parquet": pl.scan_parquet,
    "ipc": pl.scan_ipc,
    "csv": lambda source, **options: pl.scan_csv(source, schema_overrides=SCHEMA, **options),
    "ndjson": lambda source, **options: pl.scan_ndjson(source, schema=SCHEMA, **options),
}


def _each(name: str, ask: Callable[[Callable[..., pl.LazyFrame]], pl.LazyFrame]) -> dict[str, Build]:
    """Returns a query of files in each of the formats. **Arguments:** `ask`: makes it of what scans them."""

    def of(suffix: str) -> Build:
        return lambda t: ask(lambda **options: SCANS[suffix](t.files[suffix], **options))

    return {f"{suffix}: {name}": of(suffix) for suffix in SCANS}


SCANNING = (
    queries(
        {
            **_each("a glob", lambda scan: scan()),
            **_each("some columns", lambda scan: scan().select("g", "id")),
            **_each("a row index", lambda scan: scan(row_index_name="row", row_index_offset=5)),
            **_each(
                "a row index and a filter", lambda scan: scan(row_index_name="row").filter(c("i") > 0, c("row") > 3)
            ),
            **_each("n_rows", lambda scan: scan(n_rows=11)),
            **_each("a slice", lambda scan: scan().slice(9, 17)),
            **_each("the last rows", lambda scan: scan().tail(6)),
            **_each("a filter", lambda scan: scan().filter(c("id") > 30, c("g").is_not_null())),
            **_each(
                "paths of files",
                lambda scan: scan(include_file_paths="path").select("id", c("path").str.extract(r"(\d)\.\w+$")),
            ),
            **_each("len", lambda scan: scan().select(pl.len())),
            **_each("sums", lambda scan: scan().select(c("i", "s", "h").sum(), n=c("g").n_unique())),
            **_each("sort", lambda scan: scan().sort("i", "id", descending=True)),
            **_each(
                "windows",
                lambda scan: scan().select("id", s=c("i").cum_sum(), m=c("i").max().over("g"), p=c("id").shift()),
            ),
            **_each("with_row_index", lambda scan: scan().filter(c("b")).with_row_index()),
            **_each("group_by in order", lambda scan: scan().group_by("g", maintain_order=True).agg("id")),
            **_each("concat of scans", lambda scan: pl.concat([scan().select("id"), scan().select("id").head(4)])),
            "parquet: a list of files": lambda t: pl.scan_parquet(
                sorted(t.files["parquet"].parent.glob("table-*.parquet"))
            ),
            "parquet: a list of files in another order": lambda t: pl.scan_parquet(
                sorted(t.files["parquet"].parent.glob("table-*.parquet"), reverse=True), row_index_name="row"
            ),
            "parquet: one file": lambda t: pl.scan_parquet(t.files["parquet"].parent / "table-2.parquet").filter(
                c("id") % 2 == 0
            ),
            "parquet: a folder": lambda t: pl.scan_parquet(
                t.wide_files["parquet"].parent / "wide-*.parquet", parallel="row_groups"
            ),
            "parquet: every dtype": lambda t: pl.scan_parquet(t.wide_files["parquet"]),
            "parquet: statistics": lambda t: pl.scan_parquet(t.files["parquet"]).filter(c("id").is_between(20, 24)),
            "parquet: bytes in memory": lambda t: pl.scan_parquet(
                t.files["parquet"].parent.joinpath("table-2.parquet").read_bytes()
            ).select("id"),
            "ipc: every dtype": lambda t: pl.scan_ipc(t.wide_files["ipc"]),
            "csv: inferred": lambda t: pl.scan_csv(t.files["csv"].parent / "table-2.csv", infer_schema_length=None),
            "csv: no header": lambda t: pl.scan_csv(
                t.files["csv"].parent / "table-2.csv", has_header=False, skip_rows=1, infer_schema=False
            ).select("column_1"),
            "csv: a comment and other names": lambda t: pl.scan_csv(
                t.files["csv"], with_column_names=lambda names: [name.upper() for name in names]
            ).select("ID", "G"),
            "ndjson: inferred": lambda t: pl.scan_ndjson(
                t.files["ndjson"].parent / "table-2.ndjson", infer_schema_length=None
            ).select("id"),
        }
    )
    + queries(
        {
            **_each("join", lambda scan: scan().join(scan().select("id", "h", z="g"), on=["id", "h"], how="full")),
            **_each("group_by", lambda scan: scan().group_by("g", "h").agg(c("i").sum(), n=pl.len())),
            **_each("unique", lambda scan: scan().select("g", "h").unique()),
        },
        order="undefined",
    )
    + queries(
        {
            **_each("means", lambda scan: scan().group_by("h").agg(c("f").mean(), s=c("f").sum())),
        },
        order="undefined",
        rtol=FLOATS,
    )
)
