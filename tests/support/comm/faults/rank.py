"""A rank for the fault tests: does what the lines of its standard input say, one JSON object for each life of the job.

It joins a generation, does `num_operations` drawn operations, takes up a `stance`, and stays in it until an error
comes. It says on its standard output when it has `joined`, when it is `ready`, and how all `ended`. Then it waits for
the next line, which is how a survivor joins again, and ends with its standard input.
"""

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from braidax.comm import Communicator, Tuning, connect
from braidax.comm.stores.file import FileStore
from braidax.errors import BraidaxError, PeerLost
from tests.support.comm.faults.operations import OPERATIONS
from tests.support.comm.faults.streams import STREAMS
from tests.support.comm.relay import RelayedStore
from tests.support.comm.transports.tcps import transport_of

_LARGE_BYTES = 1 << 26
_NEVER = 77  # a tag under which nobody sends


def main() -> None:
    """Lives once for each line."""
    faulthandler.register(signal.SIGUSR1)  # the test asks a rank that says nothing where it is
    FileStore(sys.argv[1])  # whatever is imported late is there before descriptors are counted
    say({"event": "there"})
    for line in sys.stdin:
        say(live(json.loads(line), sys.argv[1]))


def say(what: dict[str, Any]) -> None:
    """Writes a line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def live(given: dict[str, Any], folder: str) -> dict[str, Any]:
    """Joins a generation, and returns how it ended."""
    before = descriptors()
    store = FileStore(folder)
    ended: dict[str, Any] = {"event": "ended", "error": None}
    try:
        comm = connect(
            store if given["relay"] is None else RelayedStore(store, rank=given["rank"], port=given["relay"]),
            rank=given["rank"],
            size=given["size"],
            transport=transport_of(given["transport"], given["rank"]),
            job=given["job"],
            generation=given["generation"],
            timeout_seconds=given["timeout_seconds"],
            tuning=Tuning(
                peer_timeout_seconds=given["peer_timeout_seconds"],
                spin_seconds=given["spin_seconds"],
                host=given["hosts"][given["rank"]],
            ),
        )
    except BraidaxError as error:
        return ended | described(error) | {"during": "connect"} | left_over(before)
    say({"event": "joined"})
    during = ["nothing"]
    try:
        act(comm, given, during)
        comm.barrier()
    except BraidaxError as error:
        ended |= described(error) | insist(comm)
    began = time.monotonic()
    comm.close()
    return ended | {"during": during[-1], "close_seconds": time.monotonic() - began} | left_over(before)


def act(comm: Communicator, given: dict[str, Any], during: list[str]) -> None:
    """Does the operations, and takes up the stance."""
    draw = random.Random(given["seed"])
    num_operations, stance = given["num_operations"], given["stances"][comm.rank]
    while num_operations is None or len(during) <= num_operations:
        operation = draw.choice(STREAMS if given.get("operations") == "streams" else OPERATIONS)
        during.append(operation.__name__)
        operation(comm, draw)
    during.append(stance)
    STANCES[stance](comm, given["victim"])


def insist(comm: Communicator) -> dict[str, Any]:
    """Calls again and again after the failure, and returns what each call raises and how long the slowest takes."""
    again: list[str] = []
    slowest = 0.0
    peer = (comm.rank + 1) % comm.size
    calls: list[Callable[[], Any]] = [
        comm.barrier,
        lambda: comm.all_reduce(np.ones(1 << 16)),
        lambda: comm.recv(peer),
        lambda: comm.send_buffer(b"x", peer),
        lambda: comm.start.recv(peer).wait(),
    ]
    for call in calls:
        began = time.monotonic()
        try:
            call()
        except BraidaxError as error:
            again.append(type(error).__name__)
        else:
            again.append("nothing")
        slowest = max(slowest, time.monotonic() - began)
    return {"again": again, "again_seconds": slowest}


def described(error: BraidaxError) -> dict[str, Any]:
    """Returns what the test wants to know about an error, and when it came."""
    lost = {"peer": error.rank, "host": error.host} if isinstance(error, PeerLost) else {}
    return {"at": time.monotonic(), "error": type(error).__name__, "text": str(error), **lost}


def left_over(before: Counter[str]) -> dict[str, Any]:
    """Returns what a communicator has not given up, or has closed though it was not its own."""
    after = descriptors()
    changed = [*(after - before).elements(), *(f"gone: {name}" for name in (before - after).elements())]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("braidax")]
    return {"threads": threads, "descriptors": sorted(changed)}


def descriptors() -> Counter[str]:
    """Returns the files and sockets that this process has."""
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found[str(descriptor.readlink())] += 1
    del found["/proc/sys/vm/overcommit_memory"]  # glibc's, for a moment, when a heap of some thread shrinks
    return found


def idle(comm: Communicator, victim: int) -> None:
    """Calls nothing until the test says so."""
    say({"event": "ready"})
    sys.stdin.readline()
    comm.recv((comm.rank + 1) % comm.size, tag=_NEVER)


def late(comm: Communicator, victim: int) -> None:
    """Comes to the barrier when the test says so."""
    say({"event": "ready"})
    sys.stdin.readline()
    comm.barrier()


def waiting(call: Callable[[Communicator, int], Any]) -> Callable[[Communicator, int], None]:
    """Makes a stance of a call that cannot end, as the victim does not take part in it."""

    def stance(comm: Communicator, victim: int) -> None:
        say({"event": "ready"})
        call(comm, victim)

    return stance


def abort(comm: Communicator, victim: int) -> None:
    say({"event": "ready"})
    sys.stdin.readline()
    comm.abort("the disk is full")


def abort_and_exit(comm: Communicator, victim: int) -> None:
    abort(comm, victim)
    os._exit(3)


def close(comm: Communicator, victim: int) -> None:
    say({"event": "ready"})
    sys.stdin.readline()
    comm.close()


def forget(comm: Communicator, victim: int) -> None:
    """Ends the process by the interpreter's own end, with the communicator still open."""
    say({"event": "ready"})
    sys.stdin.readline()
    sys.exit(0)


