"""What every gang must do that stays, wherever its ranks come from: checks of a gang of 3 whose ranks all live."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.errors import ArgumentError, CallFailed, CommError, GangError, PeerLost, WaitTimeout
from braidax.gang import Gang
from tests.support.gang import clusters

LARGE_BYTES = 64 << 20


def total(comm: Communicator, number: float) -> float:
    """Sums over all ranks."""
    return float(comm.all_reduce(np.array([number]))[0])


def all_sum(comm: Communicator, values: np.ndarray) -> float:
    """Sums what all ranks keep."""
    return total(comm, float(values.sum()))


def append(comm: Communicator, values: list[int], own: int) -> int:
    """Changes what the rank keeps."""
    values.append(own)
    return len(values)


def make(comm: Communicator, number: int) -> np.ndarray:
    """Returns what is to be kept."""
    return np.full(3, number + comm.rank)


def make_but_in_one(comm: Communicator, rank: int) -> int:
    """Returns what is to be kept, but raises in one rank; nobody waits for it."""
    if comm.rank == rank:
        raise LookupError("nothing here")
    return -1


def unsendable(comm: Communicator) -> Any:
    """Returns what only stays where it is."""
    return (number for number in range(3))


def begin_with(comm: Communicator, values: Any) -> Any:
    """Takes one of what is kept."""
    return next(values)


def wait_for_file(comm: Communicator, path: str) -> tuple[int, int]:
    """Waits for a file that another call makes."""
    deadline = time.monotonic() + clusters.UNTIL_SECONDS
    while not Path(path).exists():
        assert time.monotonic() < deadline, "nobody made the file"
        time.sleep(0.005)
    return comm.rank, comm.size


def make_file(comm: Communicator, path: str) -> tuple[int, int]:
    """Makes a file when all ranks of the call are there."""
    comm.barrier()
    Path(path).touch()
    return comm.rank, comm.size


def identity(comm: Communicator) -> int:
    """Returns which communicator a call gets."""
    return id(comm)


def describe(comm: Communicator, array: np.ndarray) -> tuple[int, bool, float]:
    """Returns where an array begins, whether it may be written, and what is in it; then writes."""
    found = array.ctypes.data % 64, array.flags.writeable, float(array[::4096].sum())
    array[:] = 7
    return found


def check_a_call_that_raises_fails_alone(gang: Gang, folder: Path) -> None:
    """The ranks stay with what they keep, those that wait for the one that raised are released, and all meet anew."""
    gang.put("list", [[1], [2], [3]])
    pids, generation = gang.run(clusters.pid_of), gang.generation
    for rank in (1, 2):
        with pytest.raises(CallFailed, match=rf"^rank {rank} \(host .*\): LookupError: nothing in rank {rank}") as told:
            gang.run(clusters.fail_in_one, rank)
        assert isinstance(told.value.__cause__, LookupError)
        assert gang.lost == ()
        assert gang.run(append, gang.kept("list"), 9) == [1 + rank] * 3
        assert gang.run(total, 2.0) == [6.0] * 3
        assert gang.generation == generation + rank
    assert gang.run(clusters.pid_of) == pids
    assert gang.get("list") == [[1, 9, 9], [2, 9, 9], [3, 9, 9]]
    gang.delete("list")


def check_a_lost_rank_is_replaced(gang: Gang, folder: Path) -> None:
    """The others stay; calls are refused until another process is there; what was kept can be made whole again."""
    gang.put("x", [np.arange(3), np.arange(4), np.arange(5)])
    pids, generation = gang.run(clusters.pid_of), gang.generation
    with pytest.raises(PeerLost, match=rf"^rank 1 \(host .*, pid {pids[1]}\) ") as told:
        gang.run(clusters.die_in_one, 1)
    assert told.value.rank == 1
    assert gang.lost == (1,)
    with pytest.raises(GangError, match=r"in ranks 0, 1, 2: rank 1 .*; call replace\(\) .* or restart\(\) for all"):
        gang.run(total, 1.0)
    assert gang.run(total, 1.0, ranks=[0, 2]) == [2.0, 2.0]
    gang.replace()
    assert gang.lost == ()
    again = gang.run(clusters.pid_of)
    assert (again[0], again[2]) == (pids[0], pids[2])
    assert again[1] != pids[1]
    assert (gang.generation, len(gang.hosts)) == (generation + 1, 3)
    assert gang.run(total, 1.0) == [3.0] * 3
    for use in (lambda: gang.get("x"), lambda: gang.run(all_sum, gang.kept("x"))):
        with pytest.raises(GangError, match=r"name='x' is not whole any more: rank 1 of 3 lacks it"):
            use()
    assert [len(part) for part in gang.get("x", ranks=[0, 2])] == [3, 5]
    assert gang.run(make, 7, ranks=[1], keep="x") == [None]
    assert gang.run(all_sum, gang.kept("x")) == [3 + 21 + 10] * 3
    gang.delete("x")


def check_a_rank_is_replaced_while_others_are_busy(gang: Gang, folder: Path) -> None:
    """Those go on with their call, and meet the new one in the next."""
    gang.put("x", [1, 2, 3])
    generation = gang.generation
    busy = gang.submit(wait_for_file, str(folder / "go"), ranks=[0, 2])
    gang.replace([1], others="leave")
    assert gang.lost == ()
    assert gang.lacking("x") == (1,)
    assert gang.run(make, 7, ranks=[1], keep="x") == [None]
    assert not busy.done
    (folder / "go").touch()
    assert busy.result(timeout_seconds=clusters.UNTIL_SECONDS) == [(0, 2), (1, 2)]
    assert gang.run(total, 1.0) == [3.0] * 3
    assert (gang.generation, len(gang.hosts)) == (generation + 1, 3)
    gang.delete("x")


def check_an_idle_rank_that_is_lost_is_named(gang: Gang, folder: Path) -> None:
    """It is known before the next call, which says so as if it had been lost then."""
    pid = gang.run(clusters.pid_of)[2]
    os.kill(pid, signal.SIGKILL)
    clusters.until(lambda: gang.lost == (2,))
    with pytest.raises(PeerLost, match=rf"^rank 2 \(host .*, pid {pid}\) "):
        gang.run(total, 1.0)
    with pytest.raises(GangError, match=r"call replace\(\)"):
        gang.run(total, 1.0)
    gang.replace()
    assert gang.run(total, 1.0) == [3.0] * 3


def check_a_rank_that_is_lost_when_another_raised_is_named(gang: Gang, folder: Path) -> None:
    """The call tells what was raised first, the next one who was lost meanwhile; only then is it known to all."""

    def raise_and_die(comm: Communicator) -> None:
        if comm.rank == 1:
            raise LookupError("nothing here")
        try:
            comm.recv(1)
        except CommError:
            if comm.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            raise

    pid = gang.run(clusters.pid_of)[0]
    with pytest.raises(CallFailed, match=r"^rank 1 .*LookupError"):
        gang.run(raise_and_die)
    clusters.until(lambda: gang.lost == (0,))
    with pytest.raises(PeerLost, match=rf"^rank 0 \(host .*, pid {pid}\) "):
        gang.run(total, 1.0)
    with pytest.raises(GangError, match=r"call replace\(\)"):
        gang.run(total, 1.0)
    gang.replace()
    assert gang.run(total, 1.0) == [3.0] * 3


def check_subsets_run_at_once(gang: Gang, folder: Path) -> None:
    """Calls of disjoint ranks do, each in a world of its own; others wait in line, in order."""
    path = str(folder / "made")
    waiting = gang.submit(wait_for_file, path, ranks=[1])
    behind = gang.submit(total, 1.0)
    last = gang.submit(total, 2.0, ranks=[0])
    made = gang.submit(make_file, path, ranks=[2])
    assert not waiting.done
    with pytest.raises(WaitTimeout, match="waits for its ranks to be free, and stays in line"):
        made.result(timeout_seconds=0.05)
    Path(path).touch()
    assert (waiting.ranks, waiting.result(timeout_seconds=30)) == ((1,), [(0, 1)])
    assert behind.result(timeout_seconds=30) == [3.0] * 3
    assert (last.result(timeout_seconds=30), made.result(timeout_seconds=30)) == ([2.0], [(0, 1)])
    path = str(folder / "again")
    waiting = gang.submit(wait_for_file, path, ranks=[1])
    made = gang.submit(make_file, path, ranks=[0, 2])
    assert made.result(timeout_seconds=30) == [(0, 2), (1, 2)]
    assert (waiting.result(timeout_seconds=30), waiting.done) == ([(0, 1)], True)
    for ranks in ([0, 2], None):
        assert gang.run(identity, ranks=ranks) == gang.run(identity, ranks=ranks)


def check_a_subset_fails_alone(gang: Gang, folder: Path) -> None:
    """A call that raises in some ranks ends no generation of others, and names ranks of the gang."""
    whole, pair = gang.run(identity), gang.run(identity, ranks=[0, 1])
    with pytest.raises(CallFailed, match=r"^rank 2 .*LookupError") as told:
        gang.run(clusters.fail_in_one, 1, ranks=[1, 2])
    assert told.value.rank == 2
    assert gang.run(identity) == whole
    assert gang.run(identity, ranks=[0, 1]) == pair
    assert gang.run(total, 1.0, ranks=[1, 2]) == [2.0, 2.0]


def check_each_rank_gets_its_own(gang: Gang, folder: Path) -> None:
    """`per_rank` comes last, kept things in it and in anything else are replaced by what is kept."""

    def combine(comm: Communicator, common: dict[str, Any], own: Any) -> tuple[int, Any, Any]:
        return comm.rank, common, own

    gang.put("own", ["a", "b", "c"])
    kept = gang.kept("own")
    assert gang.run(combine, {"all": [kept]}, per_rank=[1, kept, np.arange(2).tolist()]) == [
        (0, {"all": ["a"]}, 1),
        (1, {"all": ["b"]}, "b"),
        (2, {"all": ["c"]}, [0, 1]),
    ]
    assert gang.run(combine, {}, per_rank=["y", "z"], ranks=[1, 2]) == [(0, {}, "y"), (1, {}, "z")]
    gang.delete("own")


def check_things_are_kept(gang: Gang, folder: Path) -> None:
    """By name, in place of what was kept before; what cannot be sent can be kept; a call that fails keeps nothing."""
    assert gang.names() == ()
    gang.put("b", [1, 2, 3])
    assert gang.run(make, 5, keep="a") == [None] * 3
    assert [part.tolist() for part in gang.get("a")] == [[5] * 3, [6] * 3, [7] * 3]
    assert gang.names() == ("a", "b")
    with pytest.raises(CallFailed, match="LookupError"):
        gang.run(clusters.fail_in_one, 2, keep="a")
    for name in ("a", "new"):
        with pytest.raises(CallFailed, match="LookupError"):
            gang.run(make_but_in_one, 2, keep=name)
    assert gang.names() == ("a", "b")
    assert [part.tolist() for part in gang.get("a")] == [[5] * 3, [6] * 3, [7] * 3]
    gang.run(unsendable, keep="b")
    assert [gang.run(begin_with, gang.kept("b")) for _ in range(2)] == [[0] * 3, [1] * 3]
    with pytest.raises(CallFailed, match=r"the result cannot be sent: it is of type builtins\.generator"):
        gang.get("b")
    with pytest.raises(ArgumentError, match=r"name='aa' is not kept by this gang, did you mean 'a'; it keeps 'a', 'b'"):
        gang.run(all_sum, gang.kept("aa"))
    gang.delete("a")
    gang.delete("b")
    for use in (lambda: gang.get("a"), lambda: gang.delete("a"), lambda: gang.run(all_sum, gang.kept("a"))):
        with pytest.raises(ArgumentError, match=r"name='a' is not kept by this gang; it keeps nothing: put it first"):
            use()
    assert gang.names() == ()


def check_rows_are_divided(gang: Gang, folder: Path) -> None:
    """What is put by another number of parts is divided evenly."""
    gang.put("rows", [np.arange(4), np.arange(4, 5), np.empty(0, np.int64), np.arange(5, 8)])
    assert [part.tolist() for part in gang.get("rows")] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    gang.delete("rows")


def check_a_limit_ends_the_call_alone(gang: Gang, folder: Path) -> None:
    """Ranks that wait for a message come back when the call is aborted, and keep what they have."""
    gang.put("x", [1, 2, 3])
    pids = gang.run(clusters.pid_of)
    words = r"^ranks 0, 1, 2 of 3 did not answer within timeout_seconds=0\.3, so the call was aborted; allow more"
    with pytest.raises(WaitTimeout, match=words):
        gang.run(clusters.wait_for_one_another, timeout_seconds=0.3)
    assert gang.lost == ()
    assert gang.run(clusters.pid_of) == pids
    assert gang.get("x") == [1, 2, 3]
    gang.delete("x")


def check_what_is_deleted_later_is_gone_behind_the_next_run(gang: Gang, folder: Path) -> None:
    gang.put("x", [1, 2, 3])
    gang.delete_later("x")
    gang.delete_later("never there")
    assert gang.get("x") == [1, 2, 3]
    gang.run(clusters.pid_of)
    assert "x" not in gang.names()


def check_large_arguments_are_their_own(gang: Gang, folder: Path) -> None:
    """They arrive aligned, may be written, and what a rank writes changes nothing here."""
    array = np.ones(LARGE_BYTES // 8)
    assert gang.run(describe, array) == [(0, True, LARGE_BYTES / 8 / 4096)] * 3
    assert array[0] == 1.0
    gang.put("large", [array] * 3)
    (first, *_) = gang.get("large", ranks=[0])
    assert (first.ctypes.data % 64, first.flags.writeable, first.nbytes) == (0, True, LARGE_BYTES)
    first[:] = 3.0
    assert gang.get("large", ranks=[0])[0][0] == 1.0
    gang.delete("large")


def seeds(*, quick: int, nightly: int) -> list[Any]:
    """Returns seeds, of which only the first ones run where nothing else is asked for."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, nightly))]


