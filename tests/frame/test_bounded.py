"""Memory that is bounded, as the kernel counts it: tables of 8 times the limit on ranks that are processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import braidax.frame as bf
from braidax.comm import Communicator
from braidax.errors import ArgumentError, PeerLost
from braidax.gang import LocalGang

LIMIT = 256 << 20
TEXT = 484  # bytes, so that 8 times the limit are few rows
ROWS = 8 * LIMIT // (TEXT + 40)
# Polars' allocator else keeps what is free for ten seconds, which the kernel counts.
ENVIRONMENT = {"_RJEM_MALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0"}


def build(path: Path, num_rows: int) -> pl.LazyFrame:
    """Returns a table in a file, of which half of the rows have one key."""
    number = pl.int_range(pl.len())
    text = pl.concat_str(pl.lit("x" * (TEXT - 16)), number.cast(pl.String).str.zfill(16))
    key = pl.when(number % 2 == 0).then(7).otherwise(8 + number * 7919 % 4_000_000)
    rows = pl.select(key=pl.repeat(0, num_rows)).lazy().select(k=key, s=text)
    rows.sink_parquet(path, row_group_size=8_000)
    return pl.scan_parquet(path)


def memory_bytes(comm: Communicator, name: str) -> int:
    """Returns what the kernel says of this process, and lets it count the peak anew."""
    del comm
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def joined(table: pl.LazyFrame, other: pl.LazyFrame) -> pl.LazyFrame:
    return other.join(table, on="k")


def grouped(table: pl.LazyFrame, other: pl.LazyFrame) -> pl.LazyFrame:
    del other
    return table.group_by("k").agg(pl.len(), pl.col("s").min())


def sorted_(table: pl.LazyFrame, other: pl.LazyFrame) -> pl.LazyFrame:
    del other
    return table.sort("k")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("query", [joined, grouped, sorted_])
def test_a_table_of_eight_times_the_limit(query: Callable[..., pl.LazyFrame], tmp_path: Path) -> None:
    table = build(tmp_path / "table.parquet", ROWS)
    few = build(tmp_path / "few.parquet", 100)
    others = pl.DataFrame({"k": [7, *range(2_000_000)], "v": pl.int_range(2_000_001, eager=True)}).lazy()
    others.sink_parquet(tmp_path / "others.parquet", row_group_size=100_000)
    other = pl.scan_parquet(tmp_path / "others.parquet")
    spilled = tmp_path / "spilled"
    spilled.mkdir()
    memory = bf.Memory(limit_bytes=LIMIT, spill_folder=spilled)
    with LocalGang(2, environment=ENVIRONMENT) as gang:
        bf.from_polars(query(few, few.select("k")), gang, memory=memory).sink_parquet(tmp_path / "warm")
        gang.run(memory_bytes, "VmRSS")
        before = gang.run(memory_bytes, "VmRSS")
        rows = sum(bf.from_polars(query(table, other), gang, memory=memory).sink_parquet(tmp_path / "out"))
        peaks = gang.run(memory_bytes, "VmHWM")
    keys = query(table.select("k", s=pl.lit("")), other)
    assert rows == keys.select(pl.len()).collect().item()
    over = [(peak - base) / LIMIT for peak, base in zip(peaks, before, strict=True)]
    assert max(over) <= 1.25, over
    assert not list(spilled.iterdir())


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pl.LazyFrame:
    """A table that does not fit into the least memory."""
    return build(tmp_path_factory.mktemp("table") / "table.parquet", 100_000)


def test_a_rank_that_is_killed_leaves_no_files(table: pl.LazyFrame, gang: LocalGang, tmp_path: Path) -> None:
    spilled = tmp_path / "spilled"
    spilled.mkdir()
    memory = bf.Memory(limit_bytes=32 << 20, spill_folder=spilled)
    seen = str(tmp_path / "seen")

    def kill(rows: pl.DataFrame) -> pl.DataFrame:
        files = [os.fspath(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        if any(str(spilled) in file for file in files):
            Path(seen).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rows

    lazy = table.sort("k").map_batches(kill, streamable=True, schema=table.collect_schema()).sort("s")
    with pytest.raises(PeerLost):
        bf.from_polars(lazy, gang, memory=memory).sink_parquet(tmp_path / "out", max_replays=0)
    assert Path(seen).exists()
    assert not list(spilled.iterdir())


def test_a_function_that_raises_leaves_no_files(table: pl.LazyFrame, gang: LocalGang, tmp_path: Path) -> None:
    spilled = tmp_path / "spilled"
    spilled.mkdir()
    memory = bf.Memory(limit_bytes=32 << 20, spill_folder=spilled)

    def fails(value: Any) -> int:
        raise ValueError("no value is good")  # whichever rank is the first to say so

    lazy = table.sort("s").select(pl.col("k").map_elements(fails, pl.Int64))
    with pytest.raises(Exception, match="no value is good"):
        bf.from_polars(lazy, gang, memory=memory).sink_parquet(tmp_path / "out")
    assert not list(spilled.iterdir())
    assert not (tmp_path / "out").exists()


def test_limits_and_folders_that_cannot_be(table: pl.LazyFrame, gang: LocalGang, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"limit_bytes=7: expected at least 33554432 .32 MiB.*give a rank more"):
        bf.Memory(limit_bytes=7)
    memory = bf.Memory(limit_bytes=32 << 20, spill_folder=tmp_path / "not there")
    with pytest.raises(Exception, match=r"spill_folder='.*not there' takes no file.*local disk"):
        bf.collect(table.sort("s"), gang, memory=memory)
