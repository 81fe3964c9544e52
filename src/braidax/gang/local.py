"""A gang of processes on this machine."""

import math
import os
import pickle
import secrets
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from io import TextIOBase
from pathlib import Path
from typing import Literal, final

from braidax.comm import TcpStoreServer, Tuning
from braidax.comm.environment import without_place
from braidax.comm.rendezvous import DEFAULT
from braidax.connections.channel import Channel, Frame
from braidax.connections.channel_loop import ChannelLoop
from braidax.errors import ArgumentError, GangError
from braidax.gang.calling.parcels import Parcel, channel_of, framed, unframed
from braidax.gang.calling.ranks import Ended, Message, Ranks
from braidax.gang.child import ABORT, CALL, Birth
from braidax.gang.gang import Gang
from braidax.gang.processes import Command, Processes, print_lines
from braidax.lifeline import check_is_told_of_ends

_HOST = "127.0.0.1"
_LEAVE_SECONDS = 5.0  # an idle rank that does not leave by itself in that time is ended by force
_FORCE_SECONDS = 2.0  # between the signals that end a busy one when another one has failed
_LAST_WORDS_SECONDS = 2.0  # between the end of a rank's socket and that of its process
_SILENT = "closed its connection without an answer"
_CODE = """
import sys
sys.path[:] = PATH
from braidax.gang.child import main
main(int(sys.argv[1]))
"""


@dataclass(frozen=True)
class _Options:
    """What the ranks of every generation start from."""

    transport: str
    environment: Mapping[str, str] = field(repr=False)
    log: TextIOBase | None
    timeout_seconds: float
    grace_seconds: float
    tuning: Tuning


