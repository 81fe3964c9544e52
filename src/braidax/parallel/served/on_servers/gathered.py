"""Sums over the gradients of an update, of which each server has a part, before anything moves by them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.wire import packed

from .dense import DensePart
from .updates import Given, Update

_KEPT = 64  # agreements; nobody asks for one that is older than workers may be apart


class Agreed(NamedTuple):
    """What all servers take an update by. **Fields:** `members`: whose gradients count, by rank. `totals`, `squares`:
    lists of numbers, as of `Gathered` of those who train."""

    members: list[int]
    totals: list[NDArray[Any]]
    squares: list[NDArray[Any]]

    def told(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Returns it as a message has it: fields and arrays."""
        pairs = {"0": self.totals, "1": self.squares}.items()
        arrays = {f"{name}/{at}": one for name, some in pairs for at, one in enumerate(some)}
        return {"members": self.members, "num_numbers": [len(self.totals), len(self.squares)]}, arrays


@final
class Agreements:
    """The last updates that were taken as agreed, for who asks what one was taken by, and what those to come are to be
    taken by."""

    def __init__(self) -> None:
        self._found: dict[int, Agreed] = {}
        self._members: dict[int, list[int]] = {}
        self._due: dict[str, int] = {}

    def propose(self, about: str, step: int, value: Any) -> Any:
        """Keeps what workers are to agree on, and returns that: the first it was told, but for an end that is over, or
        a recovery.

        **Arguments:** `step`: whose members, or how many updates who proposes something else has taken.
        """
        if about != "members":
            if self._due.get(about, -1) <= step:
                self._due[about] = value
            return self._due[about]
        if step in self._found:
            return self._found[step].members
        self._members.pop(step - _KEPT, None)
        return self._members.setdefault(step, value)

    @property
    def end(self) -> int | None:
        """Behind how many updates all workers end, if one of them has asked for it."""
        return self._due.get("end")

    @property
    def recovery(self) -> int | None:
        """Behind how many updates others take the place of lost servers, as of the last time."""
        return self._due.get("recovery")

    def keep(self, step: int, update: Update) -> None:
        """Keeps in mind by what an update was taken."""
        if update.members is not None:
            self._found[step] = Agreed(update.members, *next(iter(update.told.values())))
            self._found.pop(step - _KEPT, None)

    def of(self, step: int) -> Agreed:
        """Returns by what an update was taken. **Raises:** `ArgumentError` where that is not known."""
        if step not in self._found:
            raise ArgumentError(
                f"sums of step {step} were asked for, whose update was taken: expected the next step of this worker"
            )
        return self._found[step]

    def forget(self) -> None:
        """Begins anew."""
        self._found.clear()
        self._members.clear()
        self._due.clear()


def proposed(agreements: Agreements, fields: Mapping[str, Any]) -> Any:
    """Keeps what workers are to agree on, unless it was told before, and tells that.

    **Arguments:** `fields`: of the request. **Raises:** `ArgumentError` for what is no such thing.
    """
    about, step, value = fields["about"], int(fields["step"]), fields["value"]
    numbers = value if about == "members" else [value]
    if (
        about not in ("members", "end", "recovery")
        or not isinstance(numbers, list)
        or any(type(one) is not int for one in numbers)
    ):
        raise ArgumentError(
            f"workers would agree on {about}={value!r}: expected members, a list of ranks, an end, or a recovery"
        )
    return packed("agreed", {"value": agreements.propose(about, step, value)})


def sums_of_rows(given: Given) -> dict[str, NDArray[Any]]:
    """Returns the sums over gradients of rows that have room, by numbers of tables and sums.

    **Raises:** `ArgumentError` where a table has no room, and then nothing has moved.
    """
    moving = [(shard, shard.admitted(ids, gradients)) for shard, ids, gradients in given]
    pairs = [(number, shard.sums(gradients)) for number, (shard, gradients) in enumerate(moving)]
    return {f"{number}/{at}": one for number, sums in pairs for at, one in enumerate(sums)}


def sums_of_all(update: Update, dense: DensePart) -> dict[str, NDArray[Any]]:
    """Returns sums over the mean of the gradients of an update, and the parts that this server has."""
    if update.sums is None:
        *gradients, loss = update.mean_of_dense()
        parts = {f"part/{at}": one for at, one in enumerate(dense.parts(gradients, loss))}
        update.sums = {**sums_of_rows(update.mean()), **parts}
    return update.sums


def moved_whole(dense: DensePart, update: Update, given: Given) -> Sequence[list[NDArray[Any]]]:
    """Moves what a server has whole. **Arguments:** `given`: the mean for tables.

    **Returns:** for each table the numbers by which its rows move.
    """
    *gradients, loss = update.mean_of_dense()
    if update.members is None:
        rows = {shard.form.name: (shard, gradients) for shard, _, gradients in given}
        found = [rows[name][0].sums(rows[name][1]) for name in dense.form.sums]
        totals = [one for some in found for one in some]
    else:
        totals = next(iter(update.told.values()))[0]
    numbers = dense.move(gradients, loss, totals)
    return [numbers.get(shard.form.name, []) for shard, _, _ in given]
