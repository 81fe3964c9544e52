"""Receives that wait for messages, and messages that wait for receives."""

from collections import deque
from typing import Generic, TypeVar, final

PostedT = TypeVar("PostedT")
ArrivedT = TypeVar("ArrivedT")


@final
class Matching(Generic[PostedT, ArrivedT]):
    """Pairs the receives and the messages of each (peer, tag), oldest with oldest, whichever comes first."""

    def __init__(self) -> None:
        self._posted: dict[tuple[int, int], deque[PostedT]] = {}
        self._arrived: dict[tuple[int, int], deque[ArrivedT]] = {}

    def post(self, peer: int, tag: int, receive: PostedT) -> ArrivedT | None:
        """Returns the message that waits for a receive; None when there is none, and the receive waits."""
        if (message := _oldest(self._arrived, (peer, tag))) is None:
            self._posted.setdefault((peer, tag), deque()).append(receive)
        return message

    def take(self, peer: int, tag: int) -> ArrivedT | None:
        """Returns the message that waits for a receive, if there is one."""
        return _oldest(self._arrived, (peer, tag))

    def arrive(self, peer: int, tag: int, message: ArrivedT) -> PostedT | None:
        """Returns the receive that waits for a message; None when there is none, and the message waits."""
        if (receive := _oldest(self._posted, (peer, tag))) is None:
            self._arrived.setdefault((peer, tag), deque()).append(message)
        return receive

    def give_up(self, peer: int) -> list[PostedT]:
        """Forgets the receives from a peer that sends no more, and returns them; its messages stay."""
        keys = [key for key in self._posted if key[0] == peer]
        return [receive for key in keys for receive in self._posted.pop(key)]

    def forget(self, peer: int) -> None:
        """Forgets the messages of a peer that wait."""
        for key in [key for key in self._arrived if key[0] == peer]:
            del self._arrived[key]

    def clear(self) -> None:
        """Forgets everything."""
        self._posted.clear()
        self._arrived.clear()


ItemT = TypeVar("ItemT")


def _oldest(queues: dict[tuple[int, int], deque[ItemT]], key: tuple[int, int]) -> ItemT | None:
    if (queue := queues.get(key)) is None:
        return None
    item = queue.popleft()
    if not queue:
        del queues[key]
    return item
