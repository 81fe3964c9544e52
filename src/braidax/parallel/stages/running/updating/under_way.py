"""Updates in the midst of a batch, and which versions of the weights there are meanwhile."""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from braidax.parallel.stages.schedules import Operation, Schedule, Versions
from braidax.parallel.stages.schedules.versions import given_up

from .stage_update import Owned, StageUpdate


@final
class Updating:
    """What stages own while they update; the newest of it.

    **Arguments:** `owned`: by each stage; its memory is given up when no microbatch needs it. `updates`: of each.
    `before_update`: is called once, before the first update of this process.
    """

    def __init__(
        self,
        schedule: Schedule,
        versions: Versions,
        owned: Sequence[Owned],
        updates: Sequence[StageUpdate],
        before_update: Callable[[], object] | None,
    ) -> None:
        self._owned, self._updates, self._before = list(owned), updates, before_update
        self._given_up = given_up(schedule, versions.used)
        self._first = [one.params for one in owned]

    def update(self, stage: int, sums: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Makes the next version of a stage. **Returns:** its buffers, and sums of nothing."""
        if self._before is not None:
            self._before()
            self._before = None
        made = self._updates[stage](sums, self._owned[stage])
        self._owned[stage] = made.owned
        return made.buffers, made.sums

    def given_up(self, operation: Operation) -> tuple[int, ...]:
        """Returns which versions an operation was the last to need; gives up the arrays of the first one."""
        gone = self._given_up.get(operation, ())
        if 0 in gone:
            for array in self._first[operation.stage]:
                _give_up(array)
        return gone

    def finished(self) -> list[Owned]:
        """Returns what stages own in the end."""
        if self._before is not None:  # nothing of any stage is here
            self._before()
        return self._owned


def _give_up(array: jax.Array) -> None:
    """Deletes an array; what was dispatched before still reads it."""
    if not array.is_deleted() and array.addressable_shards:
        array.delete()
