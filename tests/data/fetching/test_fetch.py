"""Fetching: errors at the right batch, limits, knobs, spans, and threads that always end."""

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from braidax.data.fetching.fetch import Draw, Fetch
from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.data.sampling.order import Cursor
from braidax.data.source import VARYING
from braidax.errors import ArgumentError, BraidaxError, FormatError, ReadError, RecordError, WaitTimeout
from braidax.spans import Trace
from tests.support.data.numbered import Large, Numbers, all_ids, check, ids, peeked, reading_threads
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

SAMPLE_BYTES = 6 * 4 + 4


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


def failing_at(record: int, error: Exception) -> Callable[[np.ndarray], None]:
    def before(indices: np.ndarray) -> None:
        if record in indices:
            raise error

    return before


# Errors of the source


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("position", [0, 17, 39])
def test_a_record_that_fails_is_named_at_its_batch(mesh: Mesh, threads: int, position: int) -> None:
    source, cause = Numbers(40), KeyError("spoiled")
    loader = DataLoader(source, mesh, P("data"), batch_size=8, knobs=Knobs(threads=threads, prefetch=3))
    whole = peeked(loader, 5)
    bad = position // 8
    record = whole[bad][position % 8]
    source.before = failing_at(record, cause)
    got: list[list[int]] = []
    with pytest.raises(RecordError) as caught:
        for batch in loader:
            got.append(ids(batch))
    assert got == whole[:bad]
    assert loader.cursor == Cursor(0, 0, 8 * bad)
    assert caught.value.__cause__ is cause
    for fact in ("source=Numbers", "KeyError", "spoiled", str(record)):
        assert fact in str(caught.value)
    assert reading_threads() == []
    if bad < 4:
        loader.cursor = loader.cursor._replace(position=8 * (bad + 1))
        assert all_ids(loader) == whole[bad + 1 :]


def test_a_loader_goes_on_when_the_source_was_mended(mesh: Mesh) -> None:
    source = Numbers(40)
    loader = DataLoader(source, mesh, P("data"), batch_size=8)
    whole = peeked(loader, 5)
    source.before = failing_at(whole[2][3], OSError(5, "disk gone"))
    got: list[list[int]] = []
    with pytest.raises(ReadError, match="disk gone"):
        for batch in loader:
            got.append(ids(batch))
    source.before = None
    assert got + all_ids(loader) == whole


def test_many_records_are_not_all_listed(mesh: Mesh) -> None:
    def before(indices: np.ndarray) -> None:
        raise ValueError("no")

    loader = DataLoader(Numbers(64, before), mesh, P(), batch_size=32, knobs=Knobs(threads=1))
    with pytest.raises(RecordError, match=r"\[(\d+, ){7}\d+\]… \(16 in all\)"):  # half of the first batch
        next(iter(loader))


def test_of_several_reads_that_fail_the_first_rows_are_told() -> None:
    """Whichever ends first: the read of the last row fails, and then that of the first one."""
    source, last_has_failed = Numbers(64), threading.Event()
    loader = DataLoader(source, batch_size=8, knobs=Knobs(threads=4))
    first, *_, last = loader.peek(1)[0].tolist()

    def before(indices: np.ndarray) -> None:
        if last in indices:
            last_has_failed.set()
            raise ValueError("of the last row")
        if first in indices:
            assert last_has_failed.wait(60)
            raise ValueError("of the first row")

    source.before = before
    with pytest.raises(RecordError, match=rf"of the first row, while it read the records \[{first}\]"):
        next(iter(loader))


def test_all_threads_read_the_first_batch() -> None:
    """Had one thread to read all of it, this would hang: nobody knows yet how long a sample takes."""
    together, sizes = threading.Barrier(4), list[int]()

    def before(indices: np.ndarray) -> None:
        if len(sizes) < 8:
            sizes.append(len(indices))
            together.wait(60)

    loader = DataLoader(Numbers(64, before), batch_size=32, knobs=Knobs(threads=4))
    batches = iter(loader)
    next(batches)
    assert sizes == [4] * 8
    together.abort()
    assert len(list(batches)) == 1


@pytest.mark.parametrize("error", [FormatError("a.bin: truncated"), RecordError("a.bin, record 7: corrupt")])
def test_what_a_source_says_is_passed_on_as_it_is(mesh: Mesh, error: Exception) -> None:
    loader = DataLoader(Numbers(16, failing_at(7, error)), mesh, P("data"), batch_size=16)
    with pytest.raises(type(error)) as caught:
        next(iter(loader))
    assert caught.value is error


