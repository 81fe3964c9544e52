"""What a study measures: settings, in blocks of random order, so many steps each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from braidax.errors import ArgumentError

from .factors import FACTORS, PAIRS, Factor, Levels, Setting, Sweep, crossed, sweep

_LEAST_WARM_STEPS = 4


@dataclass(frozen=True)
class Length:
    """Of a run. **Fields:** `num_warm`: steps before those that count. `num_counted`: those that do."""

    num_warm: int
    num_counted: int


@dataclass(frozen=True)
class Design:
    """All that a study measures.

    **Fields:** `pairs`: experiments by name. `levels`: how coarse factors are that are on. `sweeps`: of single factors.
    `num_blocks`: how often each setting is run. `num_steps`: that count of each run, at least. `seed`: of the order.

    **Raises:** `ArgumentError` for an experiment that is none, and for no blocks or steps.
    """

    pairs: tuple[str, ...] = tuple(PAIRS)
    levels: Levels = field(default_factory=Levels)
    sweeps: tuple[Sweep, ...] = ()
    num_blocks: int = 8
    num_steps: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        if strange := [name for name in self.pairs if name not in PAIRS]:
            raise ArgumentError(f"pairs has {strange}: expected some of {', '.join(PAIRS)}")
        for name in ("num_blocks", "num_steps"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)}: expected 1 or more")

    @property
    def factors(self) -> tuple[Factor, ...]:
        """What any of its experiments switches."""
        return tuple(one for one in FACTORS if any(one in PAIRS[name] for name in self.pairs))

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All that is measured, each once."""
        found = [one for name in self.pairs for one in crossed(self.levels, PAIRS[name])]
        found += [one for each in self.sweeps for one in each.settings]
        return tuple(dict.fromkeys(found))

    def order(self) -> tuple[tuple[int, Setting], ...]:
        """Returns the runs in order, each with its block.

        Every block has each setting once, in random order, and every second one goes back the way of the one before
        (ABBA): what drifts evenly, such as a machine that grows warm, is the same for all.
        """
        found: list[tuple[int, Setting]] = []
        settings = self.settings
        for block in range(self.num_blocks):
            order = np.random.default_rng([self.seed, block // 2]).permutation(len(settings))
            found += [(block, settings[at]) for at in (order if block % 2 == 0 else order[::-1])]
        return tuple(found)

    def length(self, setting: Setting) -> Length:
        """Returns how long a run is: it begins to count where a checkpoint is due, and has as many whole intervals."""
        every = setting.checkpoint_every or 1
        return Length(every * -(-_LEAST_WARM_STEPS // every), every * -(-self.num_steps // every))


def sweeps_of(
    levels: Levels, factors: Sequence[Factor], *, quick: bool, most_microbatches: int = 8
) -> tuple[Sweep, ...]:
    """Returns the sweeps of a study: each factor with all others off and, in a long one, with all others on.

    **Arguments:** `quick`: fewer, that need no programs of their own. `most_microbatches`: of a batch.
    """
    values: dict[Factor, tuple[int, ...]] = {
        "prefetch": (1, 2, 4, 8),
        "checkpoint": (1, 2, 5, 10),
        "pipeline": tuple(count for count in (2, 4, 8) if count <= most_microbatches),
    }
    if quick:
        values = {"prefetch": (1, levels.prefetch), "checkpoint": (1, levels.checkpoint_every)}
    besides = ((),) if quick else ((), tuple(factors))
    return tuple(
        sweep(levels, factor, values[factor], beside) for factor in factors if factor in values for beside in besides
    )
