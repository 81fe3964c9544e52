"""The training loop, written once: short enough to copy and change."""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from braidax.checkpoint import Checkpointer, Preemption, Saver
from braidax.data import Cursor, DataLoader
from braidax.errors import ArgumentError, BraidaxError, CheckpointError, CommError, PeerLost, WaitTimeout
from braidax.parallel import Step, TrainStep
from braidax.report import Report, RunLength

if TYPE_CHECKING:
    from braidax.parallel import PipelinedStep, ServedStep, WorkerStep

    AnyStep = Step | TrainStep | PipelinedStep | ServedStep | WorkerStep

TestMetrics = Callable[[Any, Any], Mapping[str, Any]]
"""Gives the metrics of a state on a batch."""


@runtime_checkable
class Evaluating(Protocol):
    """A step that gives the metrics of a state on a batch: a `Step`, or one of stages."""

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        """Computes them."""
        ...

    def finish(self) -> None:
        """Waits for all so far."""
        ...


@runtime_checkable
class HasTables(Protocol):
    """A step whose tables are elsewhere, on servers."""

    @property
    def tables(self) -> Any:
        """Stands for them in a checkpoint."""
        ...

    def prepare(self, batch: Any) -> None:
        """Begins to pull what a coming batch reads."""
        ...


@runtime_checkable
class HasVariables(Protocol):
    """A step of a worker, all of whose variables are on servers."""

    @property
    def variables(self) -> Any:
        """Stands for them in a checkpoint."""
        ...

    @property
    def fetches_ahead(self) -> bool:
        """Whether it pulls rows ahead that are never late."""
        ...

    def meet(self, state: Any) -> Any:
        """Returns the state to go on with, when all workers have come."""
        ...

    def of_first(self, value: Any) -> Any:
        """Returns the array that the first worker gives, when all have come."""
        ...


_log = logging.getLogger("braidax")
_WITHIN_SECONDS = 30.0  # which platforms leave between SIGTERM and SIGKILL


def fit(
    step: "AnyStep",
    state: Any,
    loader: DataLoader,
    *,
    saver: Saver | None = None,
    report: Report | None = None,
    test: DataLoader | None = None,
    test_metrics: TestMetrics | None = None,
    coming: Literal["auto", "known", "unknown"] = "auto",
) -> Any:
    """Trains until the loader's epochs are over, and goes on where the newest checkpoint left off.

    The first Ctrl-C lets the step in progress finish, saves a checkpoint and raises `KeyboardInterrupt`; the second one
    stops at once. SIGTERM, too, is answered by a last checkpoint, within 30 seconds, and `SystemExit(143)`: of several
    processes it is enough that one is told. The saver stays open: who made it closes it.

    **Arguments:** `step`: from `braidax.parallelize`; a decorated one takes `(state, batch)` and returns its metrics as
    a dict. `state`: from `step.init`, or a decorated step's; it is donated. `loader`: batches as `step` takes them; bad
    records are counted at the end. `saver`: of several workers the first one's; restores before the first step, of
    workers all, and is shown the state and the loader's cursor after each one; the plan is in its notes. `report`: what
    is shown and written, nothing by default; its trace becomes that of the loader, a `Checkpointer` and stages. `test`:
    if given, evaluated after each epoch. `test_metrics`: of a state and a batch of `test`; by default the step's
    `evaluate`, which a decorated one does not have: give it `step.wrap(fn)`. `coming`: whether updates are told the
    next batch, which is then taken from the loader an update earlier; by default where rows of tables are fetched ahead
    from servers, or by devices that send while they compute, not CPUs (`Step.fetches_ahead`).

    **Returns:** the state after the last step; a run that was over already trains no more. **Raises:** `DataError` when
    a batch had ids out of range, with `Hybrid(out_of_range="raise")`; `PeerLost` when a process with stages has ended.
    """
    before_apply = None if saver is None else saver.wait
    report = Report(show="nothing") if report is None else report
    _trace_all(report, step, loader, saver)
    tested = _tested(step, test, test_metrics)
    note_plan = _noting(saver, step)
    state = _restored(saver, step, state, loader)
    begun, batches = loader.cursor, _Batches(loader, is_ahead=_is_told(step, coming))
    length, first_step = _length(loader, state, saver)
    named, closed, told = _failure_named(step, saver), contextlib.closing(batches), report.following(length, first_step)
    with named, closed, loader, told, _interrupt_kept() as interrupted, _preempted(saver) as preempted:
        while not interrupted() and not preempted() and not batches.are_over:
            epoch = batches.cursor.epoch
            with report.waiting():
                batch, known = batches.take()
            state, metrics = step.update(state, batch, before_apply=before_apply, **known)
            report.update(_checked(metrics, "the decorated step"), epoch=epoch)
            if saver is not None:
                note_plan()
                saver.update(_saved(step, state, batches.cursor))
            if test is not None and batches.cursor.epoch > epoch:
                report.note({f"test_{name}": value for name, value in evaluate(tested, state, test).items()})
        step.finish()
        if saver is not None and batches.cursor != begun:
            saver.save(_saved(step, state, batches.cursor))
        _tell_skipped(loader, report)
    if interrupted():
        raise KeyboardInterrupt
    if preempted():
        raise SystemExit(128 + signal.SIGTERM)
    return state