def test_an_error_comes_on_the_thread_of_the_consumer(mesh: Mesh) -> None:
    raised_on: list[threading.Thread] = []

    def before(indices: np.ndarray) -> None:
        raised_on.append(threading.current_thread())
        raise ValueError("no")

    with pytest.raises(RecordError):
        list(DataLoader(Numbers(16, before), mesh, P("data"), batch_size=16))
    assert threading.current_thread() not in raised_on
    assert all(thread.name.startswith("braidax-read") for thread in raised_on)


# Limits


def test_a_source_that_hangs_is_given_up_within_the_limit(mesh: Mesh) -> None:
    release, source = threading.Event(), Numbers(40)
    loader = DataLoader(source, mesh, P("data"), batch_size=8, knobs=Knobs(threads=2, timeout_seconds=1.0))
    whole = peeked(loader, 5)

    def before(indices: np.ndarray) -> None:
        if set(indices.tolist()) & set(whole[2]):
            release.wait(60)

    source.before = before
    got: list[list[int]] = []
    start = time.monotonic()
    try:
        with pytest.raises(WaitTimeout) as caught:
            for batch in loader:
                got.append(ids(batch))
        assert time.monotonic() - start < 30
        assert got == whole[:2]
        message = str(caught.value)
        assert "the batch at Cursor(seed=0, epoch=0, position=16) of Numbers" in message
        assert "timeout_seconds=1" in message
        assert loader.cursor == Cursor(0, 0, 16)
        loader.close()  # nothing is left to wait for
    finally:
        release.set()
    source.before = None
    assert all_ids(loader) == whole[2:]


def test_closing_does_not_wait_for_ever(mesh: Mesh) -> None:
    release, source = threading.Event(), Numbers(40)
    loader = DataLoader(source, mesh, P("data"), batch_size=8, knobs=Knobs(threads=2, timeout_seconds=0.5))
    whole, hanging = peeked(loader, 5), threading.Event()

    def before(indices: np.ndarray) -> None:
        if set(indices.tolist()) & set(whole[1]):
            hanging.set()
            release.wait(60)

    source.before = before
    batches = iter(loader)
    try:
        assert ids(next(batches)) == whole[0]
        assert hanging.wait(60)
        with pytest.raises(WaitTimeout, match=r"thread 'braidax-read-\d' did not end within timeout_seconds=0.5"):
            loader.close()
        loader.close()
    finally:
        release.set()
    with pytest.raises(BraidaxError, match="closed"):
        next(batches)


def test_ctrl_c_over_a_read_that_hangs_does_not_wait_for_it(mesh: Mesh) -> None:
    release, hangs = threading.Event(), threading.Event()

    def before(indices: np.ndarray) -> None:
        hangs.set()
        release.wait(60)

    def interrupt() -> None:
        assert hangs.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presses = threading.Thread(target=interrupt)
    loader = DataLoader(Numbers(16, before), mesh, P("data"), batch_size=16, knobs=Knobs(timeout_seconds=200.0))
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert not release.is_set()  # it still hangs
    finally:
        release.set()
        presses.join(60)


