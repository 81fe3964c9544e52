"""What a person sees of a run: the progress line, the metrics on disk, and the share of time spent waiting for data.

A report follows a loop from a thread of its own. Metrics stay on the devices until their step is done; only then are
they fetched, and the loop is never held up by it, except that it may not run more than a few steps ahead.
"""

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import jax
import numpy as np

from braidax.errors import ArgumentError, import_extra
from braidax.spans import Span, Trace

_STEPS_AHEAD = 2
_RECENT_STEPS = 50


@dataclass(frozen=True)
class RunLength:
    """How long a run is: `steps_per_epoch`, `epochs` (`None` without end) and `batch_size` in samples."""

    steps_per_epoch: int
    epochs: int | None
    batch_size: int

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run, or `None` if it has no end."""
        return None if self.epochs is None else self.steps_per_epoch * self.epochs


@dataclass(frozen=True)
class Pace:
    """How steps have spent their time; paces add up.

    `step_seconds` is the time that the devices worked and `stall_seconds` the time in which they had nothing to do
    because the batch was not there yet; `num_samples` is what was trained.
    """

    step_seconds: float = 0.0
    stall_seconds: float = 0.0
    num_samples: int = 0

    def __add__(self, other: "Pace") -> "Pace":
        return Pace(
            self.step_seconds + other.step_seconds,
            self.stall_seconds + other.stall_seconds,
            self.num_samples + other.num_samples,
        )

    @property
    def seconds(self) -> float:
        """Computing and waiting; evaluation between steps does not count."""
        return self.step_seconds + self.stall_seconds

    @property
    def samples_per_second(self) -> float:
        """Samples trained per second, 0 if there were none."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def stall_percent(self) -> float:
        """Share of the time in which the devices waited for data, in percent."""
        return 100 * self.stall_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class _Done:
    """One finished step: its number from 1, its epoch from 0, its metrics and its pace."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    pace: Pace


@runtime_checkable
class _Sink(Protocol):
    def step(self, done: _Done) -> None: ...
    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Report:
    """Follows a training loop: `with report.following(length, first_step):`, in it `waiting()` and `update(…)`.

    **Arguments:** `show`: `"line"` draws one progress line, `"plain"` writes a line now and then, `"nothing"` writes
    neither; `"auto"` is `"line"` on a terminal and `"plain"` elsewhere. `every_seconds`: the time between plain lines.
    `metrics`: a JSONL file, a line for each step and each
    evaluation; lines of steps that are about to be repeated are dropped. `tensorboard`: a folder for event files (needs
    the extra `tensorboard`). `trace`: gets a span on the lane `step` for each step.
    """

    def __init__(
        self,
        *,
        show: Literal["auto", "line", "plain", "nothing"] = "auto",
        every_seconds: float = 5.0,
        metrics: str | Path | None = None,
        tensorboard: str | Path | None = None,
        trace: Trace | None = None,
    ) -> None:
        if every_seconds < 0:
            raise ArgumentError(f"every_seconds={every_seconds!r} must be 0 (each step) or more seconds")
        self.trace = Trace() if trace is None else trace
        self._show = show
        self._every_seconds = every_seconds
        self._metrics = metrics
        self._tensorboard = tensorboard
        self.noted: dict[str, float] = {}
        self._pace = Pace()
        self._run: _Run | None = None

    @contextlib.contextmanager
    def following(self, length: RunLength, first_step: int) -> Generator[Self, None, None]:
        """Opens the files and the display, and closes them when the `with` block ends.

        **Arguments:** `length`: how long the run is. `first_step`: steps done before this session.

        **Raises:** whatever a computation raised that a step started, at the latest when the block ends.
        """
        sinks: list[_Sink] = []
        with contextlib.ExitStack() as stack:
            if self._metrics is not None:
                sinks.append(_Jsonl(Path(self._metrics), first_step))
                stack.callback(sinks[-1].close)
            if self._tensorboard is not None:
                sinks.append(_TensorBoard(Path(self._tensorboard), first_step))
                stack.callback(sinks[-1].close)
            if self._show != "nothing":
                sinks.append(self._display(length, first_step))
                stack.callback(sinks[-1].close)
            self._pace = self.pace
            self._run = _Run(length, first_step, sinks, self.trace)
            stack.callback(self._run.close)
            with self.trace.active():
                yield self

    @contextlib.contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Measures the `with` block, in which the loop asks the loader for its next batch, as waiting for data."""
        run = self._following()
        run.asked = time.perf_counter()
        yield
        run.arrived = time.perf_counter()

    def update(self, metrics: Any) -> None:
        """Takes the metrics of a step that was just started; waits only when the loop is more than two steps ahead.

        **Arguments:** `metrics`: a mapping of arrays, still being computed. Those that are not scalar are left out.
        """
        self._following().update(metrics)

    def note(self, values: Mapping[str, float]) -> None:
        """Shows and writes values that belong to no single step, such as a test accuracy, and keeps them in `noted`."""
        self.noted.update(values)
        self._following().note(values)

    @property
    def pace(self) -> Pace:
        """What all steps have added up to, without the first of each session, which compiles."""
        return self._pace if self._run is None else self._pace + self._run.pace

    def _following(self) -> "_Run":
        if self._run is None:
            raise ArgumentError("this report follows no run yet; use it inside `with report.following(length, step):`")
        return self._run

    def _display(self, length: RunLength, first_step: int) -> _Sink:
        words = _Words(length, first_step)
        if self._show == "line" or (self._show == "auto" and sys.stdout.isatty()):
            return _Line(words)
        return _PlainLines(words, self._every_seconds)


