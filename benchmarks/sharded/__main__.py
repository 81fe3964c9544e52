"""Everything sharded: ours, XLA's own way with the same shardings, and one written by hand with `shard_map`.

GPT-2's shape, scanned over layers and rematerialised, at 4, 12 and 24 layers on 8 virtual devices, which share the
cores. Memory and bytes are those of the compiled programs of the gradients; steps of a smaller one are timed in turns.
Then BERT, ResNet-50 and DLRM beside one `jax.jit`, and fully sharded steps on 2 processes. What is compiled and not
run is in `benchmarks.sharded.compiled`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import braidax as bx
from benchmarks.harness import Report, arguments, models, run, say, systems, take_turns
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import BY_HAND, HELD, MEGATRON, OURS, TENSOR, XLA, System
from benchmarks.sharded import processes, tasks
from braidax.program import total_sent
from braidax.tasks.bert_model import Sizes

NUM_DEVICES, NUM_PROCESSES = 8, 2
STEP, MEMORY, SENT = "step", "arguments and temporaries of the gradients", "sent by a device, a step"
FORMULA = "formula"
_SMALLER = "GPT-2, width 512"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    **Fields:** `compiled`: the shape of models that are compiled only, and `layers`, how deep they are. `timed`: of
    those whose steps are timed, and `timed_layers`. `rounds`: turns of a system.
    """

    compiled: Shape
    layers: tuple[int, ...]
    timed: Shape
    timed_layers: tuple[int, ...]
    rounds: int
    bert: Sizes
    stages: tuple[int, ...]
    dlrm_rows: int


FULL = Scale(
    Shape(50_257, 768, 4, 512, 32),
    (4, 12, 24),
    Shape(16_384, 512, 4, 128, 16),
    (4, 12),
    5,
    Sizes(30_528, positions=128, num_layers=2),
    (3, 4, 6, 3),
    100_000,
)
QUICK = Scale(
    Shape(512, 128, 2, 32, 8),
    (2,),
    Shape(512, 128, 2, 32, 8),
    (2,),
    2,
    Sizes(1024, 32, width=64, num_layers=2, num_heads=2),
    (1, 1, 1, 1),
    2000,
)
_FEWER = ("layers", "steps", "hybrid_sharding", "tensor", "accumulate", "bert")  # with --quick


def main() -> int:
    parser = arguments("sharded", __doc__ or "", tuple(_CASES))
    options = parser.parse_args()
    scale, report = QUICK if options.quick else FULL, Report(options, "jaxlib", "optax")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for name in options.only or (_FEWER if options.quick else _CASES):
        start = time.perf_counter()
        _CASES[name](report, scale)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    return report.finish()


def _layers(report: Report, scale: Scale) -> None:
    mesh = _data()
    memory, sent, beside = list[float](), list[float](), list[list[float]]()
    for number in scale.layers:
        shape, at = replace(scale.compiled, layers=number), f"{number} layers"
        step, found = _systems(shape, mesh, {"data": bx.FullySharded()})
        sizes = {name: system.memory_bytes() for name, system in found.items()}
        given = found[OURS].compiled.memory_analysis().argument_size_in_bytes
        total = sum(variable.num_bytes for variable in step.plan.variables)
        num_bytes = {name: sum(total_sent(system.collectives()).values()) for name, system in found.items()}
        memory.append(sizes[OURS] / shape.formula_bytes(NUM_DEVICES, given))
        beside.append([sizes[OURS] / sizes[name] for name in (XLA, HELD, BY_HAND)])
        sent.append(num_bytes[OURS] / (3 * total * (NUM_DEVICES - 1) / NUM_DEVICES))
        sizes[FORMULA] = shape.formula_bytes(NUM_DEVICES, given)
        num_bytes[FORMULA] = 3 * total * (NUM_DEVICES - 1) / NUM_DEVICES
        for name in sizes:
            report.add("GPT-2", name, MEMORY, "MiB", [sizes[name] / 2**20], at=at)
            report.add("GPT-2", name, SENT, "MB", [num_bytes[name] / 1e6], at=at)
        jax.clear_caches()
    report.at_most("fsdp_memory", max(memory), 1.05)
    report.at_most("fsdp_memory_xla", max(xla for xla, *_ in beside), 0.8)
    report.at_most("fsdp_memory_others", max(max(others) for _, *others in beside), 1)
    report.at_most("fsdp_bytes", max(sent), 1.02)


