"""Which ranks of a gang meet under which generation: a call that fails ends the generation of its ranks, and of nobody
else."""

from typing import final

from braidax.gang.calling.orders import Meeting

MAX_SUBSETS = 16
"""Subsets of a gang that keep their communicators between calls. Of more, the one that was called longest ago ends."""


@final
class Worlds:
    """The meetings of a gang's ranks, of all of them and of subsets. One thread uses it.

    **Arguments:** `job`: the name of the gang. `size`: the number of its ranks. `timeout_seconds`: how long ranks may
    take to meet.
    """

    def __init__(self, job: str, size: int, timeout_seconds: float) -> None:
        self._job = job
        self._all = tuple(range(size))
        self._timeout_seconds = timeout_seconds
        self._open: dict[tuple[int, ...], Meeting] = {}  # in the order of their last calls
        self._num_subsets = 0
        self.generation = -1

    def meeting(self, ranks: tuple[int, ...]) -> Meeting:
        """Returns where these ranks meet: where they did last, unless that is over."""
        meeting = self._open.pop(ranks, None)
        self._open[ranks] = meeting = self._next(ranks) if meeting is None else meeting
        subsets = [key for key in self._open if key != self._all]
        for key in subsets[: max(0, len(subsets) - MAX_SUBSETS)]:
            del self._open[key]
        return meeting

    def of(self, rank: int) -> frozenset[tuple[str, int]]:
        """Returns job and generation of all meetings of a rank that are not over."""
        return frozenset((each.job, each.generation) for ranks, each in self._open.items() if rank in ranks)

    def end(self, ranks: tuple[int, ...]) -> None:
        """Ends the generation of these ranks, as a group."""
        self._open.pop(ranks, None)

    def end_all(self) -> None:
        """Ends all generations."""
        self._open = {}

    def lose(self, rank: int) -> None:
        """Ends the generations of all groups that a rank was in."""
        self._open = {ranks: each for ranks, each in self._open.items() if rank not in ranks}

    def _next(self, ranks: tuple[int, ...]) -> Meeting:
        """Returns a meeting that nobody has come to: under the gang's next generation, for a subset under its own
        name."""
        if ranks == self._all:
            self.generation += 1
            return Meeting(self._job, self.generation, ranks, self._timeout_seconds)
        self._num_subsets += 1
        return Meeting(f"{self._job}.{self._num_subsets}", 0, ranks, self._timeout_seconds)
