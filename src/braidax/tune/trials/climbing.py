"""Coordinate search over a grid of settings, with as few trials as that takes, on measurements that have noise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, final

from braidax.errors import ArgumentError, BraidaxError
from braidax.tune.control.comparing import ERRORS, LEAST_GAIN, Comparison, compare

Setting = Mapping[str, Any]
"""A value for each knob, by name."""

Duel = Callable[[Setting, Setting], tuple[Sequence[float], Sequence[float]]]
"""Returns the seconds of at least 8 steps with each of two settings, measured in turns."""


@dataclass(frozen=True)
class Trial:
    """One setting that was measured beside the best one until then.

    **Fields:** `setting`. `step_seconds`: the mean of its steps; None where it could not run. `found`: how much faster
    they are. `verdict`: `"kept"` or `"no better"`, or why it could not run.
    """

    setting: Setting
    step_seconds: float | None
    found: Comparison | None
    verdict: str

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.setting.items())
        measured = "" if self.step_seconds is None else f"{1e3 * self.step_seconds:.3g} ms a step, {self.found}: "
        return f"{told}: {measured}{self.verdict}"


@dataclass(frozen=True)
class Climb:
    """What trials have found.

    **Fields:** `best`: the setting whose steps were fastest beyond doubt. `trials`: all, in their order.
    """

    best: Setting
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.best.items())
        return "\n".join([*map(str, self.trials), f"best: {told}"])


def climb(space: Mapping[str, Sequence[Any]], duel: Duel, *, start: Setting, max_trials: int = 12) -> Climb:
    """Looks for the setting with the fastest steps: one knob at a time, a value up or down, on while that helps.

    Knobs take turns in the order of `space`, until each was tried on both sides without gain, or trials are used up. A
    setting replaces another where its steps are faster by more than 1 % and by twice the standard error. Trials that
    are left then look again at settings of which that may still be so, and take their earlier steps into account.

    **Arguments:** `space`: by knob the values that it may have, in order. `duel`: measures two settings beside each
    other, the best one and another; a `BraidaxError` that it raises says that the other one cannot run. `start`: where
    the search begins, a value of each knob. `max_trials`: how many settings are measured against the best one.

    **Raises:** `ArgumentError` for a start outside of the space.
    """
    _check(space, start, max_trials)
    search = _Search(space, duel, max_trials, {name: start[name] for name in space})
    names = list(space)
    num_fruitless, at = 0, 0
    while search.has_trials:
        if num_fruitless < len(names):
            helped = search.along(names[at % len(names)])
            at += 1
        elif (close := search.closest()) is not None:
            helped = search.look_again(close)
        else:
            break
        num_fruitless = 0 if helped else num_fruitless + 1
    return Climb(search.best, tuple(search.trials))


@dataclass
class _Contender:
    """A setting that was measured beside the best one, and is no better as far as that can be told.

    **Fields:** `best`, `own`: seconds of steps with either. `found`: how much faster `own` are.
    """

    setting: Setting
    best: list[float]
    own: list[float]
    found: Comparison

    @property
    def promise(self) -> float:
        """The gain that it may have at most, as far as that can be told."""
        return self.found.gain + ERRORS * self.found.error


@final
@dataclass
class _Search:
    space: Mapping[str, Sequence[Any]]
    duel: Duel
    max_trials: int
    best: Setting
    trials: list[Trial] = field(default_factory=list[Trial])
    seen: list[Setting] = field(default_factory=list[Setting])
    contenders: list[_Contender] = field(default_factory=list[_Contender])

    @property
    def has_trials(self) -> bool:
        return len(self.trials) < self.max_trials

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
        at = list(values).index(self.best[name]) + direction
        if not 0 <= at < len(values):
            return None
        setting = {**self.best, name: values[at]}
        return None if setting in self.seen else setting

    def closest(self) -> _Contender | None:
        """Returns the setting that may gain most, if one may gain what is worth it."""
        found = max(self.contenders, key=lambda one: one.promise, default=None)
        return found if found is not None and found.promise > LEAST_GAIN else None

    def look_again(self, contender: _Contender) -> bool:
        """Measures a setting once more. **Returns:** whether it is the best one now."""
        self.contenders.remove(contender)
        return self._try(contender.setting, contender.best, contender.own)

    def _try(self, setting: Setting, seconds_of_best: Sequence[float] = (), seconds: Sequence[float] = ()) -> bool:
        """Measures a setting. **Arguments:** `seconds_of_best`, `seconds`: of steps that were measured before."""
        self.seen += [self.best, setting]
        try:
            best, other = self.duel(self.best, setting)
        except BraidaxError as error:
            self.trials.append(Trial(setting, None, None, f"cannot run: {error}"))
            return False
        best, other = [*seconds_of_best, *best], [*seconds, *other]
        found = compare(best, other)
        helps = found.is_worth_it and found.is_beyond_noise
        self.trials.append(Trial(setting, fmean(other), found, "kept" if helps else "no better"))
        if helps:
            self.best, self.contenders = setting, []
        else:
            self.contenders.append(_Contender(setting, best, other, found))
        return helps


def _check(space: Mapping[str, Sequence[Any]], start: Setting, max_trials: int) -> None:
    for name, values in space.items():
        if name not in start or start[name] not in values:
            raise ArgumentError(
                f"start has {name}={start.get(name)!r}, which is none of {list(values)}: expected one of its values"
            )
    if max_trials < 1:
        raise ArgumentError(f"max_trials={max_trials}: expected how many settings to measure, 1 or more")
