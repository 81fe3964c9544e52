"""Worker processes: the same samples, whatever raises, crashes or hangs; nothing is left behind."""

import contextlib
import gc
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from braidax.data.loader import DataLoader
from braidax.data.open import open as open_source
from braidax.data.source import Source, allocate, prepare, source_at
from braidax.data.workers.processes import InProcesses, in_processes, worker
from braidax.data.workers.processes.memory import SharedMemory, nameless_file
from braidax.data.workers.processes.pickling import pack, unpack
from braidax.errors import ArgumentError, BraidaxError, FormatError, PeerLost, ReadError, RecordError, WaitTimeout
from braidax.spans import Trace, span
from tests.support.data import troubled
from tests.support.data.troubled import (
    NUM_SAMPLES,
    Surroundings,
    Troubled,
    UnpacksNowhereElse,
    children,
    eventually,
    exists,
    hears_no_interrupt,
    runs,
)
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children


@pytest.fixture(scope="module", autouse=True)
def workers_are_forks() -> Iterator[None]:
    """Lets workers begin with what they import; those of programs below are such as users have."""
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, *LOAD_AND_SAVE, "tests.support.data.troubled")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trouble")


@pytest.fixture(scope="module")
def source(folder: Path, workers_are_forks: None) -> Iterator[InProcesses]:
    """Two workers that all tests share; a test that ends one leaves another in its place."""
    source = in_processes(Troubled(folder), num_workers=2, timeout_seconds=60)
    yield source
    source.close()


def read(source: Source, indices: Any) -> Any:
    out = allocate(source.sample_spec, len(indices))
    source.read(np.asarray(indices, np.int64), out)
    return out


def same_but_for_the_process(left: Any, right: Any) -> None:
    for name in left.keys() - {"process"}:
        np.testing.assert_array_equal(left[name], right[name])


# Samples


@pytest.mark.parametrize("num_samples", [1, 0, 7, 5000, 300])
def test_samples_are_those_that_the_source_reads_itself(source: InProcesses, folder: Path, num_samples: int) -> None:
    indices = np.random.default_rng(num_samples).integers(0, 90_000, num_samples)
    got = read(source, indices)
    same_but_for_the_process(got, read(Troubled(folder), indices))
    assert os.getpid() not in got["process"]
    assert [type(text) for text in got["text"][:1]] == [str][:num_samples]


def test_many_threads_share_few_workers(source: InProcesses, folder: Path) -> None:
    expected, wrong, processes = Troubled(folder), list[str](), set[int]()

    def work(number: int) -> None:
        for size in (3, 200, 40):
            indices = np.arange(number * 100, number * 100 + size)
            got = read(source, indices)
            processes.update(got["process"].tolist())
            try:
                same_but_for_the_process(got, read(expected, indices))
            except AssertionError as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert len(processes) == 2
    assert processes <= set(children(os.getpid()))


def test_it_is_the_same_source_but_for_the_workers(source: InProcesses, folder: Path) -> None:
    assert len(source) == NUM_SAMPLES
    assert source.sample_spec == Troubled(folder).sample_spec
    assert source.describe() == {"format": "troubled", "workers": "2 processes"}


def test_each_epoch_is_its_own(source: InProcesses) -> None:
    first, second = source_at(source, 5, 1), source_at(source, 5, 2)
    assert read(first, [10])["id"] == [5011]
    assert read(second, [10])["id"] == [5012]
    assert read(source_at(first, None, 3), [10])["id"] == [13]
    assert read(first, [10])["id"] == [5011]
    assert read(source, [10])["id"] == [10]


def test_nothing_is_fetched_ahead_where_no_worker_would_find_it(folder: Path) -> None:
    inner = Troubled(folder)
    source = in_processes(inner, num_workers=1)
    prepare(inner, np.array([1]))
    prepare(source_at(source, 0, 0), np.array([3, 4]))
    assert inner.prepared == [1]


