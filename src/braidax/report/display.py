"""What a person sees of a run: one line that is redrawn, or a plain line now and then."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping

from braidax.report.pace import Done, Pace, RunLength

_RECENT_STEPS = 50


class Words:
    """Puts steps into words; rates are over the latest steps, so that they follow a change."""

    def __init__(self, length: RunLength, first_step: int) -> None:
        self.length = length
        self._first_step = first_step
        self._recent: deque[Pace] = deque(maxlen=_RECENT_STEPS)

    def begun(self) -> str:
        """Says where the session begins, if that is not at the first step."""
        if self.length.num_steps is not None and self._first_step >= self.length.num_steps:
            if self._first_step > self.length.num_steps:
                return f"this run has gone further: it is at step {self._first_step}, of {self.length.num_steps}"
            return f"this run is over: it ended with step {self._first_step}"
        return f"going on after step {self._first_step}" if self._first_step else ""

    def step(self, done: Done) -> str:
        """Says what a step did, how fast steps are, and how long the rest takes."""
        # The first step compiles: its time says nothing about the rest.
        if done.step == self._first_step + 2:
            self._recent.clear()
        self._recent.append(done.pace)
        pace = sum(self._recent, Pace())
        epochs, num_steps = self.length.epochs, self.length.num_steps
        step = f"step {done.step}" if num_steps is None else f"step {done.step}/{num_steps}"
        epoch = f"epoch {done.epoch + 1}" if epochs is None else f"epoch {done.epoch + 1}/{epochs}"
        metrics = sorted(done.metrics.items(), key=lambda metric: metric[0] != "loss")
        words = [step, epoch, *(f"{name} {value:.4g}" for name, value in metrics)]
        if done.step == self._first_step + 1:
            return "  ".join([*words, f"first step {pace.step_seconds:.1f} s, compiling included"])
        words += [f"{pace.samples_per_second:,.0f} samples/s", f"stall {pace.stall_percent:.1f} %"]
        if num_steps is not None:
            words.append(f"ETA {_duration((num_steps - done.step) * pace.seconds / len(self._recent))}")
        return "  ".join(words)

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> str:
        """Says values that were found after an epoch."""
        return "  ".join([f"epoch {epoch + 1} done", *(f"{name} {value:.4g}" for name, value in values.items())])


class PlainLines:
    """A line for the first and the last step, and between them when enough time has passed."""

    def __init__(self, words: Words, every_seconds: float) -> None:
        self._words = words
        self._output = sys.stdout
        self._every_seconds = every_seconds
        self._written = -math.inf
        if words.begun():
            self._print(words.begun())

    def step(self, done: Done) -> None:
        """Writes a step, if it is time."""
        line = self._words.step(done)
        now = time.monotonic()
        if now - self._written >= self._every_seconds or done.step == self._words.length.num_steps:
            self._written = now
            self._print(line)

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Writes values."""
        self._print(self._words.note(step, epoch, values))

    def say(self, line: str) -> None:
        """Writes a line."""
        self._print(line)

    def close(self) -> None:
        """Hands over what is written."""
        self._output.flush()

    def _print(self, line: str) -> None:
        self._output.write(line + "\n")
        self._output.flush()


class Line:
    """One line with a bar, redrawn in place; notes scroll by above it."""

    def __init__(self, words: Words) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._words = words
        text = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
        self._bar = Progress(BarColumn(bar_width=12), text, console=Console())
        self._task = self._bar.add_task("the first step compiles", total=words.length.num_steps)
        self._bar.start()
        if words.begun():
            self._bar.console.print(words.begun(), markup=False, highlight=False)

    def step(self, done: Done) -> None:
        """Draws the line anew."""
        self._bar.update(self._task, completed=done.step, description=self._words.step(done))

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Writes values above the line."""
        self._bar.console.print(self._words.note(step, epoch, values), markup=False, highlight=False)

    def say(self, line: str) -> None:
        """Writes a line above the one that is redrawn."""
        self._bar.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        """Leaves the line as it is."""
        self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