def large_all_reduce(comm: Communicator, victim: int) -> None:
    """Sums 64 MiB, and says how long that took."""
    array = np.arange(_LARGE_BYTES // 8, dtype=np.float64)
    comm.barrier()
    say({"event": "ready"})
    began = time.monotonic()
    found = comm.all_reduce(array + comm.rank)
    say({"event": "took", "seconds": time.monotonic() - began})
    np.testing.assert_array_equal(found, comm.size * array + sum(range(comm.size)))


def _other(comm: Communicator, victim: int) -> int:
    """Returns a rank that is neither this one nor the victim, if there is one."""
    others = [rank for rank in range(comm.size) if rank not in (comm.rank, victim)]
    return others[0] if others else victim


STANCES: dict[str, Callable[[Communicator, int], None]] = {
    "idle": idle,
    "recv": waiting(lambda comm, victim: comm.recv(victim, tag=_NEVER)),
    "recv of another": waiting(lambda comm, victim: comm.recv(_other(comm, victim), tag=_NEVER)),
    "recv_buffer": waiting(lambda comm, victim: comm.recv_buffer(bytearray(100), victim, tag=_NEVER)),
    "send": waiting(lambda comm, victim: comm.send(np.zeros(_LARGE_BYTES, np.uint8), victim, tag=_NEVER)),
    "barrier": waiting(lambda comm, victim: comm.barrier()),
    "all_reduce": waiting(lambda comm, victim: comm.all_reduce(np.zeros(_LARGE_BYTES // 8))),
    "all_to_all": waiting(lambda comm, victim: comm.all_to_all([np.zeros(1 << 20)] * comm.size)),
    "wait": waiting(lambda comm, victim: comm.start.recv(victim, tag=_NEVER).wait()),
    "wait of all_reduce": waiting(lambda comm, victim: comm.start.all_reduce(np.zeros(1 << 20)).wait()),
    "late": late,
    "large all_reduce": large_all_reduce,
    "abort": abort,
    "abort and exit": abort_and_exit,
    "close": close,
    "forget": forget,
    "leave": lambda comm, victim: None,
}


if __name__ == "__main__":
    main()
