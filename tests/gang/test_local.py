"""Local gangs: what a function gives, how failures are told, and that nothing is left behind."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from braidax.comm import Communicator, Tuning
from braidax.errors import Aborted, ArgumentError, CallFailed, GangError, PeerLost, WaitTimeout
from braidax.gang import LocalGang, local
from braidax.gang.calling import dispatch
from tests.support.gang import programs
from tests.support.tree import ROOT


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalGang]:
    with LocalGang(3) as gang:
        yield gang


@pytest.fixture
def gang(shared: LocalGang) -> LocalGang:
    """A gang of 3 whose ranks live, whatever another test did to them."""
    shared.replace()
    return shared


@pytest.fixture
def fresh() -> Iterator[LocalGang]:
    """A gang of 3 of one's own, whose ranks have done nothing."""
    with LocalGang(3) as gang:
        yield gang


def test_results_come_in_rank_order(gang: LocalGang) -> None:
    array = np.arange(1000.0)
    results = gang.run(programs.nested, array, {"a": "b"})
    assert [result["rank"] for result in results] == [0, 1, 2]
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result["sum"], 3 * array)
        names, part = result["deep"][0]
        assert names == {"a": "b"}
        np.testing.assert_array_equal(part, array[:rank])
    assert (gang.size, gang.hosts) == (3, (os.uname().nodename,) * 3)


def test_large_arguments_and_results_pass(gang: LocalGang) -> None:
    array = np.arange(2_000_000)
    results = gang.run(lambda comm, whole: whole[comm.rank :: comm.size], array)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, array[rank::3])
        assert result.flags.writeable


def test_ranks_keep_what_modules_hold_until_they_restart(fresh: LocalGang) -> None:
    assert fresh.run(programs.keep, 1) == [[1]] * 3
    assert fresh.run(programs.keep, 2) == [[1, 2]] * 3
    before, generation = fresh.run(programs.pids), fresh.generation
    fresh.restart()
    assert fresh.run(programs.keep, 3) == [[3]] * 3
    assert fresh.generation == generation + 1
    assert all(programs.is_gone(pid) for pid in before)


def test_ranks_do_not_wait_for_jax() -> None:
    with LocalGang(1) as gang:
        assert gang.run(lambda comm: "jax" in sys.modules) == [False]


def test_ranks_see_their_environment_and_not_whose_rank_their_parent_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_RANK", "7")
    with LocalGang(1, environment={"COLOR": "blue"}) as gang:
        assert gang.run(lambda comm: (os.environ.get("COLOR"), os.environ.get("BRAIDAX_RANK"))) == [("blue", None)]


def test_a_failure_names_rank_host_and_error(fresh: LocalGang) -> None:
    pids = fresh.run(programs.pids)
    with pytest.raises(CallFailed) as raised:
        fresh.run(programs.fail_on_1, "raised")
    where = f"rank 1 (host {fresh.hosts[1]}, pid {pids[1]})"
    assert str(raised.value) == f"{where}: ValueError: the value"
    assert (raised.value.rank, raised.value.host) == (1, fresh.hosts[1])
    assert repr(raised.value.__cause__) == "ValueError('the value')"
    (note,) = raised.value.__notes__
    assert note == f"The traceback there:\n{raised.value.traceback}"
    assert raised.value.traceback.startswith("Traceback")
    assert 'raise ValueError("the value")' in raised.value.traceback
    assert fresh.run(programs.pids) == pids
    fresh.restart()
    assert len(set(fresh.run(programs.pids)) | set(pids)) == 6


@pytest.mark.parametrize("how", ["wrapped", "hidden"])
def test_the_first_failure_is_named_and_not_what_came_of_it(gang: LocalGang, how: str) -> None:
    with pytest.raises(CallFailed, match="ValueError: the value") as raised:
        gang.run(programs.fail_on_1, how)
    assert raised.value.rank == 1


def test_the_others_do_not_wait_for_a_rank_that_raised() -> None:
    log = io.StringIO()
    with LocalGang(3, log=log) as gang, pytest.raises(CallFailed, match="ValueError: the value"):
        gang.run(programs.fail_on_1, "raised")
    assert sorted(log.getvalue().splitlines()) == ["[0] aborted", "[2] aborted"]


def test_where_all_only_tell_of_others_the_first_is_named(gang: LocalGang) -> None:
    def abort(comm: object) -> None:
        raise Aborted("on purpose")

    with pytest.raises(CallFailed, match="Aborted: on purpose") as raised:
        gang.run(abort)
    assert isinstance(raised.value.__cause__, Aborted)


def test_an_error_that_cannot_be_pickled_is_told_in_words(gang: LocalGang) -> None:
    with pytest.raises(CallFailed, match="Stubborn: stubborn") as raised:
        gang.run(programs.stubborn)
    assert raised.value.__cause__ is None