@pytest.mark.parametrize(("method", "hedge_seconds"), [("rows", None), ("empty_rows", 0.0), ("reads", None)])
def test_memory_that_ends_in_a_reader_is_an_error_at_once(
    mesh: Mesh, method: str, hedge_seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a thread that died in silence, and after the limit "the source may hang"."""

    def fail(*arguments: Any) -> Any:
        raise MemoryError("no room")

    knobs = Knobs(timeout_seconds=30.0, hedge_seconds=hedge_seconds)
    loader = DataLoader(Numbers(16), mesh, P("data"), batch_size=16, knobs=knobs)
    for name in {method, "rows"} - ({"rows"} if method == "reads" else set()):
        monkeypatch.setattr(type(loader._plan), name, fail)
    with pytest.raises(MemoryError, match="no room"):
        next(iter(loader))


def test_a_source_may_raise_a_timeout_of_its_own(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(16, failing_at(3, TimeoutError("mount"))), mesh, P("data"), batch_size=16)
    with pytest.raises(ReadError, match="TimeoutError: mount"):
        next(iter(loader))


# Knobs


@pytest.mark.parametrize(
    ("knobs", "fact"),
    [
        ({"threads": 0}, "threads=0"),
        ({"threads": -2}, "threads=-2"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0"),
        ({"timeout_seconds": -1.0}, "timeout_seconds=-1.0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds=inf"),
        ({"max_bytes": 0}, "max_bytes=0"),
    ],
)
def test_knobs_that_cannot_work(knobs: dict[str, Any], fact: str) -> None:
    with pytest.raises(ArgumentError, match=f"{fact} is not a (finite, )?positive"):
        Knobs(**knobs)


def test_a_prefetch_below_none_cannot_work() -> None:
    with pytest.raises(ArgumentError, match="prefetch=-1 is not an integer from 0 on; None lets the loader adapt it"):
        Knobs(prefetch=-1)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_hedging_that_cannot_work(seconds: float) -> None:
    with pytest.raises(ArgumentError, match=f"hedge_seconds={seconds} is not a number of seconds from 0 on"):
        Knobs(hedge_seconds=seconds)


def test_epochs_that_cannot_work(mesh: Mesh) -> None:
    for epochs in (0, -1):
        with pytest.raises(ArgumentError, match=f"epochs={epochs} is not a positive integer"):
            DataLoader(Numbers(16), mesh, P("data"), batch_size=8, epochs=epochs)


def test_knobs_may_be_set_while_running(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(200), mesh, P("data"), batch_size=8, knobs=Knobs(threads=1, prefetch=1))
    expected, got = peeked(loader, 25), list[list[int]]()
    settings = {3: Knobs(threads=3, prefetch=1), 9: Knobs(threads=3, prefetch=6), 15: Knobs(), 20: Knobs(prefetch=1)}
    for batch in loader:
        check(batch)
        got.append(ids(batch))
        if len(got) in settings:
            loader.knobs = settings[len(got)]
            assert loader.knobs is settings[len(got)]
    assert got == expected


def test_more_threads_read_at_once_after_the_knob_is_set(mesh: Mesh) -> None:
    """Three reads wait for one another: with one thread only they would never end."""
    threads, together, number = set[threading.Thread](), threading.Barrier(3), itertools.count()
    changed = threading.Event()

    def before(indices: np.ndarray) -> None:
        if not changed.is_set():
            threads.add(threading.current_thread())
        elif next(number) < 3:
            together.wait(60)

    loader = DataLoader(Numbers(80, before), mesh, P(), batch_size=8, knobs=Knobs(threads=1, prefetch=2))
    expected, got = peeked(loader, 10), list[list[int]]()
    for batch in loader:
        got.append(ids(batch))
        if len(got) == 3:
            changed.set()
            loader.knobs = Knobs(threads=3, prefetch=2)
    assert got == expected
    assert len(threads) == 1
    assert next(number) > 3


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetch_is_how_far_fetching_runs_ahead(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, prefetch: int) -> None:
    started, start = list[int](), Fetch.start

    def watched(self: Fetch, draw: Draw) -> Any:
        started.append(len(draw()[1]))
        return start(self, draw)

    monkeypatch.setattr(Fetch, "start", watched)
    loader = DataLoader(Numbers(80), mesh, P("data"), batch_size=8, knobs=Knobs(prefetch=prefetch))
    for number, _ in enumerate(loader):
        assert len(started) == min(number + 1 + prefetch, 10)  # the one in use, and the ones ahead


# Threads end


def test_a_second_for_ends_the_first_with_an_error(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(64), mesh, P("data"), batch_size=8)
    whole = peeked(loader, 8)
    first = iter(loader)
    got = [ids(next(first))]
    second = iter(loader)
    got.append(ids(next(second)))
    with pytest.raises(BraidaxError, match="a cursor can serve one loop only"):
        next(first)
    got += [ids(batch) for batch in second]
    assert got == whole
    assert reading_threads() == []


def test_a_for_inside_the_for_is_the_same_mistake(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(64), mesh, P("data"), batch_size=8)
    with pytest.raises(BraidaxError, match="another for was started over it"):
        for _ in loader:
            for _ in loader:
                pass
    assert reading_threads() == []


def test_break_leaves_no_thread(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(640), mesh, P("data"), batch_size=8, epochs=None)
    for _ in loader:
        assert reading_threads()
        break
    assert reading_threads() == []


def test_an_exception_in_the_loop_leaves_no_thread(mesh: Mesh) -> None:
    def loop() -> None:
        for _ in DataLoader(Numbers(640), mesh, P("data"), batch_size=8):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert reading_threads() == []


def test_the_end_leaves_no_thread(mesh: Mesh) -> None:
    list(DataLoader(Numbers(64), mesh, P("data"), batch_size=8))
    assert reading_threads() == []


def test_close_inside_the_loop(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(64), mesh, P("data"), batch_size=8)
    whole = peeked(loader, 8)
    with pytest.raises(BraidaxError, match="was closed"):
        for batch in loader:
            assert ids(batch) == whole[0]
            loader.close()
            loader.close()
            assert reading_threads() == []
    assert all_ids(loader) == whole[1:]


def test_with_closes(mesh: Mesh) -> None:
    with DataLoader(Numbers(64), mesh, P("data"), batch_size=8) as loader:
        batches = iter(loader)
        next(batches)
        assert reading_threads()
    assert reading_threads() == []
    with pytest.raises(BraidaxError, match="was closed"):
        next(batches)


def test_a_loader_never_iterated_may_be_closed(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(64), mesh, P("data"), batch_size=8)
    loader.close()
    assert len(all_ids(loader)) == 8


SUSPENDED = """
import sys, time
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from jax.sharding import PartitionSpec as P
from braidax.data import DataLoader, prefetch_to_device

class Slow:
    def __len__(self):
        return 640
    def __getitem__(self, index):
        time.sleep(0.003)
        return {"x": np.int32(index)}

mesh = jax.make_mesh((4,), ("data",))
source = Slow() if sys.argv[1] == "slow" else {"x": np.arange(640, dtype=np.int32)}
loader = DataLoader(source, mesh, P("data"), batch_size=16)
if sys.argv[1] == "foreign":
    batches = prefetch_to_device(iter(loader), mesh, P("data"))
else:
    batches = iter(loader)
first, second = next(batches), next(batches)
print(np.asarray(second["x"]).shape)
if sys.argv[1] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fast", 0), ("raises", 3))),
        ("slow", 0),
        ("foreign", 0),
    ],
)
def test_a_program_may_end_in_the_middle_of_a_loop(how: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE, codes=(SUSPENDED,))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SUSPENDED, how], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stderr, done.stdout, done.returncode) == ("", "(16,)\n", status)


