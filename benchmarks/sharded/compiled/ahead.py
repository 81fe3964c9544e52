"""Steps compiled for H100s and TPUs that are not here: which bytes are sent while no matrices are multiplied."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh

import braidax as bx
from benchmarks.harness import Report, say, systems
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.models import Model
from benchmarks.harness.systems import BY_HAND, HELD, OURS, XLA
from braidax.parallel.plan.plan import layouts_of
from braidax.program import Collective, exposed_part, find_target, total_sent

DATA_PARALLEL, ROWS = "ours, DataParallel", "ours, Hybrid, told the coming batch"
GATHERS, SUMS, EXCHANGES = ("all-gather", "collective-permute"), ("all-reduce",), ("all-to-all", "ragged-all-to-all")
WAITED, MEMORY = "sent while no matrices are multiplied", "memory of a device"


def case_of(shape: Shape, target: str) -> str:
    """Returns the case that a report has of GPT-2's form."""
    return f"GPT-2, {shape.layers} layers of width {shape.width}, {shape.vocabulary:,} words, {target}"


def fully_sharded(report: Report, target: str, shape: Shape, *, peers: Sequence[str]) -> Sequence[Collective]:
    """Compiles GPT-2's form fully sharded, ours and by peers; returns what ours sends."""
    case = case_of(shape, target)
    step, ours = _ours(report, case, OURS, target, shape, {"data": bx.FullySharded()})
    make = {XLA: systems.xla, HELD: systems.held, BY_HAND: systems.by_hand}
    mesh = _mesh(find_target(target).devices)
    like = _step(shape, mesh, {"data": bx.FullySharded()})
    for name in peers:
        system = make[name](shape, mesh, like)
        _add(report, case, name, system.collectives(), system.peak_bytes(step))
    return ours


def data_parallel(report: Report, target: str, shape: Shape) -> Sequence[Collective]:
    """Compiles GPT-2's form with everything replicated; returns what is sent."""
    return _ours(report, case_of(shape, target), DATA_PARALLEL, target, shape, {"data": bx.DataParallel()})[1]


def rows(report: Report, target: str, shape: Shape) -> Sequence[Collective]:
    """Compiles GPT-2's form with an output weight of its own, and words read by rows; returns what is sent."""
    shape = replace(shape, output="apart")
    case = f"{case_of(shape, target)}, an output weight of its own"
    step, found = _ours(report, case, ROWS, target, shape, {"data": bx.Hybrid()}, coming="known")
    assert any(layout.by_rows for layout in layouts_of(step.plan)), "words are read by rows"
    return found


def clicks(report: Report, target: str, model: Model) -> Sequence[Collective]:
    """Compiles a model of clicks, whose tables are read by rows; returns what is sent."""
    step = bx.parallelize(
        model.loss, model.optimizer, _mesh(jax.devices()), {"data": bx.Hybrid()}, init=model.init, batch=model.spec
    )
    assert any(layout.by_rows for layout in layouts_of(step.plan)), "ids are read by rows"
    compiled = step.compile_for(target, coming="known")
    _add(report, f"{model.name}, {target}", ROWS, compiled.collectives, compiled.peak_bytes)
    return compiled.collectives


def waited(collectives: Sequence[Collective], kinds: Sequence[str] = ()) -> float:
    """Returns which part of the bytes of some kinds, or of all, is sent while no matrices are multiplied."""
    return exposed_part(one for one in collectives if not kinds or one.kind in kinds)


def _ours(
    report: Report,
    case: str,
    system: str,
    target: str,
    shape: Shape,
    strategies: Mapping[str, Any],
    *,
    coming: Literal["known", "unknown"] = "unknown",
) -> tuple[bx.Step, Sequence[Collective]]:
    step = _step(shape, _mesh(jax.devices()), strategies)
    compiled = step.compile_for(target, coming=coming)
    _add(report, case, system, compiled.collectives, compiled.peak_bytes)
    return step, compiled.collectives


def _add(report: Report, case: str, system: str, collectives: Sequence[Collective], peak_bytes: float) -> None:
    sent = total_sent(collectives)
    total = sum(sent.values())
    report.add(case, system, "sent by a device, a step", "MB", [total / 1e6])
    report.add(case, system, WAITED, "MB", [waited(collectives) * total / 1e6])
    report.add(case, system, "of all", "%", [100 * waited(collectives)])
    report.add(case, system, MEMORY, "MiB", [peak_bytes / 2**20])
    for kind, num_bytes in sorted(sent.items()):
        report.add(case, system, f"{kind}", "MB", [num_bytes / 1e6])
        report.add(case, system, f"{kind}, waited for", "%", [100 * waited(collectives, (kind,))])
    say(f"  {case}, {system}: {100 * waited(collectives):.1f} % of {total / 1e6:.0f} MB waited for")


def _step(shape: Shape, mesh: Mesh, strategies: Mapping[str, Any]) -> bx.Step:
    def loss(params: Any, batch: Any) -> jax.Array:
        return shape.loss(params, batch)

    return bx.parallelize(loss, systems.OPTIMIZER, mesh, strategies, init=shape.init, batch=shape.spec())


def _mesh(devices: Sequence[Any]) -> Mesh:
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
