"""What workers agree on by their servers: whose gradients an update takes, and behind which update all of them end, or
let others take the place of servers that are lost."""

from collections.abc import Generator, Sequence
from typing import Any, Literal, final

from braidax.errors import PeerLost
from braidax.parallel.served.asking import Asking
from braidax.parallel.served.wire import Message

About = Literal["members", "end", "recovery"]
"""The ranks whose gradients the update of a step takes; the number of updates behind which all workers end, or let
others take the place of lost servers."""


def agreeing(ranks: Sequence[int], value: Any) -> Generator[tuple[int, Any], Any, Any]:
    """Asks all servers, one after the other, to keep what a worker proposes; each keeps the first that it is told, and
    tells that. The worker goes on with what it was told.

    All workers that come to the end have the same, whichever servers are lost meanwhile, if one of them is not: who has
    come to the end has told every server that is still there, and who comes behind is told that by the first one.

    **Arguments:** `ranks`: of servers, in the order that all workers have. `value`: that this one proposes.

    **Yields:** whom to ask, and to keep what; it is sent what was kept, or None of a server that is lost.

    **Returns:** what all have.
    """
    for rank in ranks:
        kept = yield rank, value
        value = value if kept is None else kept
    return value


@final
class Agreement:
    """What workers agree on by their servers. **Arguments:** `num_workers`: of all. `staleness`: as of `Servers`.

    **Fields:** `end`: behind how many updates all end, once one of them has asked for that, and this one has heard it.
    `recovery`: the same, of the last time that others take the place of lost servers.
    """

    def __init__(self, asking: Asking, num_workers: int, staleness: int | None) -> None:
        self._asking, self._num_workers, self._staleness = asking, num_workers, staleness
        self._begun = 0
        self.end: int | None = None
        self.recovery: int | None = None

    def members(self, step: int, members: list[int]) -> list[int]:
        """Returns whose gradients the update of a step takes, the same for all workers.

        While nobody is lost all were told the same, and nobody is asked; nor is anybody where an update is of one
        worker alone. **Arguments:** `members`: as this one knows.
        """
        if self._staleness is None or (len(members) == self._num_workers and not self._asking.lost()):
            return members
        return self._agreed("members", step, members)

    def begin(self, num_updates: int) -> None:
        """Goes on behind so many updates: what workers ended by before is over."""
        self._begun, self.end, self.recovery = num_updates, None, None

    def end_behind(self, num_updates: int, *, taken: int) -> None:
        """Lets all workers end behind so many updates, unless one of them has asked for another number before.

        **Arguments:** `taken`: how many updates this one has taken.
        """
        self.end = self._agreed("end", taken, num_updates)

    def recovers(self, taken: int, *, wants: Literal["now", "no"]) -> bool:
        """Returns whether others take the place of lost servers before the next update. One worker does that at once;
        of several who agree, as on an end, the first one wants it. Asynchronous ones do not.

        **Arguments:** `taken`: how many updates this one has taken. `wants`: whether this one wants it.
        """
        if self._num_workers == 1:
            return wants == "now"
        if self._staleness is not None and wants == "now" and (self.recovery is None or self.recovery < taken):
            self.recovery = self._agreed("recovery", taken, taken + self._staleness + 2)
        return self.recovery == taken

    def hear(self, answer: Message) -> None:
        """Takes note of what a server tells beside rows."""
        end = answer.fields["end"]
        if self.end is None and end is not None and end > self._begun:
            self.end = end
        if (recovery := answer.fields["recovery"]) is not None:
            self.recovery = max(recovery, -1 if self.recovery is None else self.recovery)

    def _agreed(self, about: About, step: int, value: Any) -> Any:
        ranks = self._asking.layout.ranks
        asks = agreeing(sorted(ranks), value)
        try:
            rank, told = next(asks)
            while True:
                fields = {"about": about, "step": step, "value": told}
                question = self._asking.packed("agree", ranks.index(rank), fields)
                answer = self._asking.ask(rank, question)
                rank, told = asks.send(None if isinstance(answer, PeerLost) else answer.fields["value"])
        except StopIteration as found:
            return found.value