def test_a_worker_needs_no_workers_of_its_own(folder: Path) -> None:
    source = in_processes(Troubled(folder), num_workers=1)
    assert type(unpacked(source)) is Troubled


# Errors


def test_an_error_of_the_source_names_the_records(source: InProcesses) -> None:
    with pytest.raises(RecordError, match=r"source=Troubled raised KeyError: 'spoiled', .* \[5, 90000\]") as caught:
        read(source, [5, troubled.RAISES_KEY_ERROR])
    assert isinstance(caught.value.__cause__, KeyError)
    assert re.match(r"In worker process \d \(pid \d+\):\nTraceback", caught.value.__notes__[0])
    assert 'raise KeyError("spoiled")' in caught.value.__notes__[0]


def test_an_error_of_ours_stays_what_it_is(source: InProcesses) -> None:
    with pytest.raises(FormatError) as caught:
        read(source, [troubled.RAISES_FORMAT_ERROR])
    assert (str(caught.value), caught.value.offset) == ("a.bin: truncated", 17)


def test_an_error_that_cannot_be_pickled_becomes_the_nearest_of_ours(source: InProcesses) -> None:
    with pytest.raises(RecordError) as caught:
        read(source, [troubled.RAISES_ITS_OWN])
    assert (type(caught.value), str(caught.value)) == (RecordError, "record 90002: mine")


def test_code_that_wants_to_exit_does_not(source: InProcesses) -> None:
    with pytest.raises(RecordError, match=r"cannot read the records \[90003\] in a worker process: SystemExit: 3"):
        read(source, [troubled.LEAVES])


def test_a_timeout_of_the_source_is_no_hang(source: InProcesses) -> None:
    with pytest.raises(ReadError, match="raised TimeoutError: mount"):
        read(source, [troubled.SAYS_TIMEOUT])


# Deaths


def test_records_that_kill_every_worker_are_named(source: InProcesses, folder: Path) -> None:
    with pytest.raises(RecordError) as caught:
        read(source, [*range(9), troubled.KILLED])
    message = str(caught.value)
    assert "the last one was ended by signal 9 (SIGKILL), as the kernel does when memory runs out" in message
    for fact in ("source=Troubled", "[0, 1, 2, 3, 4, 5, 6, 7]… (10 in all)", "ended 3 worker processes", "mend"):
        assert fact in message
    assert len(list(folder.glob(f"{troubled.KILLED} *"))) == 3
    last = caught.value.__cause__
    assert isinstance(last, PeerLost)
    assert (last.rank in range(source.num_workers), last.host) == (True, socket.gethostname())
    same_but_for_the_process(read(source, [1, 2]), read(Troubled(folder), [1, 2]))


def test_what_a_crash_interrupted_is_read_again(folder: Path, capfd: Any) -> None:
    source = in_processes(Troubled(folder), num_workers=1)
    indices = [3, troubled.CRASHES_ONCE, 4]
    got = read(source, indices)
    assert len(list(folder.glob(f"{troubled.CRASHES_ONCE} *"))) == 2
    assert got["id"].tolist() == indices
    source.close()
    said = capfd.readouterr().err  # workers write where this process does
    assert "Fatal Python error: Segmentation fault" in said
    assert "in _meet_trouble" in said


def test_a_worker_that_died_while_it_was_idle_is_replaced(source: InProcesses) -> None:
    before = int(read(source, [1])["process"][0])
    os.kill(before, signal.SIGKILL)
    after = int(read(source, [1])["process"][0])
    assert after != before
    assert not exists(before)  # reaped as well


def test_a_worker_that_hangs_is_killed(folder: Path) -> None:
    source = in_processes(Troubled(folder), num_workers=1, timeout_seconds=0.5)
    with pytest.raises(WaitTimeout) as caught:
        read(source, [8, troubled.HANGS])
    found = re.match(
        r"worker process 0 \(pid (\d+)\) did not read the records \[8, 90006\] within timeout_seconds=0.5 and",
        str(caught.value),
    )
    assert found is not None
    assert not exists(int(found[1]))
    assert read(source, [8])["id"] == [8]
    source.close()


