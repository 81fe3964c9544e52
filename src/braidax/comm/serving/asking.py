"""Those who ask."""

import threading
import time
from collections import Counter
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.group import Group
from braidax.comm.group_messages import ANSWER as ANSWERS
from braidax.comm.group_messages import ASK, BODY, MAX_NUMBER, Steps, tag_of
from braidax.comm.messages import Parcel, Value, pack
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
    over,
    run_until,
    unexpected,
    word_of,
)
from braidax.comm.small import HEADER, SMALL
from braidax.comm.transports.transport import MAX_JOINED, Operation
from braidax.connections.raised import Raised
from braidax.errors import ArgumentError, CallFailed, CommError, WaitTimeout

_MAX_UNANSWERED = 64  # of requests to a rank that nobody waits for any more


@final
class Asking:
    """Asks the ranks of a group; any thread may. **Arguments:** `group`: of the communicator."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._progress = group.progress
        self._send_receive, self._send_receive_value = group.progress.send_receive, group.progress.send_receive_value
        self._number = group.progress.number
        self._peers: dict[Any, int] = {rank: peer for rank, peer in enumerate(group.ranks) if rank != group.rank}
        self._tag, self._bodies, self._answers = (tag_of(group.number, kind, 0) for kind in (ASK, BODY, ANSWERS))
        self._places: list[NDArray[np.uint8]] = []  # for words, to be used again
        self._lock = threading.Lock()  # guards what follows
        self._unanswered: Counter[int] = Counter()

    def ask(self, rank: int, value: Value, timeout_seconds: float) -> Value:
        """Returns the answer of a rank. **Arguments, Raises:** see `Communicator.ask`."""
        peer = self._peers.get(rank)
        if peer is None or self._unanswered or not timeout_seconds > 0:
            return self._ask_any(rank, value, timeout_seconds)
        number = self._number() & MAX_NUMBER
        place = self._places.pop() if self._places else np.empty(PLACE_BYTES, np.uint8)
        answers = self._answers | number
        try:
            heard = self._send_receive_value(peer, self._tag, REQUEST, number, value, answers, place, SMALL)
        except (TypeError, ValueError, BufferError):  # it is not contiguous
            heard = None
        if heard is None:
            return self._ask_any(rank, value, timeout_seconds)
        if type(heard) is tuple:  # as most small ones are
            self._places.append(place)
            kind, _, answer = heard
            if kind == ANSWER:
                return answer
            raise self._failed(rank, kind, answer)
        if type(heard) is bytearray:
            heard = over(peer, len(heard))
        return self._rest(rank, number, None, heard, place, timeout_seconds)

    def _ask_any(self, rank: int, value: Value, timeout_seconds: float) -> Value:
        self._check(rank, timeout_seconds)
        number = self._number() & MAX_NUMBER
        parcel, place = in_one(pack(value)), np.empty(PLACE_BYTES, np.uint8)
        words = (HEADER.pack(REQUEST, number), *parcel.first)
        words = words if len(words) <= MAX_JOINED else (b"".join(words),)
        peer = self._group.ranks[rank]
        heard = self._send_receive(peer, self._tag, words, self._answers | number, place)
        if type(heard) is bytearray:
            heard = over(peer, len(heard))
        return self._rest(rank, number, parcel, heard, place, timeout_seconds)

    def _rest(
        self,
        rank: int,
        number: int,
        parcel: Parcel | None,
        heard: Operation,
        place: NDArray[np.uint8],
        timeout_seconds: float,
    ) -> Value:
        """Returns the answer to a request that was sent. **Arguments:** `parcel`: what of it may have to follow."""
        talk = Talk(self._progress, self._group.ranks[rank], self._bodies | number, self._answers | number)
        steps = self._steps(talk, rank, parcel, heard, place)
        try:
            return run_until(self._progress, talk, steps, time.monotonic() + timeout_seconds)
        except WaitTimeout:
            raise self._late(rank, timeout_seconds) from None

    def end(self, rank: int) -> None:
        """Tells a rank that this one asks it no more."""
        self._check_rank(rank)
        self._progress.send_now(self._group.ranks[rank], self._tag, (memoryview(HEADER.pack(DONE, 0)),))

    def _steps(
        self, talk: Talk, rank: int, parcel: Parcel | None, heard: Operation, place: NDArray[np.uint8]
    ) -> Steps[Value]:
        try:
            yield [heard]
            kind, _ = word_of(self._progress.world, talk.peer, place[: heard.num_bytes])
            if kind == GO and parcel is not None and parcel.rest:
                yield from talk.send_rest(parcel)
                heard = talk.hear(place)
                yield [heard]
                kind, _ = word_of(self._progress.world, talk.peer, place[: heard.num_bytes])
            if kind not in (ANSWER, RAISED):
                raise self._failed(rank, kind, b"")
            answer = yield from talk.value(arriving_of(place[: heard.num_bytes]))
        except Withdrawn:
            if talk.is_given_up:
                return []  # to nobody
            raise CommError(
                f"{self._name(rank)} gave up its answer, as this rank did not take it within the limit there; expected "
                "both limits to be long enough for it: raise timeout_seconds there"
            ) from None
        finally:
            if talk.is_given_up:
                with self._lock:
                    self._unanswered[rank] -= 1
        if kind == RAISED and not talk.is_given_up:
            raise self._failed(rank, kind, answer)
        return answer

    def _failed(self, rank: int, kind: int, told: Value) -> CallFailed | CommError:
        """Returns the error of a word that is no answer. **Arguments:** `told`: of what its handler raised."""
        world, peer = self._progress.world, self._group.ranks[rank]
        if kind != RAISED:
            return unexpected(world, peer, f"a word of kind {kind}")
        raised = Raised.from_text(bytes(told).decode())
        words = f"{world.describe(peer)} could not answer: {raised.words}"
        return CallFailed(words, rank, world.hosts[peer], raised.traceback)

    def _check_rank(self, rank: Any) -> None:
        self._group.check_rank(rank, "rank")
        if rank == self._group.rank:
            raise ArgumentError(f"rank={rank!r}: expected another rank than this one; call the handler itself")

    def _check(self, rank: Any, timeout_seconds: float) -> None:
        self._check_rank(rank)
        if not timeout_seconds > 0:
            raise ArgumentError(f"timeout_seconds={timeout_seconds!r}: expected seconds > 0")
        if self._unanswered[rank] >= _MAX_UNANSWERED:
            raise WaitTimeout(
                f"{self._name(rank)} has left {_MAX_UNANSWERED} requests of this rank without an answer, each up to "
                "its limit; expected it to serve: with comm.serve(handler)"
            )

    def _late(self, rank: int, timeout_seconds: float) -> WaitTimeout:
        with self._lock:
            self._unanswered[rank] += 1
        return WaitTimeout(
            f"{self._name(rank)} did not answer within {timeout_seconds:g} s; expected it to serve: with "
            "comm.serve(handler). If its handler is only slow, raise timeout_seconds=. Whether it has done what it was "
            "asked for is not known; its answer will be dropped"
        )

    def _name(self, rank: int) -> str:
        return self._progress.world.describe(self._group.ranks[rank])
