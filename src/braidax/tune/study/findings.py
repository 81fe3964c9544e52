"""What the runs of a study say: times, effects, interactions, and verdicts with how sure they are."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.tune.attribution import LANES

from .design import Design
from .factors import FACTORS, PAIRS, Factor, Setting
from .predictions import Predicted, Spent, predict_interactions
from .runs import Run, Use
from .statistics import Estimate, Sign, contrast, estimate, interaction, mean_contrast, median, percent

_EFFECT: dict[Sign, str] = {"less": "pays", "more": "does not pay", "undecided": "undecided"}
_COST: dict[Sign, str] = {"less": "costs nothing", "more": "costs time", "undecided": "no cost shows"}
_CROSSED: dict[Sign, str] = {
    "less": "better together",
    "more": "in each other's way",
    "undecided": "undecided",
}
Held = Literal["held", "missed", "undecided"]
_WORSE: dict[Sign, str] = {"less": "refuted", "more": "confirmed", "undecided": "undecided"}


@dataclass(frozen=True)
class Timed:
    """A setting with its seconds a step. **Fields:** `label`: for people. `lanes`: the means of all blocks."""

    setting: Setting
    label: str
    seconds: Estimate
    lanes: Mapping[str, float]


@dataclass(frozen=True)
class Effect:
    """What a factor changes, in seconds a step: less is faster.

    **Fields:** `alone`: with all others off. `with_others`: with all others on that the study has. `on_average`: over
    all mixes of the others; both None where the study has not crossed all. `verdict`: of it alone. `names`: of the two
    settings that `alone` compares.
    """

    factor: Factor
    alone: Estimate
    with_others: Estimate | None
    on_average: Estimate | None
    verdict: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Crossed:
    """Two factors. **Fields:** `alone`: `T(ab) - T(a) - T(b) + T(nothing)`, in seconds a step. `on_average`: the same
    over all mixes of the others, where there are such. `names`: of the four settings, in that order. `predicted`:
    `alone`, from the last three of them. `held`: whether its sign is so; undecided where the interval holds 0."""

    factors: tuple[Factor, Factor]
    alone: Estimate
    on_average: Estimate | None
    verdict: str
    names: tuple[str, ...]
    predicted: Predicted
    held: Held


@dataclass(frozen=True)
class Hypothesis:
    """Whether all of an experiment's factors on are worse than the best single one.

    **Fields:** `pair`: the experiment. `best`: the factor that alone is fastest, by its median. `difference`: all on
    less the best one, in seconds a step. `percent`: of the best one. `names`: of the two settings.
    """

    pair: str
    best: Factor
    difference: Estimate
    percent: float
    verdict: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Findings:
    """All that a study has found."""

    timed: tuple[Timed, ...]
    effects: tuple[Effect, ...]
    crossed: tuple[Crossed, ...]
    hypotheses: tuple[Hypothesis, ...]

    def of(self, setting: Setting) -> Timed:
        """Returns what was measured of a setting."""
        return next(one for one in self.timed if one.setting == setting)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it, for JSON."""
        timed = [
            {
                "name": one.setting.name,
                "label": one.label,
                "setting": one.setting.to_dict(),
                "seconds": asdict(one.seconds),
                "lanes": dict(one.lanes),
                "trace": f"traces/{one.setting.name}.json.gz",
            }
            for one in self.timed
        ]
        rest = {name: [asdict(one) for one in getattr(self, name)] for name in ("effects", "crossed", "hypotheses")}
        return {"settings": timed, **rest}


def find(design: Design, runs: Sequence[Run]) -> Findings:
    """Returns what runs say: of the blocks that have all settings. **Raises:** `ArgumentError` where none has."""
    table = _Table(design, runs)
    levels, factors = design.levels, design.factors
    timed = tuple(Timed(one, label(one, design), estimate(table.of(one)), table.lanes(one)) for one in design.settings)
    is_full = {levels.setting(some) for some in _subsets(factors)} <= set(design.settings)
    effects = tuple(_effect(table, factor, factors, is_full=is_full) for factor in factors)
    pairs = [pair for pair in itertools.combinations(factors, 2) if levels.setting(pair) in design.settings]
    predicted = predict_interactions(table.spent(), {factor: table.spent(factor) for factor in factors})
    crossed = tuple(_crossed(table, pair, factors, predicted[pair], is_full=is_full) for pair in pairs)
    return Findings(timed, effects, crossed, tuple(_hypothesis(table, name) for name in design.pairs))