def kill_at_random_moments(gang: Gang, seed: int) -> None:
    """Kills a rank whatever is done, every second time another one while that is replaced, and checks what follows.

    It is told, survivors stay with what they keep, and the gang is made whole. **Arguments:** `gang`: of 3 ranks.
    """
    chance = random.Random(seed)
    gang.put("x", [np.full(1000, float(rank)) for rank in range(3)])
    pids = gang.run(clusters.pid_of)
    victim, other = chance.sample(range(3), 2)
    with _killed(pids[victim], chance.uniform(0.0, 0.15)):
        raised: list[BaseException] = []
        for _ in range(5000):
            try:
                _anything(gang, chance)
            except (CallFailed, PeerLost, GangError, WaitTimeout) as error:
                raised.append(error)
                break
    assert isinstance(raised[0], PeerLost), raised
    assert raised[0].rank == victim
    clusters.until(lambda: gang.lost == (victim,))
    lost = [victim]
    if seed % 2:
        lost.append(other)
        with _killed(pids[other], chance.uniform(0.0, 1.5)):
            _replace(gang)
    else:
        begun = time.monotonic()
        gang.replace()
        assert time.monotonic() - begun < clusters.UNTIL_SECONDS  # what hangs does so for 30 s or 60 s more
    again = _pids_of_the_living(gang)
    assert [again[rank] == pids[rank] for rank in range(3)] == [rank not in lost for rank in range(3)]
    for rank in lost:
        assert gang.run(_constant, float(rank), ranks=[rank], keep="x") == [None]
    assert [part.tolist() for part in gang.get("x")] == [[float(rank)] * 1000 for rank in range(3)]
    assert gang.run(total, 1.0) == [3.0] * 3


