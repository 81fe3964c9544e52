"""What a person sees of a run: the progress line, the metrics on disk, and the share of time spent waiting for data.

A report follows a loop from a thread of its own. Metrics stay on the devices until their step is done; only then are
they fetched, and the loop is never held up by it, except that it may not run more than a few steps ahead.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import jax
import numpy as np

from braidax.errors import ArgumentError
from braidax.report.display import Line, PlainLines, Words
from braidax.report.ends import Ends
from braidax.report.pace import Done, Logger, Pace, RunLength, Sink
from braidax.spans import Span, Trace

_STEPS_AHEAD = 2
_DEVICES = "devices"


class Report:
    """Follows a training loop: `with report.following(length, first_step):`, in it `waiting()` and `update(…)`.

    `updating`, `saving` and `evaluating` measure the rest of the loop: then its trace tells where a step's time goes.

    Of several processes of JAX the first one shows and writes. A run that is over already is shown as such, and nothing
    is written.

    **Arguments:** `show`: `"line"` draws one progress line, `"plain"` writes a line now and then, `"nothing"` writes
    neither; `"auto"` is `"line"` on a terminal and `"plain"` elsewhere. `every_seconds`: the time between plain lines.
    `metrics`: a JSONL file, to which a line is added for each step and each evaluation, and one with `resumed` where a
    session goes on: the last line of a step is the one that counts. `tensorboard`: a folder for event files (needs the
    extra `tensorboard`). `loggers`: functions such as the `log` of a run of wandb, each called with the values of a
    step and `step=`, on the report's thread; what one raises ends the loop, and who made it ends it. `trace`: gets a
    span on the lane `step` for each step, and under `fit` what the loader and the checkpointer do.
    """

    def __init__(
        self,
        *,
        show: Literal["auto", "line", "plain", "nothing"] = "auto",
        every_seconds: float = 5.0,
        metrics: str | Path | None = None,
        tensorboard: str | Path | None = None,
        loggers: Sequence[Logger] = (),
        trace: Trace | None = None,
    ) -> None:
        _check_loggers(loggers)
        if every_seconds < 0:
            raise ArgumentError(f"every_seconds={every_seconds!r} must be 0 (each step) or more seconds")
        self.trace = Trace() if trace is None else trace
        self.traces_all = trace is not None
        self._show = show
        self._every_seconds = every_seconds
        self._metrics = metrics
        self._tensorboard = tensorboard
        self._loggers = tuple(loggers)
        self.noted: dict[str, float] = {}
        self._pace = Pace()
        self._run: _Run | None = None

    @contextlib.contextmanager
    def following(self, length: RunLength, first_step: int) -> Generator[Self, None, None]:
        """Opens the files and the display, and closes them when the `with` block ends.

        **Arguments:** `length`: how long the run is. `first_step`: steps done before this session.

        **Raises:** whatever a computation raised that a step started, at the latest when the block ends.
        """
        with contextlib.ExitStack() as stack:
            sinks = list[Sink]()
            if jax.process_index() == 0:
                for sink in self._sinks(length, first_step):
                    sinks.append(sink)
                    stack.callback(sink.close)
            self._pace = self.pace
            self._run = _Run(length, first_step, sinks, self.trace)
            stack.callback(self._run.close)
            self._run.loop("begin", time.perf_counter())
            with self.trace.active():
                yield self

    @contextlib.contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Measures the `with` block, in which the loop asks the loader for its next batch, as waiting for data."""
        run = self._following()
        run.asked = time.perf_counter()
        yield
        run.arrived = time.perf_counter()
        run.loop("data wait", run.asked)

    @contextlib.contextmanager
    def updating(self, before_apply: Callable[[], object] | None = None) -> Generator[Callable[[], None], None, None]:
        """Measures the `with` block, in which the loop calls the step's `update`, as dispatch.

        Yields what to give `update` as `before_apply`: it notes that the gradients are dispatched, and calls the
        function that was given, whose time is that of snapshots (`saver.wait`).
        """
        run = self._following()
        begun = time.perf_counter()
        run.dispatched = run.updated = None

        def dispatched() -> None:
            run.dispatched = time.perf_counter()
            if before_apply is not None:
                before_apply()
                run.loop("snapshot stall", run.dispatched)

        yield dispatched
        run.updated = time.perf_counter()
        run.loop("dispatch", begun)

    @contextlib.contextmanager
    def saving(self) -> Generator[None, None, None]:
        """Measures the `with` block, in which the loop calls the saver's `update`, as time of snapshots."""
        with self._following().measuring("snapshot stall"):
            yield

    @contextlib.contextmanager
    def evaluating(self) -> Generator[None, None, None]:
        """Measures the `with` block, in which the loop evaluates, as time of no step."""
        with self._following().measuring("evaluation"):
            yield

    def update(self, metrics: Any, *, epoch: int, state: Any = None) -> None:
        """Takes the metrics of a step that was just started; waits only when the loop is more than two steps ahead.

        **Arguments:** `metrics`: a mapping of arrays, still being computed. Those that are not scalar are left out.
        `epoch`: of the step's batch, from 0. `state`: that the step returned, if its end is to be known: metrics are
        there before the optimizer is done. It may be donated to the next step. Learning rates that
        `optax.inject_hyperparams` keeps in it are metrics then, by the name `learning_rate`, unless there is one.
        """
        self._following().update(metrics, epoch, state)

    def note(self, values: Mapping[str, float]) -> None:
        """Shows and writes values that belong to no single step, such as a test accuracy, and keeps them in `noted`."""
        self.noted.update(values)
        self._following().note(values)

    def say(self, line: str) -> None:
        """Shows a line to who looks on; it is not written to the metrics."""
        self._following().say(line)

    @property
    def pace(self) -> Pace:
        """What all steps have added up to, without the first of each session, which compiles."""
        return self._pace if self._run is None else self._pace + self._run.pace

    def _following(self) -> "_Run":
        if self._run is None:
            raise ArgumentError("this report follows no run yet; use it inside `with report.following(length, step):`")
        return self._run

    def _sinks(self, length: RunLength, first_step: int) -> Generator[Sink, None, None]:
        """Opens who is told of the run: of one that is over nothing is written."""
        is_over = length.num_steps is not None and first_step >= length.num_steps
        if self._metrics is not None and not is_over:
            from braidax.report.metrics_file import MetricsFile

            yield MetricsFile(Path(self._metrics), first_step)
        if self._tensorboard is not None and not is_over:
            from braidax.report.tensorboard import TensorBoard

            yield TensorBoard(Path(self._tensorboard), first_step)
        if self._loggers and not is_over:
            from braidax.report.logged import Logged

            yield Logged(self._loggers)
        if self._show != "nothing":
            words = Words(length, first_step)
            on_terminal = self._show == "line" or (self._show == "auto" and sys.stdout.isatty())
            yield Line(words) if on_terminal and not is_over else PlainLines(words, self._every_seconds)


