"""A gang of processes on this machine."""

import contextlib
import math
import os
import pickle
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import TextIOBase
from pathlib import Path
from typing import final

from braidax.comm import TcpStoreServer, Tuning
from braidax.comm.environment import without_place
from braidax.comm.rendezvous import DEFAULT
from braidax.errors import ArgumentError, GangError
from braidax.gang.child import LENGTH_BYTES, Birth
from braidax.gang.gang import Ended, Gang, Ranks
from braidax.gang.processes import Command, Processes, print_lines

_HOST = "127.0.0.1"
_LEAVE_SECONDS = 5.0  # an idle rank that does not leave by itself in that time is ended by force
_FORCE_SECONDS = 2.0  # between the signals that end a busy one when another one has failed
_LAST_WORDS_SECONDS = 2.0  # between the end of a rank's socket and that of its process
_CODE = """
import sys
sys.path[:] = PATH
from braidax.gang.child import main
main(int(sys.argv[1]))
"""


@dataclass(frozen=True)
class _Options:
    """What the ranks of every epoch start from."""

    transport: str
    environment: Mapping[str, str] = field(repr=False)
    log: TextIOBase | None
    timeout_seconds: float
    grace_seconds: float
    tuning: Tuning


@final
class LocalGang(Gang):
    """A gang whose ranks are fresh processes of this machine.

    They see the import paths, the folder and the environment of this process as these are at `start`, and read nothing
    from the terminal. What they write comes out of this process, each line with `[rank] ` in front. They end with this
    process, even if it is killed. JAX is imported only by functions that need it.

    **Arguments:** `size`: the number of ranks. `transport`: what carries their messages. `environment`: variables that
    each rank begins with, besides those of this process. `log`: where their lines go; None is `sys.stdout` and
    `sys.stderr`. `timeout_seconds`: how long they may take to start and to meet, and at first how long each wait of the
    communicator may take (`comm.timeout_seconds`). `grace_seconds`: how long ranks may take to save and end, from
    SIGTERM to SIGKILL, when Ctrl-C, or what the handler of a signal raises, interrupts `run`; a second interrupt ends
    them at once. `tuning`: as `braidax.comm.connect` takes it.

    **Raises:** `ArgumentError` for values that cannot work.
    """

    def __init__(
        self,
        size: int,
        *,
        transport: str = "tcp",
        environment: Mapping[str, str] | None = None,
        log: TextIOBase | None = None,
        timeout_seconds: float = 60.0,
        grace_seconds: float = 30.0,
        tuning: Tuning = DEFAULT,
    ) -> None:
        job = f"local-{os.getpid()}-{secrets.token_hex(4)}"
        super().__init__(size, job=job, timeout_seconds=timeout_seconds)
        if not 0 <= grace_seconds < math.inf:
            raise ArgumentError(f"{grace_seconds=}: expected a finite number of seconds >= 0")
        if tuning.tls is not None:
            raise ArgumentError("tuning.tls: expected None; no message of a local gang leaves this machine")
        self._options = _Options(transport, dict(environment or {}), log, timeout_seconds, grace_seconds, tuning)
        self._secret = secrets.token_bytes(32)
        self._server: TcpStoreServer | None = None

    def _begin(self, epoch: int, deadline: float) -> Ranks:
        if self._server is None:
            self._server = TcpStoreServer(host=_HOST, secret=self._secret)
        port = int(self._server.address.rpartition(":")[2])
        options = self._options
        births = [
            Birth(
                rank=rank,
                size=self.size,
                job=self.job,
                epoch=epoch,
                transport=options.transport,
                store=(_HOST, port, self._secret),
                limits=(deadline, options.timeout_seconds),
                tuning=options.tuning,
            )
            for rank in range(self.size)
        ]
        try:
            return _LocalRanks(births, options)
        except OSError as error:
            raise GangError(
                f"the system started no {self.size} processes ({error}); take fewer ranks, or allow more processes and "
                "descriptors (ulimit -u, ulimit -n)"
            ) from error

    def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


