"""Updates that not all have pushed yet, and when one is taken."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.on_servers.growing.seen_shard import SeenShard
from braidax.parallel.served.row_memory import sum_by_id
from braidax.parallel.served.wire import Message

from .shard import Shard

AnyShard = Shard | SeenShard
"""A server's part of a table, that has all rows, or grows."""

Given = list[tuple[AnyShard, NDArray[Any], NDArray[Any]]]
"""Gradients of tables: ids, all different, and `[m, D]`."""


class _Request(NamedTuple):
    """A request that is answered when so many updates were taken. **Fields:** of it; `answer`: that will be."""

    step: int
    rank: int
    message: Message
    answer: "Future[Any]"


@final
class Waiting:
    """Requests that are answered later."""

    def __init__(self) -> None:
        self._requests: list[_Request] = []

    def add(self, step: int, rank: int, message: Message) -> "Future[Any]":
        """Returns what will answer a request. **Arguments:** `step`: when so many updates were taken."""
        self._requests.append(_Request(step, rank, message, Future()))
        return self._requests[-1].answer

    def answer(self, answer: Callable[[int, Message], Any], is_due: Callable[[int], bool]) -> None:
        """Answers what has waited for what is now; what has to wait on takes its place again.

        **Arguments:** `answer`: a request of a rank. `is_due`: whether those are asked again that wait for so many
        updates.
        """
        requests, self._requests = self._requests, []
        for one in requests:
            if not is_due(one.step):
                self._requests.append(one)
                continue
            try:
                found = answer(one.rank, one.message)
            except Exception as error:  # noqa: BLE001 (that of one request: who has asked raises it)
                one.answer.set_exception(error)
                continue
            if isinstance(found, Future):
                self._requests[-1] = one
            else:
                one.answer.set_result(found)


@dataclass
class Update:
    """An update of one step.

    **Fields:** by who has pushed it `given`: gradients of each table, `told`: the numbers by which they move rows, and
    `dense`: gradients of variables that a server has whole, and the loss. `members`: whose gradients count, where all
    servers have agreed on that; None: of all who have pushed. `sums`: over all given, once somebody has asked for them.
    """

    given: dict[int, Given] = field(default_factory=dict[int, Given])
    told: dict[int, list[list[NDArray[Any]]]] = field(default_factory=dict[int, list[list[NDArray[Any]]]])
    dense: dict[int, list[NDArray[Any]]] = field(default_factory=dict[int, list[NDArray[Any]]])
    members: list[int] | None = None
    sums: dict[str, NDArray[Any]] | None = None
    _total: Given | None = None

    def of_members(self, members: Sequence[int]) -> "Update":
        """Returns it as if these alone had given gradients. **Raises:** `ArgumentError` where one has not."""
        if lacking := sorted({*members} - self.given.keys()):
            raise ArgumentError(
                f"an update counts the gradients of the ranks {[*members]}, and those of {lacking} are not here: "
                f"expected all servers to have them; begin anew from the last checkpoint"
            )
        if len(members) == len(self.given):
            return self
        given = {rank: self.given[rank] for rank in members}
        return Update(given, self.told, {rank: self.dense[rank] for rank in members}, self.members)

    def give(self, rank: int, given: Given, dense: list[NDArray[Any]] | None = None) -> None:
        """Takes the gradients of somebody, in place of those that it has given before."""
        self.given[rank], self.dense[rank] = given, dense or []
        self._total = self.sums = None

    def summed(self) -> Given:
        """Returns the gradients of all who have given some, in their order, each row once."""
        if self._total is None or len(self.given) == 1:
            tables = zip(*(self.given[rank] for rank in sorted(self.given)), strict=True)
            self._total = [_summed(parts) for parts in tables]
        return self._total

    def mean(self) -> Given:
        """Returns the mean of them."""
        count = len(self.given)
        return [(shard, ids, _divided(gradients, count)) for shard, ids, gradients in self.summed()]

    def mean_of_dense(self) -> list[NDArray[Any]]:
        """Returns the mean of what belongs to variables that a server has whole; the loss is the last."""
        some = [self.dense[rank] for rank in sorted(self.dense)]
        return [_divided(functools.reduce(np.add, one), len(one)) for one in zip(*some, strict=True)]


