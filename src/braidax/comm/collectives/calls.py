"""`Calls`: the collectives of one group, which all members call in the same order, and so number alike."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from operator import or_
from typing import Any, final

from braidax.comm.group_messages import MAX_NUMBER, GroupMessages
from braidax.comm.losing.domain import Domain
from braidax.comm.progress import Progress


@final
class Calls:
    """Numbers the collectives of a group.

    **Arguments, Fields:** as of `GroupMessages`. `first_tag`: of its collectives, without their numbers. `next_tag`: of
    the one that comes next.
    """

    def __init__(
        self,
        progress: Progress | Domain,
        ranks: Sequence[int],
        rank: int,
        hosts: Sequence[int],
        first_tag: int,
        unheard: deque[Any],
    ) -> None:
        self.progress = progress
        self.ranks = ranks
        self.rank = rank
        self.hosts = tuple(hosts)
        self.unheard = unheard
        numbers = chain(range(1, MAX_NUMBER + 1), chain.from_iterable(repeat(range(MAX_NUMBER + 1))))
        self._tags = map(partial(or_, first_tag), numbers)  # no function in Python, which an interrupt would end
        self.next_tag = next(self._tags)

    def begin(self) -> int:
        """Counts a collective that has begun under `next_tag`, which is returned."""
        tag, self.next_tag = self.next_tag, next(self._tags)
        return tag

    def next(self, head: bytes) -> GroupMessages:
        """Returns the messages of the next collective. **Arguments:** `head`: what this rank brings to it."""
        return GroupMessages(self.progress, self.ranks, self.rank, self.begin(), self.hosts, head, self.unheard)
