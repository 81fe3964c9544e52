"""RINAS' question, asked of today's loaders: what does a global shuffle cost?

Records of 512 tokens (warm, cold, in an object store), texts of varying length, photographs of 500 x 375 pixels as
224 x 224, and two small models end to end against serial ordered fetching.
"""

import functools
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import braidax as bx
from benchmarks.harness import Report, arguments, run, take_turns
from benchmarks.shuffle import alone, inputs, store, systems, training
from braidax.data import Permutation

SIZE = 224
SEQUENCE = 128  # tokens that the language model sees at once: four sequences a record


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`."""

    num_tokens: int  # records
    num_texts: int
    num_photos: int
    rounds: int
    seconds: float
    grain_threads: tuple[int, ...]
    workers: tuple[int, ...]


FULL = Scale(500_000, 100_000, 1_200, rounds=5, seconds=1.0, grain_threads=(16, 64, 256), workers=(0, 2))
QUICK = Scale(20_000, 4_000, 100, rounds=1, seconds=0.2, grain_threads=(16,), workers=(0,))

Systems = Mapping[str, Callable[[], float]]


def main() -> int:
    parser = arguments("shuffle", __doc__ or "", tuple(CASES))
    parser.add_argument("--inputs", metavar="FOLDER", help="keep the generated inputs here and use them again")
    parser.add_argument("--streaming", metavar="PYTHON", help="of an environment with mosaicml-streaming, as a peer")
    options = parser.parse_args()
    scale, report = QUICK if options.quick else FULL, Report(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.inputs or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only or CASES:
            print(f"{name} …", file=sys.stderr, flush=True)
            CASES[name](report, scale, folder, options)
    return report.finish()


def _tokens(report: Report, scale: Scale, folder: Path, options: Any) -> None:
    """Records of 512 tokens of 16 bits, in the page cache."""
    npy, hugging = inputs.write_tokens(folder, scale.num_tokens)
    for path in (npy, hugging):
        inputs.bring_to_page_cache(path)
    array, batch_size = np.asarray(np.load(npy, mmap_mode="r")), 2048
    rate = functools.partial(systems.rate, batch_size=batch_size, seconds=scale.seconds)
    rows = systems.Rows(array)
    chosen = np.random.default_rng(0).permutation(len(array))[:200_000]

    def one_take() -> float:
        return systems.rate(
            lambda: (np.take(array, chosen, axis=0) for _ in itertools.count()), len(chosen), seconds=0.5
        )

    running: dict[str, Callable[[], float]] = {
        "np.take": one_take,
        "braidax, npy": lambda: rate(lambda: systems.ours(bx.open(npy), batch_size)),
        "braidax, HF folder": lambda: rate(lambda: systems.ours(bx.open(hugging), batch_size)),
        "HF datasets, batched": lambda: rate(lambda: systems.hugging_face(hugging, batch_size)),
        "HF datasets, one by one": lambda: rate(lambda: systems.hugging_face_one_by_one(hugging, batch_size), warmup=1),
        "tf.data, in memory": lambda: rate(lambda: systems.tf_gather(array, batch_size)),
    }
    for workers in scale.workers:
        running[f"torch, HF, {workers} workers"] = lambda workers=workers: rate(
            lambda: systems.torch_loader(_hf_torch(hugging), batch_size, workers=workers)
        )
    running["braidax.torch, HF"] = lambda: rate(lambda: _ours_for_torch(_hf_torch(hugging), batch_size))
    for threads in (0, *scale.grain_threads):  # 0: what Grain recommends for data in memory
        running[f"Grain, elements, {threads} threads"] = lambda threads=threads: rate(
            lambda: systems.grain_elements(rows, batch_size, threads=threads), warmup=1
        )
        running[f"Grain, batches, {threads} threads"] = lambda threads=threads: rate(
            lambda: systems.grain_batches(rows, batch_size, threads=threads),
            warmup=max(1, min(threads, 64)),  # what was read before the clock ran is not what it reads in a second
        )
    running |= _streaming(options, "tokens", npy, folder, batch_size, scale.seconds)
    medians = _measure(report, "tokens", running, scale.rounds)
    report.at_least("tokens_hf", medians["braidax, HF folder"] / medians["HF datasets, batched"], 10)
    report.at_least("tokens_grain", medians["braidax, npy"] / _best(medians, "Grain"), 50)
    report.at_least("tokens_limit", medians["braidax, npy"] / medians["np.take"], 0.5)


def _texts(report: Report, scale: Scale, folder: Path, options: Any) -> None:
    """Texts of 20 to 400 words; ours as padded arrays of bytes, the peers as lists of strings."""
    path, batch_size = inputs.write_texts(folder, scale.num_texts), 512
    rate = functools.partial(systems.rate, batch_size=batch_size, seconds=scale.seconds)

    def padded() -> Any:
        return bx.data.mapped(bx.open(path), _padded_bytes)

    running: dict[str, Callable[[], float]] = {
        "braidax": lambda: rate(lambda: systems.ours(padded(), batch_size)),
        "HF datasets, batched": lambda: rate(lambda: systems.hugging_face(path, batch_size)),
        "HF datasets, one by one": lambda: rate(lambda: systems.hugging_face_one_by_one(path, batch_size), warmup=1),
        "braidax.torch, HF": lambda: rate(lambda: _ours_for_torch(_hf(path), batch_size)),
    }
    for workers in scale.workers:
        running[f"torch, HF, {workers} workers"] = lambda workers=workers: rate(
            lambda: systems.torch_loader(_hf(path), batch_size, workers=workers)
        )
    for threads in scale.grain_threads:
        running[f"Grain, elements, {threads} threads"] = lambda threads=threads: rate(
            lambda: systems.grain_elements(_hf(path), batch_size, threads=threads), warmup=1
        )
    running["tf.data, in memory"] = lambda: rate(lambda: systems.tf_texts(path.with_suffix(".txt"), batch_size))
    running |= _streaming(options, "texts", path.with_suffix(".txt"), folder, batch_size, scale.seconds)
    _measure(report, "texts", running, scale.rounds)


def _photos(report: Report, scale: Scale, folder: Path, options: Any) -> None:
    """JPEG files of 500 x 375 pixels, delivered as 224 x 224."""
    path, batch_size = inputs.write_photos(folder, scale.num_photos), 64
    photos, rate = (
        systems.Photos(path, SIZE),
        functools.partial(systems.rate, batch_size=batch_size, seconds=2 * scale.seconds, warmup=2),
    )
    running: dict[str, Callable[[], float]] = {
        "braidax": lambda: rate(lambda: systems.ours(bx.open(path, image_size=(SIZE, SIZE)), batch_size)),
        "tf.data": lambda: rate(lambda: systems.tf_photos(path, batch_size, SIZE)),
        "braidax.torch, PIL": lambda: rate(lambda: _ours_for_torch(photos, batch_size)),
    }
    for workers in scale.workers:
        running[f"torch, PIL, {workers} workers"] = lambda workers=workers: rate(
            lambda: systems.torch_loader(photos, batch_size, workers=workers)
        )
    running[f"Grain, PIL, {scale.grain_threads[0]} threads"] = lambda: rate(
        lambda: systems.grain_elements(photos, batch_size, threads=scale.grain_threads[0])
    )
    running |= _streaming(options, "photos", path, folder, batch_size, 2 * scale.seconds)
    medians = _measure(report, f"photos ({inputs.jpeg_bytes(path) >> 10} KiB)", running, scale.rounds)
    report.at_least("jpeg_torch", medians["braidax"] / _best(medians, "torch, PIL"), 2)
    report.at_least("jpeg_tfdata", medians["braidax"] / medians["tf.data"], 1.3)


def _cold(report: Report, scale: Scale, folder: Path, options: Any) -> None:
    """The token records again, out of the page cache before each measurement; read through it, not by O_DIRECT."""
    npy, hugging = inputs.write_tokens(folder, scale.num_tokens)
    batch_size = 1024

    def cold(path: Path, make: Callable[[], systems.Batches]) -> float:
        gc.collect()  # or a map that the last system made may keep pages where they are
        inputs.drop_from_page_cache(path)
        return systems.rate(make, batch_size, seconds=scale.seconds, warmup=1)

    def rows() -> systems.Rows:
        return systems.Rows(np.asarray(np.load(npy, mmap_mode="r")))

    running: dict[str, Callable[[], float]] = {
        "braidax, npy": lambda: cold(npy, lambda: systems.ours(bx.open(npy), batch_size)),
        "braidax, HF folder": lambda: cold(hugging, lambda: systems.ours(bx.open(hugging), batch_size)),
        "np.take": lambda: cold(npy, lambda: _takes(npy, batch_size)),
        "HF datasets, batched": lambda: cold(hugging, lambda: systems.hugging_face(hugging, batch_size)),
        "torch, HF, 2 workers": lambda: cold(
            hugging, lambda: systems.torch_loader(_hf_torch(hugging), batch_size, workers=2)
        ),
    }
    for threads in scale.grain_threads:
        running[f"Grain, elements, {threads} threads"] = lambda threads=threads: cold(
            npy, lambda: systems.grain_elements(rows(), batch_size, threads=threads)
        )
    _measure(report, "tokens, cold", running, min(scale.rounds, 3))


def _remote(report: Report, scale: Scale, folder: Path, options: Any) -> None:
    """The token records in an object store that answers each request after 5 or 20 ms."""
    npy, _ = inputs.write_tokens(folder, scale.num_tokens)
    array, batch_size = np.load(npy, mmap_mode="r"), 256
    first, record_bytes = npy.stat().st_size - array.nbytes, inputs.TOKENS * array.itemsize
    for delay in (0.005, 0.02):
        with store.serve(folder, delay_seconds=delay) as address:
            remote = systems.Remote(
                address, npy.name, num_records=len(array), record_bytes=record_bytes, first=first
            )  # fmt: skip
            rate = functools.partial(systems.rate, batch_size=batch_size, seconds=2 * scale.seconds)
            running: dict[str, Callable[[], float]] = {
                "braidax": lambda address=address, rate=rate: rate(
                    lambda: systems.ours(_opened(f"{address}/{npy.name}"), batch_size)
                ),
                "serial": lambda remote=remote, delay=delay: systems.rate(
                    lambda: systems.serial(remote, 16), 16, seconds=50 * delay, warmup=1
                ),
            }
            for threads in scale.grain_threads:
                running[f"Grain, elements, {threads} threads"] = lambda threads=threads, remote=remote, rate=rate: rate(
                    lambda: systems.grain_elements(remote, batch_size, threads=threads)
                )
            medians = _measure(report, f"object store, {1e3 * delay:g} ms", running, min(scale.rounds, 3))
    report.at_least("remote_serial", medians["braidax"] / medians["serial"], 20)
    report.at_least("remote_grain", medians["braidax"] / _best(medians, "Grain"), 1.2)


def _training(report: Report, scale: Scale, folder: Path, options: Any) -> None:
    """Training where loading is the bottleneck, against serial ordered fetching."""
    npy, _ = inputs.write_tokens(folder, scale.num_tokens)
    array = np.load(npy, mmap_mode="r")
    first, record_bytes = npy.stat().st_size - array.nbytes, inputs.TOKENS * array.itemsize
    seconds, batch_size = 3 * scale.seconds, 16
    model = training.language_model(SEQUENCE)
    with store.serve(folder, delay_seconds=0.005) as address:
        remote = systems.Remote(address, npy.name, num_records=len(array), record_bytes=record_bytes, first=first)
        medians = _measure(
            report,
            "train, language, 5 ms store",
            {
                "braidax": lambda: training.throughput(
                    model,
                    lambda: systems.ours(_opened(f"{address}/{npy.name}"), batch_size),
                    lambda batch: batch["data"].reshape(-1, SEQUENCE),
                    batch_size,
                    seconds=seconds,
                ),
                "serial ordered": lambda: training.throughput(
                    model,
                    lambda: systems.serial(remote, batch_size),
                    lambda batch: batch.view(np.uint16).reshape(-1, SEQUENCE),
                    batch_size,
                    seconds=seconds,
                ),
            },
            min(scale.rounds, 3),
        )
    report.at_least("train_lm", medians["braidax"] / medians["serial ordered"], 1.59)
    path, batch_size = inputs.write_photos(folder, scale.num_photos), 32
    photos, model = systems.Photos(path, SIZE), training.vision_model(SIZE)
    medians = _measure(
        report,
        "train, vision, JPEG files",
        {
            "braidax": lambda: training.throughput(
                model,
                lambda: systems.ours(bx.open(path, image_size=(SIZE, SIZE)), batch_size),
                lambda batch: batch["image"],
                batch_size,
                seconds=seconds,
            ),
            "serial ordered": lambda: training.throughput(
                model, lambda: systems.serial(photos, batch_size), lambda batch: batch, batch_size, seconds=seconds
            ),
        },
        min(scale.rounds, 3),
    )
    report.at_least("train_vision", medians["braidax"] / medians["serial ordered"], 1.89)


def _why(report: Report, scale: Scale, folder: Path, options: Any) -> None:
    """Why a global shuffle matters: the loss after one epoch over samples that lie sorted by class."""
    rng, num_samples = np.random.default_rng(0), 20_000
    labels = np.repeat(np.arange(10), num_samples // 10)
    centers = rng.normal(size=(10, 32))
    samples = (centers[labels] + rng.normal(size=(num_samples, 32))).astype(np.float32)
    orders = {
        "global shuffle": Permutation(num_samples, seed=0, epoch=0)(np.arange(num_samples)),
        "buffer of 1,000": training.buffered_order(num_samples, 1000),
    }
    for name, order in orders.items():
        loss = training.final_loss(order, samples, labels, batch_size=64)
        report.add("sorted by class", name, "loss", "nats", [loss])


def _limits(report: Report, scale: Scale, folder: Path, options: Any) -> None:
    """Memory over an epoch, and the start of a source of 10^9 records."""
    npy, _ = inputs.write_tokens(folder, scale.num_tokens)
    early, late = alone.memory(npy, 512)
    report.add("tokens", "braidax, npy", "resident after 5 %", "MiB", [early / 2**20])
    report.add("tokens", "braidax, npy", "resident at the end", "MiB", [late / 2**20])
    report.at_most("rss", late / early, 1.05)
    seconds, num_bytes = alone.start_of_a_billion(folder)
    report.add("10^9 records", "braidax", "to the first batch", "s", [seconds])
    report.add("10^9 records", "braidax", "memory", "MiB", [num_bytes / 2**20])
    report.at_most("start_1e9", max(seconds / 1.0, num_bytes / 50e6), 1)


CASES: dict[str, Callable[[Report, Scale, Path, Any], None]] = {
    "tokens": _tokens,
    "texts": _texts,
    "photos": _photos,
    "cold": _cold,
    "remote": _remote,
    "training": _training,
    "why": _why,
    "limits": _limits,
}


def _measure(report: Report, case: str, running: Systems, rounds: int) -> dict[str, float]:
    told = {name: _told(name, run) for name, run in running.items()}
    figures = take_turns(told, rounds=rounds, longest_seconds=4)
    return {name: report.add(case, name, "throughput", "samples/s", values) for name, values in figures.items()}


def _streaming(
    options: Any, kind: str, source: Path, folder: Path, batch_size: int, seconds: float
) -> dict[str, Callable[[], float]]:
    """MosaicML Streaming, where there is an environment for it; in its main process: with workers it hung here."""
    shuffles = ("py1e", "naive") if options.streaming else ()
    return {
        f"Streaming, {shuffle}": functools.partial(
            alone.streaming, options.streaming, kind, source, folder / f"{kind}_mds", shuffle=shuffle,
            batch_size=batch_size, seconds=seconds,
        )
        for shuffle in shuffles
    }  # fmt: skip


def _told(name: str, run: Callable[[], float]) -> Callable[[], float]:
    def told() -> float:
        start = time.perf_counter()
        figure = run()
        print(f"  {name}: {figure:,.0f} ({time.perf_counter() - start:.1f} s)", file=sys.stderr, flush=True)
        return figure

    return told


def _best(medians: Mapping[str, float], prefix: str) -> float:
    return max(value for name, value in medians.items() if name.startswith(prefix))


def _opened(address: str) -> bx.data.Source:
    """Opens an object, without the disk cache: the peers have none."""
    return bx.open(address, remote=bx.data.Remote(cache_bytes=0))


def _hf(path: Path) -> Any:
    import datasets

    return datasets.load_from_disk(str(path))


def _hf_torch(path: Path) -> Any:
    return _hf(path).with_format("torch")


def _ours_for_torch(dataset: Any, batch_size: int) -> systems.Batches:
    from braidax.torch import DataLoader

    while True:
        yield from DataLoader(dataset, batch_size, shuffle=True, drop_last=True)


def _padded_bytes(window: Any) -> Any:
    texts = np.array(
        [text.encode() for text in window["text"]], "S2048"
    )  # longer ones are cut, others padded with zeros
    return {"text": texts.view(np.uint8).reshape(len(texts), 2048)}


def _takes(path: Path, batch_size: int) -> systems.Batches:
    array = np.asarray(np.load(path, mmap_mode="r"))
    rng = np.random.default_rng(0)
    while True:
        yield np.take(array, rng.integers(0, len(array), batch_size), axis=0)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 1)
    run(main)
