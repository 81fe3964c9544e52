"""The best mix of a case, found in a few trials: settings take turns on a bench that stays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from braidax.tune.trials.climbing import Climb, climb
from braidax.tune.trials.climbing import Setting as Values

from .design import Design, Length
from .factors import Setting
from .runs import Run

SPACE: Mapping[str, Sequence[Any]] = {
    "prefetch": (0, 1, 2, 3, 4, 6, 8, 12),
    "sync": ("one piece", "overlapped"),
    "microbatches": (None, 2, 4, 8),
    "checkpoint_every": (5, 10, 15, 20),
}
"""The values that are tried, by field of `Setting`: 256 mixes, all of which lose 20 updates at most."""


def find_best_mix(
    measure: Callable[[Setting, Length], Run],
    space: Mapping[str, Sequence[Any]] = SPACE,
    *,
    start: Setting,
    num_steps: int = 30,
    max_trials: int = 12,
) -> Climb:
    """Looks for the mix with the fastest steps, one knob at a time, from where a run stands.

    **Arguments:** `measure`: what `open_bench` yields. `space`: values by field of `Setting`. `start`: a mix of these.
    `num_steps`: that each of two mixes is run for in a turn, of two. `max_trials`: as of `climb`.

    **Returns:** what trials found; `Setting(**found.best)` is the mix. **Raises:** as `climb`.
    """

    def duel(best: Values, other: Values) -> tuple[list[float], list[float]]:
        taken: dict[bool, list[float]] = {True: [], False: []}
        for is_best in (True, False, False, True):
            setting = Setting(**(best if is_best else other))
            length = Design(num_steps=num_steps).length(setting)
            taken[is_best] += measure(setting, length).steps
        return taken[True], taken[False]

    values = {name: getattr(start, name) for name in space}
    return climb(space, duel, start=values, max_trials=max_trials)
