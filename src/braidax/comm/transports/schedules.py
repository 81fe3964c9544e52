"""What runs the schedules of collectives in the bindings in C."""

from collections.abc import Callable
from typing import final

from braidax.comm.transports.transport import Operation, disagreeing, of_another_length
from braidax.connections.world import World


@final
class BindingSchedules:
    """Runs schedules in a binding; see `Schedules`. **Arguments:** `make`: its `Schedule`. `run`: of its worker."""

    def __init__(self, make: Callable[..., object], run: Callable[..., Operation | None]) -> None:
        self._make = make
        self.run = run  # and no method that calls it: small collectives are counted in microseconds

    def compile(
        self, rows: bytes, sizes: tuple[int, int, int], num_tickets: int, operation: str, dtype: str
    ) -> object | None:
        """See `Schedules.compile`."""
        try:
            return self._make(rows, sizes, num_tickets, operation, dtype)
        except LookupError:
            return None


def disagree(
    world: World, operation: Operation, peer: int, theirs: bytes, ours: bytes, num_bytes: int, expected_bytes: int
) -> None:
    """Ends a run of a schedule in which a peer sent something else. **Arguments:** `theirs`, `ours`: the heads."""
    if theirs and theirs != ours:
        operation.fail(disagreeing(world, peer, theirs, ours))
    else:
        operation.fail(of_another_length(world, peer, num_bytes, expected_bytes))