# Spans


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_what_was_done_is_in_the_trace(mesh: Mesh, remainder: Any) -> None:
    loader = DataLoader(Numbers(43), mesh, P("data"), batch_size=8, epochs=2, remainder=remainder)
    loader.trace = trace = Trace(max_spans=1000)
    num_batches = len(list(loader))
    totals = trace.totals()
    assert set(totals) == {"read", "host-to-device", "wait"}
    assert totals["read"].num_bytes == 2 * (43 if remainder == "pad" else 40) * SAMPLE_BYTES
    assert totals["host-to-device"].num_spans == totals["wait"].num_spans == num_batches == len(loader)
    assert totals["host-to-device"].num_bytes >= num_batches * 8 * SAMPLE_BYTES
    threads = {span.lane: {other.thread for other in trace.spans if other.lane == span.lane} for span in trace.spans}
    assert threads["wait"] == {threading.current_thread().name}
    assert all(name.startswith("braidax-read") for name in threads["read"] | threads["host-to-device"])


def test_the_bytes_of_a_batch_read_in_pieces_add_up(mesh: Mesh) -> None:
    loader = DataLoader(Large(16), mesh, P("data"), batch_size=8)
    list(loader)
    totals = loader.trace.totals()
    assert totals["read"].num_bytes == 16 * (SAMPLE_BYTES + (1 << 20))
    assert totals["read"].num_spans == 16  # two mebibytes a read at most: here one sample


