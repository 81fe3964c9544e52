"""What ranks do in the tests of local gangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from braidax.comm import Communicator
from braidax.errors import Aborted

kept: list[int] = []


class Stubborn(Exception):
    """Cannot be pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("stubborn")


class OnlyThere:
    """Can be unpickled in the process that made it only."""

    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> None:
    if pid != os.getpid():
        raise LookupError("not in this process")


def nested(comm: Communicator, array: np.ndarray, names: dict[str, str]) -> dict[str, Any]:
    """Returns arrays in other things."""
    return {"rank": comm.rank, "sum": comm.all_reduce(array * comm.rank), "deep": [(names, array[: comm.rank])]}


def pids(comm: Communicator) -> int:
    """Returns the process of the rank."""
    return os.getpid()


def keep(comm: Communicator, number: int) -> list[int]:
    """Remembers numbers."""
    kept.append(number)
    return kept


def fail_on_1(comm: Communicator, how: str) -> None:
    """Raises on rank 1 while the others wait; they make of it what `how` says."""
    try:
        if comm.rank == 1:
            raise ValueError("the value")
        comm.barrier()
    except Aborted as error:
        sys.stdout.write("aborted\n")
        if how == "wrapped":
            raise RuntimeError("something else") from error
        if how == "hidden":
            raise KeyError("later") from None
        raise


def stubborn(comm: Communicator) -> None:
    """Raises what cannot be pickled."""
    raise Stubborn(1, 2)


def unsendable(comm: Communicator) -> Any:
    """Returns what cannot be pickled, on rank 1."""
    return threading.Lock() if comm.rank == 1 else 0


def only_there(comm: Communicator) -> Any:
    """Returns what nobody else can unpickle, on rank 1."""
    return OnlyThere() if comm.rank == 1 else 0


def end_on_1(comm: Communicator, number: int) -> None:
    """Ends the process of rank 1: by a signal or, for 0, by itself."""
    if comm.rank == 1:
        for line in range(25):
            sys.stderr.write(f"line {line}\n")
        sys.stderr.write("last words")
        if number == 0:
            os._exit(3)
        os.kill(os.getpid(), number)
        time.sleep(60)
    comm.barrier()


def sleep_after_0(comm: Communicator) -> int:
    """Sleeps on all ranks but rank 0."""
    if comm.rank > 0:
        time.sleep(600)
    return comm.rank


def write(comm: Communicator) -> None:
    """Writes to both streams, in pieces."""
    for piece in ("a", "b\nc", "\n"):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stderr.write(f"to stderr ä{comm.rank}\n")


def leave_a_child(comm: Communicator) -> int:
    """Starts a process and leaves it running."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def interrupt_parent(comm: Communicator) -> None:
    """Presses Ctrl-C for the parent, and goes on."""
    if comm.rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended; one that nobody has reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: list[int], *, seconds: float) -> None:
    """Waits until processes have ended, and fails when they have not within a limit."""
    deadline = time.monotonic() + seconds
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if not is_gone(pid)]
        time.sleep(0.01)
