"""Connections between the processes that load together, each to the first of them: it hears all, and tells all.

A round takes one short message each way, and one does for several that are ready at once: it says through which. JAX's
coordination service would do, and takes more calls and more CPU.
"""

import json
import math
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from braidax.connections.channel import Channel, Frame, close_sent
from braidax.connections.channel_loop import ChannelLoop
from braidax.connections.listener import Listener
from braidax.connections.world import World

_NUMBER = struct.Struct("!q")  # of the round, before the words; where all is fine of the last one
_PURPOSE = b"braidax loader"
_MAX_BYTES = 1 << 20  # of what is said at once
_MAX_UNSENT_BYTES = 1 << 16  # which a process may leave unread of what it is told, when its kernel takes no more
_SLICE_SECONDS = 0.1  # of a wait, which `stop` ends
_GRACE_SECONDS = 2.0  # which the first process has to say who is late
_LINGER_SECONDS = 1.0
_MAX_WORDS = 4000  # of an error


class Verdict(NamedTuple):
    """What became of a round.

    **Fields:** `kind`: all are ready; or some failed, in `words`, left, or did not come in time. `processes`: which.
    """

    kind: Literal["fine", "failed", "left", "late"]
    processes: tuple[int, ...] = ()
    words: str = ""


_FINE = Verdict("fine")