def label(setting: Setting, design: Design) -> str:
    """Returns a setting in words: the factors that are on, with how coarse they are where that is not the usual."""
    usual = design.levels.setting(setting.on)
    values = {
        "prefetch": (setting.prefetch, usual.prefetch),
        "checkpoint": (setting.checkpoint_every, usual.checkpoint_every),
        "sync": (setting.sync, usual.sync),
        "pipeline": (setting.microbatches, usual.microbatches),
    }
    return (
        " + ".join(
            factor if values[factor][0] == values[factor][1] else f"{factor} {values[factor][0]}"
            for factor in setting.on
        )
        or "nothing"
    )


class _Table:
    """Seconds by setting and block."""

    def __init__(self, design: Design, runs: Sequence[Run]) -> None:
        self.design = design
        found = {(run.setting, run.block): run for run in runs}
        blocks = [
            block for block in range(design.num_blocks) if all((setting, block) in found for setting in design.settings)
        ]
        if not blocks:
            raise ArgumentError(
                f"runs has {len(found)} runs, and no block with all {len(design.settings)} settings: run the study on"
            )
        self._runs = {setting: [found[setting, block] for block in blocks] for setting in design.settings}

    def of(self, setting: Setting) -> NDArray[np.float64]:
        return np.array([run.step_seconds for run in self._runs[setting]])

    def on(self, *factors: Factor) -> NDArray[np.float64]:
        return self.of(self.design.levels.setting(factors))

    def name(self, *factors: Factor) -> str:
        return self.design.levels.setting(factors).name

    def lanes(self, setting: Setting) -> dict[str, float]:
        runs = self._runs[setting]
        return {lane: float(np.mean([run.lanes[lane] for run in runs])) for lane in LANES}

    def spent(self, *factors: Factor) -> Spent:
        """Returns medians: a block that something else has slowed moves them no more than it does `of`."""
        runs = self._runs[self.design.levels.setting(factors)]
        lanes = {lane: median([run.lanes[lane] for run in runs]) for lane in LANES}
        uses = [run.use for run in runs if run.use is not None]
        if not uses:
            return Spent(lanes)
        return Spent(lanes, Use(*(median([getattr(use, one.name) for use in uses]) for one in fields(Use))))


def _subsets(factors: Sequence[Factor]) -> list[tuple[Factor, ...]]:
    return [some for count in range(len(factors) + 1) for some in itertools.combinations(factors, count)]


def _effect(table: _Table, factor: Factor, factors: Sequence[Factor], *, is_full: bool) -> Effect:
    others: list[Factor] = [one for one in factors if one != factor]
    alone = contrast([table.on(factor)], [table.on()])
    with_others = on_average = None
    if is_full and others:
        with_others = contrast([table.on(factor, *others)], [table.on(*others)])
        on_average = mean_contrast([(table.on(factor, *some), table.on(*some)) for some in _subsets(others)])
    words = _COST if factor == "checkpoint" else _EFFECT
    return Effect(factor, alone, with_others, on_average, words[alone.sign], (table.name(factor), table.name()))


def _crossed(
    table: _Table, pair: tuple[Factor, Factor], factors: Sequence[Factor], predicted: Predicted, *, is_full: bool
) -> Crossed:
    one, other = pair
    left: list[Factor] = [each for each in factors if each not in pair]
    alone = interaction(table.on(one, other), table.on(one), table.on(other), table.on())
    on_average = None
    rest = _subsets(left)
    if is_full and len(rest) > 1:
        plus = sum((table.on(one, other, *some) + table.on(*some) for some in rest), np.zeros(()))
        minus = sum((table.on(one, *some) + table.on(other, *some) for some in rest), np.zeros(()))
        on_average = estimate((plus - minus) / len(rest))
    names = (table.name(one, other), table.name(one), table.name(other), table.name())
    held: Held = "held" if predicted.sign == alone.sign else "missed"
    return Crossed(
        pair,
        alone,
        on_average,
        _CROSSED[alone.sign],
        names,
        predicted,
        "undecided" if alone.sign == "undecided" else held,
    )


def _hypothesis(table: _Table, pair: str) -> Hypothesis:
    factors: list[Factor] = [one for one in FACTORS if one in PAIRS[pair]]
    best = min(factors, key=lambda one: float(np.median(table.on(one))))
    difference = contrast([table.on(*factors)], [table.on(best)])
    share = percent(difference.value, float(np.median(table.on(best))))
    names = (table.name(*factors), table.name(best))
    return Hypothesis(pair, best, difference, share, _WORSE[difference.sign], names)