def _saved(step: object, state: Any, cursor: Cursor) -> Any:
    """Returns the tree of a run's checkpoints, which begins with the state and ends with the cursor."""
    if isinstance(step, HasVariables):
        return state, step.variables, cursor
    return (state, step.tables, cursor) if isinstance(step, HasTables) else (state, cursor)


def _restored(saver: Saver | None, step: object, state: Any, loader: DataLoader) -> Any:
    """Returns the state to go on with, and sets the loader to go on with it."""
    seed = loader.cursor.seed
    if saver is not None:
        state, *_, loader.cursor = saver.restore(_saved(step, state, loader.cursor))
    if isinstance(step, HasVariables):
        state = step.meet(state)
        _, epoch, position = loader.cursor
        has_saver, *begun = map(int, step.of_first(np.array([saver is not None, epoch, position])))
        if has_saver and any(begun):
            loader.cursor = Cursor(loader.cursor.seed, *begun)
    if loader.cursor.seed != seed:
        _log.warning("fit: the loader has seed=%s; the run goes on with its own, %s", seed, loader.cursor.seed)
    return state


def _is_told(step: "AnyStep", coming: Literal["auto", "known", "unknown"]) -> bool:
    """Whether updates are told the coming batch. **Raises:** `ArgumentError` where they could make nothing of it."""
    if coming not in ("auto", "known", "unknown"):
        raise ArgumentError(f'coming is {coming!r}, expected "auto", "known" or "unknown"')
    served = isinstance(step, HasTables) or (isinstance(step, HasVariables) and step.fetches_ahead)
    fetches = served or (isinstance(step, Step) and step.fetches_ahead)
    if coming == "known" and not fetches:
        raise ArgumentError(
            'coming is "known", and the step fetches nothing ahead: it is decorated, or reads no table by rows; '
            'expected "auto" or "unknown"'
        )
    if coming == "auto":
        return served or (fetches and all(device.platform != "cpu" for device in step.mesh.devices.flat))
    return coming == "known"


class _Batches:
    """The batches of a loader, each with the one that comes, if that is wanted and there is one.

    `cursor` stands behind the last one that was taken, wherever the loader's own is.
    """

    def __init__(self, loader: DataLoader, *, is_ahead: bool) -> None:
        self._loader, self._batches, self._is_ahead = loader, iter(loader), is_ahead
        self.cursor = loader.cursor
        self._following: tuple[Any, Cursor] | None = None
        self._error: BraidaxError | None = None

    @property
    def are_over(self) -> bool:
        """Whether all epochs are over."""
        return self._loader.epochs is not None and self.cursor.epoch >= self._loader.epochs

    def take(self) -> tuple[Any, dict[str, Any]]:
        """Returns a batch, and what an update is told of the one that comes, whose error is raised when it is taken."""
        if self._error is not None:
            raise self._error
        batch, self.cursor = self._next() if self._following is None else self._following
        self._following = None
        if self._is_ahead and not self.are_over:
            try:
                self._following = self._next()
            except BraidaxError as error:
                self._error = error
        return batch, {} if self._following is None else {"coming": self._following[0]}

    def close(self) -> None:
        """Sets the loader's cursor behind what was taken."""
        if self._loader.cursor != self.cursor:
            self._loader.cursor = self.cursor

    def _next(self) -> tuple[Any, Cursor]:
        return next(self._batches), self._loader.cursor


def _trace_all(report: Report, step: "AnyStep", loader: DataLoader, saver: Saver | None) -> None:
    if report.traces_all:
        loader.trace = report.trace
        if not isinstance(step, Step | TrainStep | HasTables | HasVariables):
            step.trace = report.trace
        if isinstance(saver, Checkpointer):
            saver.trace = report.trace


def evaluate(step: Evaluating | TestMetrics, state: Any, loader: DataLoader) -> dict[str, float]:
    """Returns the mean of each scalar metric over one pass through a loader.

    Each batch weighs as much as it has valid samples, so the result is exact if `loader` was made with
    `remainder="pad"` and the loss takes means over the samples that `batch["mask"]` marks.

    **Arguments:** `step`: its `evaluate` gives the metrics of a batch; or a function of state and batch that does, such
    as `step.wrap(fn)` of a decorated one. `state`: is not changed. `loader`: all of the epoch that its cursor is in is
    read, and the cursor stays; `seed=None` reads in file order.

    **Raises:** `ArgumentError` for a loader that would drop the last samples.
    """
    _check_keeps_all(loader)
    metrics_of = step.evaluate if isinstance(step, Evaluating) else step
    totals: dict[str, jax.Array] = {}
    num_samples = 0
    for batch in loader.epoch():
        valid = min(loader.batch_size, loader.num_samples - num_samples)
        num_samples += valid
        for name, metric in _checked(metrics_of(state, batch), "test_metrics").items():
            if isinstance(metric, jax.Array) and metric.ndim == 0:
                totals[name] = totals.get(name, 0) + metric * valid
    if isinstance(step, Evaluating):
        step.finish()
    return {name: float(total) / num_samples for name, total in totals.items()}


