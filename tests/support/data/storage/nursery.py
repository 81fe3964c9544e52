"""Processes that use derived files: forks of one that has imported what they need, which takes longer than all they do.

It has started nothing of JAX. An order is a line of JSON, `{"code", "environment"}`, with the descriptors that the fork
has as its input and output; the answer is the number of its process.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, final

from tests.support.gang.programs import wait_until_gone
from tests.support.tree import ROOT

_ORDER_BYTES = 1 << 16


@final
class Forked:
    """A process that runs code, which is killed by its owner."""

    def __init__(self, pid: int, stdin: Any, stdout: Any) -> None:
        self.pid = pid
        self._stdin, self._stdout = stdin, stdout

    def line(self) -> str:
        """Returns the next line that it says, or nothing once it has ended."""
        return self._stdout.readline().strip()

    def put(self, text: str = "go") -> None:
        """Gives it a line."""
        self._stdin.write(text + "\n")
        self._stdin.flush()

    def kill(self) -> None:
        """Ends it as `kill -9` does, and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        wait_until_gone([self.pid], seconds=30)

    def close(self) -> None:
        """Ends it, and gives up its pipes."""
        self.kill()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@final
class Nursery:
    """The process that forks; in a `with` block it ends behind it."""

    def __init__(self) -> None:
        self._orders, there = socket.socketpair()
        with there:
            command = [sys.executable, "-W", "ignore", "-m", "tests.support.data.storage.nursery", str(there.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, pass_fds=[there.fileno()]
            )

    @contextlib.contextmanager
    def process(self, code: str, **environment: str) -> Iterator[Forked]:
        """Runs code in a process of its own, which is killed when the block ends."""
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        order = json.dumps({"code": code, "environment": environment}).encode()
        socket.send_fds(self._orders, [order], [theirs_in, theirs_out])
        os.close(theirs_in)
        os.close(theirs_out)
        running = Forked(int(self._orders.recv(100)), os.fdopen(ours_in, "w"), os.fdopen(ours_out))
        try:
            yield running
        finally:
            running.close()

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *raised: object) -> None:
        self._orders.close()
        assert self._process.wait(30) == 0


def main(orders: socket.socket) -> None:
    """Forks a process for each order until there is no more."""
    import braidax.data.storage.derived
    import braidax.data.storage.inflate  # noqa: F401 (every fork has it)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        order, descriptors, *_ = socket.recv_fds(orders, _ORDER_BYTES, 2)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            _run(json.loads(order), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.sendall(str(pid).encode())


def _run(order: Any, stdin: int, stdout: int) -> None:
    """Runs code as a program whose standard streams are these, and ends the process."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        os.environ.update(order["environment"])
        exec(order["code"], {"__name__": "__main__"})
        sys.stdout.flush()
        status = 0
    except BaseException:  # noqa: BLE001 (nothing of a fork may go on as its parent)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
