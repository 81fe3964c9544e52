"""`Tuner`: turns the knobs of a loop while it runs, one at a time, and takes back what does not help."""

import contextlib
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, Self, final

import jax

from braidax.checkpoint import Checkpointer, Saver
from braidax.data import DataLoader
from braidax.errors import ArgumentError
from braidax.tune.control.comparing import Comparison, compare
from braidax.tune.control.diary import Diary, Entry
from braidax.tune.control.hot import hold_memory, loader_knobs
from braidax.tune.control.limits import Limits, Priority, limits_of
from braidax.tune.control.moves import Move, Moves
from braidax.tune.control.spacing import SpacingControl
from braidax.tune.control.windows import Measuring, Window, comparable

_WARM_UP_STEPS = 5  # that compile
_ERRORS = 4.0  # standard errors that a loss, or a drift, has to be above
_HOPELESS = 0.05  # a loss after which a trial ends at once
_MAX_ROUNDS = 3
_DRIFT = 0.15
_TURN_STEPS = 512  # of several processes one tries at a time


@final
class Tuner:
    """Turns knobs of a loop while it runs: `with tuner.owning(loader, saver):`, in it `stepped()` after each update.

    A move is tried in four windows of steps: before, after, after, before. It is kept if steps are faster by more than
    1 % and by twice the standard error; what did not help is taken back, and rests, each time twice as long. When
    steps have become 15 % faster or slower, everything may be tried again. How far apart checkpoints are follows from
    what they are measured to cost. While it owns a loader and a checkpointer, their own controllers are paused.

    Numbers that you have given stay: `Knobs(threads=…)`, `Knobs(prefetch=…)`, `Every(…)`.

    A loop that runs ahead of its devices without bound shows no times: `fit` runs two steps ahead.

    **Arguments:** `priority`: `"speed"`, `"balanced"` or `"safe"` (as of `PRIORITIES`), or `Limits` of your own.
    `diary`: a file that keeps what was tried and what became of it; a later session goes on with what it says.
    `clock`: returns seconds.

    **Raises:** `ArgumentError` for another word, and as `Diary`.
    """

    def __init__(
        self,
        priority: Priority | Limits = "balanced",
        *,
        diary: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits_of(priority)
        self.diary = Diary(diary)
        self._clock = clock
        self._loop: _Loop | None = None

    @contextlib.contextmanager
    def owning(self, loader: DataLoader, saver: Saver | None = None) -> Generator[Self, None, None]:
        """Owns the knobs of a loader, and of a `Checkpointer`, inside the `with` block; then they keep their values.

        **Raises:** `ArgumentError` when it owns others, and when one batch takes more memory than the limit.
        """
        if self._loop is not None:
            raise ArgumentError("this Tuner owns the knobs of a loop already: make another one")
        _check_memory(loader, self.limits)
        hold_memory(loader, self.limits.memory_bytes)
        was_paused, loader.depth.paused = loader.depth.paused, True
        self._loop = _Loop(self, loader, saver if isinstance(saver, Checkpointer) else None)
        try:
            yield self
        finally:
            self._loop.close()
            self._loop = None
            loader.depth.paused = was_paused

    def stepped(self) -> None:
        """Takes note that an update was dispatched, and now and then turns a knob; called once after every update."""
        if self._loop is None:
            raise ArgumentError("this Tuner owns no loop: call stepped inside `with tuner.owning(loader, saver):`")
        self._loop.stepped(self._clock())

    def pause(self) -> None:
        """Leaves out the step in progress: something else goes on, such as an evaluation."""
        if self._loop is not None:
            self._loop.last = None


@dataclass
class _Trial:
    """A move that is being tried, and the windows so far."""

    move: Move
    part: Literal["after", "before"]
    before: Window
    after: Window
    rounds: int = 0


@final
class _Loop:
    """What a tuner knows of one loop."""

    def __init__(self, tuner: Tuner, loader: DataLoader, saver: Checkpointer | None) -> None:
        self.last: float | None = None
        self._diary, self._loader, self._saver = tuner.diary, loader, saver
        self._spacing = None if saver is None else SpacingControl(saver, tuner.limits)
        knobs = loader_knobs(loader)
        self._num_steps = 0
        self._moves = Moves(knobs)
        self._trial: _Trial | None = None
        self._known: Window | None = None  # how steps are, since the last change
        self._num_drifted = 0
        left = tuner.diary.settings
        for knob in knobs:
            value, before = left.get(knob.name), knob.read()
            if value in knob.values and value != before:
                knob.write(int(value))
                self._write(knob.name, before, int(value), "taken over", "an earlier session left it so")
        self._measuring = Measuring(_WARM_UP_STEPS + loader.depth.prefetch)
        self._waited = self._wait_seconds

    def stepped(self, now: float) -> None:
        self._num_steps += 1
        last, self.last = self.last, now
        if last is None:
            return
        under_way = self._saver is not None and self._saver.is_under_way
        if not self._measuring.add(now - last, disturbed=under_way):
            self._waited = self._wait_seconds
        if self._measuring.is_full:
            window = self._measuring.window(self._wait_seconds - self._waited)
            self._measure(0)
            if self._have_moved_checkpoints():
                self._known = None
            elif self._trial is None:
                self._rested(window)
            else:
                self._tried(self._trial, window)

    def close(self) -> None:
        """Takes back what is being tried."""
        if self._trial is not None:
            self._trial.move.knob.write(self._trial.move.before)
            self._trial = None
        if self._spacing is not None:
            self._spacing.close()

    @property
    def _wait_seconds(self) -> float:
        return self._loader.stats().seconds["wait"]

    def _measure(self, settling_steps: int) -> None:
        self._measuring = Measuring(settling_steps)
        self._waited = self._wait_seconds

    def _have_moved_checkpoints(self) -> bool:
        """Decides how far apart they are, and returns whether that has changed; a trial then says nothing any more."""
        entry = None if self._spacing is None else self._spacing.decide(self._num_steps)
        if entry is None:
            return False
        self._diary.add(entry)
        if self._trial is not None:
            move, self._trial = self._trial.move, None
            self._turn(move, move.before)
            self._write(move.knob.name, move.before, move.after, "reverted", "checkpoints have moved meanwhile")
        return True

    def _rested(self, window: Window) -> None:
        """Decides after a window in which nothing was tried."""
        self._see_drift(window)
        turn = self._num_steps // _TURN_STEPS % jax.process_count()
        move = self._moves.propose(window) if turn == jax.process_index() else None
        if move is not None:
            self._trial = _Trial(move, "after", before=window, after=Window())
            self._turn(move, move.after)

    def _see_drift(self, window: Window) -> None:
        if self._known is None:
            self._known = window
            return
        found = compare(*comparable(self._known, window))
        self._num_drifted = self._num_drifted + 1 if abs(found.gain) > max(_DRIFT, _ERRORS * found.error) else 0
        if self._num_drifted >= 2:
            self._known, self._num_drifted = window, 0
            self._moves.forget()
            self._write("", None, None, "looked again", f"steps have become {found}")

    def _tried(self, trial: _Trial, window: Window) -> None:
        """Goes on with a trial after a window: after, after, before; then it decides."""
        if trial.part == "before":
            trial.before += window
            trial.rounds += 1
            self._decide(trial, compare(*comparable(trial.before, trial.after)))
            return
        is_second = bool(trial.after.seconds)
        trial.after += window
        found = compare(*comparable(trial.before, trial.after))
        if found.gain < -max(_HOPELESS, _ERRORS * found.error):
            self._end(trial, found, helped=False)
        elif is_second:
            trial.part = "before"
            self._turn(trial.move, trial.move.before)

    def _decide(self, trial: _Trial, found: Comparison) -> None:
        helped = found.is_worth_it and found.is_beyond_noise
        if found.is_worth_it and not helped and trial.rounds < _MAX_ROUNDS:
            trial.part = "after"
            self._turn(trial.move, trial.move.after)
            return
        self._end(trial, found, helped=helped)

    def _end(self, trial: _Trial, found: Comparison, *, helped: bool) -> None:
        move = trial.move
        self._trial = None
        self._moves.tell(move, helped=helped)
        self._turn(move, move.after if helped else move.before)
        if helped:
            self._known = None
        self._write(move.knob.name, move.before, move.after, "kept" if helped else "reverted", f"{found}; {move.why}")

    def _turn(self, move: Move, value: int) -> None:
        if move.knob.read() != value:
            move.knob.write(value)
            self._measure(move.knob.settling_steps())

    def _write(
        self,
        knob: str,
        before: float | None,
        after: float | None,
        verdict: Literal["kept", "reverted", "taken over", "looked again"],
        why: str,
    ) -> None:
        self._diary.add(Entry(self._num_steps, knob, before, after, verdict, why))


def _check_memory(loader: DataLoader, limits: Limits) -> None:
    batch = jax.tree.leaves(loader.source.batch_spec(loader.batch_size))
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in batch)
    if limits.memory_bytes is not None and num_bytes > limits.memory_bytes:
        raise ArgumentError(
            f"memory_bytes={limits.memory_bytes:,} cannot be kept: one batch of {loader.batch_size} samples takes "
            f"{num_bytes:,} bytes, which binds; expected that many at least, or a smaller batch_size"
        )