def _check_keeps_all(loader: DataLoader) -> None:
    """Raises `ArgumentError` for a loader that drops samples, which an evaluation would not see."""
    num_dropped = loader.num_samples - loader.batches_per_epoch * loader.batch_size
    if num_dropped > 0:
        raise ArgumentError(
            f"the loader of an evaluation would drop the last {num_dropped} of its {loader.num_samples:,} samples, "
            f"which fill no batch of batch_size={loader.batch_size}; make it with remainder='pad', and let the loss "
            "take means over the samples that batch['mask'] marks, or with a batch_size that divides them"
        )


def _tell_skipped(loader: DataLoader, report: Report) -> None:
    skipped = loader.source.describe().get("bad records")
    if skipped is not None:
        report.say(f"bad records: {skipped}")


def _tested(step: "AnyStep", test: DataLoader | None, test_metrics: TestMetrics | None) -> Evaluating | TestMetrics:
    """Returns what `evaluate` takes."""
    if test is not None and test_metrics is None and isinstance(step, TrainStep):
        raise ArgumentError(
            "test is given, and a decorated step has no evaluate: give test_metrics=step.wrap(fn) as well, where "
            "fn(state, batch) returns a dict of metrics"
        )
    if test is None and test_metrics is not None:
        raise ArgumentError("test_metrics is given, and test is None: give the loader of what is evaluated, too")
    if test is not None:
        _check_keeps_all(test)
    return step if test_metrics is None else test_metrics


def _noting(saver: Saver | None, step: "AnyStep") -> Callable[[], None]:
    """Notes the plan of a step; returns what does so behind an update: a decorated step has none before."""
    if saver is not None:
        saver.notes.pop("plan", None)

    def note() -> None:
        if saver is not None and "plan" not in saver.notes:
            saver.notes["plan"] = step.plan.to_json()

    if isinstance(step, Step):
        note()
    return note


@contextlib.contextmanager
def _failure_named(step: "AnyStep", saver: Saver | None) -> Generator[None, None, None]:
    """Raises `PeerLost` in place of what devices and checkpoints raise because a process has ended, and waits for
    it no longer; of steps that know how to ask.
    """
    ask = getattr(step, "check_processes", None)
    if ask is None:
        yield
        return
    if isinstance(saver, Checkpointer):
        saver.while_waiting = partial(ask, wait_seconds=0.0)
    try:
        yield
    except PeerLost:
        raise
    except (jax.errors.JaxRuntimeError, CheckpointError, CommError, WaitTimeout):
        ask()
        raise
    finally:
        if isinstance(saver, Checkpointer):
            saver.while_waiting = None


def _checked(metrics: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"{what} returned metrics of type {type(metrics).__name__}, expected a dict by name, such as "
            f'{{"loss": loss}}'
        )
    return metrics  # pyright: ignore[reportUnknownVariableType]


def _length(loader: DataLoader, state: Any, saver: Saver | None) -> tuple[RunLength, int]:
    """Returns how long a run is, and how many steps its state has seen, in whatever batches that was."""
    cursor, epochs, batch_size = loader.cursor, loader.epochs, loader.batch_size
    known = getattr(state, "step", None)
    first_step = cursor.epoch * loader.batches_per_epoch + cursor.position // batch_size
    if isinstance(known, jax.Array) and not known.addressable_shards:  # with a stage of another process
        first_step = first_step if saver is None else saver.num_updates
    elif known is not None:
        first_step = int(known)
    if epochs is None:
        return RunLength(None, None, batch_size), first_step
    left = loader.num_samples - cursor.position
    pads = loader.batches_per_epoch * batch_size > loader.num_samples
    in_epoch = -(-left // batch_size) if pads else left // batch_size
    coming = in_epoch + (epochs - cursor.epoch - 1) * loader.batches_per_epoch
    return RunLength(first_step + max(0, coming), epochs, batch_size), first_step


@contextlib.contextmanager
def _preempted(saver: Saver | None) -> Generator[Callable[[], bool], None, None]:
    """Says after an update whether the job was asked to end, if there is something to save."""
    if saver is None:
        yield lambda: False
        return
    with Preemption(within_seconds=_WITHIN_SECONDS) as preemption:

        def due() -> bool:
            if not preemption.due(saver.num_updates):
                return False
            saver.timeout_seconds = min(saver.timeout_seconds, max(0.001, preemption.seconds_left))
            return True

        yield due


@contextlib.contextmanager
def _interrupt_kept() -> Generator[Callable[[], bool], None, None]:
    """Keeps the first Ctrl-C for the loop to ask about: raised inside a step, it would cost the donated state."""
    pressed = threading.Event()

    def keep(signal_number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            signal.default_int_handler(signal_number, frame)
        pressed.set()

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, keep)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
