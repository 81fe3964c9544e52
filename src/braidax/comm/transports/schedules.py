"""What runs the schedules of collectives in the bindings in C."""

from collections.abc import Callable
from typing import Any, final

import numpy as np

from braidax.comm.transports.transport import Operation, Repeats, disagreeing, of_another_length
from braidax.connections.world import World


@final
class BindingSchedules:
    """Runs schedules in a binding; see `Schedules`. **Arguments:** `binding`: the module. `worker`: of it."""

    def __init__(self, binding: Any, worker: Any) -> None:
        self._make: Callable[..., object] = binding.Schedule
        self._make_repeats: Callable[[Any], Repeats] = binding.Repeats
        # No methods that call them: small collectives are counted in microseconds.
        self.run: Callable[..., Operation | None] = worker.run
        self.repeat: Callable[..., Any] = worker.repeat

    def compile(
        self, rows: bytes, sizes: tuple[int, int, int], num_tickets: int, operation: str, dtype: str
    ) -> object | None:
        """See `Schedules.compile`."""
        try:
            return self._make(rows, sizes, num_tickets, operation, dtype)
        except LookupError:
            return None

    def repeats(self) -> Repeats:
        """See `Schedules.repeats`."""
        return self._make_repeats(np.empty)


def disagree(
    world: World, operation: Operation, peer: int, theirs: bytes, ours: bytes, num_bytes: int, expected_bytes: int
) -> None:
    """Ends a run of a schedule in which a peer sent something else. **Arguments:** `theirs`, `ours`: the heads."""
    if theirs and theirs != ours:
        operation.fail(disagreeing(world, peer, theirs, ours))
    else:
        operation.fail(of_another_length(world, peer, num_bytes, expected_bytes))
