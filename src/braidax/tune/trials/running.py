"""Trials of a training: two settings take turns, on steps, loaders and checkpointers of their own."""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, final

import jax

from braidax.checkpoint import Saver
from braidax.data import DataLoader
from braidax.errors import ArgumentError
from braidax.tune.trials.climbing import Climb, Setting, climb

_WARM_UP_STEPS = 6  # that compile, and fill what is prefetched
_STEPS_AHEAD = 2


@dataclass(frozen=True)
class Course:
    """What one setting trains with.

    **Fields:** `step`: from `parallelize`. `state`: to begin with, which is donated. `loader`: that does not end before
    the trials do, `epochs=None`. `saver`: if checkpoints are part of what is tried; in a folder of its own.
    """

    step: Any
    state: Any
    loader: DataLoader
    saver: Saver | None = None


def try_settings(
    make: Callable[[Setting], AbstractContextManager[Course]],
    space: Mapping[str, Sequence[Any]],
    *,
    start: Setting,
    max_trials: int = 12,
    num_steps: int = 32,
) -> Climb:
    """Trains a few steps with each of a few settings, and returns which one is fastest; for knobs that need a rebuild.

    The best setting and another one are open at a time, and take turns: best, other, other, best.

    **Arguments:** `make`: opens what a setting trains with, closed at the end of its `with` block. `space`, `start`,
    `max_trials`: as of `climb`. `num_steps`: that each of the two is measured for, 16 or more, in two turns.

    **Raises:** as `climb`, and what `make` or a step raises that is no `BraidaxError`.
    """
    if num_steps < 16:
        raise ArgumentError(f"num_steps={num_steps}: expected 16 or more, so that steps can be compared")
    with contextlib.closing(_Runs(make, num_steps // 2)) as runs:
        return climb(space, runs.duel, start=start, max_trials=max_trials)


@final
class _Runs:
    """The settings that are open: the best one, and for the time of a duel another."""

    def __init__(self, make: Callable[[Setting], AbstractContextManager[Course]], num_steps: int) -> None:
        self._make, self._num_steps = make, num_steps
        self._best: tuple[Setting, _Run] | None = None
        self._other: tuple[Setting, _Run] | None = None

    def duel(self, best: Setting, other: Setting) -> tuple[list[float], list[float]]:
        """As of `Duel`."""
        self._keep(best)
        if self._best is None:
            self._best = best, _Run(self._make(best))
        self._other = other, _Run(self._make(other))
        champion, challenger = self._best[1], self._other[1]
        turns = [run.steps(self._num_steps) for run in (champion, challenger, challenger, champion)]
        return turns[0] + turns[3], turns[1] + turns[2]

    def close(self) -> None:
        """Closes what is open."""
        for pair in (self._best, self._other):
            if pair is not None:
                pair[1].close()
        self._best = self._other = None

    def _keep(self, best: Setting) -> None:
        """Closes what lost."""
        if self._other is not None:
            winner, loser = (self._other, self._best) if self._other[0] == best else (self._best, self._other)
            self._best, self._other = winner, None
            if loser is not None:
                loser[1].close()


@final
class _Run:
    """One setting, under way."""

    def __init__(self, opened: AbstractContextManager[Course]) -> None:
        with ExitStack() as stack:
            self._course = stack.enter_context(opened)
            self._state = self._course.state
            self._batches: Iterator[Any] = iter(self._course.loader)
            self.steps(_WARM_UP_STEPS)
            self._stack = stack.pop_all()

    def steps(self, num_steps: int) -> list[float]:
        """Trains, at most two steps ahead of the devices, and returns the seconds of each step."""
        step, saver = self._course.step, self._course.saver
        pending, ends = deque[Any](), [time.perf_counter()]
        for _ in range(num_steps):
            before_apply = None if saver is None else saver.wait
            self._state, metrics = step.update(self._state, next(self._batches), before_apply=before_apply)
            if saver is not None:
                saver.update(self._state)
            pending.append(metrics)
            if len(pending) > _STEPS_AHEAD:
                ends.append(_ended(pending.popleft()))
        ends += [_ended(metrics) for metrics in pending]
        jax.block_until_ready(self._state)
        ends[-1] = time.perf_counter()
        return [end - begun for begun, end in itertools.pairwise(ends)]

    def close(self) -> None:
        """Ends the batches, and what was opened."""
        del self._batches, self._state
        self._stack.close()


def _ended(metrics: Any) -> float:
    jax.block_until_ready(metrics)
    return time.perf_counter()