def _divided(total: NDArray[Any], count: int) -> NDArray[Any]:
    return total if count == 1 else (total / count).astype(total.dtype)


def _summed(
    parts: Sequence[tuple[AnyShard, NDArray[Any], NDArray[Any]]],
) -> tuple[AnyShard, NDArray[Any], NDArray[Any]]:
    """Sums the gradients that several have of one table."""
    if len(parts) == 1:
        return parts[0]
    return parts[0][0], *sum_by_id([(ids, gradients) for _, ids, gradients in parts])


@final
class Updates:
    """Which updates are under way. One is complete when all who train have pushed it; where `staleness` is None, each
    that one of them pushes is an update by itself.

    **Arguments:** `server`: named by errors. `num_workers`: who train. `staleness`: how many updates one who pushes may
    be ahead of another.

    **Fields:** `step`: how many were taken.
    """

    def __init__(self, server: str, num_workers: int, staleness: int | None) -> None:
        self._server, self._num_workers, self._staleness = server, num_workers, staleness
        self.step = 0
        self._coming: dict[tuple[int, int], Update] = {}  # by who pushes, if they are their own, and step
        self._next: dict[int, int] = {}  # which step of each is next, if they are their own
        self._absent: set[int] = set()

    def begin(self, step: int) -> None:
        """Forgets all that are under way. **Arguments:** `step`: how many were taken."""
        self.step = step
        self._coming.clear()
        self._next.clear()

    def told(self) -> list[list[int]]:
        """Returns which update of each is next, if they are their own, for `follow`."""
        return [[rank, step] for rank, step in self._next.items()]

    def follow(self, told: Sequence[Sequence[int]]) -> None:
        """Takes no update again that another server has taken. **Arguments:** what `told` returns there."""
        for rank, step in told:
            self._next[rank] = max(step, self._next.get(rank, 0))

    def _key(self, rank: int, step: int) -> tuple[int, int]:
        return (rank if self._staleness is None else -1, step)

    def is_taken(self, rank: int, step: int) -> bool:
        """Returns whether an update was taken that somebody pushes once more."""
        if self._staleness is None:
            return step < self._next.get(rank, 0)
        return self.step - 1 - self._staleness <= step < self.step

    def is_early(self, step: int) -> bool:
        """Returns whether somebody pushes one update too early: another server, which it has asked, has seen it, and
        this one has a copy of the same part that has yet to hear of others."""
        return self._staleness is not None and self._num_workers > 1 and step == self.step + self._staleness + 1

    def of(self, rank: int, step: int) -> Update:
        """Returns the update that somebody pushes, not taken yet. **Raises:** `ArgumentError` for another step."""
        if self._staleness is not None and not self.step <= step <= self.step + self._staleness:
            raise ArgumentError(
                f"an update of step {step} was pushed, and the tables on {self._server} have seen {self.step} "
                f"updates: expected a state that is as old as they are; go on with the last one"
            )
        return self._coming.setdefault(self._key(rank, step), Update())

    def is_given(self, update: Update, step: int) -> bool:
        """Returns whether all whose gradients an update takes have given them, and it is the next one."""
        if self._staleness is None:
            return True
        return step == self.step and len(update.given.keys() - self._absent) >= self._num_workers - len(self._absent)

    def complete(self, rank: int, step: int) -> Update | None:
        """Returns the next update that all have pushed, or one has for all, or None.

        **Arguments:** who has pushed what just now.
        """
        found = self._coming.get(self._key(rank, step if self._staleness is None else self.step))
        if found is None or (self._staleness is None and rank not in found.told):
            return None
        if found.members is not None:
            return found
        missing = self._num_workers - len(self._absent)
        there = len(found.told.keys() - self._absent)
        return found if self._staleness is None or (there >= missing and found.told) else None

    def took(self, rank: int, step: int) -> None:
        """Counts an update that `complete` has returned."""
        del self._coming[self._key(rank, step if self._staleness is None else self.step)]
        self.step += 1
        if self._staleness is None:
            self._next[rank] = step + 1

    def leave_out(self, rank: int) -> None:
        """Completes updates without somebody who is gone; what it has pushed counts."""
        self._absent.add(rank)
