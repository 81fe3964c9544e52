"""A rank dies while a frame is computed: another process takes its place, and the frame is computed again."""

import gc
import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax as bx
import braidax.frame as bf
from braidax.errors import ArgumentError, CallFailed, GangError, PeerLost
from braidax.frame.replaying import replayed
from braidax.gang import LocalGang
from tests.support.frame.losing.dying import Dying, Failing
from tests.support.gang import programs
from tests.support.gang.clusters import until

ROWS, SIZE = 3000, 3
LAST = ROWS - 1.0


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def table() -> pl.DataFrame:
    return pl.DataFrame({"k": [i % 70 for i in range(ROWS)], "v": [float(i) for i in range(ROWS)]})


def grouped(lazy: pl.LazyFrame) -> pl.LazyFrame:
    """Puts two exchanges behind a plan."""
    return lazy.group_by("k").agg(pl.col("v").sum(), pl.len()).sort("k")


def dying(notes: Path, *, times: int, at: float = LAST) -> pl.LazyFrame:
    """Returns a plan that ends a rank, by default the last one, while the others wait for its rows."""
    return grouped(table().lazy().map_batches(Dying(str(notes), at, times), streamable=True))


def replays(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "braidax"]


def kill(gang: LocalGang, rank: int) -> None:
    os.kill(gang.run(programs.pids)[rank], signal.SIGKILL)
    until(lambda: gang.lost == (rank,))


def test_a_rank_dies_and_the_result_is_the_same(gang: LocalGang, notes: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = gang.run(programs.pids)
    assert_frame_equal(bf.collect(dying(notes, times=1), gang), grouped(table().lazy()).collect())
    after = gang.run(programs.pids)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, False]
    (told,) = replays(caplog)
    assert told.startswith("rank 2 (host ")
    assert "was ended by signal 9 (SIGKILL)" in told
    assert told.endswith("; the frame is computed again, replay 1 of 2")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_several_die_one_after_the_other(gang: LocalGang, notes: Path, caplog: pytest.LogCaptureFixture) -> None:
    result, profile = bf.profile(dying(notes, times=2), gang)
    assert_frame_equal(result, grouped(table().lazy()).collect())
    assert [told[-13:] for told in replays(caplog)] == ["replay 1 of 2", "replay 2 of 2"]
    assert profile.operations[0].num_rows == 70
    assert profile.seconds < 60


