"""The seed's figures 3-6: our loader against a naive loop, on CIFAR-100 at 224 x 224 and MNIST at 30 x 30.

The naive loop is one CPU thread: it holds the unpickled data set in memory, resizes image by image with Pillow, stacks,
reshapes as flax's `shard` does, and hands over to flax's own `prefetch_to_device` (two batches ahead). Both sides
deliver uint8 batches of equal shape, split over the devices, globally shuffled, by the same bilinear interpolation; the
largest difference of a pixel is measured.
"""

import collections
import gzip
import itertools
import math
import pickle
import struct
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from numpy.typing import NDArray
from PIL import Image

import braidax as bx
from benchmarks.harness import Report, arguments, run, take_turns
from benchmarks.naive.archives import write_cifar100, write_mnist
from braidax.data import Knobs, Permutation
from braidax.tasks.wide_resnet import wide_resnet

LEAVES = ("image", "label")
SIZES = {"cifar100@224": (224, 224), "mnist@30": (30, 30)}


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`."""

    num_train: int
    rounds: int
    seconds: float
    batch_sizes: tuple[int, ...]
    device_counts: tuple[int, ...]
    thread_counts: tuple[int, ...]
    intervals: int
    training: tuple[tuple[int, int, int], ...]  # batch size, devices, threads


FULL = Scale(
    num_train=50_000,
    rounds=5,
    seconds=0.6,
    batch_sizes=(64, 128, 256, 512),
    device_counts=(1, 2, 4, 8),
    thread_counts=(1, 2, 4),
    intervals=200,
    training=(
        (64, 1, 2),
        (64, 2, 2),
        (64, 4, 2),
        (64, 8, 1),
        (64, 8, 2),
        (64, 8, 4),
        (128, 8, 2),
        (256, 8, 2),
        (512, 8, 2),
    ),
)
QUICK = Scale(
    num_train=2_000,
    rounds=2,
    seconds=0.05,
    batch_sizes=(64, 512),
    device_counts=(1, 8),
    thread_counts=(1, 2),
    intervals=8,
    training=((64, 8, 2),),
)


def main() -> int:
    parser = arguments("naive", __doc__ or "")
    parser.add_argument("--plot", metavar="FILE", help="draw runtime per sample to FILE (.png or .svg)")
    parser.add_argument("--archives", metavar="FOLDER", help="keep the generated archives here and use them again")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    scale, report = QUICK if options.quick else FULL, Report(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.archives or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        paths = _archives(folder, scale)
        for name, path in paths.items():
            _loader_alone(report, scale, name, path)
        _claim_speedups(report)
        _thread_scaling(report, scale, paths["cifar100@224"])
        _spread(report, scale, paths["cifar100@224"])
        _stall(report, scale, paths["cifar100@224"])
        for name, path in paths.items():
            _training_loop(report, scale, name, path)
    _permute(report, scale)
    if options.plot:
        _plot(report, options.plot)
    return report.finish()


def _archives(folder: Path, scale: Scale) -> dict[str, Path]:
    cifar, mnist = folder / "cifar-100-python.tar.gz", folder / "mnist"
    if not cifar.exists():
        write_cifar100(folder, num_train=scale.num_train, num_test=100)
    if not mnist.exists():
        write_mnist(folder, num_train=scale.num_train, num_test=100)
    return {"cifar100@224": cifar, "mnist@30": mnist}


# The naive loop


def read_naively(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Returns the whole training set as a user reads it who knows the format: images `[N, H, W, C]`, labels `[N]`."""
    if path.is_file():
        with tarfile.open(path) as archive:
            member = archive.extractfile("cifar-100-python/train")
            assert member is not None, "the archive has a training set"
            content = pickle.load(member, encoding="bytes")
        pixels = np.asarray(content[b"data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(pixels), np.asarray(content[b"fine_labels"], np.int32)
    with gzip.open(path / "train-images-idx3-ubyte.gz") as file:
        _, num, height, width = struct.unpack(">4I", file.read(16))
        pixels = np.frombuffer(file.read(), np.uint8).reshape(num, height, width)
    with gzip.open(path / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read()[8:], np.uint8).astype(np.int32)
    return pixels, labels


def resize_naively(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Returns one image resized by Pillow, as torchvision's `Resize` does to it."""
    resized = Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(resized).reshape(*size, -1)


def naive_batches(
    images: NDArray[np.uint8], labels: NDArray[np.int32], size: tuple[int, int], batch_size: int, devices: list[Any]
) -> Iterator[Any]:
    """Yields batches for ever, leaves `[devices, batch / devices, ...]`, prefetched by flax."""

    def host_batches() -> Iterator[Any]:
        rng = np.random.default_rng(0)
        while True:
            order = rng.permutation(len(images))
            for start in range(0, len(order) - batch_size + 1, batch_size):
                chosen = order[start : start + batch_size]
                batch = {
                    "image": np.stack([resize_naively(images[i], size) for i in chosen]),
                    "label": labels[chosen],
                }
                yield jax.tree.map(lambda leaf: leaf.reshape(len(devices), -1, *leaf.shape[1:]), batch)

    return flax.jax_utils.prefetch_to_device(host_batches(), 2, devices=devices)


# Cases


def _intervals(batches: Iterator[Any], *, warmup: int, count: int) -> tuple[float, list[float]]:
    """Draws batches and waits for each to be on its devices.

    **Returns:** batches per second over `count` of them, and the seconds between their arrivals.
    """
    for _ in range(warmup):
        jax.block_until_ready(next(batches))
    marks = [time.perf_counter()]
    for _ in range(count):
        jax.block_until_ready(next(batches))
        marks.append(time.perf_counter())
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    return count / (marks[-1] - marks[0]), list(np.diff(marks))


def _our_batches(source: Any, mesh: Mesh, batch_size: int, threads: int | None) -> tuple[bx.DataLoader, Iterator[Any]]:
    loader = bx.DataLoader(
        source, mesh, PartitionSpec("data"), batch_size=batch_size, epochs=None, knobs=Knobs(threads=threads)
    )
    return loader, iter(loader)


def _loader_alone(report: Report, scale: Scale, name: str, path: Path) -> None:
    size = SIZES[name]
    images, labels = read_naively(path)
    source = bx.open(path, image_size=size)
    _check_equal(report, name, source, images, size)
    grid = [(batch, count, 2) for batch in scale.batch_sizes for count in scale.device_counts]
    grid += [(max(scale.batch_sizes), max(scale.device_counts), threads) for threads in scale.thread_counts]
    for batch_size, num_devices, threads in dict.fromkeys(grid):
        devices = jax.devices()[:num_devices]
        mesh = jax.make_mesh((num_devices,), ("data",), devices=devices)

        def ours(batch_size: int = batch_size, threads: int = threads, mesh: Mesh = mesh) -> float:
            _, batches = _our_batches(source, mesh, batch_size, threads)
            return _rate(batches, batch_size, scale.seconds)

        def naive(batch_size: int = batch_size, devices: list[Any] = devices) -> float:
            return _rate(naive_batches(images, labels, size, batch_size, devices), batch_size, scale.seconds)

        figures = take_turns({"ours": ours, "naive": naive}, rounds=scale.rounds)
        case = f"{name} batch={batch_size} devices={num_devices} threads={threads}"
        ratios = [a / b for a, b in zip(*figures.values(), strict=True)]
        report.add(case, "ours / naive", "loader alone", "x", ratios)
        for system, rates in figures.items():
            report.add(case, system, "loader alone", "samples/s", rates)
            report.add(case, system, "per sample", "us", [1e6 / rate for rate in rates])
            report.add(case, system, "per device", "us", [1e6 / rate * num_devices for rate in rates])


def _rate(batches: Iterator[Any], batch_size: int, seconds: float) -> float:
    """Returns samples per second, over as many batches as take about `seconds`."""
    for _ in range(4):
        jax.block_until_ready(next(batches))
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or count < 4:
        jax.block_until_ready(next(batches))
        count += 1
    rate = batch_size * count / (time.perf_counter() - start)
    batches.close()  # pyright: ignore[reportAttributeAccessIssue] (both are generators)
    return rate


def _check_equal(report: Report, name: str, source: Any, images: NDArray[np.uint8], size: tuple[int, int]) -> None:
    chosen = np.random.default_rng(0).integers(0, len(images), 256)
    out = {leaf: np.empty((256, *spec.shape), spec.dtype) for leaf, spec in source.sample_spec.items()}
    source.read(chosen, out)
    expected = np.stack([resize_naively(images[i], size) for i in chosen])
    difference = float(np.abs(out["image"].astype(int) - expected).max())
    report.add(name, "ours - naive", "largest pixel difference", "/255", [difference])
    report.at_most(f"{name.split('@')[0]}_difference", difference, 1)


def _claim_speedups(report: Report) -> None:
    medians = {(row.case, row.system): row.median for row in report.rows if row.metric == "loader alone"}
    batch, devices = 512, 8
    for claim, name, target in (("cifar_loader", "cifar100@224", 12.0), ("mnist_loader", "mnist@30", 10.0)):
        case = f"{name} batch={batch} devices={devices} threads=2"
        report.at_least(claim, medians[case, "ours / naive"], target)


def _thread_scaling(report: Report, scale: Scale, path: Path) -> None:
    """One and two threads in turn, so that both see the same machine."""
    source, mesh = bx.open(path, image_size=SIZES["cifar100@224"]), jax.make_mesh((8,), ("data",))

    def rate(threads: int) -> float:
        return _rate(_our_batches(source, mesh, 512, threads)[1], 512, scale.seconds)

    figures = take_turns({"1 thread": lambda: rate(1), "2 threads": lambda: rate(2)}, rounds=scale.rounds)
    ratios = [two / one for one, two in zip(*figures.values(), strict=True)]
    median = report.add("cifar100@224 batch=512 devices=8", "2 threads / 1 thread", "loader alone", "x", ratios)
    for system, rates in figures.items():
        report.add("cifar100@224 batch=512 devices=8", system, "loader alone", "samples/s", rates)
    report.at_least("thread_scaling", median, 1.6)


def _spread(report: Report, scale: Scale, path: Path) -> None:
    """The seed saw instability at large batches: the intervals between batches of 512, the median run of several."""
    images, labels = read_naively(path)
    size, devices = SIZES["cifar100@224"], jax.devices()
    source, mesh = bx.open(path, image_size=size), jax.make_mesh((8,), ("data",))
    case, ratios = "cifar100@224 batch=512 devices=8 threads=2", collections.defaultdict[str, list[float]](list)
    intervals = collections.defaultdict[str, list[float]](list)
    for _ in range(scale.rounds):
        runs = {
            "ours": (_our_batches(source, mesh, 512, 2)[1], scale.intervals // 2),
            "naive": (naive_batches(images, labels, size, 512, devices), max(4, scale.intervals // 20)),
        }
        for system, (batches, count) in runs.items():
            _, seconds = _intervals(batches, warmup=6, count=count)
            intervals[system] += seconds
            ratios[system].append(float(np.percentile(seconds, 95) / np.median(seconds)))
    for system in intervals:
        report.add(case, system, "batch interval", "s", intervals[system])
        report.add(case, system, "p95 / median of a run", "x", ratios[system])
    report.at_most("spread", float(np.median(ratios["ours"])), 1.25)


def _stall(report: Report, scale: Scale, path: Path) -> None:
    """The share of the time that a step waits for data, if it takes 1.2x the loader's batch time on the same cores.

    With the loader's default knobs. What else `next()` costs the loop (to free the last batch, to get the GIL and a
    core back) is shown as a row of its own.
    """
    source = bx.open(path, image_size=SIZES["cifar100@224"])
    mesh = jax.make_mesh((8,), ("data",))
    _, batches = _our_batches(source, mesh, 512, None)
    _, intervals = _intervals(batches, warmup=4, count=max(8, scale.intervals // 4))
    step = _compute_for(1.2 * float(np.median(intervals)))
    stalls: list[float] = []
    outside: list[float] = []
    for _ in range(scale.rounds):
        loader, batches = _our_batches(source, mesh, 512, None)
        for _ in range(4):
            step(next(batches))
        waited, computed, start = -loader.trace.totals()["wait"].seconds, 0.0, time.perf_counter()
        for _ in range(max(8, scale.intervals // 8)):
            batch = next(batches)
            begin = time.perf_counter()
            step(batch)
            computed += time.perf_counter() - begin
        seconds = time.perf_counter() - start
        waited += loader.trace.totals()["wait"].seconds
        stalls.append(100 * waited / seconds)
        outside.append(100 * (seconds - computed - waited) / seconds)
        loader.close()
    case = "cifar100@224 batch=512, step of 1.2 x batch time"
    report.add(case, "ours", "stall", "%", stalls)
    report.add(case, "ours", "next(), not waiting for data", "%", outside)
    report.at_most("stall", float(np.median(stalls)), 2.0)


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


def _training_loop(report: Report, scale: Scale, name: str, path: Path) -> None:
    """Both loaders in front of the same step: the task's smallest preset."""
    task = wide_resnet(path, preset="tiny", image_size=SIZES[name][0])
    images, labels = read_naively(path)
    for batch_size, num_devices, threads in scale.training:
        devices = jax.devices()[:num_devices]
        mesh = jax.make_mesh((num_devices,), ("data",), devices=devices)
        spec = {leaf: task.train.batch_spec(batch_size)[leaf] for leaf in LEAVES}
        strategies = {"data": bx.DataParallel()}
        step = bx.parallelize(task.loss, optax.sgd(0.01), mesh, strategies, init=task.init, batch=spec)
        joined = jax.jit(_join, out_shardings=step.batch_shardings)

        def ours(mesh: Mesh = mesh, step: bx.Step = step, size: int = batch_size, threads: int = threads) -> float:
            batches = _our_batches(task.train, mesh, size, threads)[1]
            return _train(step, ({leaf: batch[leaf] for leaf in LEAVES} for batch in batches), size, scale.seconds)

        def naive(step: bx.Step = step, size: int = batch_size, devices: Any = devices, joined: Any = joined) -> float:
            batches = naive_batches(images, labels, SIZES[name], size, devices)
            return _train(step, (joined(batch) for batch in batches), size, scale.seconds)

        figures = take_turns({"ours": ours, "naive": naive}, rounds=min(scale.rounds, 3))
        case = f"{name} batch={batch_size} devices={num_devices} threads={threads}"
        ratios = [a / b for a, b in zip(*figures.values(), strict=True)]
        report.add(case, "ours / naive", "training wide_resnet tiny", "x", ratios)
        for system, rates in figures.items():
            report.add(case, system, "training wide_resnet tiny", "samples/s", rates)


def _join(batch: Any) -> Any:
    """From `[devices, batch / devices, ...]`, as `pmap` wants it, to global arrays `[batch, ...]`."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)


def _train(step: bx.Step, batches: Iterator[Any], batch_size: int, seconds: float) -> float:
    state = step.init(jax.random.key(0))
    state, metrics = step.update(state, next(batches))
    jax.block_until_ready(metrics)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 3 * seconds or count < 2:
        state, metrics = step.update(state, next(batches))
        jax.block_until_ready(metrics)
        count += 1
    return batch_size * count / (time.perf_counter() - start)


def _permute(report: Report, scale: Scale) -> None:
    positions = np.arange(200_000, dtype=np.int64)
    peaks: dict[int, int] = {}
    for exponent in (6, 9, 12):
        seconds: list[float] = []
        for epoch in range(scale.rounds):
            permutation = Permutation(10**exponent, seed=0, epoch=epoch)
            start = time.perf_counter()
            permutation(positions)
            seconds.append((time.perf_counter() - start) / len(positions))
        report.add(f"10^{exponent} samples", "ours", "permute", "us/index", [1e6 * value for value in seconds])
        tracemalloc.start()
        Permutation(10**exponent, seed=0, epoch=0)(positions[:512])
        peaks[exponent] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        report.add(f"10^{exponent} samples", "ours", "peak memory, 512 indices", "KiB", [peaks[exponent] / 1024])
    rng_seconds = []
    for seed in range(scale.rounds):
        start = time.perf_counter()
        np.random.default_rng(seed).permutation(10**6)
        rng_seconds.append(time.perf_counter() - start)
    report.add("10^6 samples", "numpy, in memory", "permute", "us/index", [1e6 * s / 10**6 for s in rng_seconds])
    slowest = max(row.median for row in report.rows if row.metric == "permute" and row.system == "ours")
    report.at_most("permute", slowest, 1.0)
    report.at_most("permute_memory", max(peaks.values()) / min(peaks.values()), 1.5)


def _plot(report: Report, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    for (name, metric), axis in zip(itertools.product(SIZES, ("per sample", "per device")), axes.flat, strict=True):
        lines: dict[tuple[str, str], list[tuple[int, float, float]]] = collections.defaultdict(list)
        for row in report.rows:
            if row.metric == metric and row.case.startswith(name) and row.case.endswith("threads=2"):
                batch, devices = (int(part.split("=")[1]) for part in row.case.split()[1:3])
                lines[row.system, f"{devices} devices"].append((batch, row.median, max(row.values)))
        for (system, label), points in sorted(lines.items()):
            sizes, medians, highs = (list(column) for column in zip(*sorted(points), strict=True))
            style = "-o" if system == "ours" else "--s"
            line = axis.plot(sizes, medians, style, label=f"{system}, {label}")[0]
            axis.fill_between(sizes, medians, highs, color=line.get_color(), alpha=0.2)
        axis.set(title=f"{name}, {metric}", xlabel="batch size", ylabel="us, median to max", xscale="log", yscale="log")
        ticks = sorted({batch for points in lines.values() for batch, _, _ in points})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.legend(fontsize=7, ncols=2)
    figure.suptitle("Loader alone, 2 threads: runtime per sample and per device")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run(main)