def test_what_cannot_be_sent_is_named(gang: LocalGang) -> None:
    with pytest.raises(ArgumentError, match=r"args\[1\] is <unlocked _thread.lock .*cannot be sent to the ranks"):
        gang.run(programs.keep, 1, threading.Lock())
    with pytest.raises(CallFailed, match=r"rank 1 .*the result cannot be sent: it is of type _thread\.lock") as raised:
        gang.run(programs.unsendable)
    assert raised.value.rank == 1
    with pytest.raises(CallFailed, match="rank 1: its result cannot be unpickled here: LookupError: not in") as raised:
        gang.run(programs.only_there)
    assert raised.value.rank == 1


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (0, "ended with exit status 3"),
        (signal.SIGKILL, r"was ended by signal 9 \(SIGKILL\), as the kernel does when memory runs out"),
        pytest.param(signal.SIGSEGV, r"was ended by signal 11 \(SIGSEGV\)", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_is_named_with_its_last_lines(gang: LocalGang, number: int, how: str) -> None:
    pid = gang.run(programs.pids)[1]
    with pytest.raises(PeerLost, match=rf"rank 1 \(host .*, pid {pid}\) {how}; the last lines") as raised:
        gang.run(programs.end_on_1, int(number))
    first, *log = str(raised.value).splitlines()
    assert first.endswith("the last lines that it wrote:")
    assert len(log) == 20
    assert "last words" in log or number == signal.SIGSEGV  # its own words are many
    assert raised.value.rank == 1


def test_a_process_that_ends_between_runs_is_named(gang: LocalGang) -> None:
    pid = gang.run(programs.pids)[2]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match=rf"rank 2 \(host .*, pid {pid}\) was ended by signal 9"):
        gang.run(lambda comm: comm.barrier())


def test_a_frozen_rank_is_named() -> None:
    with LocalGang(3, tuning=Tuning(peer_timeout_seconds=1.0)) as gang:
        pid = gang.run(programs.pids)[1]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"rank 1 does not answer: it is frozen or cut off; rank ") as raised:
            gang.run(lambda comm: comm.barrier())
        assert (raised.value.rank, raised.value.host) == (1, gang.hosts[1])
        assert isinstance(raised.value.__cause__, PeerLost)
        programs.wait_until_gone([pid], seconds=5)
        assert gang.lost == (1,)


def test_a_rank_is_not_ended_since_a_loader_has_lost_a_process_of_its_number(
    gang: LocalGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others than the communicator number processes in their own way: rank 1 is well, and only busy."""
    monkeypatch.setattr(dispatch, "OTHERS_SECONDS", 0.2)
    go = tmp_path / "go"

    def lose(comm: Communicator) -> None:
        if comm.rank == 0:
            raise PeerLost("process 1 has left this pass over the data", 1)
        deadline = time.monotonic() + 60
        while comm.rank == 1 and not go.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    pids = gang.run(programs.pids)
    with pytest.raises(CallFailed, match=r"rank 0 .*PeerLost: process 1 has left this pass") as raised:
        gang.run(lose)
    assert raised.value.rank == 0
    assert "rank 1 had not answered; the next call there waits for that." in raised.value.__notes__
    go.touch()
    assert gang.run(programs.pids) == pids


def test_a_limit_names_the_ranks_that_are_late(gang: LocalGang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "OTHERS_SECONDS", 0.5)
    pids = gang.run(programs.pids)
    words = (
        r"^ranks 1, 2 of 3 did not answer within timeout_seconds=0\.3, so the call was aborted; ranks 1, 2 did not "
        r"even then and were ended by force: call replace\(\)"
    )
    with pytest.raises(WaitTimeout, match=words):
        gang.run(programs.sleep_after_0, timeout_seconds=0.3)
    programs.wait_until_gone(pids[1:], seconds=5)
    assert gang.lost == (1, 2)
    with pytest.raises(GangError, match=r"in ranks 0, 1, 2: rank 1 was ended by force: .* rank 2 .*call replace\(\)"):
        gang.run(programs.pids)
    assert gang.run(programs.pids, ranks=[0]) == pids[:1]
    gang.replace()
    assert gang.run(programs.pids)[0] == pids[0]


def test_an_interrupt_ends_the_ranks(fresh: LocalGang) -> None:
    pids = fresh.run(programs.pids)
    with pytest.raises(KeyboardInterrupt):
        fresh.run(programs.interrupt_parent)
    assert all(programs.is_gone(pid) for pid in pids)
    with pytest.raises(GangError, match="it was interrupted"):
        fresh.run(programs.pids)


def test_lines_have_the_rank_in_front() -> None:
    log = io.StringIO()
    with LocalGang(2, log=log) as gang:
        gang.run(programs.write)
    lines = log.getvalue().splitlines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert sorted(own) == [f"[{rank}] ab", f"[{rank}] c", f"[{rank}] to stderr ä{rank}"]
        assert own.index(f"[{rank}] ab") < own.index(f"[{rank}] c")
    assert len(lines) == 6


def test_lines_come_out_of_the_standard_streams(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalGang(1) as gang:
        gang.run(programs.write)
    assert capfd.readouterr() == ("[0] ab\n[0] c\n", "[0] to stderr ä0\n")


def test_what_a_rank_has_started_ends_with_it() -> None:
    with LocalGang(2) as gang:
        children = gang.run(programs.leave_a_child)
        assert not any(programs.is_gone(pid) for pid in children)
    programs.wait_until_gone(children, seconds=5)


def test_a_rank_that_cannot_join_says_why() -> None:
    with (
        pytest.raises(CallFailed, match="ArgumentError: name='carrier pigeon'"),
        LocalGang(2, transport="carrier pigeon"),
    ):
        pass


SLEEPING = """
import os, time
try:
    os.close(os.open(os.path.join(os.path.dirname(__file__), "first"), os.O_CREAT | os.O_EXCL))
except FileExistsError:
    {others}
else:
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("others", "named"),
    [("pass", "rank [01]"), pytest.param("time.sleep(600)", "ranks 0, 1", marks=pytest.mark.slow)],
)
def test_processes_that_do_not_start_are_named_in_time(tmp_path: Path, others: str, named: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLEEPING.format(others=others))
    gang = LocalGang(2, timeout_seconds=3.0, environment={"PYTHONPATH": str(tmp_path)})
    words = rf"^{named} of 2 did not start and join the others within timeout_seconds=3; all ranks were ended"
    begun = time.monotonic()
    with pytest.raises(WaitTimeout, match=words), gang:
        pass
    assert 3.0 <= time.monotonic() - begun < 9.0
    (tmp_path / "sitecustomize.py").unlink()
    with gang:
        assert len(gang.run(programs.pids)) == 2