@final
class LocalGang(Gang):
    """A gang whose ranks are fresh processes of this machine.

    They see the import paths, the folder and the environment of this process as these are when they are started, and
    read nothing from the terminal. What they write comes out of this process, each line with `[rank] ` in front. They
    end with this process, even if it is killed. JAX is imported only by functions that need it.

    **Arguments:** `size`: the number of ranks. `transport`: what carries their messages. `environment`: variables that
    each rank begins with, besides those of this process. `log`: where their lines go; None is `sys.stdout` and
    `sys.stderr`. `timeout_seconds`: how long they may take to start and to meet, and at first how long each wait of the
    communicator may take (`comm.timeout_seconds`). `grace_seconds`: how long ranks may take to save and end, from
    SIGTERM to SIGKILL, when Ctrl-C, or what the handler of a signal raises, interrupts `run`; a second interrupt ends
    them at once. `tuning`: as `braidax.comm.connect` takes it.

    **Raises:** `ArgumentError` for values that cannot work; `GangError` on other systems than Linux.
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
        check_is_told_of_ends("LocalGang")
        job = f"local-{os.getpid()}-{secrets.token_hex(4)}"
        super().__init__(size, job=job, timeout_seconds=timeout_seconds, transport=transport)
        if not 0 <= grace_seconds < math.inf:
            raise ArgumentError(f"{grace_seconds=}: expected a finite number of seconds >= 0")
        if tuning.tls is not None:
            raise ArgumentError("tuning.tls: expected None; no message of a local gang leaves this machine")
        self._options = _Options(transport, dict(environment or {}), log, timeout_seconds, grace_seconds, tuning)
        self._secret = secrets.token_bytes(32)
        self._server: TcpStoreServer | None = None

    def _begin(self, deadline: float) -> Ranks:
        if self._server is None:
            self._server = TcpStoreServer(host=_HOST, secret=self._secret)
        port = int(self._server.address.rpartition(":")[2])
        return _LocalRanks(self.size, self._options, (_HOST, port, self._secret), deadline)

    def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


class _LocalRanks(Ranks):
    """Processes, each at the other end of a socket."""

    def __init__(self, size: int, options: _Options, store: tuple[str, int, bytes], deadline: float) -> None:
        self._options = options
        self._store = store
        self._host = socket.gethostname()
        self._prefixes: list[str] = []  # by the number of the process
        self._ranks: dict[int, _Rank] = {}
        self._loop: ChannelLoop[int | None] = ChannelLoop()
        self._processes: Processes | None = None
        try:
            self._processes = Processes(
                [], write=print_lines(self._prefixes, options.log), grace_seconds=_FORCE_SECONDS
            )
            self._loop.add(self._processes, None)
            self._start(range(size), deadline)
        except BaseException:
            self.end("stop")
            raise

    def ask(self, messages: Mapping[int, Message]) -> None:
        for rank, message in messages.items():
            self._ranks[rank].owes = True
            self._loop.send(self._ranks[rank].channel, framed(CALL, message.head, message.body))

    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, Parcel | Ended]:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not (found := self._popped()):  # of a rank that has answered and ended, the end is told by the next call
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            moved = self._loop.wait(left)
            for number, frames in moved:
                self._move(number, frames)
            if self._loop.was_woken or not moved:
                return self._popped()
        return found

    def _popped(self) -> dict[int, Parcel | Ended]:
        found = {number: told for number, rank in self._ranks.items() for told in rank.pop()}
        self.kill([number for number, told in found.items() if isinstance(told, Ended)])  # what it had started
        return found

    def wake(self) -> None:
        self._loop.wake()

    def abort(self, ranks: Collection[int], call: int, reason: str) -> None:
        for rank in ranks:
            if self._ranks[rank].is_open:
                parcel: Parcel = [call.to_bytes(8, "little"), reason.encode()]
                self._loop.send(self._ranks[rank].channel, framed(ABORT, parcel))

    def kill(self, ranks: Collection[int]) -> None:
        assert self._processes is not None
        for rank in ranks:
            self._loop.discard(self._ranks[rank].channel)
            self._ranks[rank].close()
            self._processes.discard(self._ranks[rank].process)

    def replace(self, ranks: Collection[int], deadline: float) -> None:
        self.kill(ranks)
        self._start(ranks, deadline)

    def end(self, reason: Literal["stop", "interrupt"]) -> None:
        is_idle = not any(rank.owes and rank.is_open for rank in self._ranks.values())
        self._loop.close()
        for rank in self._ranks.values():
            rank.close()  # whoever is idle leaves now
        processes, self._processes = self._processes, None
        if processes is not None:
            grace_seconds = self._options.grace_seconds if reason == "interrupt" else None
            processes.end(leave_seconds=_LEAVE_SECONDS if is_idle else 0.0, grace_seconds=grace_seconds)

    def _start(self, ranks: Collection[int], deadline: float) -> None:
        """Starts a process for each of these ranks. **Raises:** `GangError`; those that were started are killed."""
        assert self._processes is not None
        code = _CODE.replace("PATH", repr(sys.path))
        environment = {"PYTHONUNBUFFERED": "1", **without_place(os.environ), **self._options.environment}
        options = self._options
        for rank in ranks:
            birth = Birth(rank, options.transport, self._store, deadline, options.timeout_seconds, options.tuning)
            here, there = socket.socketpair()
            try:
                with there:
                    arguments = (sys.executable, "-c", code, str(there.fileno()))
                    command = Command(arguments, environment, str(Path.cwd()), (there.fileno(),))
                    self._prefixes.append(f"[{rank}] ")
                    (number,) = self._processes.add([command])
            except OSError as error:
                here.close()
                self._prefixes.pop()
                self.kill([each for each in ranks if each in self._ranks and self._ranks[each].is_open])
                raise GangError(
                    f"the system started no {len(ranks)} processes ({error}); take fewer ranks, or allow more "
                    "processes and descriptors (ulimit -u, ulimit -n)"
                ) from error
            self._ranks[rank] = _Rank(channel_of(here), number)
            self._loop.add(self._ranks[rank].channel, rank)
            self._loop.send(self._ranks[rank].channel, framed(CALL, [pickle.dumps(birth)]))

    def _move(self, number: int | None, frames: list[Frame]) -> None:
        """Takes in what has come from a rank, or where that is None, which processes ended."""
        if number is None:
            self._note_endings(0.0)
            return
        rank = self._ranks[number]
        why = rank.take_in(frames)
        if why is not None:
            self._loop.discard(rank.channel)
            if rank.ended is None:
                self._note_endings(_LAST_WORDS_SECONDS)
            rank.ended = rank.ended or Ended(self._host, None, why, time.time())

    def _note_endings(self, seconds: float) -> None:
        assert self._processes is not None
        numbers = {rank.process: rank for rank in self._ranks.values()}
        for ending in self._processes.wait(timeout_seconds=seconds):
            rank = numbers.get(ending.number)
            if rank is not None and rank.is_open:
                rank.take_in(rank.channel.receive(most_bytes=sys.maxsize))  # it may have answered before it ended
                rank.ended = Ended(self._host, ending.pid, ending.how, ending.time_seconds, ending.log)


@dataclass(eq=False)
class _Rank:
    """One rank as the gang sees it.

    **Fields:** `process`: its number. `owes`: whether it owes an answer. `ended`: how it did. `answers`: that came.
    """

    channel: Channel
    process: int
    owes: bool = False
    ended: Ended | None = None
    is_open: bool = True
    answers: list[Parcel] = field(default_factory=list)

    def take_in(self, frames: list[Frame]) -> str | None:
        """Notes answers that have come; returns why nothing more will come, if that is so."""
        try:
            self.answers += [unframed(frame, num_kinds=1)[1] for frame in frames]
        except GangError as error:
            return f"sent what is no answer: {error}"
        end = self.channel.ended
        if end is None:
            return None
        return f"sent what is no answer: {end.words}" if end.kind == "refused" else _SILENT

    def pop(self) -> "list[Parcel | Ended]":
        """Returns the answer that is owed, or how the rank ended, once; before that nothing."""
        if not self.is_open:
            return []
        if self.answers and self.owes:
            self.owes = False
            return [self.answers.pop()]
        if self.ended is not None:
            self.close()
            return [self.ended]
        return []

    def close(self) -> None:
        """Closes the connection: the rank, if it is idle, leaves. A second call does nothing."""
        self.is_open = False
        self.channel.close()
