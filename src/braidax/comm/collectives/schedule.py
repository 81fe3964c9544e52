"""`Schedule`: what one member does in a collective, step by step, as data that C runs without the GIL, or else Python.

A step sends, receives, waits for one of both, reduces, or copies. Steps go from the first one to the last, and only a
wait stops them. They know three places: the array that the member has (`OWN`, which is read only), the one that it
fills (`OUT`, which may be the same memory), and scratch memory.

The first message between two members is *headed*: before what it carries it says what its sender brings to the
collective. It arrives in scratch memory, and nothing of it is used before that was compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.group_messages import HEAD_BYTES

OPENING_BYTES = 1 << 14
"""What a headed message may carry; so that it fits, whichever collective its receiver calls."""
_ALIGNMENT = 64


class Kind(IntEnum):
    """What a step does; the numbers are those of `schedules.h`."""

    SEND = 0
    RECEIVE = 1
    WAIT = 2
    REDUCE = 3
    COPY = 4


OWN, OUT, SCRATCH = range(3)


class Part(NamedTuple):
    """Some bytes of a place."""

    place: int
    begin: int
    num_bytes: int

    def part(self, begin: int, end: int) -> "Part":
        """Returns the bytes from one offset in these to another one."""
        return Part(self.place, self.begin + begin, end - begin)


NOTHING = Part(OWN, 0, 0)


class Step(NamedTuple):
    """A step.

    **Fields:** `kind`. `peer`: of a message, by its rank in the group. `ticket`: of a message, or which one is waited
    for. `to`: what is sent, received or filled; of a headed message what it carries. `room`: what a headed message is
    received into, head included; of one that is sent it is true. `first`, `second`: operands; `first` is copied.
    """

    kind: Kind
    peer: int = 0
    ticket: int = 0
    to: Part = NOTHING
    room: Part | None = None
    first: Part = NOTHING
    second: Part = NOTHING


@final
@dataclass(frozen=True)
class Schedule:
    """What a member does. **Fields:** `steps`; `num_tickets`: of messages; `scratch_bytes`: of memory."""

    steps: tuple[Step, ...]
    num_tickets: int
    scratch_bytes: int

    def rows(self, ranks: Sequence[int]) -> NDArray[np.int64]:
        """Returns the steps as numbers. **Arguments:** `ranks`: of the members in the world, by rank in the group.

        **Returns:** `[steps, 11]`: kind, peer, ticket, bytes, room's bytes (0: not headed), and place and first byte
        of `to` (of a headed receive: of its room), `first` and `second`.
        """
        rows = np.zeros((len(self.steps), 11), np.int64)
        for row, step in zip(rows, self.steps, strict=True):
            is_message = step.kind in (Kind.SEND, Kind.RECEIVE)
            where = step.room if step.kind is Kind.RECEIVE and step.room is not None else step.to
            peer = ranks[step.peer] if is_message else 0
            capacity = 0 if step.room is None else step.room.num_bytes
            row[:] = (
                step.kind,
                peer,
                step.ticket,
                step.to.num_bytes,
                capacity,
                *where[:2],
                *step.first[:2],
                *step.second[:2],
            )
        return rows


@final
class Planning:
    """A schedule that is being made, of one member.

    It begins by telling the next member what this one brings, and by hearing the one before it: so all ranks notice
    when two do not bring the same, also where their algorithms would never send to one another.

    **Arguments:** `rank`, `size`: of the member and of the group. `carried`: what the first message to the next member
    carries, up to `OPENING_BYTES`. `expected_bytes`: what that of the member before carries.

    **Fields:** `opening_sent`: the ticket of the first message to the next member.
    """

    def __init__(self, rank: int, size: int, *, carried: Part = NOTHING, expected_bytes: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.opening_sent = 0
        self._steps: list[Step] = []
        self._num_tickets = 0
        self._scratch_bytes = 0
        self._told: set[int] = set()
        self._heard: set[int] = set()
        self._has_heard = size == 1
        self._opening, self._carried_here = 0, NOTHING
        if size > 1:
            self._opening, self._carried_here = self.receive_headed((rank - 1) % size, expected_bytes)
            self.opening_sent = self.send_headed((rank + 1) % size, carried)

    def done(self) -> Schedule:
        """Returns the schedule, which ends when all its messages have."""
        waited = {step.ticket for step in self._steps if step.kind is Kind.WAIT}
        self.wait(*(ticket for ticket in range(self._num_tickets) if ticket not in waited))
        return Schedule(tuple(self._steps), self._num_tickets, self._scratch_bytes)

    def hear(self) -> Part:
        """Waits for what the member before brings. **Returns:** what its message carries."""
        self.wait()
        return self._carried_here

    def scratch(self, num_bytes: int) -> Part:
        """Returns scratch memory that nothing else uses."""
        begin = self._scratch_bytes
        self._scratch_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return Part(SCRATCH, begin, num_bytes)

    def send(self, peer: int, what: Part) -> int:
        """Begins to send to a member that has been told what this one brings. **Returns:** its ticket."""
        return self._message(Kind.SEND, peer, what)

    def receive(self, peer: int, to: Part) -> int:
        """Begins to receive from a member that has said what it brings. **Returns:** its ticket."""
        return self._message(Kind.RECEIVE, peer, to)

    def send_headed(self, peer: int, what: Part = NOTHING) -> int:
        """Begins to tell a member what this one brings, and to send up to `OPENING_BYTES`. **Returns:** its ticket."""
        self._told.add(peer)
        return self._message(Kind.SEND, peer, what, NOTHING._replace(num_bytes=HEAD_BYTES))

    def receive_headed(self, peer: int, num_bytes: int = 0) -> tuple[int, Part]:
        """Begins to receive what a member brings. **Returns:** its ticket, and what its message carries."""
        self._heard.add(peer)
        room = self.scratch(HEAD_BYTES + max(num_bytes, OPENING_BYTES))
        what = room.part(HEAD_BYTES, HEAD_BYTES + num_bytes)
        return self._message(Kind.RECEIVE, peer, what, room), what

    def greet(self, told: Sequence[int], heard: Sequence[int]) -> list[int]:
        """Tells members what this one brings, and hears others, where that was not done. **Returns:** the tickets."""
        tickets = [self.receive_headed(peer)[0] for peer in heard if peer not in self._heard]
        tickets += [self.send_headed(peer) for peer in told if peer not in self._told]
        return tickets

    def wait(self, *tickets: int) -> None:
        """Goes on only when messages have been sent, or are there, and the member before has said what it brings.

        What comes of members that do not bring the same, such as a message that is too long, is so explained by that.
        """
        if not self._has_heard:
            self._has_heard = True
            tickets = (self._opening, *tickets)
        self._steps += [Step(Kind.WAIT, ticket=ticket) for ticket in tickets]

    def reduce(self, to: Part, first: Part, second: Part) -> None:
        """Reduces elements; `to` may be an operand."""
        if to.num_bytes:
            self._steps.append(Step(Kind.REDUCE, to=to, first=first, second=second))

    def copy(self, to: Part, what: Part) -> None:
        """Copies bytes."""
        if to.num_bytes and to != what:
            self._steps.append(Step(Kind.COPY, to=to, first=what))

    def _message(self, kind: Kind, peer: int, to: Part, room: Part | None = None) -> int:
        ticket = self._num_tickets
        self._num_tickets += 1
        self._steps.append(Step(kind, peer, ticket, to, room))
        return ticket
