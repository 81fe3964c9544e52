"""One worker process, as its parent sees it: started in a fresh interpreter, asked for windows, ended and reaped."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.dtypes
import numpy as np
from numpy.typing import NDArray

from braidax.data.workers.processes.memory import SharedMemory, nameless_file
from braidax.data.workers.processes.messages import channel_of, packed, receive, send
from braidax.errors import BraidaxError, PeerLost, WaitTimeout
from braidax.spans import take_told

_START_SECONDS = 300.0  # of imports from a slow disk, on busy cores
_ENDING_SECONDS = 2.0  # a worker that does not end by itself in that time is killed
_REAP_SECONDS = 10.0  # after a kill

_CODE = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
import sys
sys.path[:] = PATH
from braidax.data.workers.processes.child import main
main(*map(int, sys.argv[1:]))
"""
_ONE_THREAD = {  # the workers are the parallelism
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENCV_FOR_THREADS_NUM": "1",
}


class WorkerDied(Exception):
    """A worker process ended while it was asked for something; the message says how, and is the same each time.

    Never leaves this package. Its cause is what those outside are told.
    """


class WorkerClosed(Exception):
    """A worker process was ended by its owner while it was asked for something. Never leaves this package."""


@dataclass(frozen=True)
class Birth:
    """What every worker of a source starts from, so that one that starts later reads the same.

    **Fields:** `source`: the descriptor of the packed source. `code`: what is run, with places for descriptors.
    `folder`, `environment`: of the process.
    """

    source: int
    code: str
    folder: str
    environment: dict[str, str]

    @staticmethod
    def of(source: int) -> "Birth":
        """Returns the birth of workers that see paths, folder and settings as this process does now."""
        has_64_bits = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
        settings = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(has_64_bits)}
        environment = {**_ONE_THREAD, **os.environ, **settings}
        return Birth(source, _CODE.replace("PATH", repr(sys.path)), str(Path.cwd()), environment)


class Worker:
    """A worker process; one thread at a time asks it, any thread may end it.

    **Arguments:** `number`: for names. `birth`: what it starts from.

    **Raises:** `OSError` when the system starts no process.
    """

    def __init__(self, number: int, birth: Birth) -> None:
        self.number = number
        self._asking = threading.Lock()
        self._ended = False
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            here, connection = socket.socketpair()
            self._channel = ours.enter_context(contextlib.closing(channel_of(here)))
            theirs.enter_context(connection)
            parent, lifeline = os.pipe()
            ours.callback(os.close, lifeline)
            theirs.callback(os.close, parent)
            descriptor = nameless_file()
            ours.callback(os.close, descriptor)
            self.memory = SharedMemory(descriptor)
            self._process = _started(birth, connection.fileno(), descriptor, parent)
            self._ours = ours.pop_all()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, as far as is known without asking it anything."""
        return not self._ended and self._process.poll() is None

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"worker process {self.number} (pid {self._process.pid})"

    def lost(self, how: str) -> PeerLost:
        """Returns the error that says how its process ended."""
        return PeerLost(f"{self.name} {how}", self.number, socket.gethostname())

    def wait_until_ready(self) -> None:
        """Waits until the worker has its source.

        **Raises:** `WorkerDied`, `WorkerClosed`; `WaitTimeout`; `PeerLost` when it could not begin at all; what
        unpacking the source raised.
        """
        try:
            self._ask(None, time.monotonic() + _START_SECONDS)
        except WorkerDied as died:
            if self._process.returncode < 0:
                raise
            raise self.lost(
                f"{died} before it had its source; what it wrote to stderr says why: mend the environment that "
                f"{sys.executable} starts in"
            ) from died
        except WaitTimeout:  # of the source's unpacking
            raise
        except TimeoutError as error:
            raise WaitTimeout(
                f"{self.name} did not start within {_START_SECONDS:g} s; make the imports that the source needs "
                "faster, or take fewer workers: num_workers="
            ) from error

    def read(self, at: Any, indices: NDArray[np.int64], *, timeout_seconds: float) -> list[NDArray[Any]]:
        """Lets the worker read samples into the shared memory.

        **Arguments:** `at`: the seed and epoch, or None. `indices`: int64 `[n]`.

        What the worker's spans tell is taken by the trace that is active here.

        **Returns:** the leaves of varying size. **Raises:** `WorkerDied`, `WorkerClosed`; `TimeoutError` when there is
        no answer in time; what reading raised.
        """
        varying, told = self._ask(packed((at, indices)), time.monotonic() + timeout_seconds)
        take_told(f"loader worker {self.number}", told)
        return varying

    def end(self, *, deadline: float) -> None:
        """Lets the worker end by itself, kills it behind the deadline, and reaps it. May be called twice."""
        self.ask_to_end()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill()
        self._channel.cut()  # whoever asks sees the end now
        with self._asking:
            self._ours.close()

    def ask_to_end(self) -> None:
        """Tells the worker that nothing more will be asked: it ends when it has answered."""
        self._ended = True
        with contextlib.suppress(OSError):  # it is gone already
            self._channel.socket.shutdown(socket.SHUT_WR)

    def _ask(self, request: bytes | None, deadline: float) -> Any:
        with self._asking:
            try:
                if request is not None:
                    send(self._channel, request, deadline=deadline)
                answer = receive(self._channel, deadline=deadline)
            except TimeoutError:
                self._ended = True
                raise
            except OSError as error:
                if self._ended:
                    raise WorkerClosed from error
                how = self._last_words()
                raise WorkerDied(how) from self.lost(how)
        if answer[0] == "raised":
            _, error, cause, text = answer
            raised: BraidaxError = pickle.loads(error)
            raised.add_note(f"In {self.name}:\n{text}")
            raise raised from pickle.loads(cause)
        return answer[1] if len(answer) > 1 else None

    def _last_words(self) -> str:
        try:
            status = self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return "closed its connection"
        if status >= 0:
            return f"ended with exit status {status}"
        if status == -signal.SIGKILL:
            return "was ended by signal 9 (SIGKILL), as the kernel does when memory runs out"
        return f"was ended by signal {-status} ({signal.strsignal(-status)})"

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, as on a dead network disk
            self._process.wait(_REAP_SECONDS)


def end_all(workers: list[Worker]) -> None:
    """Ends workers together, within a few seconds."""
    for worker in workers:
        worker.ask_to_end()
    deadline = time.monotonic() + _ENDING_SECONDS
    for worker in workers:
        worker.end(deadline=deadline)


def _started(birth: Birth, *descriptors: int) -> subprocess.Popen[bytes]:
    # The parent decides what Ctrl-C means: the worker is born with the signal blocked, and then ignores it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, "-c", birth.code, *map(str, descriptors), str(birth.source)],
            stdin=subprocess.DEVNULL,
            pass_fds=(*descriptors, birth.source),
            cwd=birth.folder,
            env=birth.environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