@pytest.mark.parametrize("max_replays", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_replays_are_bounded(gang: LocalGang, notes: Path, max_replays: int) -> None:
    with pytest.raises(PeerLost, match=r"^rank 2 \(host .* was ended by signal 9") as raised:
        bf.collect(dying(notes, times=9), gang, max_replays=max_replays)
    assert len(list(notes.iterdir())) == 1 + max_replays
    told = "The frame was computed again before, as often as max_replays=1 allows."
    assert getattr(raised.value, "__notes__", []) == [told] * max_replays
    assert gang.lost == (2,)


def test_a_rank_that_is_lost_beforehand_is_replaced(gang: LocalGang) -> None:
    kill(gang, 1)
    expected = grouped(table().lazy()).collect()
    assert_frame_equal(bf.collect(grouped(table().lazy()), gang), expected)
    kill(gang, 0)
    with pytest.raises(PeerLost):
        gang.run(programs.pids)
    with pytest.raises(GangError, match=r"call replace\(\)"):  # of which the gang has told already
        bf.collect(grouped(table().lazy()), gang, max_replays=0)
    assert_frame_equal(bf.collect(grouped(table().lazy()), gang, max_replays=1), expected)


def test_what_is_no_lost_rank_is_not_replayed(gang: LocalGang, notes: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = table().lazy().filter(pl.col("v") == 0).map_batches(Failing(str(notes)), streamable=True).head(1)
    with pytest.raises(CallFailed, match="the function of a user"):
        bf.collect(failing, gang)
    assert len(list(notes.iterdir())) == len({file.name.partition("-")[2] for file in notes.iterdir()}) <= SIZE
    stopped = LocalGang(1)
    with pytest.raises(GangError, match="it was not started"):
        bf.collect(table().lazy(), stopped)
    assert replays(caplog) == []
    with pytest.raises(ArgumentError, match=r"max_replays=-1: expected how often .*, 0 or more"):
        bf.collect(table().lazy(), gang, max_replays=-1)


def test_a_table_that_dies_with_its_rank_is_computed_again(gang: LocalGang, caplog: pytest.LogCaptureFixture) -> None:
    first = bf.from_polars(table(), gang).with_columns((pl.col("v") * 2).alias("w")).persist()
    (parent,) = gang.names()
    second = first.filter(pl.col("k") < 50).persist()
    expected = table().lazy().with_columns((pl.col("v") * 2).alias("w")).filter(pl.col("k") < 50)
    (name,) = set(gang.names()) - {parent}
    kill(gang, 1)
    both = second.join(first.select("v"), on="v", how="semi")  # reads both of them
    assert_frame_equal(both.sort("v").collect(), expected.sort("v").collect())
    assert len([told for told in replays(caplog) if "its part was lost on ranks 1" in told]) == 2
    assert gang.names() == tuple(sorted([parent, name]))
    assert (gang.lacking(name), gang.lacking(parent), gang.lacking("other")) == ((), (), (0, 1, 2))
    del first, both
    gc.collect()
    kill(gang, 2)
    assert_frame_equal(second.sort("v").collect(), expected.sort("v").collect())
    assert gang.names() == (name,)  # what it was computed from is gone again


def test_a_plan_alone_does_not_know_of_what_it_reads(gang: LocalGang) -> None:
    other = bf.from_polars(table(), gang).persist()
    kill(gang, 0)
    with pytest.raises(GangError, match=r"is not whole any more: rank 0 of 3 lacks it"):
        bf.collect(other.lazy_frame, gang)
    assert other.select(pl.len()).collect().item() == ROWS


def test_tables_go_with_a_gang_that_is_restarted_and_come_back(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGang(2) as gang:
        first = bf.from_polars(table(), gang).persist()
        second = bf.from_polars(table(), gang).persist()
        gang.restart()
        assert gang.names() == ()
        del first
        gc.collect()
        assert second.select(pl.len()).collect().item() == ROWS
        assert len(gang.names()) == 1
    assert replays(caplog) == ["a persisted table was computed again from its plan: its part was lost on ranks 0, 1"]


def test_ranks_die_while_a_table_is_persisted_and_while_it_is_read(gang: LocalGang, notes: Path) -> None:
    dies = Dying(str(notes), 0.0, 1)
    kept = bf.from_polars(table(), gang).map_batches(dies, streamable=True).persist()
    assert len(list(notes.iterdir())) == 1
    again = Dying(str(notes), LAST, 2)
    found = kept.map_batches(again, streamable=True).group_by("k").agg(pl.len()).sort("k").collect()
    assert len(list(notes.iterdir())) == 2
    assert_frame_equal(found, table().group_by("k").agg(pl.len()).sort("k"))


@pytest.mark.parametrize("kind", ["arrow", pytest.param("parquet", marks=pytest.mark.slow)])
def test_a_folder_is_written_once_and_whole(gang: LocalGang, notes: Path, tmp_path: Path, kind: str) -> None:
    frame = bf.from_polars(dying(notes, times=1), gang)
    out = tmp_path / "folders" / "out"
    sink = frame.sink_arrow if kind == "arrow" else frame.sink_parquet
    assert sum(sink(out)) == 70
    assert [item.name for item in out.parent.iterdir()] == ["out"]
    assert len(bx.open(out)) == 70
    assert gang.names() == ()
    bounded = bf.from_polars(dying(notes, times=9), gang)
    sink = bounded.sink_arrow if kind == "arrow" else bounded.sink_parquet
    with pytest.raises(PeerLost):
        sink(out.with_name("other"), max_replays=0)
    assert [item.name for item in out.parent.iterdir()] == ["out"]


def test_threads_that_share_a_gang_replace_a_rank_once(gang: LocalGang, notes: Path) -> None:
    before = gang.run(programs.pids)
    with ThreadPoolExecutor(3) as pool:
        plans = [dying(notes, times=1), *[grouped(table().lazy())] * 2]
        for found in pool.map(lambda plan: bf.collect(plan, gang), plans):
            assert_frame_equal(found, grouped(table().lazy()).collect())
    assert len(set(before) - set(gang.run(programs.pids))) == 1


def test_a_rank_that_another_thread_has_replaced_is_a_lost_one(gang: LocalGang) -> None:
    """A call that was refused for a lost rank may be told of that when nobody is lost any more."""
    calls: list[int] = []

    def compute() -> int:
        calls.append(len(calls))
        if len(calls) == 1:
            os.kill(gang.run(programs.pids)[1], signal.SIGKILL)
            until(lambda: bool(gang.lost))
            gang.replace()
            raise GangError("the gang cannot run a function in rank 1")
        return 5

    assert replayed(gang, compute, max_replays=1) == 5
    with pytest.raises(GangError, match="as ever"):
        replayed(gang, lambda: failing(calls), max_replays=1)
    assert calls == [0, 1, 2]


def failing(calls: list[int]) -> None:
    calls.append(len(calls))
    raise GangError("as ever")