class _Times(NamedTuple):
    """When the loop asked for a batch, had it, had dispatched its gradients, and its update, if it tells."""

    asked: float
    arrived: float
    dispatched: float | None
    updated: float | None


class _Run:
    """One session of a report, and the thread that waits for its steps to be done."""

    def __init__(self, length: RunLength, first_step: int, sinks: Sequence[Sink], trace: Trace) -> None:
        self.step = first_step
        self.epoch = 0
        self.asked = self.arrived = time.perf_counter()
        self.pace = Pace()
        self._length = length
        self._sinks = sinks
        self._trace = trace
        self._first_step = first_step
        self._last_end = 0.0
        self.dispatched: float | None = None
        self.updated: float | None = None
        from braidax.report.learning_rates import LearningRates

        self._ends, self._rates = Ends(), LearningRates()
        self._pending: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="braidax-report")

    def update(self, metrics: Any, epoch: int, state: Any) -> None:
        self.step, self.epoch = self.step + 1, epoch
        end = () if state is None else self._ends.of(state)
        rates = {} if state is None else self._rates.of(state)
        times = _Times(self.asked, self.arrived, self.dispatched, self.updated)
        self._submit(self._finish, self.step, epoch, times, metrics, end, rates)

    @contextlib.contextmanager
    def measuring(self, name: str) -> Generator[None, None, None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.loop(name, begun)

    def loop(self, name: str, begun: float) -> None:
        """Records what the loop's thread has done until now."""
        self._record("loop", name, threading.current_thread().name, begun, time.perf_counter())

    def note(self, values: Mapping[str, float]) -> None:
        self._submit(self._note, self.step, self.epoch, dict(values))

    def say(self, line: str) -> None:
        self._submit(self._say, line)

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

    def _finish(
        self, step: int, epoch: int, times: "_Times", metrics: Any, ends: Sequence[Any], rates: Mapping[str, Any]
    ) -> None:
        jax.block_until_ready(metrics)
        made = time.perf_counter()
        jax.block_until_ready(ends)
        end, before, arrived = time.perf_counter() if ends else made, self._last_end, times.arrived
        start = max(arrived, before)
        stalled = max(0.0, arrived - max(times.asked, before))
        self._last_end = end
        self._record("step", f"step {step}", _DEVICES, start, end)
        self._record("devices", "gradients", _DEVICES, max(times.dispatched or times.updated or arrived, before), made)
        if ends:
            self._record("devices", "apply", _DEVICES, max(times.updated or arrived, made), end)
        pace = Pace(end - start, stalled, self._length.batch_size)
        if step > self._first_step + 1:
            self.pace += pace
        done = Done(step, epoch, _scalars(rates) | _scalars(metrics), pace)
        for sink in self._sinks:
            sink.step(done)

    def _record(self, lane: str, name: str, thread: str, start: float, end: float) -> None:
        self._trace.record(Span(lane, name, thread, start, max(0.0, end - start), 0))

    def _note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.note(step, epoch, values)

    def _say(self, line: str) -> None:
        for sink in self._sinks:
            sink.say(line)


def _check_loggers(loggers: Sequence[Logger]) -> None:
    for place, log in enumerate(loggers):
        if not callable(log):
            remedy = ": give its method `log`" if callable(getattr(log, "log", None)) else ""
            raise ArgumentError(
                f"loggers[{place}] is a {type(log).__name__}, expected a function of a dict and step=, such as the "
                f"`log` of a run of wandb{remedy}"
            )


def _scalars(metrics: Any) -> dict[str, float]:
    leaves = jax.tree_util.tree_leaves_with_path(metrics)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(np.asarray(leaf).reshape(()))
        for path, leaf in leaves
        if np.size(leaf) == 1
    }