def test_the_source_of_an_epoch_is_drawn_and_told_ahead(mesh: Mesh) -> None:
    told = list[tuple[int, list[int]]]()

    class Drawn(Numbers):
        epoch = -1

        def at(self, seed: int | None, epoch: int) -> Numbers:
            drawn = Drawn(self.num_samples)
            assert seed == 5
            drawn.epoch = epoch
            return drawn

        def prepare(self, indices: np.ndarray) -> None:
            told.append((self.epoch, indices.tolist()))

        def read(self, indices: np.ndarray, out: Any) -> None:
            super().read(indices, out)
            out["x"][:, 0] = self.epoch

    loader = DataLoader(Drawn(16), mesh, P("data"), batch_size=8, epochs=2, seed=5, knobs=Knobs(threads=1))
    epochs = [sorted(set(np.asarray(batch["x"])[:, 0].tolist())) for batch in loader]
    assert epochs == [[0.0], [0.0], [1.0], [1.0]]
    loader.cursor = Cursor(5, 0, 0)
    assert told == list(zip([0, 0, 1, 1], peeked(loader, 4), strict=True))


def test_stats_say_where_the_time_went(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(64), mesh, P("data"), batch_size=8, knobs=Knobs(threads=3, prefetch=2))
    assert loader.stats().num_batches == 0
    list(loader)
    stats = loader.stats()
    assert (stats.num_batches, stats.threads, stats.prefetch, stats.num_hedges) == (8, 3, 2, 0)
    assert set(stats.seconds) == set(stats.num_bytes) == {"wait", "read", "decode", "collate", "transfer"}
    assert stats.num_bytes["read"] == 64 * SAMPLE_BYTES
    assert stats.num_bytes["transfer"] >= 64 * SAMPLE_BYTES
    assert min(stats.seconds[name] for name in ("wait", "read", "transfer")) > 0
    assert stats.seconds["decode"] == stats.seconds["collate"] == 0


def test_bytes_in_flight_are_bounded(mesh: Mesh) -> None:
    loader = DataLoader(Large(64), mesh, P("data"), batch_size=8, knobs=Knobs(prefetch=6, max_bytes=20 << 20))
    assert loader.stats().prefetch == 2  # a batch has 8 MiB
    loader.knobs = Knobs(prefetch=6, max_bytes=1)
    assert loader.stats().prefetch == 1
    loader.knobs = Knobs(prefetch=6)
    assert loader.stats().prefetch == 6


def test_depth_may_be_set_from_outside(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(64), mesh, P("data"), batch_size=8)
    loader.depth.paused = True
    loader.depth.threads, loader.depth.prefetch = 5, 4
    names = set[str]()
    for _ in loader:
        names |= set(reading_threads())
    assert len(names) == 5
    assert (loader.stats().threads, loader.stats().prefetch) == (5, 4)


# Workers and varying leaves


def test_processes_read_the_same_batches_and_end_with_the_loader(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE)
    data = {"x": np.arange(64, dtype=np.int32)}
    plain = [np.asarray(batch["x"]).tolist() for batch in DataLoader(data, mesh, P("data"), batch_size=8)]
    with DataLoader(data, mesh, P("data"), batch_size=8, workers="processes") as loader:
        assert [np.asarray(batch["x"]).tolist() for batch in loader] == plain


@pytest.mark.usefixtures("unchecked")
def test_workers_that_are_not_known(mesh: Mesh) -> None:
    with pytest.raises(ArgumentError, match="workers='fibers' is not 'threads' or 'processes'"):
        DataLoader(Numbers(16), mesh, P(), batch_size=8, workers="fibers")


def test_a_leaf_of_varying_size_is_refused_with_what_to_do(mesh: Mesh) -> None:
    class Texts(Numbers):
        @property
        def sample_spec(self) -> Any:
            return {"id": jax.ShapeDtypeStruct((), np.int32), "text": VARYING}

    with pytest.raises(ArgumentError, match=r"source=Texts has the leaf \['text'\], whose size varies .*tokenized"):
        DataLoader(Texts(16), mesh, P(), batch_size=8)