def _steps(report: Report, scale: Scale) -> None:
    mesh = _data()
    for number in scale.timed_layers:
        shape = replace(scale.timed, layers=number)
        step, found = _systems(shape, mesh, {"data": bx.FullySharded()})
        _time(report, _SMALLER, f"{number} layers", shape, step, found, scale.rounds)
        jax.clear_caches()
    report.against("fsdp_step", _SMALLER, STEP, ours=OURS, peers=[XLA, HELD])
    report.against("fsdp_step_by_hand", _SMALLER, STEP, ours=OURS, peers=[BY_HAND])


def _hybrid_sharding(report: Report, scale: Scale) -> None:
    """Gathered inside hosts, sums of parts across."""
    mesh, case = _mesh((2, NUM_DEVICES // 2), ("host", "device")), f"{_SMALLER}, 2 × 4"
    shape = replace(scale.timed, layers=scale.timed_layers[0])
    step, found = _systems(shape, mesh, {"host": bx.DataParallel(), "device": bx.FullySharded()})
    crossed: dict[str, float] = {}
    for name, system in found.items():
        crossed[name] = sum(
            one.times * one.sent_bytes for one in system.collectives() if one.group_size != NUM_DEVICES // 2
        )
        report.add(case, name, "sent across hosts by a device, a step", "MB", [crossed[name] / 1e6])
        report.add(case, name, MEMORY, "MiB", [system.memory_bytes() / 2**20])
    _time(report, case, "", shape, step, found, scale.rounds)
    report.at_most("hsdp_bytes", crossed[OURS] / min(crossed.values()), 1)
    report.against("hsdp_step", case, STEP, ours=OURS, peers=[XLA, HELD, BY_HAND])
    jax.clear_caches()


def _systems(shape: Shape, mesh: Mesh, strategies: Mapping[str, Any]) -> tuple[bx.Step, dict[str, System]]:
    step, own = systems.ours(shape, mesh, strategies)
    return step, {
        OURS: own,
        XLA: systems.xla(shape, mesh, step),
        HELD: systems.held(shape, mesh, step),
        BY_HAND: systems.by_hand(shape, mesh, step),
    }


def _tensor(report: Report, scale: Scale) -> None:
    """Layers' work split over 4 devices: bytes along that axis, and steps."""
    size = 4 if scale.timed.heads % 4 == 0 else 2
    mesh = _mesh((NUM_DEVICES // size, size), ("data", "model"))
    shape = replace(scale.timed, layers=scale.timed_layers[0], qkv="by heads", backward="kept")
    case = f"GPT-2 by heads, width {shape.width}, {NUM_DEVICES // size} × {size}"
    strategies = {"data": bx.DataParallel(), "model": bx.parallel.TensorParallel(min_bytes=0)}
    step, own = systems.ours(shape, mesh, strategies)
    found = {
        TENSOR: own,
        XLA: systems.xla(shape, mesh, step),
        HELD: systems.held(shape, mesh, step),
        MEGATRON: systems.megatron(shape, mesh, step),
    }
    activations = shape.batch * size // NUM_DEVICES * shape.length * shape.width * 4
    # Four all-reduces a layer; of the vocabulary, what is looked up and the gradient of the head's input.
    sent = {FORMULA: 2 * (size - 1) / size * (4 * shape.layers + 2) * activations}
    for name, system in found.items():
        along = [one for one in system.collectives() if one.group_size != NUM_DEVICES // size]
        sent[name] = sum(total_sent(along).values())
        report.add(case, name, MEMORY, "MiB", [system.memory_bytes() / 2**20])
    for name, num_bytes in sent.items():
        report.add(case, name, "sent along model by a device, a step", "MB", [num_bytes / 1e6])
    _time(report, case, "", shape, step, found, scale.rounds)
    report.at_most("tp_bytes", sent[TENSOR] / sent[FORMULA], 1.02)
    report.at_most("tp_bytes_peers", sent[TENSOR] / min(sent[name] for name in (XLA, HELD, MEGATRON)), 1)
    report.against("tp_step", case, STEP, ours=TENSOR, peers=[XLA, HELD, MEGATRON])
    jax.clear_caches()


def _accumulate(report: Report, scale: Scale) -> None:
    """Bytes of data-parallel gradients with several microbatches, and with one; each sums a loss, which is none."""
    mesh, shape = _data(), replace(scale.timed, layers=scale.timed_layers[0], batch=64)
    sent, loss = dict[int, float](), 2 * 4 * (NUM_DEVICES - 1) / NUM_DEVICES
    for number in (1, 8):
        _, own = systems.ours(shape, mesh, {"data": bx.DataParallel()}, microbatches=number)
        sent[number] = sum(total_sent(own.collectives()).values()) - number * loss
        report.add(_SMALLER, "ours, DataParallel", SENT, "MB", [sent[number] / 1e6], at=f"{number} microbatches")
    report.at_most("accumulate", sent[8] / sent[1], 1)
    jax.clear_caches()


def _bert(report: Report, scale: Scale) -> None:
    model = models.bert(2 * NUM_DEVICES, scale.bert)
    tasks.measure(report, "bert", OURS, model, _data(), bx.FullySharded(), rounds=scale.rounds)
    jax.clear_caches()


def _resnet50(report: Report, scale: Scale) -> None:
    model = models.resnet(scale.stages, 64, NUM_DEVICES)
    tasks.measure(report, "resnet50", OURS, model, _data(), bx.FullySharded(), rounds=scale.rounds)
    jax.clear_caches()


def _dlrm(report: Report, scale: Scale) -> None:
    """Tables by rows, everything else fully sharded."""
    model, strategy = models.dlrm(scale.dlrm_rows, 256 * NUM_DEVICES), bx.Hybrid(dense=bx.FullySharded())
    tasks.measure(report, "dlrm", "ours, Hybrid and FullySharded", model, _data(), strategy, rounds=scale.rounds)
    jax.clear_caches()


def _processes(report: Report, scale: Scale) -> None:
    shape = replace(scale.timed, layers=scale.timed_layers[0])
    sizes = {"num_processes": NUM_PROCESSES, "num_devices": NUM_DEVICES}
    processes.fully_sharded(report, shape, **sizes, rounds=max(2, scale.rounds // 2))


def _time(
    report: Report, case: str, at: str, shape: Shape, step: bx.Step, found: Mapping[str, System], rounds: int
) -> None:
    batches = [systems.place(shape, step, seed) for seed in range(3)]
    figures = take_turns({name: one.steps(batches) for name, one in found.items()}, rounds=rounds)
    for name, seconds in figures.items():
        report.add(case, name, STEP, "s", seconds, at=at)
    say(f"{case} {at}: {figures}")


def _data() -> Mesh:
    return _mesh((NUM_DEVICES,), ("data",))


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


_CASES: dict[str, Callable[[Report, Scale], None]] = {
    "layers": _layers,
    "steps": _steps,
    "hybrid_sharding": _hybrid_sharding,
    "tensor": _tensor,
    "accumulate": _accumulate,
    "bert": _bert,
    "resnet50": _resnet50,
    "dlrm": _dlrm,
    "processes": _processes,
}

if __name__ == "__main__":
    run(main)
