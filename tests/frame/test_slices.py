"""Rows that are filtered behind a slice: of the slice, wherever the rows come from."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from braidax.comm import Communicator
from braidax.frame import Memory, collect_partition
from braidax.frame.operators.reading import lines
from tests.support.frame.running import united
from tests.support.frame.worlds import Worlds

TABLE = pl.DataFrame({"i": range(200), "odd": [i % 2 for i in range(200)]}).with_columns(key=pl.col("i") * 37 % 101)
Plan = Callable[[pl.LazyFrame], pl.LazyFrame]
PLANS: dict[str, Plan] = {
    "head": lambda t: t.head(21).filter(pl.col("odd") == 1),
    "one of its columns": lambda t: t.head(21).filter(pl.col("odd") == 1).select("key"),
    "a head of that": lambda t: t.head(21).filter(pl.col("odd") == 1).head(3),
    "a head behind a filter": lambda t: t.filter(pl.col("i") > 50).head(21).filter(pl.col("odd") == 1),
    "slice": lambda t: t.slice(5, 21).filter(pl.col("odd") == 1),
    "tail": lambda t: t.tail(21).filter(pl.col("odd") == 1),
    "a head of a sort": lambda t: t.sort("key", "i").head(21).filter(pl.col("odd") == 1),
    "groups of it": lambda t: t.head(21).filter(pl.col("odd") == 1).group_by("odd").agg(pl.col("i").sum()),
    "joined to it": lambda t: t.join(t.head(21).filter(pl.col("odd") == 1), on="i", maintain_order="left"),
}


@pytest.fixture
def scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, pl.LazyFrame]:
    monkeypatch.setattr(lines, "_MANY_BYTES", 1)  # so that even these are read by lines
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 64)
    TABLE.write_csv(tmp_path / "table.csv")
    TABLE.write_ndjson(tmp_path / "table.jsonl")
    TABLE.write_parquet(tmp_path / "table.parquet", row_group_size=30)
    return {
        "memory": TABLE.lazy(),
        "CSV": pl.scan_csv(tmp_path / "table.csv"),
        "NDJSON": pl.scan_ndjson(tmp_path / "table.jsonl"),
        "Parquet": pl.scan_parquet(tmp_path / "table.parquet"),
    }


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("memory", [None, Memory(64 << 20)], ids=["in memory", "bounded"])
@pytest.mark.parametrize("name", PLANS)
def test_rows_behind_a_slice_are_filtered_of_it(
    name: str, memory: Memory | None, scans: dict[str, pl.LazyFrame], worlds: Worlds
) -> None:
    expected = PLANS[name](TABLE.lazy()).collect()
    for source, scanned in scans.items():
        plan = PLANS[name](scanned)

        def computed(comm: Communicator, plan: pl.LazyFrame = plan) -> pl.DataFrame:
            return collect_partition(plan, comm, memory=memory)

        found = united(worlds.run(2, computed))
        assert isinstance(found, pl.DataFrame), (source, found)
        assert_frame_equal(found, expected, check_dtypes=False)
