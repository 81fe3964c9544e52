"""How a collective begins, whichever it is: each member tells the next one what it brings, and hears the previous one.

Members that do not bring the same thus notice, also where their algorithms would never send to one another: around the
ring some member differs from the one before it. That one fails, and so ends the generation for all.

No wrong number comes of it meanwhile, since what a member brings also stands before everything that it sends for the
first time to another one: data is not used, nor passed on, before that was compared. A member that only sends uses
none, and does not wait: it hears the one before it in a later collective, or when it closes.
"""

from collections import deque
from collections.abc import Sequence
from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives.schedule import OPENING_BYTES
from braidax.comm.group_messages import HEAD_BYTES, GroupMessages, Steps
from braidax.comm.transports.transport import Buffer, Operation

T = TypeVar("T")

MAX_UNHEARD = 16
"""Collectives by which a member that only sends is ahead of the one before it."""


@final
class Opening:
    """The first message to the member after this one, and that of the member before it; for two members or more.

    **Arguments:** `payload`: what else is sent with it, up to `OPENING_BYTES`; copied.

    **Fields:** `sent`: to be waited for at last.
    """

    def __init__(self, messages: GroupMessages, payload: Sequence[Buffer] = ()) -> None:
        self._messages = messages
        self._place = place_of(messages)
        first = memoryview(b"".join((messages.brings, *payload)))
        self._received = messages.receive((messages.rank - 1) % messages.size, self._place.data)
        self.sent = messages.send((messages.rank + 1) % messages.size, first)

    def heard(self) -> Steps[NDArray[np.uint8]]:
        """Returns what the member before has sent with it, having heard it in all earlier collectives.

        **Raises:** `CommError` when it does not bring the same.
        """
        if self._messages.unheard:
            yield from hear(self._messages.unheard)
        return (yield from self.heard_alone())

    def heard_alone(self) -> Steps[NDArray[np.uint8]]:
        """Returns, Raises: as `heard`, of this collective only."""
        yield [self._received]
        return self._messages.check_brings(self._received, self._place)

    def later(self) -> Steps[None]:
        """Ends a collective in which this member only sends: the one before it is heard later, a few at most."""
        unheard = self._messages.unheard
        unheard.append(self)
        yield [self.sent]
        if len(unheard) > MAX_UNHEARD:
            yield from hear(unheard, MAX_UNHEARD // 2)


def hear(unheard: "deque[Opening]", num_left: int = 0) -> Steps[None]:
    """Hears the oldest openings until so many are left. **Raises:** as `Opening.heard`."""
    while len(unheard) > num_left:
        try:
            oldest = unheard.popleft()  # so that no two requests wait for one operation
        except IndexError:
            return
        try:
            yield from oldest.heard_alone()
        except GeneratorExit:  # whoever waited gave up
            unheard.appendleft(oldest)
            raise


def place_of(messages: GroupMessages, num_bytes: int = OPENING_BYTES) -> NDArray[np.uint8]:
    """Returns memory for the first message of another member. **Arguments:** `num_bytes`: at most, without the head."""
    return np.empty(len(messages.brings) + max(num_bytes, OPENING_BYTES), np.uint8)


def opened(messages: GroupMessages, steps: Steps[T]) -> Steps[T]:
    """Runs an algorithm of two members or more with an opening; what it begins first goes beside that."""
    if messages.size == 1:
        return (yield from steps)
    opening = Opening(messages)
    try:
        begun: Sequence[Operation] = next(steps)
    except StopIteration as stop:
        yield from opening.heard()
        yield [opening.sent]
        return stop.value
    yield from opening.heard()
    yield begun
    result = yield from steps
    yield [opening.sent]
    return result


def headed(messages: GroupMessages, array: NDArray[np.generic]) -> tuple[NDArray[np.uint8], NDArray[np.generic]]:
    """Returns memory that begins with what this member brings, and behind that a copy of a flat array."""
    memory = np.empty(HEAD_BYTES + array.nbytes, np.uint8)
    memory.data[:HEAD_BYTES] = messages.brings
    copy = memory[HEAD_BYTES:].view(array.dtype)
    copy[:] = array
    return memory, copy