# The end


def test_close_ends_and_reaps_the_workers_and_a_read_starts_others(folder: Path) -> None:
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    source = in_processes(Troubled(folder), num_workers=2)
    first = int(read(source, [1])["process"][0])
    source.close()
    source.close()
    assert not exists(first)
    second = int(read(source_at(source, 0, 0), [1])["process"][0])
    assert second != first
    del source
    gc.collect()
    assert not exists(second)  # also without close
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_read_under_way_when_the_source_is_closed_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_ENDING_SECONDS", 0.1)
    source = in_processes(Troubled(folder), num_workers=1)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            read(source, [troubled.HANGS])
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    before = set(folder.glob(f"{troubled.HANGS} *"))
    thread = threading.Thread(target=work)
    thread.start()
    assert eventually(lambda: set(folder.glob(f"{troubled.HANGS} *")) > before, seconds=60)
    source.close()
    thread.join(60)
    assert [type(error) for error in raised] == [BraidaxError]
    assert "the source was closed while it was read" in str(raised[0])


# What goes to the workers


def unpacked(value: Any) -> Any:
    descriptor = pack(value)
    try:
        return unpack(descriptor)
    finally:
        os.close(descriptor)


def packed_bytes(value: Any) -> int:
    descriptor = pack(value)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def test_large_arrays_are_mapped_and_changes_stay_in_one_process() -> None:
    large, small = np.arange(100_000, dtype=np.int32), np.arange(3, dtype=np.int16)
    descriptor = pack([large, small, large[::2], large.reshape(100, 1000).T])
    first, second = unpack(descriptor), unpack(descriptor)
    os.close(descriptor)
    for got, want in zip(first, (large, small, large[::2], large.reshape(100, 1000).T), strict=True):
        np.testing.assert_array_equal(got, want)
    first[0][5] = -1
    assert second[0][5] == 5


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_mapped_file_is_mapped_again(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "a.bin"
    np.arange(1_000_000, dtype=np.int32).tofile(path)
    array = np.memmap(path, np.int32, mode, offset=40, shape=(999_000,))
    views = [array, array.view(np.ndarray)[5::3], array[100:9100].reshape(90, 100).T, np.asarray(array)[:0]]
    assert packed_bytes(views) < 5000
    for got, want in zip(unpacked(views), views, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_mapped_file_with_changes_of_its_own_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.arange(100, dtype=np.int32).tofile(path)
    array = np.memmap(path, np.int32, "c")
    array[3] = -3
    np.testing.assert_array_equal(unpacked(array), array)
    gone = np.memmap(path, np.int32, "r")
    path.unlink()
    np.testing.assert_array_equal(unpacked(gone), np.arange(100))


def test_a_mapped_file_that_changed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.zeros(100, np.int32).tofile(path)
    descriptor = pack(np.memmap(path, np.int32, "r"))
    np.ones(99, np.int32).tofile(path)
    with pytest.raises(FormatError, match=r"a\.bin: changed after it was opened: .* 396, .*expected .* 400, "):
        unpack(descriptor)
    os.close(descriptor)


def test_locks_and_thread_locals_begin_anew() -> None:
    class Kept(threading.local):
        number = 3

    lock, kept = threading.Lock(), Kept()
    kept.number = 4
    with lock:
        other, again, event, inner = unpacked([lock, kept, threading.Event(), threading.RLock()])
    assert other.acquire(blocking=False)
    assert (again.number, event.is_set(), inner.acquire(blocking=False)) == (3, False, True)


class _Holder:
    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return np.float32(index)


def test_what_cannot_be_pickled_is_named() -> None:
    with Path(os.devnull).open("rb") as file:
        items = _Holder(fine=3, parts=[1, {"in": file}])
        with pytest.raises(ArgumentError) as caught:
            in_processes(open_source(items), num_workers=1)
        message = str(caught.value)
        assert message.startswith("source._items.parts[1]['in']=<_io.BufferedReader name='/dev/null'> cannot be sent")
        assert "__getstate__" in message
        with pytest.raises(ArgumentError, match=r"^source\.transform\.file=<_io"):
            in_processes(open_source(_Holder(), transform=lambda window: (file, window)[1]), num_workers=1)


def test_what_cannot_be_unpickled_there_says_why() -> None:
    first = in_processes(open_source(_Holder()), num_workers=1)
    read(first, [0])  # workers here are forks of a process that stays
    first.close()
    before = children(os.getpid())
    source = in_processes(open_source(UnpacksNowhereElse()), num_workers=1)
    with pytest.raises(ArgumentError, match="in a worker process: LookupError: no key for this host") as caught:
        read(source, [0])
    assert "__setstate__" in caught.value.__notes__[0]
    assert children(os.getpid()) == before


def test_workers_that_cannot_begin_are_not_blamed_on_the_records(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    before = children(os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])
        source = in_processes(Troubled(folder), num_workers=1)
    words = r"process 0 \(pid \d+\) ended with exit status 1 before it had its source"
    with pytest.raises(PeerLost, match=words) as caught:
        read(source, [0])
    assert (caught.value.rank, caught.value.host) == (0, socket.gethostname())
    assert capfd.readouterr().err.count("ModuleNotFoundError: No module named") == 1
    assert children(os.getpid()) == before


def test_a_worker_knows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with jax.enable_x64(True):
        source = in_processes(Surroundings(), num_workers=1)
    monkeypatch.chdir("/")
    assert (
        read(source, [0])[0] == f"hears no interrupt: True, threads: 1, x64: True, backends: False, folder: {tmp_path}"
    )
    source.close()


def test_memory_that_has_no_name_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    descriptor = nameless_file()
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    ours, theirs = SharedMemory(descriptor), SharedMemory(descriptor)
    for size in (10, 100_000):  # it grows under both
        ours.array(size)[size - 1] = 7
        assert theirs.array(size)[size - 1] == 7
    os.close(descriptor)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"num_workers": 0}, "num_workers=0 is not a positive integer"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0 is not a finite, positive"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds=inf is not a finite, positive"),
    ],
)
def test_options_that_cannot_work(folder: Path, options: dict[str, Any], fact: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(fact)):
        in_processes(Troubled(folder), **options)


