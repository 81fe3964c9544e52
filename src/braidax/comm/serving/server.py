"""Those who serve."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.condition import Condition
from braidax.comm.group import Group
from braidax.comm.group_messages import ANSWER as ANSWERS
from braidax.comm.group_messages import ASK, BODY, Steps, tag_of
from braidax.comm.messages import Value, pack
from braidax.comm.serving.conversation import (
    ANSWER,
    DONE,
    GO,
    PLACE_BYTES,
    RAISED,
    REQUEST,
    Talk,
    Withdrawn,
    arriving_of,
    in_one,
    run_until,
    unexpected,
    word_of,
)
from braidax.comm.small import HEADER, SMALL, decoded
from braidax.comm.transports.transport import Operation
from braidax.comm.waiting import AnyOf, again
from braidax.comm.watch import Notice
from braidax.connections.raised import Raised
from braidax.errors import CommError, PeerLost, WaitTimeout

Handler = Callable[[int, Value], "Value | Future[Any]"]
"""Returns the answer to the value that a rank asks with, or a future of it."""


class _Later(NamedTuple):
    """A request that is not answered yet. **Fields:** `answer`: that will be. `rank`: that asked. `number`: of it."""

    answer: "Future[Any]"
    rank: int
    number: int


_Small = tuple[int, int, Value]  # kind, number and value
_Message = bytearray | _Small
_LATER = -1  # in place of the kind of an answer that is not there yet
_LOOK_SECONDS = 0.5  # how often `wait` looks who has left
_THREAD_NAME = "braidax-serve"


@final
class Requests:
    """What the other ranks of a group ask: received from any of them, whether or not anybody serves just now.

    **Arguments:** `group`: of the communicator. **Fields:** `is_served`: whether somebody does. `ranks`: the others.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.is_served = False
        self.done: Counter[int] = Counter()  # how often each rank has said that it asks no more
        self._tag, self._answers = tag_of(group.number, ASK, 0), tag_of(group.number, ANSWERS, 0)
        self._places = {rank: np.empty(PLACE_BYTES, np.uint8) for rank in range(group.size) if rank != group.rank}
        self._receives: dict[int, Operation | _Message] = {}  # each rank's next request, or what receives that
        self.ranks, self._turn = list(self._places), -1
        self._peers = list(group.ranks)

    def next(self) -> int | None:
        """Returns a rank whose request is here, all in turn; None if there is none."""
        ranks, receives = self.ranks, self._receives
        for _ in ranks:
            self._turn = turn = (self._turn + 1) % len(ranks)
            received = receives.get(rank := ranks[turn])
            if received is not None and (type(received) is not Operation or received.done):
                return rank
        return None

    def take(self, rank: int) -> _Message:
        """Returns the message of a rank that `next` named. **Raises:** `PeerLost` of one that is gone."""
        received = self._receives.pop(rank)
        if not isinstance(received, Operation):
            return received
        if received.error is not None:
            self.group.progress.wait([received], 0.0)
        return bytearray(self._places[rank][: received.num_bytes])

    def post(self, rank: int, received: "Operation | _Message | None" = None) -> None:
        """Receives the next request of a rank. **Arguments:** `received`: that request, or what receives it already."""
        if received is None:
            place = self._places[rank].data
            received = self.group.progress.receive_now(self.group.ranks[rank], self._tag, place)
        self._receives[rank] = received

    def way(self, rank: int) -> tuple[int, int, int, NDArray[np.uint8]]:
        """Returns of a rank: its number in the world, the tags of answers and of requests, and the place of these."""
        return self._peers[rank], self._answers, self._tag, self._places[rank]

    def post_all(self) -> None:
        """Receives requests of all ranks that are there."""
        for rank in self._places:
            if rank not in self._receives and not self.has_left(rank):
                self.post(rank)

    def forget(self, rank: int) -> None:
        """Receives no more of a rank that is gone."""
        self._receives.pop(rank, None)

    def asking(self) -> list[int]:
        """Returns the ranks whose requests are waited for."""
        return list(self._receives)

    def waited_for(self) -> list[Operation]:
        """Returns the operations any of which is a request."""
        return [each for each in self._receives.values() if isinstance(each, Operation)]

    def has_left(self, rank: int) -> bool:
        """Returns whether a rank has closed its communicator, or is lost alone."""
        peer = self.group.ranks[rank]
        return peer in self.group.progress.left or peer in self.group.progress.lost

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
        self._later: list[_Later] = []
        self._ready = Operation(self._progress.world.rank)  # ends when an answer is there that was not
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
        generation.
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
        except BaseException as error:  # noqa: BLE001 (what ended the generation, or what ends it: nobody may wait in vain)
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
            if self._ready.done:
                self._answer_late()
            elif rank is None:
                with contextlib.suppress(WaitTimeout):  # nobody asks
                    self._progress.hurried = True
                    self._progress.wait(
                        AnyOf((*requests.waited_for(), self._ready, self._stopped)), time.monotonic() + self._limit()
                    )
                return
            if rank is None:
                return
            self._heed(rank, requests.take(rank))
        except CommError as error:
            if not self._forgets(rank, error):
                raise

    def _forgets(self, rank: int | None, error: CommError) -> bool:
        """Forgets who asks no more. **Arguments:** `rank`: that asked. **Returns:** whether the server goes on."""
        requests, progress = self._requests, self._progress
        if progress.failure is not None:
            return False
        gone = {other for other in (*requests.asking(), rank) if other is not None and requests.has_left(other)}
        if progress.on_loss == "generation":
            if not isinstance(error, PeerLost) or all(self._group.ranks[other] != error.rank for other in gone):
                return False
        elif rank is not None and rank not in gone:
            progress.fail(Notice("lost", self._group.ranks[rank], f"what it asked cannot be: {error}"))
            gone.add(rank)
        elif not gone:
            return requests.next() is not None  # whose error it is
        for other in gone:
            requests.forget(other)
        self._later = [one for one in self._later if one.rank not in gone]
        return True

    def _heed(self, rank: int, message: _Message) -> None:
        """Does what a rank wants, and receives its next request."""
        self._heard_at = time.monotonic()
        if isinstance(message, tuple):
            self._converse(rank, message)
            return
        kind, number = word_of(self._progress.world, self._group.ranks[rank], message)
        if kind == REQUEST and (small := decoded(message, HEADER.size)) is not None:
            self._converse(rank, (kind, number, small[0]))
            return
        if kind == DONE:
            with self._changed.lock:
                self._requests.done[rank] += 1
                self._changed.notify_all()
        elif kind == REQUEST:
            talk = self._talk(rank, number)
            self._carry_out(talk, self._steps(talk, rank, number, np.frombuffer(message, np.uint8)))
        else:
            raise unexpected(self._progress.world, self._group.ranks[rank], f"a word of kind {kind}")
        self._requests.post(rank)

    def _converse(self, rank: int, message: _Small) -> None:
        """Answers a small request, and those that follow it at once where nobody else may ask; in the fewest steps."""
        requests, stopped, ready = self._requests, self._stopped, self._ready
        send_receive, handler, now = self._progress.send_receive_value, self._handler, time.monotonic
        peer, answers, tag, place = requests.way(rank)
        is_shared = len(requests.ranks) > 1
        while True:
            kind, number, value = message
            if kind != REQUEST:
                raise unexpected(self._progress.world, peer, f"a value with a word of kind {kind}")
            try:
                answer = handler(rank, value)
            except BaseException as error:  # noqa: BLE001 (that of one request: the asker raises it, the server lives)
                kind, answer = RAISED, _told(error)
                break
            try:
                heard = send_receive(peer, answers | number, ANSWER, 0, answer, tag, place, SMALL)
            except (TypeError, ValueError, BufferError):  # it is not contiguous
                heard = None
            if heard is None:  # it is not small
                kind, answer = self._known(rank, number, answer)
                break
            if is_shared or type(heard) is not tuple or stopped.done or ready.done:
                requests.post(rank, heard)
                return
            self._heard_at, message = now(), heard
        if kind != _LATER:
            talk = self._talk(rank, number)
            self._carry_out(talk, self._reply(talk, kind, answer))
        requests.post(rank)

    def _carry_out(self, talk: Talk, steps: Steps[None]) -> None:
        with contextlib.suppress(WaitTimeout, Withdrawn):  # it does not take its answer: others do
            run_until(self._progress, talk, steps, time.monotonic() + self._limit())

    def _answer_late(self) -> None:
        """Answers what could not be at once, and can be now."""
        self._ready = Operation(self._progress.world.rank)  # what is ready behind this ends it
        done = [one for one in self._later if one.answer.done()]
        self._later = [one for one in self._later if not one.answer.done()]
        for one in done:
            if not self._requests.has_left(one.rank):
                talk = self._talk(one.rank, one.number)
                self._carry_out(talk, self._reply(talk, *_result(one.answer)))

    def _talk(self, rank: int, number: int) -> Talk:
        group = self._group.number
        return Talk(
            self._progress, self._group.ranks[rank], tag_of(group, ANSWERS, number), tag_of(group, BODY, number)
        )

    def _called(self, rank: int, number: int, value: Value) -> tuple[int, Value]:
        """Calls the handler. **Returns:** as `_known`."""
        try:
            answer = self._handler(rank, value)
        except BaseException as error:  # noqa: BLE001 (that of one request: the asker raises it, the server lives)
            return RAISED, _told(error)
        return self._known(rank, number, answer)

    def _known(self, rank: int, number: int, answer: Any) -> tuple[int, Value]:
        """Returns the kind of what the handler returned, and the answer, which is some value."""
        if not isinstance(answer, Future):
            return ANSWER, answer
        if answer.done():
            return _result(answer)
        self._later.append(_Later(answer, rank, number))
        answer.add_done_callback(lambda _: self._progress.end(self._ready))
        return _LATER, None

    def _steps(self, talk: Talk, rank: int, number: int, message: NDArray[np.uint8]) -> Steps[None]:
        value = yield from talk.value(arriving_of(message))
        if talk.is_given_up:
            raise Withdrawn
        kind, answer = self._called(rank, number, value)
        if kind != _LATER:
            yield from self._reply(talk, kind, answer)

    def _reply(self, talk: Talk, kind: int, answer: Value) -> Steps[None]:
        """Sends an answer, of which a large one follows if it is wanted."""
        try:
            parcel = in_one(pack(answer))
        except Exception as error:  # noqa: BLE001 (the handler returned no value, or there is no memory for it)
            kind, parcel = RAISED, in_one(pack(_told(error)))
        talk.say(kind, first=parcel.first)
        if not parcel.rest:
            return
        place = np.empty(PLACE_BYTES, np.uint8)
        heard = talk.hear(place)
        yield [heard]
        kind, _ = word_of(self._progress.world, talk.peer, place[: heard.num_bytes])
        if kind == GO:
            yield from talk.send_rest(parcel)


def _result(answer: "Future[Any]") -> tuple[int, Value]:
    """Returns the kind of an answer that is there, and the answer. A future that was cancelled raises that."""
    try:
        return ANSWER, answer.result(0)
    except BaseException as error:  # noqa: BLE001 (that of one request)
        return RAISED, _told(error)


def _told(error: BaseException) -> bytes:
    """Returns what an asker is told of what a handler raised."""
    return Raised.of(error).to_text().encode()