class Door:
    """Where the other processes find the first one; it is closed by whoever made it, connections stay.

    **Arguments:** `processes`: all of them, sorted. `process`: this one.
    """

    def __init__(self, processes: Sequence[int], process: int) -> None:
        self._processes = list(processes)
        self._rank = self._processes.index(process)
        self._listener = Listener()
        self.words = json.dumps(
            {
                "host": socket.gethostname(),
                "address": self._listener.address.decode(),
                "secret": secrets.token_hex(32) if self._rank == 0 else "",
            }
        )
        """What the others have to be told."""

    def connect(self, words: Mapping[int, str], *, deadline: float) -> "Hub":
        """Returns this side of the hub. **Arguments:** `words`: of each process. `deadline`: `time.monotonic` seconds.

        **Raises:** as `Listener.connect`.
        """
        told = [json.loads(words[process]) for process in self._processes]
        world = World(
            self._rank,
            [one["address"].encode() for one in told],
            [one["host"] for one in told],
            bytes.fromhex(told[0]["secret"]),
        )
        others = range(1, len(told))
        dialed, accepted = ((), others) if self._rank == 0 else ((0,), ())
        opened = self._listener.connect(world, purpose=_PURPOSE, dialed=dialed, accepted=accepted, deadline=deadline)
        return Hub({self._processes[rank]: connection for rank, connection in opened.items()}, is_first=not self._rank)

    def close(self) -> None:
        """Lets nobody in any more."""
        self._listener.close()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Hub:
    """One process's side of the hub: its connections. Rounds come in order.

    **Arguments:** `connections`: to all others on the first process, to that one elsewhere. `is_first`: of this one.
    """

    def __init__(self, connections: Mapping[int, socket.socket], *, is_first: bool) -> None:
        self._channels = {
            process: Channel(connection, max_bytes=_MAX_BYTES, max_parts=2, max_unsent_bytes=_MAX_UNSENT_BYTES)
            for process, connection in connections.items()
        }
        self._is_first = is_first
        self._ready = dict.fromkeys(self._channels, -1)  # through which round each of them is, on the first process
        self._said = -1  # through which round this one is, as it has said, elsewhere
        self._fine = -1  # through which round all are
        self._heard: deque[tuple[int, int, Verdict]] = deque()  # from whom, of which round
        self._loop: ChannelLoop[int] = ChannelLoop()
        for process, channel in self._channels.items():
            self._loop.add(channel, process)

    def agree(
        self, number: int, *, ready: Callable[[], int], deadline: Callable[[], float], stop: threading.Event
    ) -> Verdict | None:
        """Says that this process is ready for a round, and returns what became of it; None once `stop` is set.

        **Arguments:** `ready`: returns through which round this process is ready, `number` or a later one. `deadline`:
        returns until when it waits, `time.monotonic` seconds, which may change meanwhile.
        """
        if self._fine >= number:
            return _FINE
        if self._is_first:
            verdict = self._collected(number, deadline, stop)
            if verdict == _FINE:
                self._fine = min(ready(), *self._ready.values())
            if verdict is not None:
                self._tell(max(number, self._fine), verdict)
            return verdict
        if self._said < number:
            self._said = ready()
            self._tell(self._said, _FINE)
        return self._awaited(number, deadline, stop)

    def fail(self, number: int, process: int, words: str) -> None:
        """Tells all that come to a round that this process failed there, in at most 4,000 characters."""
        shown = words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 1] + "…"
        self._tell(number, Verdict("failed", (process,), shown))

    def close(self) -> None:
        """Ends the connections; what was said before still arrives. A second call does nothing."""
        channels = list(self._channels.values())
        self._channels.clear()
        self._loop.close()
        close_sent(channels, time.monotonic() + _LINGER_SECONDS)

    def _collected(self, number: int, deadline: Callable[[], float], stop: threading.Event) -> Verdict | None:
        missing = {process for process, through in self._ready.items() if through < number}
        while missing and not stop.is_set():
            left = deadline() - time.monotonic()
            if left <= 0:
                return Verdict("late", tuple(sorted(missing)))
            self._listen(min(left, _SLICE_SECONDS))
            while self._heard:
                process, said_number, said = self._heard.popleft()
                if said == _FINE:
                    self._ready[process] = max(said_number, self._ready[process])
                    if said_number >= number:
                        missing.discard(process)
                    if not missing:
                        return _FINE
                elif said_number == number:  # else it had given up a round that all came to after all
                    late = said.kind == "late"  # it waits no longer
                    return said._replace(processes=tuple(sorted(missing))) if late else said
            if gone := {process for process in missing if self._channels[process].ended is not None}:
                return Verdict("left", tuple(sorted(gone)))
        return None if missing else _FINE

    def _awaited(self, number: int, deadline: Callable[[], float], stop: threading.Event) -> Verdict | None:
        ((first, channel),) = self._channels.items()
        last = math.inf  # until when the first process may say who is late
        while not stop.is_set():
            left = min(deadline(), last) - time.monotonic()
            if left <= 0 and last < math.inf:
                return Verdict("late", (first,))
            if left <= 0:
                self._tell(number, Verdict("late"))
                deadline, left = (lambda: math.inf), _GRACE_SECONDS
                last = time.monotonic() + left
            self._listen(min(left, _SLICE_SECONDS))
            while self._heard:
                _, said_number, said = self._heard.popleft()
                if said == _FINE:
                    self._fine = max(said_number, self._fine)
                if self._fine >= number or said_number == number:
                    return said
            if channel.ended is not None:
                return Verdict("left", (first,))
        return None

    def _tell(self, number: int, verdict: Verdict) -> None:
        words = b"" if verdict.kind == "fine" else json.dumps(verdict).encode()
        for process, channel in self._channels.items():
            if verdict.kind != "failed" or process not in verdict.processes:  # that one knows, and need not listen
                self._loop.send(channel, [_NUMBER.pack(number), words])

    def _listen(self, seconds: float) -> None:
        """Waits until something comes, unless something is there."""
        for process, frames in self._loop.wait(0 if self._heard else seconds):
            try:
                self._heard += [(process, *_read(frame)) for frame in frames]
            except (IndexError, TypeError, ValueError, struct.error) as error:
                self._channels[process].refuse(f"it sent what is no verdict: {error}")


def _read(frame: Frame) -> tuple[int, Verdict]:
    """Returns the number of a round, and what was said of it."""
    (number,) = _NUMBER.unpack(frame[0])
    if not frame[1]:
        return number, _FINE
    kind, processes, said = json.loads(bytes(frame[1]))
    return number, Verdict(kind, tuple(processes), said)
