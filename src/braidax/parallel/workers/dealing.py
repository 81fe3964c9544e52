"""Which server has which variables whole, for any number of servers, and how updates reach them."""

from collections.abc import Mapping, Sequence
from typing import final

from braidax.parallel.compute.work import Work
from braidax.parallel.plan.parameter_servers import ParameterServers
from braidax.parallel.served.batches.gathering import Gathering
from braidax.parallel.served.on_servers.dense import DenseForm
from braidax.parallel.served.programs import TableForm
from braidax.parallel.served.servers import Servers

from .border import Border
from .programs import ServerForms, server_forms


@final
class Dealt:
    """What each server has whole, where there are so many; it is found once for each number.

    **Arguments:** `work`, `border`: of workers. `num_ranks`: of the gang. **Raises:** as `server_forms`.
    """

    def __init__(self, work: Work, border: Border, num_ranks: int, strategy: ParameterServers) -> None:
        self._work, self._border, self._staleness = work, border, strategy.staleness
        self.num_ranks = num_ranks
        self._found: dict[int, ServerForms] = {}
        self.of(max(1, num_ranks - strategy.spares))

    def of(self, num_servers: int) -> ServerForms:
        """Returns what servers have whole. **Raises:** as `server_forms`."""
        if num_servers not in self._found:
            self._found[num_servers] = server_forms(self._work, self._border, num_servers, self._staleness)
        return self._found[num_servers]

    def forms(self, num_servers: int) -> Sequence[DenseForm]:
        """Returns it for each server."""
        return self.of(num_servers).forms


@final
class Dealing:
    """Lets another number of servers have what they have whole.

    **Arguments:** `servers`: of `dealt`. `tables`: forms by name. `wants_norm`: as of `Gathering`.

    **Fields:** `gathering`: takes updates in two rounds; None where as many servers as there are do not need that.
    """

    def __init__(self, servers: Servers, dealt: Dealt, tables: Mapping[str, TableForm], *, wants_norm: bool) -> None:
        self._servers, self._dealt = servers, dealt
        self._of_two_rounds = Gathering(servers, tables, wants_norm=wants_norm)
        self.gathering = self._gathers()

    def _gathers(self) -> Gathering | None:
        return self._of_two_rounds if self._dealt.of(self._servers.num_servers).gathers else None

    def resize(self, num_servers: int) -> None:
        """Lets so many servers have all variables. **Raises:** as `WorkerStep.resize`."""
        self._deal(num_servers)
        self._servers.resize(num_servers)
        self.gathering = self._gathers()

    def prepare_resize(self, num_servers: int) -> None:
        """Begins to copy what so many servers will have. **Raises:** as `WorkerStep.resize`."""
        self._deal(num_servers)
        self._servers.prepare_resize(num_servers)

    def _deal(self, num_servers: int) -> None:
        """Finds what so many servers will have, if there may be as many, before anything moves."""
        if type(num_servers) is int and 1 <= num_servers <= self._dealt.num_ranks:
            self._dealt.of(num_servers)
