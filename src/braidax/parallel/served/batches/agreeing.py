"""Whose gradients an update takes, where workers may have been told different ones."""

from collections.abc import Generator, Sequence

from braidax.errors import PeerLost
from braidax.parallel.served.asking import Asking


def agreeing(ranks: Sequence[int], members: list[int]) -> Generator[tuple[int, list[int]], list[int] | None, list[int]]:
    """Asks all servers, one after the other, to keep what a worker proposes; each keeps the first that it is told, and
    tells that. The worker goes on with what it was told.

    All workers that come to the end have the same, whichever servers are lost meanwhile, if one of them is not: who has
    come to the end has told every server that is still there, and who comes behind is told that by the first one.

    **Arguments:** `ranks`: of servers, in the order that all workers have. `members`: that this one proposes.

    **Yields:** whom to ask, and to keep what; it is sent what was kept, or None of a server that is lost.

    **Returns:** whose gradients count.
    """
    for rank in ranks:
        kept = yield rank, members
        members = members if kept is None else kept
    return members


def agree(asking: Asking, step: int, members: list[int]) -> list[int]:
    """Returns whose gradients count, as `agreeing` does. **Arguments:** `step`: of the update."""
    ranks = asking.layout.ranks
    asks = agreeing(sorted(ranks), members)
    try:
        rank, told = next(asks)
        while True:
            answer = asking.ask(rank, asking.packed("agree", ranks.index(rank), {"step": step, "members": told}))
            rank, told = asks.send(None if isinstance(answer, PeerLost) else answer.fields["members"])
    except StopIteration as found:
        return found.value
