"""Steps of a small shape, in turns; the devices are virtual and share the cores."""

from collections.abc import Sequence
from dataclasses import replace

import jax

from benchmarks.harness import Report, say, systems, take_turns
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import HELD, OURS, XLA
from benchmarks.rotated import ways
from benchmarks.rotated.ways import DDP, RTP

STEP, SPEED = "step", "tokens"


def steps(report: Report, shape: Shape, chosen: Sequence[str], rounds: int, num_devices: int) -> None:
    """The chosen ways; claims a step beside fully sharded ones, and beside data parallelism."""
    case, turns = f"GPT-2, width {shape.width}, {shape.layers} layers, {num_devices} devices", {}
    all_samples = replace(shape, batch=shape.batch * num_devices)
    for way in chosen:
        step, found = ways.made(way, shape, num_devices)
        turns[way] = found.steps([systems.place(all_samples, step, seed) for seed in range(2)])
    for way, seconds in take_turns(turns, rounds=rounds).items():
        report.add(case, way, STEP, "s", seconds)
        report.add(case, way, SPEED, "tokens/s", [all_samples.batch * shape.length / one for one in seconds])
        say(f"  {way}: {seconds}")
    report.against(
        "step_fsdp", case, STEP, ours=RTP, peers=[way for way in (OURS, XLA, HELD) if way in chosen], at_least=1 / 1.05
    )
    report.against("step_ddp", case, STEP, ours=RTP, peers=[DDP], at_least=1 / 1.1)
    jax.clear_caches()
