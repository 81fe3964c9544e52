"""Sums over the gradients of an update, whose parts several servers have, as those who train put them together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from braidax.parallel.served.batches.batch_rows import BatchRows
from braidax.parallel.served.programs import TableForm, joined_sums
from braidax.parallel.served.servers import Servers
from braidax.parallel.served.wire import Message


class Gathered(NamedTuple):
    """What an update is taken by, on all servers.

    **Fields:** `members`: ranks whose gradients count. `totals`: sums over rows, by table, and numbers that servers
    need of one another. `squares`: of all gradients, summed, one number where the norm is wanted.
    """

    members: list[int]
    totals: list[NDArray[Any]]
    squares: list[NDArray[Any]]

    @classmethod
    def of(cls, answers: Sequence[Message], joins: Sequence[Sequence[str]], num_squares: int) -> "Gathered":
        """Puts together what servers have answered, one for each part; or what one says that all have agreed on.

        **Arguments:** `joins`: of the sums of each table; the last of them are of squares. `num_squares`: 1 or 0.
        """
        first = answers[0]
        if first.kind == "taken":
            pairs = enumerate(first.fields["num_numbers"])
            lists = [[first.arrays[f"{at}/{one}"] for one in range(num)] for at, num in pairs]
            return cls(first.fields["members"], *lists)
        totals, squares = list[NDArray[Any]](), list[NDArray[Any]]()
        for number, some in enumerate(joins):
            sums = joined_sums(some, number, [answer.arrays for answer in answers])
            totals += sums
            squares += sums[len(sums) - num_squares :]
        for answer in answers:
            num = sum(name.startswith("part/") for name in answer.arrays)
            parts = [answer.arrays[f"part/{at}"] for at in range(num)]
            totals += parts[: num - num_squares]
            squares += parts[num - num_squares :]
        total = [np.asarray(sum(squares), np.float32)] if num_squares else []
        return cls(first.fields["members"], totals, total)

    def told(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what servers are told: fields and arrays."""
        lists = (self.totals, self.squares)
        arrays = {f"{at}/{one}": number for at, some in enumerate(lists) for one, number in enumerate(some)}
        return {"members": self.members, "num_numbers": [len(some) for some in lists]}, arrays

    @property
    def norm(self) -> NDArray[np.float32]:
        """Of all gradients, where it is wanted."""
        return np.asarray(np.sqrt(self.squares[0]), np.float32)


@final
class Gathering:
    """Takes updates in two rounds: servers are told gradients first, and move by them when sums over all are known.

    **Arguments:** `servers`. `forms`: of the tables. `wants_norm`: whether the norm of all gradients is wanted.
    """

    def __init__(self, servers: Servers, forms: Mapping[str, TableForm], *, wants_norm: bool) -> None:
        self._servers, self._forms, self._num_squares = servers, forms, int(wants_norm)

    def gather(
        self, batch: Mapping[str, BatchRows], gradients: Mapping[str, NDArray[Any]], step: int, whole: Mapping[str, Any]
    ) -> Gathered:
        """Brings the gradients of an update to the servers, and returns the sums over all, once all have given theirs.

        Nothing moves before `push`. Where a worker is lost, some servers may have its gradients, and others not: then
        all are asked for the sums over those of whom all have some. Another worker may have been told of others, by a
        server that is lost, too: so all agree on whose count. **Arguments, Raises:** as of `Servers.push`.
        """
        of_gradients = self._servers.of_gradients(batch, gradients, step, whole)
        joins, more = [self._forms[name].joins for name in batch], dict[str, Any]()
        while True:

            def told(part: int, more: Mapping[str, Any] = more) -> tuple[dict[str, Any], dict[str, Any]]:
                fields, arrays = of_gradients(part)
                return {**fields, **more}, arrays

            answers = self._servers.ask_every("gather", told)
            every = [answer for some in answers for answer in some]
            self._servers.check_all_are_there(every)
            if taken := [answer for answer in every if answer.kind == "taken"]:
                return Gathered.of(taken, joins, self._num_squares)
            members = [set[int](answer.fields["members"]) for answer in every]
            found = sorted(set[int].intersection(*members))
            if all(one == members[0] for one in members):
                if (agreed := self._servers.agreement.members(step, found)) == found:
                    return Gathered.of([some[0] for some in answers], joins, self._num_squares)
                found = agreed
            more = {"members": found}

    def push(self, gathered: Gathered, step: int) -> int:
        """Moves everything by gradients that were gathered. **Returns:** as `Servers.push`."""
        fields, arrays = gathered.told()
        told = {**fields, "step": step, "staged": True}
        answers = self._servers.ask_every("push", lambda part: (told, arrays))
        self._servers.taken()
        return min(int(some[0].fields["step"]) for some in answers)
