"""Drawn trials: ranks are killed while a frame is computed. What comes is right, or says who was lost."""

import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.errors import PeerLost
from braidax.gang import LocalGang
from tests.support.gang import programs
from tests.support.gang.clusters import is_running, until
from tests.support.gang.forks import fork_children

SIZE, ROWS, GROUPS = 3, 120_000, 5_000
LIMIT_SECONDS = 60.0
_log = logging.getLogger(__name__)
Query = Callable[[bf.Frame, Path], pl.DataFrame]


def table() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    return pl.DataFrame(
        {
            "k": rng.integers(0, GROUPS, ROWS),
            "v": rng.integers(0, 1 << 40, ROWS),
            "s": [f"text {i}" for i in range(ROWS)],
        }
    )


def pipeline(frame: bf.Frame, folder: Path) -> pl.DataFrame:
    other = frame.group_by("k").agg(pl.col("v").max().alias("most"))
    return (
        frame.join(other, on="k").group_by("k").agg((pl.col("most") - pl.col("v")).sum(), pl.len()).sort("k").collect()
    )


def ordered(frame: bf.Frame, folder: Path) -> pl.DataFrame:
    return frame.sort("v", "s").with_columns(pl.col("v").shift(1).alias("before")).tail(ROWS // 2).collect()


def windows(frame: bf.Frame, folder: Path) -> pl.DataFrame:
    return frame.with_columns(pl.col("v").sum().over("k").alias("sum")).unique("k", keep="first").sort("k").collect()


def persisted(frame: bf.Frame, folder: Path) -> pl.DataFrame:
    kept = frame.filter(pl.col("k") % 3 == 0).persist()
    again = kept.join(kept.unique("k", keep="any").select("k"), on="k").persist()
    return again.sort("s").collect()


def written(frame: bf.Frame, folder: Path) -> pl.DataFrame:
    assert sum(frame.shuffle(seed=1).sink_parquet(folder / "out")) == ROWS
    return pl.read_parquet(folder / "out").sort("s")


QUERIES: list[Query] = [pipeline, ordered, windows, persisted, written]


@dataclass(frozen=True)
class Trial:
    """**Fields:** `kills`: rank and moment of each, in parts of the time that the query takes undisturbed."""

    seed: int
    query: Query
    kills: tuple[tuple[int, float], ...]
    max_replays: int


def drawn(seed: int) -> Trial:
    """Returns the trial of a seed."""
    draw = random.Random(seed)
    ranks = draw.sample(range(SIZE), draw.choice([1, 1, 1, 2]))
    kills = tuple((rank, draw.uniform(0, 1.1)) for rank in ranks)
    return Trial(seed, QUERIES[seed % len(QUERIES)], kills, draw.choice([0, len(ranks), len(ranks)]))


def drawn_of_two(seed: int) -> Trial:
    """Returns a trial in which a second rank dies while the first one is replaced, or the query computed again."""
    draw = random.Random(seed)
    ranks, first = draw.sample(range(SIZE), 2), draw.uniform(0, 1)
    moments = first, first + draw.choice([draw.uniform(0, 1), draw.uniform(0, 10)])
    return Trial(seed, QUERIES[seed % len(QUERIES)], tuple(zip(ranks, moments, strict=True)), 2)


class Losing:
    """A gang whose ranks are killed. **Arguments:** `folder`: for what is written. `file`: of the table."""

    def __init__(self, gang: LocalGang, folder: Path, file: Path) -> None:
        self.gang, self.folder, self.file = gang, folder, file
        self.seen: Counter[str] = Counter()
        self.pids: set[int] = set()
        self.expected: dict[Query, pl.DataFrame] = {}
        self.seconds: dict[Query, float] = {}

    def learn(self, queries: Collection[Query]) -> None:
        """Asks queries undisturbed: what they give, and how long they take."""
        for query in queries:
            for name in ("cold", "warm"):  # the first time ranks import Polars
                start = time.monotonic()
                self.expected[query] = self._asked(query, f"{query.__name__}-{name}")
                self.seconds[query] = time.monotonic() - start

    def attempt(self, trial: Trial, replays: Callable[[], int]) -> None:
        """Runs a trial; fails when what comes is neither right nor the rank that was lost."""
        pids = self.whole()
        before = replays()
        timers = [
            threading.Timer(moment * self.seconds[trial.query], _kill, (pids[rank],)) for rank, moment in trial.kills
        ]
        frame, killed = f"trial-{trial.seed}", {rank for rank, _ in trial.kills}
        for timer in timers:
            timer.start()
        start = time.monotonic()
        found = self._outcome(trial, frame)
        if isinstance(found, PeerLost):
            assert trial.max_replays == 0, (trial, found)
            assert found.rank in killed, (trial, found)
            self.seen["lost"] += 1
        else:
            assert_frame_equal(found, self.expected[trial.query])
            self.seen["replayed" if replays() > before else "undisturbed"] += 1
        assert time.monotonic() - start < LIMIT_SECONDS, trial
        for timer in timers:
            timer.join()
        until(lambda: not any(is_running(pids[rank]) for rank in killed))
        assert [item.name for item in (self.folder / frame).iterdir()] in ([], ["out"]), trial

    def whole(self) -> list[int]:
        """Returns the processes of all ranks. Of one that ended behind its query the next call may tell first."""
        for _ in range(SIZE):
            with contextlib.suppress(PeerLost):
                self.gang.replace()
                pids = self.gang.run(programs.pids)
                self.pids.update(pids)
                return pids
        pytest.fail(f"more ranks are lost than were killed: {self.gang.lost}")

    def _outcome(self, trial: Trial, name: str) -> pl.DataFrame | PeerLost:
        try:
            return self._asked(trial.query, name, max_replays=trial.max_replays)
        except PeerLost as error:
            return error

    def _asked(self, query: Query, name: str, **options: Any) -> pl.DataFrame:
        folder = self.folder / name
        folder.mkdir()
        frame = _Bounded(bf.scan_parquet(self.file, gang=self.gang), options)
        return query(frame, folder)  # pyright: ignore[reportArgumentType]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.kill(pid, signal.SIGKILL)


class _Bounded:
    """A frame whose computations get further options."""

    def __init__(self, frame: Any, options: dict[str, Any]) -> None:
        self.frame, self.options = frame, options

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.frame, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(one.frame if isinstance(one, _Bounded) else one for one in args)
            computes = name in ("collect", "persist", "sink_parquet")
            return _bounded(value(*args, **kwargs, **(self.options if computes else {})), self.options)

        return call


def _bounded(value: Any, options: dict[str, Any]) -> Any:
    return _Bounded(value, options) if isinstance(value, bf.Frame) or hasattr(value, "agg") else value


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forks() -> Iterator[None]:
    """Lets ranks begin with what they import, but for Polars; the process that forks is there before files are
    counted."""
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, "braidax.gang.child", "braidax.frame.collecting")
        with LocalGang(1):
            pass
        yield


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("transport", "seeds"),
    [
        ("tcp", range(2)),
        pytest.param("tcp", range(2, 5), marks=pytest.mark.slow),
        *(pytest.param("tcp", range(at, at + 20), marks=pytest.mark.slow) for at in (100, 120, 140, 160)),
        *(pytest.param("ucx", range(at, at + 15), marks=pytest.mark.slow) for at in (200, 215)),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.start),
)
def test_kills(transport: str, seeds: range, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_trials(transport, [drawn(seed) for seed in seeds], tmp_path, caplog)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_a_second_kill_soon_after_the_first(transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_trials(transport, [drawn_of_two(seed) for seed in range(5000, 5040)], tmp_path, caplog)


def check_trials(transport: str, trials: list[Trial], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def replays() -> int:
        return sum("the frame is computed again, replay" in record.message for record in caplog.records)

    caplog.set_level(logging.INFO)
    file = tmp_path / "table.parquet"
    table().write_parquet(file, row_group_size=ROWS // 20)
    before, files = shared_memory(), open_files()
    with LocalGang(SIZE, transport=transport) as gang:
        losing = Losing(gang, tmp_path, file)
        losing.learn({trial.query for trial in trials})
        for trial in trials:
            losing.attempt(trial, replays)
        losing.whole()
    _log.info("%d trials over %s: %s", len(trials), transport, dict(losing.seen))
    assert losing.seen["lost"] + losing.seen["replayed"] >= len(trials) // 2  # most kills fall into their query
    until(lambda: not any(map(is_running, losing.pids)))
    until(lambda: shared_memory() <= before)
    until(lambda: open_files() <= files)
    assert not list(tmp_path.rglob(".*"))
