"""What `braidax train` does: a ready-made task, from files to accuracy."""

import itertools
import logging
import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import typer

from braidax.checkpoint import Adaptive, Checkpointer, Every, Interval
from braidax.cli.machine import describe_mesh, make_mesh, parse_mesh
from braidax.cli.run_options import Value, compare, keep
from braidax.cli.strategies import check_axes, check_servers, has_servers, parse_strategies
from braidax.cli.workers import Seat, num_updates, seat_of
from braidax.data import DataLoader
from braidax.errors import ArgumentError, CommError, WaitTimeout
from braidax.gang import LocalGang
from braidax.gang.program import SERVERS
from braidax.loop import evaluate, fit
from braidax.parallel import Hybrid, Rows, Step, Strategy, Touched, measure_touched, parallelize
from braidax.report import Report
from braidax.spans import Trace
from braidax.tasks.task import Task
from braidax.tune import Priority, Tuner, attribute, gather_traces, limits_of

_log = logging.getLogger("braidax")
_MAX_SPANS = 200_000
_COUNTED_BATCHES = 4
_DIARY = "tuning.jsonl"
_SHOWN_ENTRIES = 8


@dataclass(frozen=True)
class Devices:
    """What a task is trained on.

    **Fields:** `mesh`: size of each axis by name, or None. `strategies`: by axis; None: `Hybrid` for each. `servers`:
    how many there are on this host, where strategies have something on them; None: one, or those of `braidax launch`.
    `seat`: which of several workers this is.
    """

    mesh: Mapping[str, int] | None = None
    strategies: Mapping[str, Strategy] | None = None
    servers: int | None = None
    seat: Seat = field(default_factory=Seat)


def devices_of(mesh: str | None, strategy: str | None, servers: int | None = None, *, processes: int = 1) -> Devices:
    """Returns what the options of these names say.

    **Raises:** as `parse_mesh`, `parse_strategies` and `check_servers`.
    """
    strategies = None if strategy is None else parse_strategies(strategy)
    check_servers(strategies, servers, processes, os.environ)
    axes = None if mesh is None else parse_mesh(mesh)
    return Devices(axes, strategies, servers, seat_of(strategies, os.environ))


def due_checkpoints(every: int | None, overhead: float | None, tune: Priority | None) -> Interval:
    """Returns when checkpoints are due by the options of these names: what is given first prevails."""
    if overhead is not None:
        return Adaptive(overhead=overhead)
    if tune is not None and every is None:
        return limits_of(tune).interval
    return Every(every or 100)


@dataclass(frozen=True)
class Files:
    """What a run leaves. **Fields:** `out`: its folder. `trace`: file for the Perfetto trace. `tensorboard`: folder for
    event files."""

    out: Path
    trace: Path
    tensorboard: Path | None


@dataclass(frozen=True)
class Settings:
    """How to train a task.

    **Arguments:** `files`: what is left. `devices`: on which. `epochs`, `batch_size`: instead of the task's own.
    `seed`: of the first parameters and of the shuffle. `checkpoints`: when one is due. `tune`: what knobs are turned
    for while it trains; None: they are left to their own controllers.
    """

    files: Files
    devices: Devices
    epochs: int | None
    batch_size: int | None
    seed: int
    checkpoints: Interval
    tune: Priority | None = None