class _Run:
    """One session of a report, and the thread that waits for its steps to be done."""

    def __init__(self, length: RunLength, first_step: int, sinks: Sequence[_Sink], trace: Trace) -> None:
        self.step = first_step
        self.asked = self.arrived = time.perf_counter()
        self.pace = Pace()
        self._length = length
        self._sinks = sinks
        self._trace = trace
        self._first_step = first_step
        self._last_end = 0.0
        self._pending: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="braidax-report")

    def update(self, metrics: Any) -> None:
        self.step += 1
        self._submit(self._finish, self.step, self.asked, self.arrived, metrics)

    def note(self, values: Mapping[str, float]) -> None:
        self._submit(self._note, self.step, dict(values))

    def close(self) -> None:
        try:
            while self._pending:
                self._pending.popleft().result()
        finally:
            self._thread.shutdown()

    def _submit(self, work: Any, *args: Any) -> None:
        self._pending.append(self._thread.submit(work, *args))
        while len(self._pending) > _STEPS_AHEAD or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()

    def _finish(self, step: int, asked: float, arrived: float, metrics: Any) -> None:
        jax.block_until_ready(metrics)
        end = time.perf_counter()
        start = max(arrived, self._last_end)
        stalled = max(0.0, arrived - max(asked, self._last_end))
        self._last_end = end
        self._trace.record(Span("step", f"step {step}", "devices", start, end - start, 0))
        pace = Pace(end - start, stalled, self._length.batch_size)
        if step > self._first_step + 1:
            self.pace += pace
        done = _Done(step, (step - 1) // self._length.steps_per_epoch, _scalars(metrics), pace)
        for sink in self._sinks:
            sink.step(done)

    def _note(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.note(step, max(0, step - 1) // self._length.steps_per_epoch, values)


class _Jsonl:
    """A line of JSON per step and per note; a partial line that a crash has left is dropped."""

    def __init__(self, path: Path, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= first_step]
        beside = path.with_name(path.name + ".new")
        beside.write_text("".join(line + "\n" for line in kept))
        beside.replace(path)
        self._file = path.open("a")

    def step(self, done: _Done) -> None:
        self.note(done.step, done.epoch, {**done.metrics, **_rates(done.pace)})

    def close(self) -> None:
        self._file.close()

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        numbers = {name: _json_number(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "epoch": epoch, "time": time.time(), **numbers}) + "\n")
        self._file.flush()


class _TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        module = import_extra("tensorboardX", "tensorboard", purpose="writing TensorBoard event files")
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = module.SummaryWriter(str(folder), purge_step=first_step + 1)

    def step(self, done: _Done) -> None:
        self.note(done.step, done.epoch, {**done.metrics, **_rates(done.pace)})

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Words:
    """Puts steps into words; rates are over the latest steps, so that they follow a change."""

    def __init__(self, length: RunLength, first_step: int) -> None:
        self.length = length
        self._first_step = first_step
        self._recent: deque[Pace] = deque(maxlen=_RECENT_STEPS)

    def resumed(self) -> str:
        return f"going on after step {self._first_step}" if self._first_step else ""

    def step(self, done: _Done) -> str:
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
        return "  ".join([f"epoch {epoch + 1} done", *(f"{name} {value:.4g}" for name, value in values.items())])


class _PlainLines:
    """A line for the first and the last step, and between them when enough time has passed."""

    def __init__(self, words: _Words, every_seconds: float) -> None:
        self._words = words
        self._output = sys.stdout
        self._every_seconds = every_seconds
        self._written = -math.inf
        if words.resumed():
            self._print(words.resumed())

    def step(self, done: _Done) -> None:
        line = self._words.step(done)
        now = time.monotonic()
        if now - self._written >= self._every_seconds or done.step == self._words.length.num_steps:
            self._written = now
            self._print(line)

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._print(self._words.note(step, epoch, values))

    def close(self) -> None:
        self._output.flush()

    def _print(self, line: str) -> None:
        self._output.write(line + "\n")
        self._output.flush()


class _Line:
    """One line with a bar, redrawn in place; notes scroll by above it."""

    def __init__(self, words: _Words) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._words = words
        text = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
        self._bar = Progress(BarColumn(bar_width=12), text, console=Console())
        self._task = self._bar.add_task("the first step compiles", total=words.length.num_steps)
        self._bar.start()
        if words.resumed():
            self._bar.console.print(words.resumed(), markup=False, highlight=False)

    def step(self, done: _Done) -> None:
        self._bar.update(self._task, completed=done.step, description=self._words.step(done))

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._bar.console.print(self._words.note(step, epoch, values), markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def _scalars(metrics: Any) -> dict[str, float]:
    leaves = jax.tree_util.tree_leaves_with_path(metrics)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(np.asarray(leaf).reshape(()))
        for path, leaf in leaves
        if np.size(leaf) == 1
    }


def _rates(pace: Pace) -> dict[str, float]:
    return {"samples_per_second": pace.samples_per_second, "stall_percent": pace.stall_percent}


def _step_of(line: str) -> float:
    """Returns the step that a line of JSON tells about, or infinity if a crash has cut the line short."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return math.inf


def _json_number(value: float) -> float | str:
    """JSON knows neither NaN nor infinity: they are written as strings, which `float` reads back."""
    return value if math.isfinite(value) else str(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
