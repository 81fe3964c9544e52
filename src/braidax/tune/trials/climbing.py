"""Coordinate search over a grid of settings, with as few trials as that takes, on measurements that have noise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, final

from braidax.errors import ArgumentError, BraidaxError
from braidax.tune.control.comparing import Comparison, compare

Setting = Mapping[str, Any]
"""A value for each knob, by name."""

_LEAST_GAIN = 0.01
_ERRORS = 2.0  # standard errors that a gain has to be above


@dataclass(frozen=True)
class Trial:
    """One setting that was measured.

    **Fields:** `setting`. `seconds`: of its steps; empty where it could not run. `verdict`: `"start"`, `"kept"`, or
    `"no better"`; or why it could not run. `found`: compared with what was best until then.
    """

    setting: Setting
    seconds: tuple[float, ...]
    verdict: str
    found: Comparison | None = None

    @property
    def step_seconds(self) -> float:
        """The mean of its steps; infinite where it could not run."""
        return fmean(self.seconds) if self.seconds else float("inf")

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.setting.items())
        if not self.seconds:
            return f"{told}: {self.verdict}"
        gain = "" if self.found is None else f", {self.found}"
        return f"{told}: {1e3 * self.step_seconds:.3g} ms a step{gain}: {self.verdict}"


@dataclass(frozen=True)
class Climb:
    """What trials have found.

    **Fields:** `best`: the setting whose steps were fastest beyond doubt. `trials`: all, in their order.
    """

    best: Setting
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.trials))


def climb(
    space: Mapping[str, Sequence[Any]],
    measure: Callable[[Setting], Sequence[float]],
    *,
    start: Setting,
    max_trials: int = 12,
) -> Climb:
    """Looks for the setting with the fastest steps: one knob at a time, a value up or down, on while that helps.

    Knobs take turns in the order of `space`, until each was tried on both sides without gain, or trials are used up. A
    setting replaces another where its steps are faster by more than 1 % and by twice the standard error.

    **Arguments:** `space`: by knob the values that it may have, in order. `measure`: returns the seconds of at least 8
    steps with a setting; a `BraidaxError` that it raises says that the setting cannot run, and another one is tried.
    `start`: where the search begins, a value of each knob. `max_trials`: the start included.

    **Raises:** `ArgumentError` for a start outside of the space, and what `measure` raises for the start.
    """
    _check(space, start, max_trials)
    search = _Search(space, measure, max_trials)
    search.begin(start)
    names = list(space)
    num_fruitless, at = 0, 0
    while num_fruitless < len(names) and search.has_trials:
        helped = search.along(names[at % len(names)])
        num_fruitless = 0 if helped else num_fruitless + 1
        at += 1
    return Climb(search.best.setting, tuple(search.trials))


@final
@dataclass
class _Search:
    space: Mapping[str, Sequence[Any]]
    measure: Callable[[Setting], Sequence[float]]
    max_trials: int
    trials: list[Trial] = field(default_factory=list[Trial])
    best: Trial = field(init=False)

    @property
    def has_trials(self) -> bool:
        return len(self.trials) < self.max_trials

    def begin(self, start: Setting) -> None:
        self.best = Trial({name: start[name] for name in self.space}, tuple(self.measure(start)), "start")
        self.trials.append(self.best)

    def along(self, name: str) -> bool:
        """Moves one knob as far as that helps. **Returns:** whether it did."""
        helped = False
        for direction in (1, -1):
            while self.has_trials and (setting := self._beside(name, direction)) is not None:
                if not self._try(setting):
                    break
                helped = True
            if helped:
                break
        return helped

    def _beside(self, name: str, direction: int) -> Setting | None:
        """Returns the next setting in a direction; None at the end of the values, and where it was tried before."""
        values = self.space[name]
        at = list(values).index(self.best.setting[name]) + direction
        if not 0 <= at < len(values):
            return None
        setting = {**self.best.setting, name: values[at]}
        return None if any(trial.setting == setting for trial in self.trials) else setting

    def _try(self, setting: Setting) -> bool:
        try:
            seconds = tuple(self.measure(setting))
        except BraidaxError as error:
            self.trials.append(Trial(setting, (), f"cannot run: {error}"))
            return False
        found = compare(self.best.seconds, seconds)
        helps = found.gain > max(_LEAST_GAIN, _ERRORS * found.error)
        trial = Trial(setting, seconds, "kept" if helps else "no better", found)
        self.trials.append(trial)
        if helps:
            self.best = trial
        return helps


def _check(space: Mapping[str, Sequence[Any]], start: Setting, max_trials: int) -> None:
    for name, values in space.items():
        if name not in start or start[name] not in values:
            raise ArgumentError(
                f"start has {name}={start.get(name)!r}, which is none of {list(values)}: expected one of its values"
            )
    if max_trials < 1:
        raise ArgumentError(f"max_trials={max_trials}: expected how many settings to measure, 1 or more")
