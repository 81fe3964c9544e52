"""A rank of a system: joins the others, then does what it is told over a socket, on which it sleeps in between."""

import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.comm.endpoint import Endpoint
from benchmarks.comm.loops import LOOPS


def main(kind: str, folder: Path, rank: int = -1, size: int = -1, core: int = -1) -> None:
    """Serves until the other side closes.

    **Arguments:** `rank`, `size`: -1 where a launcher knows them. `core`: to which it is bound, -1 for none.
    """
    if core >= 0:
        os.sched_setaffinity(0, {core})
    endpoint = _joined(kind, folder, rank, size)
    endpoint.barrier()
    with _control(folder) as control:
        control.send(endpoint.rank)
        while (asked := control.recv()) is not None:
            name, args = asked
            control.send(LOOPS[name](endpoint, *args))
        endpoint.close()


def _joined(kind: str, folder: Path, rank: int, size: int) -> Endpoint:
    if kind in ("tcp", "ucx"):
        from benchmarks.comm.ours import Ours

        return Ours(kind, folder, rank, size)
    from benchmarks.comm.peers import Gloo, Mpi4py

    return Gloo(folder, rank, size) if kind == "gloo" else Mpi4py()


def _control(folder: Path) -> Connection:
    control = socket.socket(socket.AF_UNIX)
    control.connect(str(folder / "control"))
    return Connection(control.detach())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which ends its ranks
    try:
        main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
    except EOFError:  # the benchmark was ended; others may be in the middle of something
        os._exit(1)
