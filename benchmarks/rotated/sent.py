"""What is sent: bytes of weights, whatever the number of tokens, and that nothing which goes around is gathered."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

import braidax as bx
from benchmarks.harness import Report, say
from benchmarks.harness.gpt2 import Shape
from benchmarks.rotated import ways
from benchmarks.rotated.ways import RTP
from braidax.program import total_sent

HOPS, FORMULA = "sent by hops, a step", "formula"
_GATHERS = re.compile(r"= (.*?) all-gather(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def weights(report: Report, shape: Shape, depths: Sequence[int], num_devices: int) -> None:
    """Bytes of hops beside the formula, at some depths and with more tokens; and what is gathered."""
    ratios, gathered = list[float](), list[int]()
    for depth in depths:
        deep, at = replace(shape, layers=depth), f"{depth} layers"
        step, found = ways.made(RTP, deep, num_devices)
        sent = total_sent(found.collectives())
        formula = 3 * ways.num_bytes(step) * (num_devices - 1) / num_devices
        ratios.append(sent["collective-permute"] / formula)
        report.add("bytes", RTP, HOPS, "MB", [sent["collective-permute"] / 1e6], at=at)
        report.add("bytes", FORMULA, HOPS, "MB", [formula / 1e6], at=at)
        for kind, num_bytes in sorted(sent.items()):
            report.add("bytes", RTP, f"by {kind}", "MB", [num_bytes / 1e6], at=at)
        spec = replace(deep, batch=deep.batch * num_devices)
        evaluation = step.wrap(_evaluation(spec)).lower().compile()
        shapes = _rotated_shapes(step)
        for program in (found.compiled, evaluation):
            gathered.append(sum(shape in shapes for shape in gathered_shapes(program.as_text() or "")))
        jax.clear_caches()
    report.at_most("bytes", max(ratios), 1.01)
    report.at_most("no_gather", sum(gathered), 0)


def tokens(report: Report, shape: Shape, times: int, num_devices: int) -> None:
    """As many samples more."""
    found: list[float] = []
    for samples in (shape.batch, times * shape.batch):
        _, system = ways.made(RTP, replace(shape, batch=samples), num_devices)
        found.append(total_sent(system.collectives())["collective-permute"])
        at = f"{samples * shape.length:,} tokens a device"
        report.add("bytes by tokens", RTP, HOPS, "MB", [found[-1] / 1e6], at=at)
        say(f"  {at}: {found[-1] / 1e6:.1f} MB")
    report.at_most("tokens", abs(found[1] - found[0]), 0)
    jax.clear_caches()


def gathered_shapes(text: str) -> list[tuple[int, ...]]:
    """Returns the shapes that a program gathers, without dims of one, smallest dims first."""
    found = [shape for result in _GATHERS.findall(text) for shape in _SHAPE.findall(result)]
    return [_form(map(int, filter(None, shape.split(",")))) for shape in found]


def _rotated_shapes(step: bx.Step) -> set[tuple[int, ...]]:
    """Returns the shapes of what goes around: all of a leaf, as it is stored, and of one layer of it."""
    params = jax.tree.leaves(step.state_specs.params)
    found: set[tuple[int, ...]] = set()
    for variable, spec in zip(step.plan.variables, params, strict=True):
        assert math.prod(spec.shape) >= math.prod(variable.shape), "plans tell variables in the order of leaves"
        if any(isinstance(placement, bx.parallel.Rotated) for placement in variable.placements):
            for shape in (variable.shape, spec.shape):
                found |= {_form(shape), _form(shape[1:])}
    return found


def _form(shape: Any) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def _evaluation(shape: Shape) -> Any:
    def loss(params: Any, batch: Any) -> jax.Array:
        return shape.loss(params, batch)

    return loss
