"""The training loop, written once: short enough to copy and change."""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from braidax.checkpoint import Checkpointer, Preemption, Saver
from braidax.data import Cursor, DataLoader
from braidax.errors import CheckpointError, CommError, PeerLost, WaitTimeout
from braidax.loop.batches import Batches, is_told
from braidax.loop.evaluating import Evaluating, TestMetrics, checked, evaluate, tested_by
from braidax.loop.steps import HasTables, HasVariables, Tuning, Untuned
from braidax.parallel import Step, TrainStep
from braidax.report import Report, RunLength

if TYPE_CHECKING:
    from braidax.loop.steps import AnyStep

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
    tuner: Tuning | None = None,
) -> Any:
    """Trains until the loader's epochs are over, and goes on where the newest checkpoint left off.

    The first Ctrl-C lets the step in progress finish, saves a checkpoint and raises `KeyboardInterrupt`, whose message
    says so; the second one stops at once. SIGTERM, too, is answered by a last checkpoint, within 30 seconds, and
    `SystemExit(143)`: of several processes it is enough that one is told; workers of `ParameterServers` end behind the
    same update, if they wait for one another. The saver stays open: who made it closes it.

    **Arguments:** `step`: from `braidax.parallelize`; a decorated one takes `(state, batch)` and returns its metrics as
    a dict. `state`: from `step.init`, or a decorated step's; it is donated. `loader`: batches as `step` takes them; bad
    records are counted at the end. `saver`: of several workers the first one's; restores before the first step, of
    workers all, and is shown the state and the loader's cursor after each one; the plan is in its notes. `report`: what
    is shown and written, nothing by default; its trace becomes that of the loader, a `Checkpointer` and stages. `test`:
    if given, evaluated after each epoch. `test_metrics`: of a state and a batch of `test`; by default the step's
    `evaluate`, which a decorated one does not have: give it `step.wrap(fn)`. `coming`: whether updates are told the
    next batch, which is then taken from the loader an update earlier; by default where rows of tables are fetched ahead
    from servers, or by devices that send while they compute, not CPUs (`Step.fetches_ahead`). `tuner`: owns the knobs
    of `loader` and `saver` until the end.

    **Returns:** the state after the last step; a run that was over already trains no more. **Raises:** `DataError` for
    ids out of range, with `Hybrid(out_of_range="raise")`; `PeerLost` when a process with stages has ended.
    """
    report = Report(show="nothing") if report is None else report
    _trace_all(report, step, loader, saver)
    tested = tested_by(step, test, test_metrics)
    save = _saving(saver, step, report)
    state = _restored(saver, step, state, loader)
    begun, batches = loader.cursor, Batches(loader, is_ahead=is_told(step, coming))
    length, first_step = _length(loader, state, saver)
    tuner = Untuned() if tuner is None else tuner
    opened = (_failure_named(step, saver), contextlib.closing(batches), loader, report.following(length, first_step))
    with contextlib.ExitStack() as inside, _interrupt_kept() as interrupted, _preempted(saver, step) as preempted:
        for one in (*opened, tuner.owning(loader, saver)):
            inside.enter_context(one)
        ends = _ending(step, interrupted, preempted)
        while not ends() and not batches.are_over:
            epoch = batches.cursor.epoch
            with report.waiting():
                batch, known = batches.take()
            with report.updating(None if saver is None else saver.wait) as dispatched:
                state, metrics = step.update(state, batch, before_apply=dispatched, **known)
            report.update(checked(metrics, "the decorated step"), epoch=epoch, state=state)
            save(state, batches.cursor)
            tuner.stepped()
            if test is not None and batches.cursor.epoch > epoch:
                _note_test(report, tested, state, test)
                tuner.pause()
        step.finish()
        if saver is not None and batches.cursor != begun:
            saver.save(_saved(step, state, batches.cursor))
        _tell_skipped(loader, report)
    if interrupted():
        raise KeyboardInterrupt(_words_of_end(saver))
    if preempted() or ends():
        if saver is not None and jax.process_index() == 0:
            sys.stderr.write(f"SIGTERM: {_words_of_end(saver)}\n")
        raise SystemExit(128 + signal.SIGTERM)
    return state


def _words_of_end(saver: Saver | None) -> str:
    """Returns what the last line of a program says that Ctrl-C has ended."""
    if saver is None:
        return "the step in progress is done; fit was given no saver, and has saved nothing"
    if not saver.num_updates:
        return "no step is done, and nothing is to be saved"
    return f"step {saver.num_updates} is done and saved; run the program again to go on from there"


def _note_test(report: Report, tested: Evaluating | TestMetrics, state: Any, test: DataLoader) -> None:
    with report.evaluating():
        found = evaluate(tested, state, test)
    report.note({f"test_{name}": value for name, value in found.items()})


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


def _trace_all(report: Report, step: "AnyStep", loader: DataLoader, saver: Saver | None) -> None:
    if report.traces_all:
        loader.trace = report.trace
        if not isinstance(step, Step | TrainStep | HasTables | HasVariables):
            step.trace = report.trace
        if isinstance(saver, Checkpointer):
            saver.trace = report.trace


def _tell_skipped(loader: DataLoader, report: Report) -> None:
    skipped = loader.source.describe().get("bad records")
    if skipped is not None:
        report.say(f"bad records: {skipped}")


def _saving(saver: Saver | None, step: "AnyStep", report: Report) -> Callable[[Any, Cursor], None]:
    """Returns what shows the saver a state; it notes the plan, which a decorated step has behind its first update."""
    if saver is None:
        return lambda state, cursor: None
    saver.notes.pop("plan", None)
    if isinstance(step, Step):
        saver.notes["plan"] = step.plan.to_json()

    def save(state: Any, cursor: Cursor) -> None:
        with report.saving():
            if "plan" not in saver.notes:
                saver.notes["plan"] = step.plan.to_json()
            saver.update(_saved(step, state, cursor))

    return save


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


def _ending(step: object, interrupted: Callable[[], bool], preempted: Callable[[], bool]) -> Callable[[], bool]:
    """Says before an update whether to end, of workers as all of them do."""
    if isinstance(step, HasVariables):
        return lambda: step.ends(wanted=interrupted() or preempted())
    return lambda: interrupted() or preempted()


@contextlib.contextmanager
def _preempted(saver: Saver | None, step: object) -> Generator[Callable[[], bool], None, None]:
    """Says after an update whether the job was asked to end, if there is something to save, here or by another one."""
    if saver is None and not isinstance(step, HasVariables):
        yield lambda: False
        return
    with Preemption(within_seconds=_WITHIN_SECONDS) as preemption:

        def due() -> bool:
            if not preemption.due(0 if saver is None else saver.num_updates):
                return False
            if saver is not None:
                saver.timeout_seconds = min(saver.timeout_seconds, max(0.001, preemption.seconds_left))
            return True

        yield due


@contextlib.contextmanager
def _interrupt_kept() -> Generator[Callable[[], bool], None, None]:
    """Keeps the first Ctrl-C for the loop to ask about: raised inside a step, it would cost the donated state."""
    pressed = threading.Event()
    told = "" if jax.process_index() else "Ctrl-C: ends behind the step in progress; press it again to end at once\n"
    if os.isatty(2):
        told = f"\n{told}"  # behind the ^C that terminals show

    def keep(signal_number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            signal.default_int_handler(signal_number, frame)
        pressed.set()
        with contextlib.suppress(OSError):  # past sys.stderr, within a write of which this may be
            os.write(2, told.encode())

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, keep)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
