"""The loader alone: throughput, threads, evenness, and the time in which a step waits for it."""

import collections
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import braidax as bx
from benchmarks.harness import Report, installed, take_turns
from benchmarks.harness.machine import num_cores
from benchmarks.naive import loops
from benchmarks.naive.scale import Scale
from benchmarks.naive.systems import (
    NEEDS,
    OPENCV,
    OURS,
    PEERS,
    PILLOW,
    RESIZES,
    SIZES,
    Start,
    mesh_of,
    our_loader,
    systems_of,
)

CIFAR = "cifar100@224"
ALONE, THROUGHPUT = "loader alone", "throughput"


def throughput(report: Report, scale: Scale, paths: Mapping[str, Path]) -> None:
    """Ours and all peers, by batch size, devices and threads."""
    for name, path in paths.items():
        case = f"{name}, {ALONE}"
        running = installed(report, case, systems_of(name, path), NEEDS)
        _check_equal(report, name, path, [peer for peer in (PILLOW, OPENCV) if peer in running])
        grid = [(batch, count, 2) for batch in scale.batch_sizes for count in scale.device_counts]
        grid += [(max(scale.batch_sizes), max(scale.device_counts), threads) for threads in scale.thread_counts]
        for batch_size, num_devices, threads in dict.fromkeys(grid):
            turns = {
                system: _turn(start, num_devices, batch_size, threads, scale.seconds)
                for system, start in running.items()
            }
            at = f"batch {batch_size}, devices {num_devices}, threads {threads}"
            for system, rates in take_turns(turns, rounds=scale.rounds).items():
                report.add(case, system, THROUGHPUT, "samples/s", rates, at=at)
        report.against(f"{name.partition('@')[0]}_loader", case, THROUGHPUT, ours=OURS, peers=PEERS)


def threads(report: Report, scale: Scale, paths: Mapping[str, Path]) -> None:
    """One and two threads in turn, so that both see the same machine."""
    if num_cores() == 1:
        report.not_measured("thread_scaling", ">= 1.6", "two threads have one core")
        return
    start = systems_of(CIFAR, paths[CIFAR])[OURS]
    largest = max(scale.batch_sizes)
    named = {"1 thread": 1, "2 threads": 2}
    turns = {name: _turn(start, 8, largest, number, scale.seconds) for name, number in named.items()}
    figures = take_turns(turns, rounds=scale.rounds)
    for system, rates in figures.items():
        report.add(f"{CIFAR}, batch {largest}, devices 8", system, THROUGHPUT, "samples/s", rates)
    ratios = [two / one for one, two in zip(*figures.values(), strict=True)]
    report.at_least("thread_scaling", ratios, 1.6)


def spread(report: Report, scale: Scale, paths: Mapping[str, Path]) -> None:
    """The seed saw instability at large batches: the intervals between the largest ones, in each of several runs."""
    largest = max(scale.batch_sizes)
    case = f"{CIFAR}, batch {largest}, devices 8, threads 2"
    running = installed(report, case, systems_of(CIFAR, paths[CIFAR]), NEEDS)
    ratios = collections.defaultdict[str, list[float]](list)
    medians = collections.defaultdict[str, list[float]](list)
    for _ in range(scale.rounds):
        for system, start in running.items():
            count = scale.intervals // 2 if system == OURS else max(4, scale.intervals // 10)
            seconds = intervals(start(mesh_of(8), largest, 2, None), warmup=6, count=count)
            medians[system].append(float(np.median(seconds)))
            ratios[system].append(float(np.percentile(seconds, 95) / np.median(seconds)))
    for system in running:
        report.add(case, system, "batch interval, the median of a run", "s", medians[system])
        report.add(case, system, "p95 / median of a run", "x", ratios[system])
    report.at_most("spread", ratios[OURS], 1.25)


