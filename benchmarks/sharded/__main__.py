"""Everything sharded: ours, XLA's own way with the same shardings, and one written by hand with `shard_map`.

GPT-2's shape, scanned over layers and rematerialised, at 4, 12 and 24 layers on 8 virtual devices, which share the
cores. Memory and bytes are those of the compiled programs of the gradients; steps are timed in turns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import braidax as bx
from benchmarks.harness import Report, arguments, run, say, take_turns
from benchmarks.sharded import systems
from benchmarks.sharded.models import Shape
from benchmarks.sharded.systems import BY_HAND, OURS, XLA, System
from braidax.program import total_sent

NUM_DEVICES = 8
STEP, MEMORY, SENT = "step", "arguments and temporaries of the gradients", "sent by a device, a step"
FORMULA = "formula"


@dataclass(frozen=True)
class Scale:
    """How much is measured. **Fields:** `shape`: of a model; `layers`: how deep. `timed`: which of these. `rounds`."""

    shape: Shape
    layers: tuple[int, ...]
    timed: tuple[int, ...]
    rounds: int


FULL = Scale(Shape(16_384, 512, 4, 128, 16), (4, 12, 24), (4, 12), 3)
QUICK = Scale(Shape(512, 128, 2, 32, 8), (2,), (2,), 2)


def main() -> int:
    parser = arguments("sharded", __doc__ or "", ("layers", "hybrid_sharding"))
    options = parser.parse_args()
    scale, report = QUICK if options.quick else FULL, Report(options, "jaxlib", "optax")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for name in options.only or ("layers", "hybrid_sharding"):
        {"layers": _layers, "hybrid_sharding": _hybrid_sharding}[name](report, scale)
    return report.finish()


def _layers(report: Report, scale: Scale) -> None:
    mesh = _mesh((NUM_DEVICES,), ("data",))
    memory, beside, sent = [], [], []
    for number in scale.layers:
        shape, at = replace(scale.shape, layers=number), f"{number} layers"
        step, found = _systems(shape, mesh, {"data": bx.FullySharded()})
        sizes = {name: system.memory_bytes() for name, system in found.items()}
        arguments = found[OURS].compiled.memory_analysis().argument_size_in_bytes
        sizes[FORMULA] = shape.formula_bytes(NUM_DEVICES, arguments)
        total = sum(variable.num_bytes for variable in step.plan.variables)
        num_bytes = {name: sum(total_sent(system.collectives()).values()) for name, system in found.items()}
        num_bytes[FORMULA] = 3 * total * (NUM_DEVICES - 1) / NUM_DEVICES
        for name in sizes:
            report.add("GPT-2", name, MEMORY, "MiB", [sizes[name] / 2**20], at=at)
            report.add("GPT-2", name, SENT, "MB", [num_bytes[name] / 1e6], at=at)
        memory.append(sizes[OURS] / sizes[FORMULA])
        beside.append(sizes[OURS] / sizes[XLA])
        sent.append(num_bytes[OURS] / num_bytes[FORMULA])
        if number in scale.timed:
            _time(report, "GPT-2", at, shape, step, found, scale.rounds)
        jax.clear_caches()
    report.at_most("fsdp_memory", max(memory), 1.05)
    report.at_most("fsdp_memory_xla", max(beside), 0.8)
    report.at_most("fsdp_bytes", max(sent), 1.02)
    report.against("fsdp_step", "GPT-2", STEP, ours=OURS, peers=[XLA, BY_HAND])


def _hybrid_sharding(report: Report, scale: Scale) -> None:
    """Gathered inside hosts, sums of parts across."""
    mesh = _mesh((2, NUM_DEVICES // 2), ("host", "device"))
    shape = replace(scale.shape, layers=scale.layers[0])
    step, found = _systems(shape, mesh, {"host": bx.DataParallel(), "device": bx.FullySharded()})
    for name, system in found.items():
        crossing = sum(one.times * one.sent_bytes for one in system.collectives() if one.group_size != NUM_DEVICES // 2)
        report.add("GPT-2, 2 × 4", name, "sent across hosts by a device, a step", "MB", [crossing / 1e6])
        report.add("GPT-2, 2 × 4", name, MEMORY, "MiB", [system.memory_bytes() / 2**20])
    _time(report, "GPT-2, 2 × 4", "", shape, step, found, scale.rounds)
    report.against("hsdp_step", "GPT-2, 2 × 4", STEP, ours=OURS, peers=[XLA, BY_HAND])
    jax.clear_caches()


def _systems(shape: Shape, mesh: Mesh, strategies: Mapping[str, Any]) -> tuple[bx.Step, dict[str, System]]:
    step, own = systems.ours(shape, mesh, strategies)
    return step, {OURS: own, XLA: systems.xla(shape, mesh, step), BY_HAND: systems.by_hand(shape, mesh, step)}


def _time(
    report: Report, case: str, at: str, shape: Shape, step: bx.Step, found: Mapping[str, System], rounds: int
) -> None:
    batches = [systems.place(shape, step, seed) for seed in range(3)]
    figures = take_turns({name: lambda one=one: one.seconds(batches) for name, one in found.items()}, rounds=rounds)
    for name, seconds in figures.items():
        report.add(case, name, STEP, "s", seconds, at=at)
    say(f"{case} {at}: {figures}")


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


if __name__ == "__main__":
    run(main)