def test_bad_records_are_skipped_and_listed(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = Numbers(32, failing_at(7, ValueError("spoiled")))
    loader = DataLoader(source, mesh, P("data"), batch_size=8, on_error="skip")
    for batch in loader:
        check(batch)
    (ledger,) = tmp_path.glob("skipped-*.jsonl")
    (line,) = [json.loads(line) for line in ledger.read_text().splitlines() if "record" in line]
    assert line["record"] == 7
    assert "spoiled" in line["error"]
    got = sorted(number for batch in all_ids(loader) for number in batch)
    assert got == sorted([*(number for number in range(32) if number != 7), line["replaced_by"]])


@pytest.mark.usefixtures("unchecked")
def test_an_on_error_that_is_not_known(mesh: Mesh) -> None:
    with pytest.raises(ArgumentError, match="on_error='ignore' is not 'raise' or 'skip'"):
        DataLoader(Numbers(16), mesh, P(), batch_size=8, on_error="ignore")


def test_knobs_that_are_no_numbers_of_bytes_are_named() -> None:
    with pytest.raises(ArgumentError, match="read_bytes=0 is not a positive number of bytes"):
        Knobs(read_bytes=0)


def test_a_read_fills_no_more_than_it_may(mesh: Mesh) -> None:
    source, read = Numbers(64), list[int]()
    source.before = lambda indices: read.append(len(indices))
    knobs = Knobs(threads=1, read_bytes=3 * SAMPLE_BYTES, hedge_seconds=float("inf"))
    with DataLoader(source, mesh, P("data"), batch_size=32, knobs=knobs) as loader:
        for _ in loader:
            pass
    assert sorted({*read}) == [2, 3]
    assert sum(read) == 64


class Asked(Numbers):
    """No sample is there before so many have been asked for."""

    def __init__(self, least: int) -> None:
        super().__init__(64, before=lambda _: self.wait())
        self.asked, self.least, self.enough = 0, least, threading.Event()

    def prepare(self, indices: np.ndarray) -> None:
        self.asked += len(indices)
        if self.asked >= self.least:
            self.enough.set()

    def wait(self) -> None:
        assert self.enough.wait(20), f"only {self.asked} samples were asked for"


@pytest.mark.parametrize("batch_size", [1, 8])
def test_coming_batches_are_asked_for_before_threads_wait(mesh: Mesh, batch_size: int) -> None:
    source = Asked(4 * batch_size)
    loader = DataLoader(source, None, batch_size=batch_size, knobs=Knobs(threads=1, prefetch=3))
    assert sorted(itertools.chain(*(ids(batch) for batch in loader))) == list(range(64))


def test_a_batch_is_asked_for_before_reads_of_an_earlier_one(mesh: Mesh) -> None:
    log, begun, go = list[tuple[str, int]](), threading.Event(), threading.Event()

    class Logged(Large):
        def prepare(self, indices: np.ndarray) -> None:
            log.append(("asked", int(indices[0])))

    def before(indices: np.ndarray) -> None:
        log.append(("read", int(indices[0])))
        begun.set()
        assert go.wait(20)

    source = Logged(64, before=before)
    fetch = Fetch(DataLoader(source, None, batch_size=4)._plan, threads=1, trace=Trace())
    fetch.start(lambda: (source, np.arange(4)))
    assert begun.wait(20)
    second = fetch.start(lambda: (source, np.arange(4, 8)))
    go.set()
    fetch.result(second, timeout_seconds=20, what=lambda: "the second batch")
    assert log == [("asked", 0), ("read", 0), ("asked", 4), *(("read", place) for place in range(1, 8))]
    fetch.close(timeout_seconds=20)


class Alone:
    """What stands in for the rounds of several processes: all have read their part."""

    def __init__(self) -> None:
        self.num_confirmed = 0

    def confirm(self, batches: Any) -> None:
        self.num_confirmed += len(batches)

    def check(self, batch: Any) -> None:
        assert len(ids(batch)) == 8

    def finish(self) -> None:
        assert self.num_confirmed == 8

    def close(self) -> None:
        self.num_confirmed = -1


@pytest.mark.usefixtures("unchecked")  # of Alone
def test_the_first_batches_are_read_while_the_processes_meet(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    read, rounds = threading.Event(), Alone()

    def meet(*_: object) -> Alone:
        assert read.wait(20)
        return rounds

    loader = DataLoader(Numbers(64, before=lambda _: read.set()), mesh, P("data"), batch_size=8)
    monkeypatch.setattr(loader, "_group", object())
    monkeypatch.setattr(loader, "_begin", meet)
    assert sorted(itertools.chain(*(ids(batch) for batch in loader))) == list(range(64))
    assert rounds.num_confirmed == -1


def test_a_pass_whose_processes_do_not_meet_ends_its_threads(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: object) -> None:
        raise ArgumentError("they differ")

    loader = DataLoader(Numbers(64), mesh, P("data"), batch_size=8)
    monkeypatch.setattr(loader, "_group", object())
    monkeypatch.setattr(loader, "_begin", meet)
    with pytest.raises(ArgumentError, match="they differ"):
        next(iter(loader))
    assert not reading_threads()