def test_starting_and_stopping_leave_nothing() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    files, threads = open_files(), threading.active_count()
    gang = LocalGang(1)
    pids: list[int] = []
    for _ in range(3):
        with gang:
            pids += gang.run(programs.pids)
        gang.stop()
        assert (open_files(), threading.active_count()) == (files, threads)
    assert gang.generation == 2
    assert len(set(pids)) == 3
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


PARENT = """
import os, signal, sys, time
from braidax.gang import LocalGang, local
from tests.support.gang import programs

def outside(comm):
    return os.getppid(), __name__

gang = LocalGang(3)
gang.start()
assert gang.run(outside) == [(os.getpid(), "__main__")] * 3
pids = gang.run(programs.pids) + gang.run(programs.leave_a_child)
os.kill(pids[1], signal.SIGSTOP)
print(*pids, flush=True)
gang.run(programs.sleep_after_0)
"""


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 6
        parent.kill()
    programs.wait_until_gone(pids, seconds=5)


def test_wrong_use_is_told(gang: LocalGang) -> None:
    with pytest.raises(ArgumentError, match="size=0: expected at least 1 rank"):
        LocalGang(0)
    with pytest.raises(ArgumentError, match="timeout_seconds=0"):
        LocalGang(1, timeout_seconds=0)
    with pytest.raises(ArgumentError, match="grace_seconds=-1: expected a finite number of seconds >= 0"):
        LocalGang(1, grace_seconds=-1)
    with pytest.raises(GangError, match=r"it was not started: call start\(\), or use it in a with block"):
        LocalGang(1).run(programs.pids)
    with pytest.raises(GangError, match=r"runs already; restart\(\) begins anew"):
        gang.start()
    stopped = LocalGang(1)
    stopped.stop()
    with pytest.raises(GangError, match=r"it was stopped: call start\(\)"):
        stopped.run(programs.pids)


def test_ranks_that_ignore_the_first_signal_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_FORCE_SECONDS", 0.5)

    def ignore(comm: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    with LocalGang(1) as gang:
        pid = gang.run(programs.pids)[0]
        with pytest.raises(WaitTimeout):
            gang.run(ignore, timeout_seconds=0.2)
        programs.wait_until_gone([pid], seconds=5)


@pytest.mark.parametrize(("grace_seconds", "saved"), [(30.0, ["0", "1"]), (0.0, [])])
def test_ranks_have_time_to_save_when_they_are_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_seconds: float, saved: list[str]
) -> None:
    def save_later(comm: Communicator, folder: Path) -> None:
        saved = threading.Event()

        def save(*_: object) -> None:
            time.sleep(0.3)
            (folder / str(comm.rank)).touch()
            saved.set()

        signal.signal(signal.SIGTERM, save)
        comm.barrier()
        if comm.rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        saved.wait(60)

    monkeypatch.setattr(local, "_FORCE_SECONDS", 0.0 if saved else 600.0)
    with LocalGang(2, grace_seconds=grace_seconds) as gang, pytest.raises(KeyboardInterrupt):
        gang.run(save_later, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == saved