@contextlib.contextmanager
def _killed(pid: int, seconds: float) -> Generator[None, None, None]:
    """Kills a process after a while, and not later than the end."""
    killing = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    killing.start()
    try:
        yield
    finally:
        killing.join()


def _replace(gang: Gang) -> None:
    """Calls `replace` until nothing interrupts it."""
    raised: list[BaseException] = []
    while len(raised) < 5:
        try:
            gang.replace()
        except (GangError, PeerLost, WaitTimeout) as error:
            raised.append(error)
        else:
            return
    raise AssertionError(raised)


def _pids_of_the_living(gang: Gang) -> list[int]:
    """Returns the ranks' processes; what was killed behind the replacement is told, and replaced."""
    try:
        return gang.run(clusters.pid_of)
    except PeerLost:
        _replace(gang)
        return gang.run(clusters.pid_of)


def _constant(comm: Communicator, number: float) -> np.ndarray:
    return np.full(1000, number)


def _anything(gang: Gang, chance: random.Random) -> None:
    """Makes one call or another, some of which raise in a rank, and checks what it returns."""
    kind = chance.randrange(7)
    if kind == 0:
        assert gang.run(total, 1.0) == [3.0] * 3
    elif kind == 1:
        ranks = sorted(chance.sample(range(3), 2))
        assert gang.run(total, 1.0, ranks=ranks) == [2.0] * 2
    elif kind == 2:
        gang.put("y", [np.arange(chance.randrange(100_000)) for _ in range(5)])
    elif kind == 3:
        assert gang.run(all_sum, gang.kept("x")) == [3000.0] * 3
    elif kind == 4:
        assert [len(part) for part in gang.get("x")] == [1000] * 3
    elif kind == 5:
        begun = [gang.submit(total, 1.0, ranks=ranks) for ranks in ([0, 1], [2], [1, 2])]
        assert [future.result(timeout_seconds=clusters.UNTIL_SECONDS) for future in begun] == [
            [2.0] * 2,
            [1.0],
            [2.0] * 2,
        ]
    else:
        where = chance.randrange(3)
        try:
            gang.run(clusters.fail_in_one, where)
        except CallFailed as error:
            if not isinstance(error.__cause__, LookupError):
                raise


def one_of_three(first: int) -> list[Any]:
    """Returns all checks, for pytest: one of three, from `first` on, and the others in the long run."""
    return [
        pytest.param(check, marks=() if number % 3 == first else pytest.mark.slow)
        for number, check in enumerate(CHECKS)
    ]


CHECKS: list[Callable[[Gang, Path], None]] = [
    check_a_call_that_raises_fails_alone,
    check_a_lost_rank_is_replaced,
    check_an_idle_rank_that_is_lost_is_named,
    check_a_rank_that_is_lost_when_another_raised_is_named,
    check_subsets_run_at_once,
    check_a_subset_fails_alone,
    check_each_rank_gets_its_own,
    check_things_are_kept,
    check_rows_are_divided,
    check_a_limit_ends_the_call_alone,
    check_what_is_deleted_later_is_gone_behind_the_next_run,
    check_large_arguments_are_their_own,
    check_a_rank_is_replaced_while_others_are_busy,
]