class _Report(Report):
    """Keeps the options of a session once it trains: of a run that is over they are nobody's."""

    def __init__(self, keep_options: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._keep_options = keep_options
        self._kept = False

    def update(self, metrics: Any, *, epoch: int, state: Any = None) -> None:
        """Takes a step, as `Report` does."""
        if not self._kept:
            self._keep_options()
        self._kept = True
        super().update(metrics, epoch=epoch, state=state)


@dataclass(frozen=True)
class _Run:
    """The engines of a run, all of which record to the trace of the report. **Fields:** `seat`: which worker has them;
    the first one alone has a `saver`. `tuner`: turns their knobs, if that was asked for."""

    step: Any
    loader: DataLoader
    test: DataLoader
    saver: Checkpointer | None
    report: Report
    seat: Seat
    tuner: Tuner | None

    def say(self, message: str) -> None:
        """Says something of all, once."""
        if self.seat.is_first:
            typer.echo(message)

    @property
    def num_saved(self) -> int:
        """How many updates the newest checkpoint has seen."""
        return 0 if self.saver is None else self.saver.num_updates


def train(task: Task, settings: Settings, made_with: Mapping[str, Value]) -> None:
    """Trains a task from where its folder says, and says how it went; Ctrl-C ends it with `typer.Exit(130)`.

    Of several processes that train together, and of several workers, the first one says and writes everything.

    **Arguments:** `made_with`: what the task was made with, by the option's name.

    **Raises:** any error of braidax.
    """
    with ExitStack() as stack:
        run = _begin(task, settings, made_with, stack)
        state = run.step.init(jax.random.key(run.loader.cursor.seed or 0))
        num_parameters = sum(math.prod(one.shape) for one in run.step.plan.variables)
        workers = f", which each of {run.seat.num_workers} workers has" if run.seat.num_workers > 1 else ""
        run.say(f"{num_parameters:,} parameters on {describe_mesh(run.step.mesh)}{workers}")
        num_samples, batch_size = (
            run.seat.num_workers * one for one in (run.loader.num_samples, run.loader.batch_size)
        )
        run.say(
            f"{num_samples:,} samples to train and {run.test.num_samples:,} to test, "
            f"{run.loader.epochs} epochs of {run.loader.batches_per_epoch:,} batches of {batch_size:,}"
        )
        trace: Path | None = None
        traced = run.report.trace
        try:
            saver, report, test, tuner = run.saver, run.report, run.test, run.tuner
            state = fit(run.step, state, run.loader, saver=saver, report=report, test=test, tuner=tuner)
            traced = _of_all(traced)
        except KeyboardInterrupt:
            run.say(f"interrupted after step {run.num_saved}; run the same command again to go on from there")
            raise typer.Exit(130) from None
        finally:
            if run.seat.is_first and "step" in traced.totals():
                trace = _unused(settings.files.trace)
                traced.save(trace)
        noted = {name.removeprefix("test_"): value for name, value in run.report.noted.items()}
        metrics = noted or {name: float(value) for name, value in evaluate(run.step, state, run.test).items()}
        _summarize(run, task.tell(metrics), settings, None if trace is None else (trace, traced))
        if run.seat.num_workers > 1:
            run.step.meet(state)  # nobody leaves before all that was pushed is there


def _begin(task: Task, settings: Settings, made_with: Mapping[str, Value], stack: ExitStack) -> _Run:
    batch_size = settings.batch_size or task.batch_size
    epochs = settings.epochs or task.epochs
    devices, seat = settings.devices, settings.devices.seat
    num_steps = num_updates(len(task.train) // batch_size * epochs, devices.strategies, seat)
    own_batch = seat.own_batch(batch_size)
    step = stack.enter_context(made_step(task, devices, batch_size=own_batch, num_steps=num_steps))
    saver: Checkpointer | None = None
    if seat.worker == 0:
        saver = stack.enter_context(Checkpointer(settings.files.out / "checkpoints", settings.checkpoints))
    options = {**made_with, "--batch-size": batch_size, "--epochs": epochs, "--seed": settings.seed}
    compared = compare(settings.files.out, options, saved=saver is not None and saver.newest() is not None)
    seed = compared.seed if seat.num_workers == 1 else int(step.of_first(np.asarray(compared.seed)))
    given = step.mesh, step.batch_shardings
    loader = DataLoader(seat.own_samples(task.train), *given, batch_size=own_batch, seed=seed, epochs=epochs)
    test = DataLoader(task.test, *given, batch_size=own_batch, seed=None, remainder="pad")
    for owner in (loader, test):
        stack.enter_context(owner)
    report = _Report(
        (lambda: keep(settings.files.out, {**options, "--seed": seed})) if seat.is_first else lambda: None,
        metrics=settings.files.out / "metrics.jsonl" if seat.is_first else None,
        tensorboard=settings.files.tensorboard if seat.is_first else None,
        trace=Trace(max_spans=_MAX_SPANS),
        show="auto" if seat.is_first else "nothing",
    )
    _check_folder(settings.files.trace.parent)
    run = _Run(step, loader, test, saver, report, seat, _tuner(settings))
    if compared.told:
        run.say(compared.told)
    return run


def _tuner(settings: Settings) -> Tuner | None:
    """Returns what turns the knobs of this process; the diary is that of the first one."""
    if settings.tune is None:
        return None
    is_first = settings.devices.seat.is_first and jax.process_index() == 0
    return Tuner(settings.tune, diary=settings.files.out / _DIARY if is_first else None)


def _of_all(trace: Trace) -> Trace:
    """Returns the trace of all processes of JAX in the first one, or its own where others do not come."""
    try:
        found = gather_traces(trace)
    except (CommError, WaitTimeout) as error:
        _log.warning("the trace is of this process alone: %s", error)
        return trace
    return trace if found is None else found


def _check_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"--trace: the folder {path} cannot be made ({error.strerror}): expected a folder to write to; give "
            "another file"
        ) from error


def _unused(path: Path) -> Path:
    """Returns a path at which there is nothing yet: `trace.json` or, when that is there, `trace-2.json` and so on."""
    names = (path if number == 1 else path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


@contextmanager
def made_step(task: Task, devices: Devices, *, batch_size: int, num_steps: int) -> Generator[Any, None, None]:
    """Makes the step of a task as `make_step` does, with its servers, if a strategy has some: on this host, or those of
    `braidax launch`."""
    with ExitStack() as stack:
        make_mesh(devices.mesh)  # before anybody asks JAX which process this is, which makes its devices
        gang: LocalGang | None = None
        if has_servers(devices.strategies) and jax.process_index() == 0 and SERVERS not in os.environ:
            gang = stack.enter_context(LocalGang(devices.servers or 1))
        step = make_step(task, devices, batch_size=batch_size, num_steps=num_steps, servers=gang)
        if not isinstance(step, Step) and has_servers(devices.strategies):
            stack.enter_context(step)
        yield step


def make_step(
    task: Task, devices: Devices, *, batch_size: int, num_steps: int, servers: LocalGang | None = None
) -> Any:
    """Makes the step of a task; by default samples are split over all axes, tables by rows where that is less.

    How much of tables a step touches is counted in a few batches first.

    **Arguments:** `num_steps`: of the whole run. `servers`: have tables, where a strategy says so.

    **Raises:** `ArgumentError` as `make_mesh` and `check_axes`.
    """
    mesh, batch, optimizer = make_mesh(devices.mesh), task.train.batch_spec(batch_size), task.optimizer(num_steps)
    chosen = devices.strategies
    strategies = dict.fromkeys(mesh.axis_names, Hybrid()) if chosen is None else chosen
    check_axes(strategies, mesh)

    def step(strategies: Mapping[str, Strategy]) -> Any:
        return parallelize(task.loss, optimizer, mesh, strategies, init=task.init, batch=batch, servers=servers)

    first = step(strategies)
    if not any(isinstance(placement, Rows) for one in first.plan.variables for placement in one.placements):
        return first
    hybrids = {axis: strategy for axis, strategy in strategies.items() if isinstance(strategy, Hybrid)}
    num_parts = math.prod(mesh.shape[axis] for axis in hybrids)
    touched = _touched(task, first, batch_size, num_parts)
    return step({**strategies, **{axis: replace(strategy, touched=touched) for axis, strategy in hybrids.items()}})


def _touched(task: Task, step: Step, batch_size: int, num_parts: int) -> dict[str, Touched]:
    """Counts the rows of tables, divided among `num_parts` devices, that a few batches touch."""
    with DataLoader(task.train, step.mesh, step.batch_shardings, batch_size=batch_size, seed=0, epochs=1) as loader:
        batches = list(itertools.islice(loader, _COUNTED_BATCHES))
    return measure_touched(task.loss, init=task.init, batches=batches, num_parts=num_parts).tables


def _summarize(run: _Run, result: str, settings: Settings, traced: tuple[Path, Trace] | None) -> None:
    pace = run.report.pace
    told = [f"test {result}"]
    if pace.num_samples:
        told += [f"stall {pace.stall_percent:.1f} %", f"{pace.samples_per_second:,.0f} samples/s"]
    elif traced is None:
        told += ["no step was left to train: --epochs for more, --out for a new run"]
    run.say("  ".join(told))
    if traced is not None and pace.num_samples:
        run.say(attribute(traced[1]).summary())
    run.say(f"checkpoint  {settings.files.out / 'checkpoints'} (step {run.num_saved})")
    run.say(f"metrics     {settings.files.out / 'metrics.jsonl'}")
    if run.tuner is not None:
        entries = list(run.tuner.diary)
        shown = f", the last {_SHOWN_ENTRIES} of {len(entries)} entries:" if len(entries) > _SHOWN_ENTRIES else ""
        run.say(f"tuning      {settings.files.out / _DIARY}{shown}")
        for entry in entries[-_SHOWN_ENTRIES:]:
            run.say(f"            {entry}")
    if traced is not None:
        path = traced[0]
        run.say(f"trace       {path} (open it in https://ui.perfetto.dev)")
