"""Questions to the servers of all parts of the tables, of which some may be lost."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, final

from braidax.errors import PeerLost
from braidax.spans import span

from .layouts.layout import Layout
from .meetings.joining import Joined
from .meetings.replacing import Replacing
from .wire import Message, packed, unpacked

_log = logging.getLogger("braidax")
_NOTICED_SECONDS = 10.0


@final
class Asking:
    """Asks servers, from any thread, until closed.

    **Arguments:** `joined`: their world. `copies`: of each part. `spares`: how many servers, the last ones, have none.
    `why_not`: as of `Replacing`.

    **Fields:** `num_ranks`: servers, spare ones included. `layout`: which of them have which parts.
    """

    def __init__(self, joined: Joined, copies: int, spares: int = 0, why_not: str = "") -> None:
        self._world, self._joined, self._run = joined.world, joined, joined.meeting.job
        self._replacing = Replacing(joined.meeting, why_not or joined.why_not)
        self.num_ranks, self._lost = joined.meeting.num_servers, set[int]()
        self.adopt(Layout((*range(self.num_ranks - spares),), copies))
        # A pull that waits for updates of others holds no push up.
        self._pool = ThreadPoolExecutor(2 * self.num_ranks * copies, thread_name_prefix="braidax-ask")

    def packed(
        self, kind: str, part: int, fields: Mapping[str, Any], arrays: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Returns a question about a part."""
        return packed(kind, {"parts": self.layout.num_parts, **fields, "run": self._run, "part": part}, arrays)

    def ask_all(self, question: Callable[[int], list[Any]], *, of: Literal["one", "all"] = "one") -> list[Message]:
        """Asks the servers of all parts at once.

        **Arguments:** `question`: for a part. `of`: whether one of those who have it is asked, or all.

        **Returns:** an answer for each part. **Raises:** `PeerLost` where all who have a part are gone; what the first
        of them raises that fails, in their order.
        """
        if of == "one":
            with span("comm", "ask servers"):
                others = [self._pool.submit(self._ask_one, question, part) for part in range(1, self.layout.num_parts)]
                return [self._ask_one(question, 0), *(one.result() for one in others)]
        return [some[0] for some in self.ask_every(question)]

    def ask_every(self, question: Callable[[int], list[Any]]) -> list[list[Message]]:
        """Asks all servers that have parts at once.

        **Returns:** for each part the answers of those who have it and are there. **Raises:** as `ask_all`.
        """
        with span("comm", "ask all servers"):
            asked = [
                [self._pool.submit(self._ask, server, part, question) for server in self._holders(part)]
                for part in range(self.layout.num_parts)
            ]
            found: list[list[Message]] = []
            for part, some in enumerate(asked):
                answers = [one.result() for one in some]
                self._first(part, answers)
                found.append([answer for answer in answers if isinstance(answer, Message)])
            return found

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
        every = self._having[part]
        return [server for server in every if server not in self._lost] or every

    def _ask(self, server: int, part: int, question: Callable[[int], list[Any]]) -> Message | PeerLost:
        return self.ask(server, question(part))

    def ask(self, server: int, question: list[Any]) -> Message | PeerLost:
        """Returns the answer of a server, or that it is lost."""
        try:
            return unpacked(self._world.ask(server, question))
        except PeerLost as error:
            has_copies = self.layout.copies > 1 and server in self.layout.ranks
            if server not in self._lost and has_copies:
                _log.warning(
                    "server %d of %d is lost (%s); training goes on with the copies of what it had",
                    server,
                    self.num_ranks,
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
            num, rank = self.layout.copies, self.layout.ranks[part]
            copies = "its only copy" if num == 1 else f"all {num} copies"
            why = (
                f"lost servers were not replaced before: {self._replacing.why_not}; " if self._replacing.why_not else ""
            )
            raise PeerLost(
                f"server {rank} of {self.num_ranks} is lost, and {copies} of what it had of the tables: {last}; {why}"
                f"begin anew from the last checkpoint, with a gang that has all its ranks (gang.replace())",
                rank,
                last.host,
            ) from last
        return found

    # Which servers have what

    @property
    def having(self) -> list[list[int]]:
        """By part the servers that have it, without those that are known to be lost, unless all are."""
        return [self._holders(part) for part in range(self.layout.num_parts)]

    @property
    def spares(self) -> list[int]:
        """Servers that have no part."""
        return [rank for rank in range(self.num_ranks) if rank not in self.layout.ranks]

    @property
    def may_recover(self) -> bool:
        """Whether others may take the place of a server that is lost."""
        return self.layout.copies > 1

    def lost(self) -> list[int]:
        """Returns the servers that are known to be lost."""
        return sorted(self._lost | {rank for rank in self._world.lost if rank < self.num_ranks})

    def wanted(self) -> list[tuple[int, int]]:
        """Returns which servers are lost that have parts, and which one is to take the place of each: a spare one, or,
        where there is none and another process has come, the same. Where none has, it asks for one."""
        if any(rank >= self.num_ranks for rank in self._world.lost):  # who trains: not all can meet again
            return []
        lost = self.lost()
        if any({*ranks} <= {*lost} for ranks in self.layout.having):  # nobody has what others would copy
            return []
        of_parts = [rank for rank in lost if rank in self.layout.ranks]
        spares = [spare for spare in self.spares if spare not in lost]
        pairs = [*zip(of_parts, spares, strict=False)]
        if (others := of_parts[len(pairs) :]) and self._replacing.have_come(lost):
            pairs += [(rank, rank) for rank in others]
        return pairs

    def call(self) -> int:
        """Calls all servers, those that have come in place of lost ones included, to meet again.

        **Returns:** the generation, for `World.move`. **Raises:** as `TcpStore`.
        """
        lost = self.lost()
        generation = self._replacing.call(lost)
        for rank in range(self.num_ranks):
            if rank not in lost:
                self.ask(rank, packed("meet", {"generation": generation}))
        return generation

    def found(self, ranks: Collection[int]) -> None:
        """Notes that servers that were lost are there, and have their parts, or none."""
        self._lost.difference_update(ranks)

    def adopt(self, layout: Layout) -> None:
        """Asks the servers of another layout from now on."""
        self.layout, self._having = layout, layout.having

    def close(self) -> None:
        """Leaves the world. A second call does nothing."""
        self._pool.shutdown()
        self._replacing.close()
        self._world.close()
        self._let_gang_notice()
        if self._joined.kept is not None:
            self._joined.kept.close()

    def _let_gang_notice(self) -> None:
        """Returns when the gang has seen all losses that messages told of first: `Gang.replace` brings back what it
        knows to be lost, and another run on the rest would wait for ranks that never come."""
        deadline, owner = time.monotonic() + _NOTICED_SECONDS, self._joined.owner
        while owner is not None and not owner.knows(self._lost) and time.monotonic() < deadline:
            time.sleep(0.01)
