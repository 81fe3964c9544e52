"""Records of 512 tokens, and texts of varying length, in the page cache or in memory."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

import braidax as bx
from benchmarks.shuffle import inputs, systems
from benchmarks.shuffle.cases import MOSAIC, Bench, hugging_face, ours
from benchmarks.shuffle.timing import Make, Timed

TOKENS, TEXTS, SMALL = "tokens", "texts", "small batches of 2 KiB records"
_SMALL_SIZES = (64, 256, 1024)


def tokens(bench: Bench) -> None:
    """Records of 512 tokens of 16 bits, in the page cache."""
    npy, size = inputs.write_tokens(bench.folder, bench.scale.num_tokens), 2048
    folder = inputs.write_tokens_for_hugging_face(npy)
    for path in (npy, folder):
        inputs.bring_to_page_cache(path)
    array = np.asarray(np.load(npy, mmap_mode="r"))
    hf, num = functools.cache(lambda form: hugging_face(folder, form)), len(array)
    gather = functools.partial(np.take, array, axis=0)
    tf = functools.cache(lambda: systems.tf_gather(array))
    limits: dict[str, Make] = {
        "np.take, 1 thread": lambda n: systems.fetched(gather, num, size, n),
        f"np.take, {bench.threads} threads": lambda n: systems.fetched(gather, num, size, n, threads=bench.threads),
    }
    from_folder: dict[str, Make] = {
        "HF datasets, batched": lambda n: systems.fetched(lambda order: hf("numpy")[order.tolist()], num, size, n),
        "HF datasets, one by one": lambda n: systems.one_by_one(_Column(hf("numpy")), size, n),
    }
    for workers in bench.scale.workers:
        from_folder[f"torch, HF, {workers} workers"] = functools.partial(
            lambda workers, n: systems.torch_loader(hf("torch"), size, n, workers=workers), workers
        )
    from_array: dict[str, Make] = {"tf.data, gather": lambda n: tf()(size, n)}
    for workers in bench.scale.workers:
        from_array[f"torch, gather, {workers} workers"] = functools.partial(
            lambda workers, n: systems.torch_loader(
                systems.Gathered(array), size, n, workers=workers, collate=systems.as_it_is
            ),
            workers,
        )
    rows = systems.Rows(array)
    for threads in (0, *bench.scale.grain_threads):  # 0: what Grain recommends for data in memory
        from_array[f"Grain, elements, {threads} threads"] = functools.partial(
            lambda threads, n: systems.grain_elements(rows, size, n, threads=threads), threads
        )
        from_array[f"Grain, gather, {threads} threads"] = functools.partial(
            lambda threads, n: systems.grain_gather(gather, num, size, n, threads=threads), threads
        )
    mine: dict[str, Make] = {
        "braidax, npy": lambda n: ours(bx.open(npy), size, threads=bench.threads)(n),
        "braidax, HF folder": lambda n: ours(bx.open(folder), size, threads=bench.threads)(n),
        "braidax.torch, HF": lambda n: systems.ours_for_torch(hf("torch"), size, n),
    }
    all_of_them = limits | mine | from_folder | from_array
    running = {
        name: Timed(make, size, epoch=num // size, seconds=bench.scale.seconds) for name, make in all_of_them.items()
    }
    streaming = bench.mosaic(TOKENS, "tokens", npy, size)
    bench.measure(TOKENS, {**running, **streaming})
    bench.claim("tokens_hf", TOKENS, "braidax, HF folder", list(from_folder), at_least=10)
    bench.claim("tokens_memory", TOKENS, "braidax, npy", [*from_array, *MOSAIC], at_least=1)
    bench.claim("tokens_limit", TOKENS, "braidax, npy", list(limits), at_least=0.9)
    bench.claim("tokens_tfdata", TOKENS, "braidax, npy", ["tf.data, gather"], at_least=4)
    of_grain = [name for name in from_array if name.startswith("Grain, gather")]
    bench.claim("tokens_grain", TOKENS, "braidax, npy", of_grain, at_least=10)
    from_torch = [name for name in from_folder if name.startswith("torch")]
    bench.claim("tokens_torch", TOKENS, "braidax.torch, HF", from_torch, at_least=1)


def small(bench: Bench) -> None:
    """Batches whose gathering takes less than what surrounds it, beside a loop without anything around it."""
    array = inputs.token_array(4 * bench.scale.num_tokens // 10).reshape(-1, 2 * inputs.TOKENS)
    path = bench.folder / f"small_{len(array)}.npy"
    np.save(path, array)
    inputs.bring_to_page_cache(path)
    for size in _SMALL_SIZES:
        makes: dict[str, Make] = {
            "braidax, npy": lambda n, size=size: ours(bx.open(path), size, threads=bench.threads)(n),
            "np.take, device_put": functools.partial(systems.taken_and_put, array, size),
        }
        running = {
            name: Timed(make, size, epoch=len(array) // size, seconds=bench.scale.seconds)
            for name, make in makes.items()
        }
        bench.measure(SMALL, running, at=f"{size:,} records")
    bench.claim("small_batches", SMALL, "braidax, npy", ["np.take, device_put"], at_least=1)


def texts(bench: Bench) -> None:
    """Texts of 20 to 400 words; all systems deliver arrays of padded bytes."""
    lines, size = inputs.write_texts(bench.folder, bench.scale.num_texts), 512
    folder = inputs.write_texts_for_hugging_face(lines)
    words = lines.read_text().splitlines()
    num, hf = len(words), functools.cache(lambda: hugging_face(folder))
    tf = functools.cache(lambda: systems.tf_texts(words))
    mine: dict[str, Make] = {
        "braidax, HF folder": lambda n: ours(_padded(folder), size, threads=bench.threads)(n),
        "braidax, text file": lambda n: ours(_padded(lines), size, threads=bench.threads)(n),
        "braidax.torch, HF": lambda n: systems.ours_for_torch(_padded(folder), size, n),
    }
    peers: dict[str, Make] = {
        "HF datasets, batched": lambda n: systems.fetched(
            lambda order: systems.padded(hf()[order.tolist()]["text"]), num, size, n
        ),
        f"HF datasets, batched, {bench.threads} threads": lambda n: systems.fetched(
            lambda order: systems.padded(hf()[order.tolist()]["text"]), num, size, n, threads=bench.threads
        ),
        "tf.data, in memory": lambda n: tf()(size, n),
    }
    for workers in bench.scale.workers:
        peers[f"torch, HF, {workers} workers"] = functools.partial(
            lambda workers, n: systems.torch_loader(hf(), size, n, workers=workers, collate=_collated), workers
        )
    for threads in (0, *bench.scale.grain_threads):
        peers[f"Grain, gather in memory, {threads} threads"] = functools.partial(
            lambda threads, n: systems.grain_gather(
                lambda order: systems.padded([words[index] for index in order.tolist()]), num, size, n, threads=threads
            ),
            threads,
        )
    running = {
        name: Timed(make, size, epoch=num // size, seconds=bench.scale.seconds) for name, make in (mine | peers).items()
    }
    streaming = bench.mosaic(TEXTS, "texts", lines, size)
    bench.measure(TEXTS, {**running, **streaming})
    bench.claim("texts", TEXTS, "braidax, HF folder", [*peers, *MOSAIC], at_least=1)
    bench.claim("texts_tfdata", TEXTS, "braidax, HF folder", ["tf.data, in memory"], at_least=1.2)
    bench.claim("texts_torch", TEXTS, "braidax.torch, HF", [name for name in peers if "torch" in name], at_least=1)


class _Column:
    """The token records of a data set, one by one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]["tokens"]


def _padded(where: Path) -> Any:
    return bx.data.padded(bx.open(where), systems.TEXT_BYTES, leaf="text")


def _collated(samples: Any) -> Any:
    return systems.padded([sample["text"] for sample in samples])
