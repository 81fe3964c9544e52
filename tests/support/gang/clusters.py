"""What the tests of gangs on clusters share: what ranks do there, and what every store of a cluster must do."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.comm.stores.limits import MAX_AMOUNT, MAX_KEY_BYTES
from braidax.comm.stores.store import ScopedStore, Store
from braidax.errors import ArgumentError, WaitTimeout

UNTIL_SECONDS = 30.0
ODD_KEYS = ["", ".", "/", "a/b", "/a/b", "a b\n\0", "Ä€😀", "A", "\ud800", "k" * 4000]


def until(condition: Callable[[], bool]) -> None:
    """Waits until something that happens by itself has happened."""
    deadline = time.monotonic() + UNTIL_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.05)


def end_worker(client: Any, worker: str) -> None:
    """Kills a worker of Dask, whose nanny starts another one. `Client.restart_workers` may wait for it for minutes."""
    os.kill(client.run(os.getpid, workers=[worker])[worker], signal.SIGKILL)
    until(lambda: worker not in client.nthreads())


def is_running(pid: int) -> bool:
    """Returns whether a process runs, zombies not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def backwards(comm: Communicator, number: float) -> tuple[int, int, float]:
    """Sums over all ranks, and returns on the last rank first, on rank 0 last."""
    total = comm.all_reduce(np.full(1000, number * (comm.rank + 1)))
    if comm.rank < comm.size - 1:
        comm.recv(comm.rank + 1)
    if comm.rank > 0:
        comm.send(b"", comm.rank - 1)
    return comm.rank, comm.size, float(total[999])


def pid_of(comm: Communicator) -> int:
    """Returns the rank's process."""
    return os.getpid()


def surroundings() -> tuple[dict[str, str], str, list[str], list[str]]:
    """Returns what a program might change in its process: variables, folder, arguments, and where modules lie."""
    return dict(os.environ), str(Path.cwd()), list(sys.argv), list(sys.path)


def variable(comm: Communicator, name: str) -> str | None:
    """Returns a variable of the rank's environment."""
    return os.environ.get(name)


def hello(comm: Communicator) -> None:
    """Says a word."""
    sys.stdout.write(f"hello from {comm.rank}\n")


def fail_in_one(comm: Communicator, rank: int) -> None:
    """Raises in one rank, while the others wait for it."""
    if comm.rank == rank:
        raise LookupError(f"nothing in rank {rank}")
    comm.barrier()


def die_in_one(comm: Communicator, rank: int) -> None:
    """Ends the process of one rank as the kernel does, while the others wait for it."""
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def wait_for_one_another(comm: Communicator) -> None:
    """Waits for a message that nobody sends."""
    comm.recv((comm.rank + 1) % comm.size)


def get_there(comm: Communicator, address: str, kind: Callable[[str], Store], key: str) -> bytes:
    """Returns a value of a store that each rank opens."""
    with kind(address) as store:
        return store.get(key, timeout_seconds=60.0)


def set_there(comm: Communicator, address: str, kind: Callable[[str], Store], key: str) -> None:
    """Sets a value, the same on each rank."""
    with kind(address) as store:
        store.set(key, b"set by a rank")


def add_there(comm: Communicator, address: str, kind: Callable[[str], Store], times: int) -> list[int]:
    """Adds to the counter `count` of a store that each rank opens."""
    with kind(address) as store:
        return [store.add("count", 1) for _ in range(times)]


def check_values(store: Store) -> None:
    """A value is what was set last, of any size; a counter of the same key is another thing."""
    for value in (b"first", b"", b"\0\xff text", bytes(range(256)) * 4096):
        store.set("key", value)
        assert store.get("key", timeout_seconds=0) == value
    assert store.add("key", 5) == 5
    assert store.add("key", -7) == -2
    assert store.get("key", timeout_seconds=0) == bytes(range(256)) * 4096
    assert [store.add("large", MAX_AMOUNT) for _ in range(2)] == [MAX_AMOUNT, 2 * MAX_AMOUNT]


def check_odd_keys(store: Store) -> None:
    """Any text is a key of its own, and so is the same key of another job or generation."""
    for number, key in enumerate(ODD_KEYS):
        store.set(key, b"%d" % number)
        assert store.add(key, number) == number
    assert [int(store.get(key, timeout_seconds=0)) for key in ODD_KEYS] == list(range(len(ODD_KEYS)))
    scopes = [ScopedStore(store, job=job, generation=generation) for job in ("a", "b") for generation in (0, 1)]
    for number, scope in enumerate(scopes):
        scope.set("key", b"%d" % number)
    assert [scope.get("key", timeout_seconds=0) for scope in scopes] == [b"0", b"1", b"2", b"3"]


def check_limits(store: Store) -> None:
    """A wait ends in time, and names key and store; what no store takes is refused."""
    for seconds in (0, 0.3):
        begun = time.monotonic()
        with pytest.raises(WaitTimeout) as caught:
            store.get("nobody's", timeout_seconds=seconds)
        assert seconds <= time.monotonic() - begun < seconds + 5
        assert str(caught.value).startswith(f'{store.address}: the key "nobody\'s" got no value within {seconds:g} s')
    with pytest.raises(ArgumentError, match=r"has 4,098 bytes: expected at most 4,096"):
        store.set("é" * (MAX_KEY_BYTES // 2 + 1), b"")
    with pytest.raises(ArgumentError, match=r"value= of the key 'k' has 67,108,865 bytes"):
        store.set("k", bytes((64 << 20) + 1))
    with pytest.raises(ArgumentError, match=r"amount=2147483648"):
        store.add("k", 1 << 31)


def check_waiting(store: Store) -> None:
    """Those that wait keep nobody else waiting, and all of them are woken."""
    with ThreadPoolExecutor(6) as threads:
        waiting = [threads.submit(store.get, f"late {number % 2}", timeout_seconds=60.0) for number in range(6)]
        with pytest.raises(WaitTimeout):
            store.get("never", timeout_seconds=0.2)
        store.set("late 1", b"1")
        store.set("late 0", b"0")
        assert [each.result(UNTIL_SECONDS) for each in waiting] == [b"0", b"1"] * 3


def check_between_processes(store: Store, kind: Callable[[str], Store], gang: Any) -> None:
    """What one process sets another gets, and no two get the same sum."""
    with ThreadPoolExecutor(1) as threads:
        here = threads.submit(store.get, "from a rank", timeout_seconds=60.0)
        assert gang.run(set_there, store.address, kind, "from a rank") == [None] * gang.size
        assert here.result(UNTIL_SECONDS) == b"set by a rank"
        there = threads.submit(gang.run, get_there, store.address, kind, "to the ranks")
        with pytest.raises(WaitTimeout):
            store.get("never", timeout_seconds=0.2)
        store.set("to the ranks", b"hello")
        assert there.result(UNTIL_SECONDS) == [b"hello"] * gang.size
    sums = gang.run(add_there, store.address, kind, 20)
    assert sorted(itertools.chain(*sums)) == list(range(1, 20 * gang.size + 1))
    assert all(each == sorted(each) for each in sums)


STORE_CHECKS = [check_values, check_odd_keys, check_limits, check_waiting]
