"""Questions to the servers of all parts of the tables, of which some may be lost."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, final

from braidax.errors import PeerLost

from .joining import Joined
from .wire import Message, packed, unpacked

_log = logging.getLogger("braidax")
_NOTICED_SECONDS = 10.0


@final
class Asking:
    """Asks servers, from any thread, until closed.

    **Arguments:** `joined`: their world. `copies`: of each part. `spares`: how many servers, the last ones, have none.

    **Fields:** `having`: by part the servers that have it.
    """

    def __init__(self, joined: Joined, copies: int, spares: int = 0) -> None:
        self._world, self._gang, self._run = joined.world, joined.gang, joined.meeting.job
        num_servers, self._copies, self._lost = joined.meeting.num_servers, copies, set[int]()
        self._num_servers = num_servers - spares  # that have a part
        self._spares = [*range(self._num_servers, num_servers)]
        self.having = [
            [(part + copy) % self._num_servers for copy in range(copies)] for part in range(self._num_servers)
        ]
        # A pull that waits for updates of others holds no push up.
        self._pool = ThreadPoolExecutor(2 * self._num_servers * copies, thread_name_prefix="braidax-ask")

    def packed(
        self, kind: str, part: int, fields: Mapping[str, Any], arrays: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Returns a question about a part."""
        return packed(kind, {**fields, "run": self._run, "part": part}, arrays)

    def ask_all(self, question: Callable[[int], list[Any]], *, of: Literal["one", "all"] = "one") -> list[Message]:
        """Asks the servers of all parts at once.

        **Arguments:** `question`: for a part. `of`: whether one of those who have it is asked, or all.

        **Returns:** an answer for each part. **Raises:** `PeerLost` where all who have a part are gone; what the first
        of them raises that fails, in their order.
        """
        if of == "one":
            others = [self._pool.submit(self._ask_one, question, part) for part in range(1, self._num_servers)]
            return [self._ask_one(question, 0), *(one.result() for one in others)]
        asked = [
            [self._pool.submit(self._ask, server, part, question) for server in self._holders(part)]
            for part in range(self._num_servers)
        ]
        return [self._first(part, [one.result() for one in some]) for part, some in enumerate(asked)]

    def _ask_one(self, question: Callable[[int], list[Any]], part: int) -> Message:
        """Asks whoever of those that have a part is there."""
        answers: list[Message | PeerLost] = []
        for server in self._holders(part):
            answers.append(self._ask(server, part, question))
            if isinstance(answers[-1], Message):
                break
        return self._first(part, answers)

    def _holders(self, part: int) -> list[int]:
        """Returns the servers that have a part, and are not known to be lost."""
        every = self.having[part]
        return [server for server in every if server not in self._lost] or every

    def _ask(self, server: int, part: int, question: Callable[[int], list[Any]]) -> Message | PeerLost:
        """Returns the answer of a server, or that it is lost."""
        try:
            return unpacked(self._world.ask(server, question(part)))
        except PeerLost as error:
            if server not in self._lost and self._copies > 1:
                _log.warning(
                    "server %d of %d is lost (%s); training goes on with the copies of what it had",
                    server,
                    self._num_servers,
                    error,
                )
            self._lost.add(server)
            return error

    def _first(self, part: int, answers: Sequence[Message | PeerLost]) -> Message:
        """Returns the first answer for a part. **Raises:** `PeerLost` where there is none."""
        found = next((answer for answer in answers if isinstance(answer, Message)), None)
        if found is None:
            last = answers[-1]
            assert isinstance(last, PeerLost), "somebody was asked"
            copies = "its only copy" if self._copies == 1 else f"all {self._copies} copies"
            raise PeerLost(
                f"server {part} of {self._num_servers} is lost, and {copies} of what it had of the tables: {last}; "
                f"begin anew from the last checkpoint, with a gang that has all its ranks (gang.replace())",
                part,
                last.host,
            ) from last
        return found

    # Servers in place of others

    def wanted(self) -> list[tuple[int, int]]:
        """Returns which servers are lost, and which spare one is to take the place of each."""
        spares = [spare for spare in self._spares if spare not in self._lost]
        lost = sorted(rank for rank in self._lost if any(rank in ranks for ranks in self.having))
        return [*zip(lost, spares, strict=False)]

    def fill(self, lost: int, spare: int, question: Callable[[int], list[Any]]) -> None:
        """Brings what one had that is lost to a spare server. **Arguments:** `question`: makes room for a part.

        **Raises:** `PeerLost` where nobody else has it, or the spare one is lost, too.
        """
        for part in (part for part, ranks in enumerate(self.having) if lost in ranks):
            source = next((rank for rank in self._holders(part) if rank not in self._lost), lost)
            self._first(part, [self._ask(spare, part, question)])
            filled = self.packed("fill", part, {"source": source})
            self._first(part, [self._ask(spare, part, lambda _, filled=filled: filled)])

    def replace(self, lost: int, spare: int) -> None:
        """Asks a spare server from now on in place of one that is lost."""
        self._spares.remove(spare)
        self.having = [[spare if rank == lost else rank for rank in ranks] for ranks in self.having]

    def close(self) -> None:
        """Leaves the world. A second call does nothing."""
        self._pool.shutdown()
        self._world.close()
        self._let_gang_notice()

    def _let_gang_notice(self) -> None:
        """Returns when the gang has seen all losses that messages told of first: `Gang.replace` brings back what it
        knows to be lost, and another run on the rest would wait for ranks that never come."""
        deadline = time.monotonic() + _NOTICED_SECONDS
        while self._gang is not None and not self._lost <= {*self._gang.lost} and time.monotonic() < deadline:
            time.sleep(0.01)
