"""Those who serve."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

import numpy as np

from braidax.comm.condition import Condition
from braidax.comm.group import Group
from braidax.comm.group_messages import ANSWER as ANSWERS
from braidax.comm.group_messages import ASK, BODY, Steps, tag_of
from braidax.comm.messages import Parcel, Value, pack
from braidax.comm.serving.conversation import (
    ANSWER,
    DONE,
    GO,
    HEADER,
    PLACE_BYTES,
    RAISED,
    REQUEST,
    Talk,
    Withdrawn,
    arriving_of,
    run_until,
    unexpected,
    word_of,
)
from braidax.comm.serving.small import decoded, encoded
from braidax.comm.transports.transport import Operation
from braidax.comm.waiting import AnyOf, again
from braidax.connections.raised import Raised
from braidax.errors import CommError, PeerLost, WaitTimeout

Handler = Callable[[int, Value], Value]
"""Returns the answer to the value that a rank asks with."""

_LOOK_SECONDS = 0.5  # how often `wait` looks who has left
_THREAD_NAME = "braidax-serve"


@final
class Requests:
    """What the other ranks of a group ask: received from any of them, whether or not anybody serves just now.

    **Arguments:** `group`: of the communicator. **Fields:** `is_served`: whether somebody takes them.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.is_served = False
        self.done: Counter[int] = Counter()  # how often each rank has said that it asks no more
        self._tag = tag_of(group.number, ASK, 0)
        self._places = {rank: np.empty(PLACE_BYTES, np.uint8) for rank in range(group.size) if rank != group.rank}
        self._receives: dict[int, Operation] = {}
        self._last = group.rank

    def next(self) -> int | None:
        """Returns a rank whose request is here, all in turn; None if there is none."""
        for distance in range(1, self.group.size + 1):
            rank = (self._last + distance) % self.group.size
            if rank in self._receives and self._receives[rank].done:
                self._last = rank
                return rank
        return None

    def take(self, rank: int) -> Any:
        """Returns the message of a rank that `next` named. **Raises:** `PeerLost` of one that is gone."""
        operation = self._receives.pop(rank)
        self.group.progress.wait([operation], 0.0)
        return self._places[rank][: operation.num_bytes]

    def post(self, rank: int) -> None:
        """Receives the next request of a rank."""
        self._receives[rank] = self.group.progress.receive_now(
            self.group.ranks[rank], self._tag, self._places[rank].data
        )

    def post_all(self) -> None:
        """Receives requests of all ranks that are there."""
        for rank in self._places:
            if rank not in self._receives and not self.has_left(rank):
                self.post(rank)

    def forget(self, rank: int) -> None:
        """Receives no more of a rank that is gone."""
        self._receives.pop(rank, None)

    def waited_for(self) -> list[Operation]:
        """Returns the operations any of which is a request."""
        return list(self._receives.values())

    def has_left(self, rank: int) -> bool:
        """Returns whether a rank has closed its communicator."""
        return self.group.ranks[rank] in self.group.progress.left

    def missing(self) -> list[int]:
        """Returns the ranks that may ask still."""
        return [rank for rank in self._places if not self.done[rank] and not self.has_left(rank)]


