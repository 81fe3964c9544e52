"""Memory of gradients: by layers, by devices, at the paper's sizes, and how large a model fits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh

import braidax as bx
from benchmarks.harness import Report, models, say
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import HELD, OURS, XLA, System
from benchmarks.rotated import ways
from benchmarks.rotated.ways import DDP, RTP, WAYS
from braidax.program import total_sent
from braidax.tasks.bert_model import Sizes

GIVEN, TEMPORARY, TOTAL = "arguments", "temporaries", "arguments and temporaries"
PEAK, WEIGHTS, SENT = "memory of a device", "without activations", "sent by a device, a step"
FORMULA = "formula"
PAPER = "GPT-2 of the paper's sizes"
_MIB, _GIB = 2**20, 2**30


def layers(report: Report, shape: Shape, depths: Sequence[int], num_devices: int) -> None:
    """All ways at some depths; claims what the weights take beside the formula, and the whole beside fully sharded."""
    beside, targets = list[float](), {6: 0.55, 24: 0.8}
    for depth in depths:
        deep, at = replace(shape, layers=depth), f"{depth} layers"
        found: dict[str, System] = {}
        for way in WAYS:
            step, found[way] = ways.made(way, deep, num_devices)
            _add(report, "GPT-2", way, at, step, found[way])
        weights = _without_activations(deep, found[RTP], num_devices)
        formula = _formula_bytes(deep, found[RTP], num_devices)
        report.add("GPT-2", RTP, WEIGHTS, "MiB", [weights / _MIB], at=at)
        report.add("GPT-2", FORMULA, WEIGHTS, "MiB", [formula / _MIB], at=at)
        beside.append(weights / formula)
        if depth in targets:
            best = min(found[way].memory_bytes() for way in (OURS, XLA, HELD))
            report.at_most(f"vs_fsdp_{depth}_layers", found[RTP].memory_bytes() / best, targets[depth])
        jax.clear_caches()
    report.at_most("formula", max(beside), 1.05)


def devices(report: Report, shape: Shape, counts: Sequence[int]) -> None:
    """All ways on ever more devices; claims that what is divided becomes less as these become more."""
    weights: dict[int, float] = {}
    for count in counts:
        at = f"{count} devices"
        for way in WAYS if count > 1 else (DDP, RTP):
            step, found = ways.made(way, shape, count)
            _add(report, "GPT-2 by devices", way, at, step, found)
            if way == RTP:
                weights[count] = _without_activations(shape, found, count)
                report.add("GPT-2 by devices", RTP, WEIGHTS, "MiB", [weights[count] / _MIB], at=at)
        jax.clear_caches()
    first = min(count for count in counts if count > 1)
    report.at_most(
        "slope", max(count * weights[count] for count in counts if count > 1) / (first * weights[first]), 1.05
    )


def sizes(report: Report, shapes: Mapping[str, Shape], num_devices: int) -> None:
    """The paper's sizes, with the optimizer's state."""
    for at, shape in shapes.items():
        for way in (DDP, HELD, OURS, RTP):
            step, found = ways.made(way, shape, num_devices)
            report.add(PAPER, way, PEAK, "GB", [found.peak_bytes(step) / 1e9], at=at)
            say(f"  {at}, {way}: {found.peak_bytes(step) / 1e9:.2f} GB")
        jax.clear_caches()


def largest(report: Report, shape: Shape, limit_bytes: int, num_devices: int) -> None:
    """How many layers fit under a limit, each of them seen to fit, and one more not to."""
    case, fits = f"the largest GPT-2 under {limit_bytes / _GIB:g} GiB a device", dict[str, int]()
    for way in (DDP, OURS, RTP):
        depth = _most_layers(way, shape, limit_bytes, num_devices)
        step, found = ways.made(way, replace(shape, layers=depth), num_devices)
        fits[way] = ways.num_bytes(step) // 4
        report.add(case, way, "layers", "", [depth])
        report.add(case, way, "parameters", "millions", [fits[way] / 1e6])
        report.add(case, way, PEAK, "MiB", [found.peak_bytes(step) / _MIB])
        say(f"  {way}: {depth} layers, {fits[way] / 1e6:.0f} million parameters")
    report.at_least("largest", fits[RTP] / fits[DDP] / num_devices, 0.9)
    jax.clear_caches()


def bert(report: Report, given: Sizes, samples: int, num_devices: int) -> None:
    """BERT, whose layers are a loop that keeps all it computes."""
    model = models.bert(samples * num_devices, given)
    along: Mesh = ways.mesh((num_devices,))
    for way in (DDP, OURS, RTP):
        step = bx.parallelize(
            model.loss, model.optimizer, along, {"data": ways.strategy(way)}, init=model.init, batch=model.spec
        )
        found = System(step.lower().gradients.compile(), lambda: None, lambda state, _: state)
        _add(report, model.name, way, "", step, found)
    jax.clear_caches()


def _most_layers(way: str, shape: Shape, limit_bytes: int, num_devices: int) -> int:
    """Returns how many layers fit: each needs as much as the other, so that two depths tell it; more prove it."""

    def peak(depth: int) -> int:
        step, found = ways.made(way, replace(shape, layers=depth), num_devices)
        return found.peak_bytes(step)

    first, second = peak(4), peak(8)
    depth = max(1, int(4 + (limit_bytes - first) * 4 // (second - first)))
    while peak(depth) > limit_bytes:
        depth -= 1
    while peak(depth + 1) <= limit_bytes:
        depth += 1
    return depth


def _without_activations(shape: Shape, found: System, num_devices: int) -> float:
    """Returns arguments and temporaries with no samples, on the line through those of once and twice as many."""
    _, twice = ways.made(RTP, replace(shape, batch=2 * shape.batch), num_devices)
    return 2 * found.memory_bytes() - twice.memory_bytes()


def _formula_bytes(shape: Shape, found: System, num_devices: int) -> float:
    """Returns arguments, and of the largest unit two parts of its weights and two of their gradients."""
    unit = max(shape.vocabulary * shape.width, 12 * shape.width**2)
    return found.compiled.memory_analysis().argument_size_in_bytes + 4 * 4 * unit / num_devices


def _add(report: Report, case: str, way: str, at: str, step: bx.Step, found: System) -> None:
    analysis = found.compiled.memory_analysis()
    report.add(case, way, GIVEN, "MiB", [analysis.argument_size_in_bytes / _MIB], at=at)
    report.add(case, way, TEMPORARY, "MiB", [analysis.temp_size_in_bytes / _MIB], at=at)
    report.add(case, way, TOTAL, "MiB", [found.memory_bytes() / _MIB], at=at)
    report.add(case, way, PEAK, "MiB", [found.peak_bytes(step) / _MIB], at=at)
    report.add(case, way, SENT, "MB", [sum(total_sent(found.collectives()).values()) / 1e6], at=at)
    say(f"  {case}, {at}, {way}: {found.memory_bytes() / _MIB:.0f} MiB")
