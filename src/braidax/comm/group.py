"""What a rank can do in a group, as algorithms that have been checked and not yet begun."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives import values
from braidax.comm.collectives.arrays import Arrays
from braidax.comm.collectives.calls import Calls
from braidax.comm.collectives.opening import Opening
from braidax.comm.group_messages import (
    BUFFER,
    COLLECTIVE,
    MAX_NUMBER,
    POINT_TO_POINT,
    GroupMessages,
    Steps,
    head_of,
    tag_of,
)
from braidax.comm.losing.domain import domain_of
from braidax.comm.losing.unfinished import Receives, Unfinished, resumed
from braidax.comm.messages import Value, copied
from braidax.comm.progress import Progress
from braidax.comm.waiting import words_of
from braidax.comm.watch import Notice
from braidax.errors import ArgumentError, CommError, PeerLost, WaitTimeout

BETWEEN_TWO = ("send", "recv", "send_buffer", "recv_buffer", "ask")
"""Operations that are no collectives."""


@final
class Group:
    """Some ranks of a world, seen from one of them. Its methods are those of `Communicator`.

    **Arguments:** `progress`: moves the messages. `number`: of the group in the world. `ranks`: of the members in the
    world, by rank in the group. `rank`: in the group. `hosts`: a number for each member's host.

    **Fields:** `domain`: moves the messages of collectives. `calls`: those. `arrays`: those of arrays. `unheard`: what
    the member before brought to collectives in which this rank only sent.
    """

    def __init__(
        self, progress: Progress, *, number: int, ranks: Sequence[int], rank: int, hosts: Sequence[int]
    ) -> None:
        self.progress = progress
        self.number = number
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.hosts = hosts
        self.unheard: deque[Opening] = deque()
        self.domain = domain_of(progress, number, ranks)
        self.calls = Calls(self.domain, ranks, rank, hosts, tag_of(number, COLLECTIVE, 0), self.unheard)
        self.arrays = Arrays(self.calls)
        self._receives: Receives | None = None if progress.on_loss == "generation" else Unfinished()
        self._under = lru_cache(256)(partial(GroupMessages, progress, ranks, rank, hosts=hosts))  # a tag

    def send(self, value: Value, dest: int, tag: int) -> Steps[None]:
        """Returns the algorithm of `Communicator.send`."""
        return values.send(self._point(dest, "dest", tag), dest, value if self._receives is None else copied(value))

    def recv(self, source: int, tag: int) -> Steps[Value]:
        """Returns the algorithm of `Communicator.recv`."""
        messages = self._point(source, "source", tag)
        if self._receives is None:
            return values.receive(messages, source)
        begin = partial(values.receive, messages, source)
        return resumed(self._receives, (source, tag), self.progress.number, begin)

    def recv_rest(self, source: int, tag: int, first: NDArray[np.uint8]) -> Steps[Value]:
        """Returns what is left of `recv`. **Arguments:** `first`: the first message."""
        return values.receive_rest(self._point(source, "source", tag), source, first)

    def broadcast(self, value: Value, root: int) -> Steps[Value]:
        """Returns the algorithm of `Communicator.broadcast`."""
        self.check_rank(root, "root")
        given = value if self._receives is None or self.rank != root else copied(value)
        return values.broadcast(self.calls.next(_head(f"broadcast from root {root}")), given, root)

    def broadcast_into(self, array: Any, root: int) -> Steps[Any]:
        """Returns the algorithm of `Communicator.broadcast_into`."""
        self.check_rank(root, "root")
        return self.arrays.broadcast_into(array, root)

    def gather(self, value: Value, root: int) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.gather`."""
        self.check_rank(root, "root")
        given = value if self._receives is None else copied(value)
        return values.gather(self.calls.next(_head(f"gather to root {root}")), given, root)

    def all_gather(self, value: Value) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.all_gather`."""
        given = value if self._receives is None else copied(value)
        return values.all_gather(self.calls.next(_head("all_gather")), given)

    def reduce(self, array: Any, operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.reduce`."""
        self.check_rank(root, "root")
        return self.arrays.reduce(array, operation, root)

    def all_to_all(self, parts: Sequence[Value]) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.all_to_all`."""
        if len(parts) != self.size:
            raise ArgumentError(f"parts= has {len(parts)} values: expected one for each of the {self.size} ranks")
        given = parts if self._receives is None else [copied(part) for part in parts]
        return values.all_to_all(self.calls.next(_head("all_to_all")), given)

    def stream(self, chunk_bytes: int, window_bytes: int) -> GroupMessages:
        """Returns the messages with which a stream begins; their number is that of the stream."""
        return self.calls.next(_head(f"exchange of chunks of {chunk_bytes:,} bytes in windows of {window_bytes:,}"))

    def failed(self, name: str, error: BaseException, timeout_seconds: float) -> None:
        """Ends the generation, unless what an operation failed of harms nobody else.

        Others wait for whoever leaves a collective, and would take its next one for this one. An interrupt leaves
        messages half sent, or received by nobody. Where ranks are lost one by one, a collective ends those of its group
        only, what is left of a message to one rank goes on, and an interrupt ends this rank's part.

        **Arguments:** `name`: of the operation. `timeout_seconds`: its limit.
        """
        if self.progress.failure is not None:
            self.progress.told = True
            return
        if isinstance(error, ArgumentError | CommError) and (name in BETWEEN_TWO or self.size == 1):
            return
        if self.progress.on_loss == "peer":
            if isinstance(error, WaitTimeout) and name in BETWEEN_TWO:
                return
            if self.domain.failure is not None and isinstance(error, CommError):
                return  # all members have been told
        if isinstance(error, PeerLost) and error.rank not in self.progress.left:
            return  # whoever waits for it judges who was lost first
        if isinstance(error, WaitTimeout):
            how = f"took longer than {timeout_seconds:g} s: {error}"
        elif isinstance(error, ArgumentError | CommError):
            how = f"failed: {error}"
        else:
            how = f"failed: {words_of(error)}"
        is_alone = name in (*BETWEEN_TWO, "serve") or not isinstance(error, Exception)
        (self.progress if is_alone else self.domain).fail(Notice("aborted", self.progress.world.rank, f"{name} {how}"))
        self.progress.told = self.progress.failure is not None

    def check_rank(self, peer: Any, name: str) -> None:
        """Raises `ArgumentError` for what is no rank of the group. **Arguments:** `name`: of the parameter."""
        if not isinstance(peer, int | np.integer) or not 0 <= peer < self.size:
            raise ArgumentError(f"{name}={peer!r}: expected a rank from 0 to {self.size - 1}")

    def buffer_tag(self, tag: int) -> int:
        """Returns the tag of `send_buffer`. **Raises:** `ArgumentError` for a `tag` that is out of range."""
        return self._tag(BUFFER, tag)

    def buffer_way(self, peer: int, name: str, tag: int) -> tuple[int, int]:
        """Returns the rank in the world of a member, and the tag of `send_buffer`. **Raises:** `ArgumentError`."""
        self.check_rank(peer, name)
        return self.ranks[peer], self.buffer_tag(tag)

    def value_way(self, peer: int, name: str, tag: int) -> tuple[int, int]:
        """Returns the rank in the world of a member, and the tag of `send`. **Raises:** `ArgumentError`."""
        self.check_rank(peer, name)
        return self.ranks[peer], self._tag(POINT_TO_POINT, tag)

    def _tag(self, kind: int, tag: Any) -> int:
        if not isinstance(tag, int | np.integer) or not 0 <= tag <= MAX_NUMBER:
            raise ArgumentError(f"tag={tag!r}: expected a whole number from 0 to {MAX_NUMBER:,}")
        return tag_of(self.number, kind, int(tag))

    def _point(self, peer: int, name: str, tag: int) -> GroupMessages:
        self.check_rank(peer, name)
        return self._under(self._tag(POINT_TO_POINT, tag))


_head = lru_cache(1024)(head_of)
