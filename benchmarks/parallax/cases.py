"""Systems that train one model, taking turns, and what is claimed of them."""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import braidax as bx
from benchmarks.harness import Report, say, take_turns
from benchmarks.harness.models import Model
from benchmarks.parallax.flax_lm1b import flax_lm1b
from benchmarks.parallax.systems import (
    DENSE,
    GATHER,
    OURS,
    PLAIN,
    PLAIN_TWO,
    XLA,
    Ran,
    Running,
    System,
    ours,
    plain,
    plain_in_two,
    split_by_hybrid,
    step_of,
)
from benchmarks.parallax.traffic import FORMULA, Formulas
from braidax.data.source import allocate
from braidax.tasks.bert import bert
from braidax.tasks.dlrm import dlrm
from braidax.tasks.lm1b import lm1b
from braidax.tasks.task import Task

_WARMUP, _STEPS = 2, 2  # of a turn: those that are not timed, and those that are
_ALIKE = 2e-3  # losses of systems, relative: they compute the same in another order
STEP, SENT = "step", "sent by a device, a step"


class Measured(NamedTuple):
    """Of one system. **Fields:** `num_bytes`: that a device sends in a step; `formula_bytes`: that it should."""

    num_bytes: float
    formula_bytes: float | None


class _Turns:
    """Turns of a system, each from the same first state, which is gone behind it: others need the memory.

    **Arguments:** `name`; `make`: compiles it, in its first turn. **Fields:** `ran`: in the last turn. `memory_bytes`:
    of all devices, measured in the first one: with the state, and within steps.
    """

    def __init__(self, name: str, make: System, model: Model, mesh: Mesh) -> None:
        self._name, self._make, self._model, self._mesh = name, make, model, mesh
        self._batches = model.batches(_WARMUP + _STEPS)
        self._running: Running | None = None
        self.ran = Ran([], [], [])
        self.memory_bytes: tuple[int, int] = (0, 0)

    @property
    def running(self) -> Running:
        """Of the first turn."""
        assert self._running is not None, f"{self._name} has had no turn yet"
        return self._running

    def __call__(self) -> float:
        """Returns the median of the seconds of a step."""
        if self._running is None:
            self._running = self._make(self._model, self._mesh)
        before = _resident_bytes("VmRSS")
        self._running.begin()
        at_init = _resident_bytes("VmHWM") - before
        try:
            self.ran = self._running.run(self._batches)
        finally:
            self._running.end()
        at_work = _resident_bytes("VmHWM") - before
        self.memory_bytes = self.memory_bytes if any(self.memory_bytes) else (at_init, at_work)
        return statistics.median(self.ran.seconds[_WARMUP:])


def measure(
    report: Report, model: Model, mesh: Mesh, systems: Mapping[str, System], *, rounds: int
) -> dict[str, Measured]:
    """Lets systems take turns; each has the memory for itself, since together they do not fit.

    **Raises:** `AssertionError` when the losses of a system differ from those of ours.
    """
    formulas = _told(report, model, mesh)
    turns = {name: _Turns(name, make, model, mesh) for name, make in systems.items()}
    figures = take_turns(turns, rounds=rounds)
    found: dict[str, Measured] = {}
    for name, seconds in figures.items():
        ran, sent = turns[name].ran, turns[name].running.sent()
        np.testing.assert_allclose(ran.losses, turns[OURS].ran.losses, rtol=_ALIKE, err_msg=f"{model.name}, {name}")
        num_bytes = sent.total(statistics.mean(ran.rounds) - 1)
        median = report.add(model.name, name, STEP, "ms", [1e3 * one for one in seconds])
        report.add(model.name, name, SENT, "MB", [num_bytes / 1e6])
        for kind, part in sorted(sent.always.items()):
            report.add(model.name, name, f"by {kind}", "MB", [part / 1e6])
        at_init, at_work = turns[name].memory_bytes
        report.add(model.name, name, "memory of a device", "MB", [turns[name].running.memory_bytes() / 1e6])
        report.add(model.name, name, "memory of all devices, init, measured", "MB", [at_init / 1e6])
        report.add(model.name, name, "memory of all devices, steps, measured", "MB", [at_work / 1e6])
        for metric, formula in (expected := formulas.of(name)).items():
            report.add(model.name, name, metric.strip(), "MB", [formula / 1e6])
        found[name] = Measured(num_bytes, expected.get(FORMULA))
        say(f"  {name}: {median:.1f} ms, {num_bytes / 1e6:.3f} MB, rounds {max(ran.rounds)}")
    return found


