"""Local gangs that stay: the contract, what only they can show, and kills at random moments."""

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.errors import ArgumentError, CallFailed, GangError, PeerLost, WaitTimeout
from braidax.gang import Gang, LocalGang, local
from braidax.gang.calling import dispatch, worlds
from braidax.gang.calling.orders import Order
from braidax.gang.calling.ranks import Ended, Message
from tests.support.gang import clusters, programs, staying
from tests.support.gang.forks import fork_children
from tests.support.readable import is_readable

ANEW = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forks() -> Iterator[None]:
    """Lets ranks begin with what they import; test_local.py has ranks as users have them."""
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, "braidax.gang.child")
        yield


@pytest.fixture(scope="module")
def shared(ranks_are_forks: None) -> Iterator[LocalGang]:
    with LocalGang(3) as gang:
        yield gang


@pytest.fixture
def gang(shared: LocalGang) -> LocalGang:
    """A gang of 3 whose ranks live and keep nothing, whatever another test did to it."""
    shared.replace()
    for name in shared.names():
        shared.delete(name)
    return shared


@pytest.mark.parametrize("check", staying.CHECKS, ids=lambda check: check.__name__)
def test_a_local_gang_stays(gang: LocalGang, tmp_path: Path, check: Callable[[Gang, Path], None]) -> None:
    check(gang, tmp_path)


def test_what_ranks_keep_is_deleted_although_one_is_lost_meanwhile(gang: LocalGang) -> None:
    pids = gang.run(programs.pids)
    gang.put("x", [0, 1, 2])
    os.kill(pids[1], signal.SIGSTOP)  # it will not answer
    with ThreadPoolExecutor(1) as executor:
        deleting = executor.submit(gang.delete, "x")
        clusters.until(lambda: "x" not in gang.names())
        os.kill(pids[1], signal.SIGKILL)
        deleting.result(clusters.UNTIL_SECONDS)
    assert gang.lost == (1,)
    gang.replace()
    assert [pid == before for pid, before in zip(gang.run(programs.pids), pids, strict=True)] == [True, False, True]


def test_a_rank_that_had_answered_is_what_was_lost_when_others_of_the_call_need_it(gang: LocalGang) -> None:
    def hear_of_one(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.recv(1)

    pids = gang.run(programs.pids)
    future = gang.submit(hear_of_one)
    clusters.until(lambda: 1 in future._call.results)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"^rank 1 .*(signal 9|had answered before)") as told:
        future.result(timeout_seconds=clusters.UNTIL_SECONDS)
    assert told.value.rank == 1
    assert gang.lost == (1,)
    gang.replace()
    assert gang.run(programs.pids)[0] == pids[0]


def test_a_rank_that_ends_with_its_answer_is_lost_although_it_is_asked_again_before_that_is_told() -> None:
    gang = LocalGang(1)
    ranks = gang._begin(time.monotonic() + clusters.UNTIL_SECONDS)
    try:
        assert isinstance(ranks, local._LocalRanks)
        assert ranks._processes is not None
        message = Message([pickle.dumps(Order(1, None, frozenset(), {}, None))], [])
        ranks.ask({0: message})
        assert is_readable(ranks._ranks[0].channel.socket, clusters.UNTIL_SECONDS)
        (process,) = ranks._processes._processes
        os.kill(process._popen.pid, signal.SIGKILL)
        assert is_readable(ranks._processes, clusters.UNTIL_SECONDS)
        assert [type(told) for told in ranks.answers(timeout_seconds=0).values()] == [list]
        ranks.ask({0: message})
        with ThreadPoolExecutor(1) as executor:
            asking = executor.submit(ranks.answers, timeout_seconds=None)
            was_told = bool(wait([asking], clusters.UNTIL_SECONDS).done)
            ranks.wake()
        assert was_told
        (told,) = asking.result().values()
        assert isinstance(told, Ended)
        assert "signal 9" in told.how
    finally:
        ranks.end("stop")
        gang.stop()