# Whole programs

PROGRAM = """
import hashlib, pathlib, re, sys
import jax, numpy as np, braidax as bx
from jax.sharding import PartitionSpec as P
from braidax.data.workers.processes import in_processes

epochs, stuck = int(sys.argv[1]) or None, pathlib.Path(sys.argv[2])
factor = 3

class Items:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        sum(range(20_000))
        if index == 40 and stuck.name:
            stuck.touch()
            re.match("(a+)+$", "a" * 60 + "b")  # for ever, in C, with the GIL
        return {"x": np.full(8, index * factor, np.int32)}

source = in_processes(bx.open(Items(), transform=lambda window: {"x": window["x"] + 1}), num_workers=2)
loader = bx.DataLoader(source, jax.make_mesh((1,), ("data",)), P("data"), batch_size=8, epochs=epochs)
digest = hashlib.sha256()
try:
    print("begun", flush=True)
    for batch in loader:
        digest.update(np.asarray(batch["x"]).tobytes())
        print("batch", flush=True)
    print(digest.hexdigest())
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts the program as a user would: a script without a guard, in a session of its own."""
    path, started = tmp_path / "train.py", list[subprocess.Popen[str]]()
    path.write_text(PROGRAM)

    def start_it(*, epochs: int, stuck: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, str(path), str(epochs), stuck]
        with (tmp_path / "stderr").open("w") as errors:
            program = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        started.append(program)
        return program

    yield start_it
    for program in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # its workers as well
        program.communicate(timeout=60)