@final
class Server:
    """Answers the requests of the other ranks on a thread of its own, inside a `with` block; see `Communicator.serve`.

    **Arguments:** `requests`: of the group. `handler`: answers one after the other. `limit`: returns the limit of a
    wait.
    """

    def __init__(self, requests: Requests, handler: Handler, limit: Callable[[], float]) -> None:
        self._requests = requests
        self._group = requests.group
        self._progress = requests.group.progress
        self._handler = handler
        self._limit = limit
        self._changed = Condition()
        self._heard_at = time.monotonic()  # when the last request came
        self._failure: CommError | None = None
        self._stopped = Operation(self._progress.world.rank)
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)

    def __enter__(self) -> "Server":
        if self._requests.is_served:
            raise CommError(
                f"{self._progress.world.describe(self._progress.world.rank)} serves already; expected one "
                "comm.serve(handler) at a time: leave its with block first"
            )
        self._requests.is_served = True
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Returns when every other rank has said that it asks this one no more, by `end_asking` or by closing.

        May be called again, for those who go on asking and say so once more.

        **Arguments:** `timeout_seconds`: the limit of the time in which nobody asks; that of the communicator by
        default.

        **Raises:** `WaitTimeout` naming the ranks that may still ask, after which the server goes on; what ended the
        epoch.
        """
        limit = self._limit() if timeout_seconds is None else timeout_seconds
        began = time.monotonic()
        while not self._changed.wait_for(self._is_over, min(limit, _LOOK_SECONDS)):
            if time.monotonic() - max(began, self._heard_at) > limit:
                raise self._late(limit)
        if self._failure is not None:
            raise again(self._failure)
        for rank in self._requests.done:
            self._requests.done[rank] -= 1

    def close(self) -> None:
        """Ends the server, once it has answered what it is at. A second call does nothing.

        **Raises:** `WaitTimeout` when the handler does not return within the limit.
        """
        if self._thread.ident is None:
            return
        self._progress.end(self._stopped)
        self._thread.join(self._limit())
        if self._thread.is_alive():
            raise WaitTimeout(
                f"handler={self._handler!r} has not returned within {self._limit():g} s; expected it to: let it end, "
                "or raise comm.timeout_seconds"
            )

    def _is_over(self) -> bool:
        return self._failure is not None or not self._requests.missing()

    def _late(self, limit: float) -> WaitTimeout:
        world = self._progress.world
        ranks = [world.describe(self._group.ranks[rank]) for rank in self._requests.missing()]
        return WaitTimeout(
            f"{world.describe(world.rank)} served {', '.join(ranks[:8])} up to the limit of {limit:g} s in which "
            "nobody asked; expected a request, or the word that there are no more: call comm.end_asking(rank) there, "
            "or raise timeout_seconds="
        )

    def _run(self) -> None:
        try:
            self._requests.post_all()
            while not self._stopped.done:
                self._serve_next()
        except BaseException as error:  # noqa: BLE001 (what ended the epoch, or what ends it: nobody may wait in vain)
            if self._progress.failure is None:
                self._group.failed("serve", error, self._limit())
        finally:
            self._requests.is_served = False
            with self._changed.lock:
                self._failure = self._progress.failure
                self._changed.notify_all()

    def _serve_next(self) -> None:
        requests = self._requests
        rank = requests.next()
        try:
            if rank is None:
                with contextlib.suppress(WaitTimeout):  # nobody asks
                    self._progress.hurried = True
                    self._progress.wait(
                        AnyOf((*requests.waited_for(), self._stopped)), time.monotonic() + self._limit()
                    )
                return
            message = requests.take(rank)
        except PeerLost as error:
            gone = [other for other in range(self._group.size) if self._group.ranks[other] == error.rank]
            if not gone or not requests.has_left(gone[0]):
                raise
            requests.forget(gone[0])
            return
        self._heard_at = time.monotonic()
        self._answer(rank, message)
        requests.post(rank)

    def _answer(self, rank: int, message: Any) -> None:
        peer = self._group.ranks[rank]
        kind, number = word_of(self._progress.world, peer, message)
        if kind == DONE:
            with self._changed.lock:
                self._requests.done[rank] += 1
                self._changed.notify_all()
            return
        if kind != REQUEST:
            raise unexpected(self._progress.world, peer, f"a word of kind {kind}")
        group = self._group.number
        talk = Talk(self._progress, peer, tag_of(group, ANSWERS, number), tag_of(group, BODY, number))
        small = decoded(message.data[HEADER.size :].tobytes())
        if small is None:
            steps = self._steps(talk, rank, message)
        elif (reply := self._reply(talk, rank, small[0])) is not None:
            steps = self._rest(talk, reply)
        else:
            return
        with contextlib.suppress(WaitTimeout, Withdrawn):  # it does not take its answer: others do
            run_until(self._progress, talk, steps, time.monotonic() + self._limit())

    def _steps(self, talk: Talk, rank: int, message: Any) -> Steps[None]:
        value = yield from talk.value(arriving_of(message))
        if talk.is_given_up:
            raise Withdrawn
        if (reply := self._reply(talk, rank, value)) is not None:
            yield from self._rest(talk, reply)

    def _reply(self, talk: Talk, rank: int, value: Value) -> Parcel | None:
        """Answers a value. **Returns:** what is yet to follow, if anything."""
        try:
            kind, answer = ANSWER, self._handler(rank, value)
            first = encoded(answer)
            parcel = pack(answer) if first is None else None
        except BaseException as error:  # noqa: BLE001 (that of one request: the asker raises it, the server lives)
            kind, first, parcel = RAISED, None, pack(Raised.of(error).to_text().encode())
        talk.say(kind, first=parcel.first if parcel is not None else (first or b"",))
        return parcel if parcel is not None and parcel.rest else None

    def _rest(self, talk: Talk, parcel: Parcel) -> Steps[None]:
        """Sends the rest of an answer, if it is wanted."""
        place = np.empty(PLACE_BYTES, np.uint8)
        heard = talk.hear(place)
        yield [heard]
        kind, _ = word_of(self._progress.world, talk.peer, place[: heard.num_bytes])
        if kind == GO:
            yield from talk.send_rest(parcel)