class _LocalRanks(Ranks):
    """Processes, each at the other end of a socket."""

    def __init__(self, births: list[Birth], options: _Options) -> None:
        code = _CODE.replace("PATH", repr(sys.path))
        environment = {"PYTHONUNBUFFERED": "1", **without_place(os.environ), **options.environment}
        folder = str(Path.cwd())
        self._ranks: list[_Rank] = []
        self._options = options
        self._is_interrupted = False
        self._host = socket.gethostname()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            commands: list[Command] = []
            for birth in births:
                here, there = socket.socketpair()
                ours.enter_context(here)
                theirs.enter_context(there)
                here.setblocking(False)
                self._ranks.append(_Rank(birth.rank, here, pickle.dumps(birth)))
                arguments = (sys.executable, "-c", code, str(there.fileno()))
                commands.append(Command(arguments, environment, folder, (there.fileno(),)))
            write = print_lines([f"[{birth.rank}] " for birth in births], options.log)
            self._processes = Processes(commands, write=write, grace_seconds=_FORCE_SECONDS)
            ours.pop_all()

    def call(self, call: bytes) -> None:
        for rank in self._ranks:
            rank.ask(call)

    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, bytes | bytearray | Ended]:
        try:
            return self._answers(timeout_seconds)
        except BaseException:
            self._is_interrupted = True
            raise

    def _answers(self, timeout_seconds: float | None) -> Mapping[int, bytes | bytearray | Ended]:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._processes, selectors.EVENT_READ)
            for rank in self._ranks:
                if rank.owes and rank.ended is None:
                    selector.register(rank.connection, rank.events, rank)
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = selector.select(left)
                for key, _ in ready:
                    self._advance(selector, key.data)
                found = {rank.number: answer for rank in self._ranks for answer in rank.pop_answer()}
                if found or not ready:
                    return found

    def end(self) -> None:
        is_idle = not any(rank.owes for rank in self._ranks)
        for rank in self._ranks:
            rank.connection.close()  # whoever is idle leaves now
        grace_seconds = self._options.grace_seconds if self._is_interrupted else None
        self._processes.end(leave_seconds=_LEAVE_SECONDS if is_idle else 0.0, grace_seconds=grace_seconds)

    def _advance(self, selector: selectors.BaseSelector, rank: "_Rank | None") -> None:
        """Moves what can be moved: of one rank, or where that is None, of the processes that ended."""
        if rank is None:
            self._note_endings(0.0)
            return
        if not rank.advance():
            selector.unregister(rank.connection)
            if rank.ended is None:
                self._note_endings(_LAST_WORDS_SECONDS)
            rank.ended = rank.ended or Ended(self._host, None, "closed its connection without an answer", time.time())
        elif selector.get_key(rank.connection).events != rank.events:
            selector.modify(rank.connection, rank.events, rank)

    def _note_endings(self, seconds: float) -> None:
        for ending in self._processes.wait(timeout_seconds=seconds):
            rank = self._ranks[ending.number]
            rank.advance()  # it may have answered before it ended
            rank.ended = Ended(self._host, ending.pid, ending.how, ending.time_seconds, ending.log)


class _Rank:
    """One rank as the gang sees it: what is on its way there and back."""

    def __init__(self, number: int, connection: socket.socket, first: bytes) -> None:
        self.number = number
        self.connection = connection
        self.ended: Ended | None = None
        self.ask(first)

    def ask(self, message: bytes) -> None:
        """Begins to send a message; an answer is owed from now on."""
        self.owes = True
        self._outgoing = [memoryview(len(message).to_bytes(LENGTH_BYTES, "little")), memoryview(message)]
        self._answer: bytearray | None = None
        self._space, self._filled = bytearray(LENGTH_BYTES), 0
        self._is_length = True

    @property
    def events(self) -> int:
        """What to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def advance(self) -> bool:
        """Sends and receives what can be now; False when the other end is closed."""
        try:
            self._send()
            return self._receive()
        except OSError:
            return False

    def pop_answer(self) -> "list[bytearray | Ended]":
        """Returns the answer that is owed, or how the rank ended without it, once; before that nothing."""
        found = self._answer or self.ended
        if not self.owes or found is None:
            return []
        self.owes, self._answer = False, None
        return [found]

    def _send(self) -> None:
        while self._outgoing:
            try:
                sent = self.connection.send(self._outgoing[0])
            except BlockingIOError:
                return
            self._outgoing[0] = self._outgoing[0][sent:]
            if not self._outgoing[0]:
                del self._outgoing[0]

    def _receive(self) -> bool:
        while self._answer is None:
            try:
                count = self.connection.recv_into(memoryview(self._space)[self._filled :])
            except BlockingIOError:
                return True
            if not count:
                return False
            self._filled += count
            if self._filled == len(self._space):
                if self._is_length:
                    self._space, self._filled = bytearray(int.from_bytes(self._space, "little")), 0
                    self._is_length = False
                else:
                    self._answer = self._space
        return True