def test_a_rank_that_goes_on_when_another_raised_holds_up_the_next_call_only(
    gang: LocalGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_or_wait(comm: Communicator, path: str) -> None:
        if comm.rank == 0:
            staying.wait_for_file(comm, f"{path} is awaited")
            raise ValueError("the value")
        Path(f"{path} is awaited").touch()
        staying.wait_for_file(comm, path)

    monkeypatch.setattr(dispatch, "OTHERS_SECONDS", 0.2)
    path = tmp_path / "go"
    pids = gang.run(programs.pids)
    with pytest.raises(CallFailed, match="the value") as told:
        gang.run(fail_or_wait, str(path), ranks=[0, 1])
    assert "rank 1 had not answered; the next call there waits for that." in told.value.__notes__
    assert gang.run(programs.pids, ranks=[0, 2]) == [pids[0], pids[2]]
    behind = gang.submit(programs.pids)
    words = (
        r"^ranks 0, 1, 2 of 3 did not begin the call within timeout_seconds=0\.1: rank 1 had not answered an earlier"
    )
    with pytest.raises(WaitTimeout, match=words):
        gang.run(programs.pids, timeout_seconds=0.1)
    assert not behind.done
    path.touch()
    assert behind.result(timeout_seconds=30) == pids
    assert gang.lost == ()


def test_a_rank_that_hangs_is_replaced_when_that_is_asked_for(gang: LocalGang) -> None:
    pids = gang.run(programs.pids)
    hanging, behind = gang.submit(programs.sleep_after_0, ranks=[0, 1]), gang.submit(programs.pids)
    gang.replace([1])
    with pytest.raises(PeerLost, match="rank 1 was ended by force: it is being replaced"):
        hanging.result(timeout_seconds=30)
    with pytest.raises((GangError, PeerLost), match="rank 1 was ended by force: it is being replaced"):
        behind.result(timeout_seconds=30)
    assert programs.is_gone(pids[1])
    again = gang.run(programs.pids)
    assert (again[0], again[2]) == (pids[0], pids[2])
    assert again[1] != pids[1]


def test_a_rank_that_ends_while_all_meet_keeps_nobody(gang: LocalGang, tmp_path: Path) -> None:
    """The others wait for it in the store, which nobody but the gang can tell them."""
    pids = gang.run(programs.pids)
    with pytest.raises(CallFailed):
        gang.run(programs.fail_on_1, "raised")
    os.kill(pids[1], signal.SIGSTOP)
    begun = time.monotonic()
    meeting = gang.submit(staying.total, 1.0)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"rank 1 .* was ended by signal 9"):
        meeting.result(timeout_seconds=30)
    gang.replace()
    assert time.monotonic() - begun < 10  # the limit of a meeting is 60 s
    assert gang.run(programs.pids)[0] == pids[0]


def test_what_a_lost_rank_has_started_ends_at_once() -> None:
    with LocalGang(2) as gang:
        children = gang.run(programs.leave_a_child)
        with pytest.raises(PeerLost):
            gang.run(clusters.die_in_one, 1)
        programs.wait_until_gone([children[1]], seconds=5)
        assert not programs.is_gone(children[0])
        gang.restart()
        programs.wait_until_gone(children, seconds=5)


def test_a_killed_rank_is_replaced_within_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess.Popen, "_execute_child", ANEW)  # as users have them
    begun = time.monotonic()
    with LocalGang(4) as gang:
        started = time.monotonic() - begun
        gang.put("x", [np.arange(3)] * 4)
        os.kill(gang.run(programs.pids)[2], signal.SIGKILL)
        clusters.until(lambda: gang.lost == (2,))
        begun = time.monotonic()
        gang.replace()
        seconds = time.monotonic() - begun
        print(f"started 4 ranks in {started:.2f} s, replaced a killed one in {seconds:.2f} s")  # noqa: T201
        assert gang.run(staying.total, 1.0) == [4.0] * 4
        assert len(gang.get("x", ranks=[0, 1, 3])) == 3
    assert seconds < max(3.0, started)  # on a machine that is busy with other tests, a start takes longer


