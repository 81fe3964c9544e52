"""A system of processes that tell where they run."""

import os

from benchmarks.pipedream.group import Place


class Told:
    """What a process of a test is asked for."""

    def __init__(self, place: Place, word: str) -> None:
        self._told = f"{word} {place.rank} of {place.size} on {sorted(os.sched_getaffinity(0))}"

    def told(self) -> str:
        """Returns which process it is."""
        return self._told

    def fallen(self) -> None:
        """Raises."""
        raise ValueError("no stage\nat all")


def begin(place: Place, word: str) -> Told:
    """Makes one, but of a word that is none."""
    if not word:
        raise ValueError("no word")
    return Told(place, word)