def claim(
    report: Report, name: str, model: Model, found: Mapping[str, Measured], *, steps: float | None, sent: float = 1
) -> None:
    """Claims ours against the best of the systems of others: steps, and bytes; and bytes against the formula.

    **Arguments:** `steps`, `sent`: how many times as good it is to be; None for no claim.
    """
    peers = [system for system in (PLAIN, XLA, GATHER) if system in found]
    if steps is not None:
        report.against(name, model.name, STEP, ours=OURS, peers=peers, at_least=steps)
    report.against(f"{name}_bytes", model.name, SENT, ours=OURS, peers=peers, at_least=sent)
    claim_bytes(report, found, f"{name}_bytes_formula")


def claim_bytes(report: Report, found: Mapping[str, Measured], claim: str) -> None:
    """Claims that ours sends no more than the formula says, by a tenth."""
    mine = found[OURS]
    assert mine.formula_bytes is not None, "there is a formula for ours"
    report.at_most(claim, mine.num_bytes / mine.formula_bytes, 1.1)


def growth(report: Report, model: Callable[[int], Model], vocabulary: int, mesh: Mesh, *, rounds: int) -> None:
    """Compares the step with that of a quarter of the vocabulary; words are those of the smaller one."""
    running = {
        name: ours(model(size), mesh, bx.Hybrid()) for name, size in {"V": vocabulary, "V / 4": vocabulary // 4}.items()
    }
    batches = model(vocabulary // 4).batches(2)
    for one in running.values():
        one.begin()
        one.run(batches)

    def turn(name: str) -> Callable[[], float]:
        return lambda: statistics.median(running[name].run(batches).seconds)

    figures = take_turns({name: turn(name) for name in running}, rounds=rounds)
    for name, values in figures.items():
        report.add(f"growth, V={vocabulary:,}", name, STEP, "ms", [1e3 * value for value in values])
    report.at_most("growth", [large / small for large, small in zip(*figures.values(), strict=True)], 1.2)


def equal(report: Report, model: Model, mesh: Mesh, *, rounds: int) -> None:
    """Lets ours and the plain jit, in one program and in two, take steps in turn, of a model without tables."""
    _told(report, model, mesh)
    running = {
        OURS: ours(model, mesh, bx.Hybrid()),
        PLAIN: plain(model, mesh, ()),
        PLAIN_TWO: plain_in_two(model, mesh),
    }
    batches = model.batches(_WARMUP)
    losses: list[list[float]] = []
    for one in running.values():
        one.begin()
        losses.append(one.run(batches).losses)
    for those in losses:
        np.testing.assert_allclose(those, losses[0], rtol=_ALIKE, err_msg=model.name)

    def turn(name: str) -> Callable[[], float]:
        return lambda: running[name].run(batches[:1]).seconds[0]

    figures = take_turns({name: turn(name) for name in running}, rounds=rounds)
    formula = Formulas(model, mesh).of(PLAIN)[FORMULA]
    for name, values in figures.items():
        median = report.add(model.name, name, STEP, "ms", [1e3 * value for value in values])
        num_bytes = running[name].sent().total(0)
        report.add(model.name, name, SENT, "MB", [num_bytes / 1e6])
        report.add(model.name, name, FORMULA.strip(), "MB", [formula / 1e6])
        report.add(model.name, name, "memory of a device", "MB", [running[name].memory_bytes() / 1e6])
        say(f"  {name}: {median:.1f} ms, {num_bytes / 1e6:.3f} MB")
    report.against("resnet50_equal", model.name, STEP, ours=OURS, peers=[PLAIN, PLAIN_TWO], at_least=1 / 1.02)


def curves(report: Report, mesh: Mesh, names: Sequence[str], *, steps: int) -> None:
    """Trains small models on their tasks' data, with rows exchanged and with everything all-reduced."""
    largest = 0.0
    for name in names:
        task = _TASKS[name](preset="tiny")
        found = {system: _losses(task, mesh, strategy, steps) for system, strategy in _STRATEGIES.items()}
        case = f"curves, {name} (tiny), {steps} steps"
        for system, losses in found.items():
            report.add(case, system, "loss, mean of the last 20", "", [statistics.mean(losses[-20:])])
        apart = np.abs(np.array(found[OURS]) / np.array(found[DENSE]) - 1)
        report.add(case, f"{OURS} / {DENSE} - 1", "largest difference of a step", "", [float(apart.max())])
        say(f"  {name}: {found[OURS][0]:.4f} -> {found[OURS][-1]:.4f} {found[DENSE][-1]:.4f}, {apart.max():.2e} apart")
        largest = max(largest, float(apart.max()))
    report.at_most("curves", largest, 1e-3)


def planning(report: Report, mesh: Mesh, *, rounds: int) -> None:
    """Takes the time to trace and plan BERT-base, and Flax' lm1b under both strategies, in turns."""
    task = bert()
    batch = task.train.batch_spec(task.batch_size)

    def plan_bert() -> bx.Step:
        return bx.parallelize(task.loss, task.optimizer(100), mesh, {"data": bx.Hybrid()}, init=task.init, batch=batch)

    seconds = [_seconds(plan_bert)[0] for _ in range(rounds)]
    report.add("BERT-base", OURS, "trace and plan", "s", seconds)
    report.at_most("trace", seconds, 5)
    model = flax_lm1b(32 * mesh.size)
    systems = {name: functools.partial(step_of, model, mesh, strategy) for name, strategy in _STRATEGIES.items()}
    compiled = {name: _seconds(plan)[1] for name, plan in systems.items()}
    turns = {name: functools.partial(lambda plan: _seconds(plan)[0], plan) for name, plan in systems.items()}
    figures = take_turns(turns, rounds=max(rounds, 3))
    for name, values in figures.items():
        report.add(model.name, name, "trace and plan", "s", values)
        report.add(model.name, name, "programs compiled while planning", "", [compiled[name]])
        say(f"  {model.name}, {name}: {statistics.median(values):.2f} s, {compiled[name]} programs compiled")
    report.at_most("plan_hybrid", figures[OURS], 2)


def _seconds(plan: Callable[[], Any]) -> tuple[float, int]:
    """Returns how long planning takes with nothing in JAX's caches, and how many programs are compiled meanwhile."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        start = time.perf_counter()
        plan()
        return time.perf_counter() - start, len(compiled)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


_TASKS: Mapping[str, Callable[..., Task]] = {"lm1b": lm1b, "dlrm": dlrm, "bert": bert}
_STRATEGIES = {OURS: bx.Hybrid(), DENSE: bx.DataParallel()}


def _resident_bytes(which: str) -> int:
    """Returns what this process has in memory: now (`VmRSS`), or at most since the last call (`VmHWM`)."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")  # from here on the kernel keeps a new maximum
    return int(status[which].split()[0]) * 1024


def _losses(task: Task, mesh: Mesh, strategy: Any, steps: int) -> list[float]:
    size, source = task.batch_size, task.train
    spec = source.batch_spec(size)
    optimizer = task.optimizer(steps)
    step = bx.parallelize(task.loss, optimizer, mesh, {"data": strategy}, init=task.init, batch=spec)
    state, random = step.init(jax.random.key(0)), np.random.default_rng(0)
    losses: list[jax.Array] = []
    for _ in range(steps):
        batch = allocate(source.sample_spec, size)
        source.read(random.choice(len(source), size, replace=False), batch)
        state, metrics = step.update(state, batch)
        losses.append(metrics["loss"])
        jax.block_until_ready(state)
    return [float(loss) for loss in losses]


def _told(report: Report, model: Model, mesh: Mesh) -> Formulas:
    """Reports sizes and what a step touches."""
    formulas = Formulas(model, mesh)
    say(f"{model.name}, {formulas.num_parameters:,} parameters, {mesh.size} devices …")
    report.add(model.name, "model", "parameters", "", [formulas.num_parameters])
    if formulas.touched:
        split = split_by_hybrid(model, mesh)
        say(f"  alpha {100 * formulas.alpha:.3g} %, Hybrid exchanges {len(split)} of {len(model.tables)} tables")
        report.add(model.name, OURS, "tables of which rows are exchanged", "", [len(split)])
        report.add(model.name, "model", "rows touched by a step (alpha)", "%", [100 * formulas.alpha])
        if len(formulas.touched) <= 3:
            for name, touched in formulas.touched.items():
                report.add(model.name, "model", f"  of {name}", "%", [100 * touched.alpha])
    return formulas