def test_large_arguments_are_not_copied_into_one_pickle(gang: LocalGang) -> None:
    """Neither here nor there is more memory taken than the array itself."""
    array = np.ones(staying.LARGE_BYTES // 8)
    (there,), here = gang.run(_begin_peak, ranks=[0]), _begin_peak()
    (peak,) = gang.run(_peak, array, ranks=[0])
    assert staying.LARGE_BYTES <= peak - there < 1.3 * staying.LARGE_BYTES
    assert _peak() - here < 0.3 * staying.LARGE_BYTES


def _begin_peak(comm: object = None) -> int:
    """Lets the peak of this process's memory begin anew, and returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak(*_: object) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_a_rank_that_sends_what_is_no_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LAST_WORDS_SECONDS", 0.3)  # it does not end by itself

    def write_there(comm: Communicator) -> None:
        if comm.rank == 1:
            os.write(int(sys.argv[1]), b"\xff" * 16)  # where its answers go
        comm.recv(1 - comm.rank)

    with LocalGang(2) as gang:
        words = r"^rank 1 \(host .*\) sent what is no answer: it announced a frame of 65,535 parts; exp"
        with pytest.raises(PeerLost, match=words):
            gang.run(write_there)
        assert gang.lost == (1,)
        gang.replace()
        assert gang.run(staying.total, 1.0) == [2.0] * 2


def test_many_replacements_leave_nothing() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with LocalGang(2) as gang:
        before = open_files()
        for _ in range(2):
            with pytest.raises(PeerLost):
                gang.run(clusters.die_in_one, 1)
            gang.replace()
        clusters.until(lambda: open_files() <= before)  # a process that was given up is held a moment longer
        assert len(gang.run(programs.pids)) == 2


def test_calls_that_wait_are_told_when_the_gang_ends(tmp_path: Path) -> None:
    gang = LocalGang(2)
    gang.start()
    running = gang.submit(staying.wait_for_file, str(tmp_path / "never"))
    waiting = gang.submit(programs.pids)
    gang.stop()
    for future in (running, waiting):
        assert future.done
        with pytest.raises(GangError, match=r"^ranks 0, 1 did not answer: it was stopped: call start\(\)"):
            future.result()
    with pytest.raises(GangError, match="it was stopped"):
        gang.submit(programs.pids)


def test_more_subsets_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was called longest ago gives up its communicator; it meets anew when it is called."""
    monkeypatch.setattr(worlds, "MAX_SUBSETS", 1)
    with LocalGang(3) as gang:
        first = gang.run(staying.make, 1, ranks=[0, 1])
        assert np.array_equal(first, gang.run(staying.make, 1, ranks=[0, 1]))
        threads = gang.run(lambda comm: threading.active_count(), ranks=[0])
        for ranks in ([0, 2], [1, 2], [0, 1], [0, 2]):
            assert gang.run(staying.total, 1.0, ranks=ranks) == [2.0, 2.0]
        assert gang.run(lambda comm: threading.active_count(), ranks=[0]) == threads


def test_wrong_use_is_told(gang: LocalGang, monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in ([], [1, 0], [0, 0], [3], [-1]):
        with pytest.raises(ArgumentError, match=r"expected different ranks of 0 to 2 in ascending order, at least one"):
            gang.run(programs.pids, ranks=ranks)
    with pytest.raises(ArgumentError, match=r"per_rank= has 2 values; expected one for each of 3 ranks"):
        gang.run(programs.pids, per_rank=[1, 2])
    with pytest.raises(ArgumentError, match=r"per_rank\[2\] is <unlocked _thread.lock .*cannot be sent to the ranks"):
        gang.run(programs.pids, per_rank=[threading.Lock()], ranks=[2])
    with pytest.raises(ArgumentError, match=r"name='': expected a text that is not empty"):
        gang.put("", [1, 2, 3])
    with pytest.raises(ArgumentError, match=r"values= is empty: expected a list"):
        gang.put("x", [])
    with pytest.raises(
        ArgumentError, match=r"values\[1\] is a builtins.int, whose rows cannot be divided: expected NumPy"
    ):
        gang.put("x", [np.arange(2), 1])
    other = LocalGang(1)
    with pytest.raises(
        ArgumentError, match=rf"kept\('x'\) is of the gang {other.job}, this one is {gang.job}: use its"
    ):
        gang.run(staying.all_sum, other.kept("x"))
    assert (other.names(), other.lost) == ((), ())
    for use in (other.replace, lambda: other.delete("x"), lambda: other.put("x", [1])):
        with pytest.raises(GangError, match="it was not started"):
            use()
    monkeypatch.setattr(dispatch, "MAX_WAITING", 0)
    with pytest.raises(GangError, match=r"0 calls wait for their ranks; expected at most 0: take the results of some"):
        gang.submit(programs.pids)
    assert gang.names() == ()


def test_an_array_is_no_list_of_values(gang: LocalGang, unchecked: None) -> None:
    with pytest.raises(
        ArgumentError, match=r"values= is a ndarray: expected a list with a value for each of the 3 ranks"
    ):
        gang.put("x", np.arange(3))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"name=7: expected a text that is not empty"):
        gang.kept(7)  # type: ignore[arg-type]


def test_what_one_gang_keeps_another_may_take(gang: LocalGang) -> None:
    """And has under the same name what is its own."""
    gang.put("rows", [np.arange(5), np.arange(5, 9)])
    with LocalGang(2) as other:
        other.put("rows", gang.get("rows"))
        assert [part.tolist() for part in other.get("rows")] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
        other.put("rows", [np.arange(2), np.arange(1)])
    assert [part.tolist() for part in gang.get("rows")] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


# By day the seed by which another rank is killed while one is replaced.
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 1 else pytest.mark.slow) for seed in range(30)]
)
def test_kills_at_random_moments(seed: int) -> None:
    with LocalGang(3, log=io.StringIO()) as gang:
        staying.kill_at_random_moments(gang, seed)
