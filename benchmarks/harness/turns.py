"""Systems that take turns, so that a machine that drifts drifts for all of them."""

import math
import time
from collections.abc import Callable, Mapping


def take_turns(
    systems: Mapping[str, Callable[[], float]], *, rounds: int, longest_seconds: float = math.inf
) -> dict[str, list[float]]:
    """Runs every system once a round, so that a machine that drifts drifts for all; returns each one's figures.

    **Arguments:** `longest_seconds`: a system that takes longer for one figure is not run again after the second round.
    """
    figures: dict[str, list[float]] = {name: [] for name in systems}
    slow: set[str] = set()
    for number in range(rounds):
        order = list(systems) if number % 2 == 0 else list(systems)[::-1]
        for name in order:
            if number < 2 or name not in slow:
                start = time.perf_counter()
                figures[name].append(systems[name]())
                slow |= {name} if time.perf_counter() - start > longest_seconds else set()
    return figures