def ended(program: subprocess.Popen[str], *, seconds: float) -> tuple[list[str], int]:
    """Returns the lines that nobody read yet and the exit status."""
    status = program.wait(timeout=seconds)
    assert program.stdout is not None
    return program.stdout.read().splitlines(), status


def await_line(program: subprocess.Popen[str], line: str, *, times: int = 1) -> None:
    assert program.stdout is not None
    for _ in range(times):
        assert program.stdout.readline() == f"{line}\n"


def test_killed_workers_do_not_change_what_a_program_computes(start: Any, tmp_path: Path) -> None:
    program = start(epochs=3)
    await_line(program, "begun")
    for _ in range(2):
        await_line(program, "batch", times=3)
        os.kill(children(program.pid)[0], signal.SIGKILL)
    lines, status = ended(program, seconds=120)
    plain = DataLoader({"x": np.zeros((64, 8))}, jax.make_mesh((1,), ("data",)), P("data"), batch_size=8, epochs=3)
    expected = hashlib.sha256()
    for indices in plain.peek(24):
        expected.update(np.repeat(indices[:, None] * 3 + 1, 8, axis=1).astype(np.int32).tobytes())
    assert (lines, status) == (["batch"] * 18 + [expected.hexdigest()], 0)
    assert (tmp_path / "stderr").read_text() == ""


def test_workers_do_not_outlive_a_killed_program(start: Any, tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    program = start(epochs=0, stuck=str(stuck))
    assert eventually(stuck.exists, seconds=120)
    workers = children(program.pid)
    assert len(workers) == 2
    mapped = [line.split(maxsplit=5)[-1].strip() for line in Path(f"/proc/{program.pid}/maps").read_text().splitlines()]
    shared = {name for name in mapped if name.startswith(("/dev/shm/", "/memfd:braidax"))}
    program.kill()
    assert eventually(lambda: not any(runs(worker) for worker in workers), seconds=5)
    assert shared == {"/memfd:braidax (deleted)"}  # what has no name is gone with its last process


@pytest.mark.parametrize("moment", [pytest.param("starting", marks=pytest.mark.slow), "running"])
def test_an_interrupted_program_ends_quietly(start: Any, tmp_path: Path, moment: str) -> None:
    program = start(epochs=0)
    await_line(program, "begun")
    if moment == "running":
        await_line(program, "batch", times=3)
    assert eventually(lambda: len(children(program.pid)) > 0, seconds=60)
    workers = children(program.pid)
    assert all(hears_no_interrupt(worker) for worker in workers)
    os.killpg(program.pid, signal.SIGINT)
    lines, status = ended(program, seconds=30)
    assert (lines[-1], status, (tmp_path / "stderr").read_text()) == ("interrupted", 0, "")
    assert eventually(lambda: not any(exists(worker) for worker in workers), seconds=5)


def test_what_a_worker_does_is_in_the_trace_of_who_reads() -> None:
    trace = Trace()
    samples = [{"x": np.full(3, number, np.float32)} for number in range(4)]
    with contextlib.closing(in_processes(open_source(samples), num_workers=1)) as source:
        read(source, [2])  # without a trace nothing is kept
        with trace.active(), span("read", "window"):
            read(source, [1, 3])
    found = {(one.process, one.lane): one for one in trace.spans}
    outer = found["", "read"]
    assert set(found) == {("", "read"), ("loader worker 0", "read"), ("loader worker 0", "decode")}
    assert all(outer.start <= one.start <= one.end <= outer.end for one in found.values())  # by one clock
    assert sum(total.seconds for total in trace.totals().values()) == pytest.approx(outer.seconds)
