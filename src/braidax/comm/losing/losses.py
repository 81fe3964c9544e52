"""`Losses`: what ends with a rank that is lost alone, and with a collective that fails alone."""

from collections.abc import Callable
from typing import Protocol, final

from braidax.comm.watch import Notice
from braidax.connections.world import World
from braidax.errors import Aborted, CommError, PeerLost


class Ending(Protocol):
    """What ends with the first of its ranks that is lost. **Fields:** `group`: its number. `ranks`: in the world."""

    group: int
    ranks: frozenset[int]

    def end_all(self, error: CommError) -> None:
        """Ends all that is waited for with an error."""
        ...


@final
class Losses:
    """What happens to another rank ends what the two have to do with each other. The owner calls it under its lock.

    **Arguments:** `world`: what is connected. `lose`: gives a rank up in the transport, see `Transport.lose`.

    **Fields:** `lost`: the ranks that are lost one by one, with the error of each. `domains`: of this rank's groups.
    """

    def __init__(self, world: World, lose: Callable[[int, CommError], None]) -> None:
        self.lost: dict[int, CommError] = {}
        self.domains: list[Ending] = []
        self._world = world
        self._lose = lose

    def end(self, notice: Notice) -> CommError:
        """Ends what a notice is about. **Returns:** the error that it ends with."""
        error = _error_of(notice, self._world)
        if notice.kind == "failed":
            for domain in self.domains:
                if domain.group == notice.group and notice.rank in domain.ranks:
                    domain.end_all(error)
            return error
        if notice.rank not in self.lost:
            self.lost[notice.rank] = error
            self._lose(notice.rank, error)
            for domain in self.domains:
                if notice.rank in domain.ranks:
                    domain.end_all(error)
        return self.lost[notice.rank]


def _error_of(notice: Notice, world: World) -> CommError:
    """Returns what the operations that end with a rank, or with its collective, fail with."""
    name = world.describe(notice.rank)
    if notice.kind == "failed":
        return Aborted(
            f"{name} ended the collectives of a group: {notice.reason}; they cannot go on, all else can: split the "
            "group beforehand where other collectives are to go on without it"
        )
    if notice.kind == "aborted":
        return Aborted(f"{name} ended its part: {notice.reason}; what others do without it goes on")
    return PeerLost(
        f"{name} is lost: {notice.reason}; what others do without it goes on", notice.rank, world.hosts[notice.rank]
    )
