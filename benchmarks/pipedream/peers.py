"""The systems that take steps of one GPT on the same two cores: ours in some ways, torch's schedules, SpectraX."""

import os
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.harness import absent
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import gpt
from benchmarks.pipedream.group import ROOT

ONE, DIVIDED = "ours, one process", "ours, DataParallel"
SPECTRAX = ROOT / ".venv" / "peers" / "spectrax" / "bin" / "python"
_OURS, _TORCH, _SPECTRAX = (f"benchmarks.pipedream.{name}" for name in ("ours", "torch_stages", "spectrax_stages"))
_TORCH_SCHEDULES = (
    ("GPipe", False),
    ("1F1B", False),
    ("1F1B", True),
    ("interleaved zero bubble", False),
    ("ZBV", False),
)
_SPECTRAX_SCHEDULES = ("GPipe", "1F1B")


class System(NamedTuple):
    """How a system is run. **Fields:** as `group` takes them; `why`: it cannot be, "" if it can."""

    module: str
    args: tuple[Any, ...]
    cores: list[set[int]]
    python: str = ""
    why: str = ""


def two_cores() -> list[set[int]]:
    """Returns a core for each of two processes; both the same where there is one only."""
    cores = sorted(os.sched_getaffinity(0))
    return [{cores[0]}, {cores[1 % len(cores)]}]


def ours(schedule: str) -> str:
    """Returns what ours is called by a schedule, on two processes."""
    return f"ours, {schedule}"


def our_systems(shape: Shape, schedules: Sequence[str], microbatches: int) -> dict[str, System]:
    """Returns ours: alone on one core, as one stage; by data parallelism; and by schedules."""
    cores = two_cores()
    alone = {ONE: System(_OURS, (shape, "1F1B", microbatches, "counted"), cores[1:])}
    half = max(microbatches // 2, 1)  # each process has half of the samples, in microbatches that are as large
    return alone | {DIVIDED: System(_OURS, (shape, "samples", half), cores)} | pipelines(shape, schedules, microbatches)


def pipelines(shape: Shape, schedules: Sequence[str], microbatches: int) -> dict[str, System]:
    """Returns ours by schedules alone: the first one is cut by measured seconds, others by counted ones."""
    cores, clocks = two_cores(), chain(["measured"], repeat("counted"))
    pairs = zip(schedules, clocks, strict=False)
    return {ours(name): System(_OURS, (shape, name, microbatches, clock), cores) for name, clock in pairs}


def peers(shape: Shape, microbatches: int, spectrax: Path, *, few: bool) -> dict[str, System]:
    """Returns the peers, with the same first parameters and samples. **Arguments:** `few`: one of each only."""
    cores, found = two_cores(), dict[str, System]()
    params = jax.tree.map(np.array, shape.init(jax.random.key(0)))
    batches = [gpt.samples(shape, seed)["ids"] for seed in range(2)]
    for schedule, compiled in _TORCH_SCHEDULES[:1] if few else _TORCH_SCHEDULES:
        args = (shape, schedule, microbatches, params, batches, gpt.RATE, compiled)
        name = f"torch, {schedule}{', compiled' if compiled else ''}"
        found[name] = System(_TORCH, args, cores, why=absent("torch"))
    why = "" if spectrax.exists() else "not installed (spectrax-lib): make .venv/peers/spectrax/stamp installs it"
    for schedule in _SPECTRAX_SCHEDULES[:1] if few else _SPECTRAX_SCHEDULES:
        args = (shape, schedule, microbatches, params, batches)
        found[f"SpectraX, {schedule}"] = System(_SPECTRAX, args, [cores[0] | cores[1]], str(spectrax), why)
    return found