def stall(report: Report, scale: Scale, paths: Mapping[str, Path]) -> None:
    """The share of the time that a step waits for data, if it takes 1.2x the loader's batch time on the same cores.

    With the loader's default knobs. What else `next()` costs the loop (to free the last batch, to get the GIL and a
    core back) is shown as a metric of its own.
    """
    source, mesh, largest = bx.open(paths[CIFAR], image_size=SIZES[CIFAR]), mesh_of(8), max(scale.batch_sizes)
    seconds = intervals(iter(our_loader(source, mesh, largest, None)), warmup=4, count=max(8, scale.intervals // 4))
    step = _compute_for(1.2 * float(np.median(seconds)))
    stalls: list[float] = []
    outside: list[float] = []
    for _ in range(scale.rounds):
        loader = our_loader(source, mesh, largest, None)
        batches = iter(loader)
        for _ in range(4):
            step(next(batches))
        waited, computed, start = -loader.trace.totals()["wait"].seconds, 0.0, time.perf_counter()
        for _ in range(max(8, scale.intervals // 8)):
            batch = next(batches)
            begin = time.perf_counter()
            step(batch)
            computed += time.perf_counter() - begin
        total = time.perf_counter() - start
        waited += loader.trace.totals()["wait"].seconds
        stalls.append(100 * waited / total)
        outside.append(100 * (total - computed - waited) / total)
        loader.close()
    case = f"{CIFAR}, batch {largest}, a step of 1.2 x the batch time"
    report.add(case, OURS, "stall", "%", stalls)
    report.add(case, OURS, "next(), not waiting for data", "%", outside)
    report.at_most("stall", stalls, 2.0)


def intervals(batches: Iterator[Any], *, warmup: int, count: int) -> list[float]:
    """Draws batches, waits for each to be on its devices, and returns the seconds between their arrivals."""
    for _ in range(warmup):
        jax.block_until_ready(next(batches))
    marks = [time.perf_counter()]
    for _ in range(count):
        jax.block_until_ready(next(batches))
        marks.append(time.perf_counter())
    batches.close()  # pyright: ignore[reportAttributeAccessIssue] (all are generators)
    return list(np.diff(marks))


def _turn(start: Start, num_devices: int, batch_size: int, threads: int, seconds: float) -> Callable[[], float]:
    return lambda: _rate(start(mesh_of(num_devices), batch_size, threads, None), batch_size, seconds)


def _rate(batches: Iterator[Any], batch_size: int, seconds: float) -> float:
    """Returns samples per second, over as many batches as take about `seconds`.

    What was prepared before the clock ran is drawn first: two batches of the peers, as many of ours.
    """
    for _ in range(4):
        jax.block_until_ready(next(batches))
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or count < 4:
        jax.block_until_ready(next(batches))
        count += 1
    rate = batch_size * count / (time.perf_counter() - start)
    batches.close()  # pyright: ignore[reportAttributeAccessIssue] (all are generators)
    return rate


def _check_equal(report: Report, name: str, path: Path, peers: list[str]) -> None:
    """Compares the pixels that ours delivers with those of each peer."""
    size, images = SIZES[name], loops.read(path)
    chosen = np.random.default_rng(0).integers(0, len(images.labels), 256)
    source = bx.open(path, image_size=size)
    out = {leaf: np.empty((256, *spec.shape), spec.dtype) for leaf, spec in source.sample_spec.items()}
    source.read(chosen, out)
    for peer in peers:
        resize = RESIZES[peer]()
        expected = np.stack([resize(images.pixels[number], size) for number in chosen])
        difference = float(np.abs(out["image"].astype(int) - expected).max())
        library = peer.partition(",")[0]
        report.add("pixels", library, "largest difference to ours", "of 255", [difference], at=name)
        report.at_most(f"{name.partition('@')[0]}_difference_{library.lower()}", difference, 1)


def _compute_for(seconds: float) -> Callable[[Any], None]:
    """Returns a step that multiplies matrices on the cores for about `seconds`, reads a batch, and ends."""

    @jax.jit
    def compute(images: jax.Array, weights: jax.Array, repeats: jax.Array) -> jax.Array:
        product = jax.lax.fori_loop(0, repeats, lambda _, w: jnp.tanh(w @ weights), weights)
        return product.sum() + images.ravel()[0]

    weights = jnp.asarray(np.random.default_rng(0).normal(size=(384, 384)).astype(np.float32) / 20)
    pixel = jnp.zeros((1, 1), jnp.uint8)
    compute(pixel, weights, jnp.int32(1)).block_until_ready()
    repeats, elapsed = 8, 0.0
    while elapsed < seconds:
        repeats *= 2
        start = time.perf_counter()
        compute(pixel, weights, jnp.int32(repeats)).block_until_ready()
        elapsed = time.perf_counter() - start
    repeats = math.ceil(repeats * seconds / elapsed)

    def step(batch: Any) -> None:
        first = batch["image"].addressable_shards[0].data[:1, :1, 0, 0]
        compute(first, weights, jnp.int32(repeats)).block_until_ready()

    return step
