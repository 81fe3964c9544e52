"""The token records where reads wait: out of the page cache, and in an object store."""

import functools
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import braidax as bx
from benchmarks.shuffle import inputs, store, systems
from benchmarks.shuffle.cases import Bench, hugging_face, ours, stored
from benchmarks.shuffle.timing import Make, Timed

COLD, REMOTE, LATE = "tokens, cold", "object store", "one of 500 reads takes 0.5 s"
_USUAL_SECONDS, _LATE_SECONDS, _LATE_EVERY = 0.005, 0.5, 500


def cold(bench: Bench) -> None:
    """The first epoch, or what comes of it in a time, through the page cache, empty before each figure."""
    npy, size = inputs.write_tokens(bench.folder, bench.scale.num_tokens), 1024
    folder = inputs.write_tokens_for_hugging_face(npy)
    num = bench.scale.num_tokens

    def mapped() -> Any:
        return np.asarray(np.load(npy, mmap_mode="r"))

    def taken(threads: int, count: int) -> Any:
        return systems.fetched(functools.partial(np.take, mapped(), axis=0), num, size, count, threads=threads)

    def in_order(count: int) -> Any:
        """Reads the file as it lies, and shuffles nothing: what the disk gives at most."""
        batch, shape = np.empty((size, mapped().shape[1]), mapped().dtype), mapped().shape
        with npy.open("rb", buffering=0) as file:
            file.seek(npy.stat().st_size - shape[0] * batch[0].nbytes)
            for _ in range(count):
                file.readinto(batch.data)
                yield batch

    def from_folder(count: int) -> Any:
        dataset = hugging_face(folder, "numpy")
        return systems.fetched(lambda order: dataset[order.tolist()], num, size, count)

    def from_torch(workers: int, count: int) -> Any:
        return systems.torch_loader(hugging_face(folder, "torch"), size, count, workers=workers)

    mine: dict[str, tuple[Path, Make]] = {
        "braidax, npy": (npy, lambda n: ours(bx.open(npy), size)(n)),
        "braidax, HF folder": (folder, lambda n: ours(bx.open(folder), size)(n)),
    }
    most = max(bench.scale.grain_threads)
    peers: dict[str, tuple[Path, Make]] = {
        "np.take, 1 thread": (npy, functools.partial(taken, 0)),
        f"np.take, {most} threads": (npy, functools.partial(taken, most)),
        "HF datasets, batched": (folder, from_folder),
    }
    for workers in bench.scale.workers:
        peers[f"torch, HF, {workers} workers"] = (
            folder,
            functools.partial(from_torch, workers),
        )
    for threads in bench.scale.grain_threads:
        peers[f"Grain, elements, {threads} threads"] = (
            npy,
            functools.partial(
                lambda threads, n: systems.grain_elements(systems.Rows(mapped()), size, n, threads=threads), threads
            ),
        )
        peers[f"Grain, gather, {threads} threads"] = (
            npy,
            functools.partial(
                lambda threads, n: systems.grain_gather(
                    functools.partial(np.take, mapped(), axis=0), num, size, n, threads=threads
                ),
                threads,
            ),
        )
    limit: dict[str, tuple[Path, Make]] = {"the file in its order, no shuffle": (npy, in_order)}
    running = {name: _one_epoch(bench, path, make, size) for name, (path, make) in (mine | peers | limit).items()}
    bench.measure(COLD, running)  # of all rounds: what a virtual disk gives differs threefold
    bench.claim("cold", COLD, "braidax, npy", list(peers), at_least=1.5)


def remote(bench: Bench) -> None:
    """The token records in an object store that answers each request after 5 or 20 ms."""
    npy, size = inputs.write_tokens(bench.folder, bench.scale.num_tokens), 256
    lines, peers = ("5 ms", "20 ms"), list[str]()
    for line, delay in zip(lines, (0.005, 0.02), strict=True):
        with store.serve(bench.folder, delay_seconds=delay) as address:
            records = in_store(address, npy)
            others = store_peers(bench, records, size)
            makes: dict[str, Make] = {"braidax": ours(stored(f"{address}/{npy.name}"), size), **others}
            running: dict[str, Callable[[], float]] = {
                name: Timed(make, size, epoch=len(records) // size, seconds=2 * bench.scale.seconds)
                for name, make in makes.items()
            }
            one_by_one = functools.partial(systems.one_by_one, records, 16)
            running["serial"] = Timed(one_by_one, 16, epoch=len(records) // 16, seconds=50 * delay)
            bench.measure(REMOTE, running, rounds=min(bench.scale.rounds, 3), at=line)
            peers = [*others, "serial"]
    bench.claim("remote", REMOTE, "braidax", peers, at_least=1.2)


def late(bench: Bench) -> None:
    """What reading twice gains where one of 500 reads takes 0.5 s and all others 5 ms.

    Of an object with a `__getitem__`, whose late reads the loader hedges, and of an object store, whose requests are
    hedged below the loader. As many threads as the peers have at most read from the beginning on.
    """
    npy, size = inputs.write_tokens(bench.folder, bench.scale.num_tokens), 256
    seconds = 4 * bench.scale.seconds  # in which some reads are late
    slow, threads = SlowNowAndThen(np.load(npy, mmap_mode="r")), max(bench.scale.grain_threads)
    makes = {
        "braidax": functools.partial(systems.ours, slow, size, threads=threads),
        "braidax, nothing twice": functools.partial(systems.ours, slow, size, threads=threads, hedged=False),
    }
    epoch = len(slow) // size
    running: dict[str, Callable[[], float]] = {
        name: Timed(make, size, epoch=epoch, seconds=seconds) for name, make in makes.items()
    }
    bench.measure(LATE, running, rounds=min(bench.scale.rounds, 3), at="object")
    serving = store.serve(
        bench.folder, delay_seconds=_USUAL_SECONDS, late_seconds=_LATE_SECONDS, late_every=_LATE_EVERY
    )
    with serving as root:
        requests = {
            "braidax": (None, True),
            "braidax, reads only": (math.inf, True),
            "braidax, requests only": (None, False),
            "braidax, nothing twice": (math.inf, False),
        }
        running = {}
        for name, (hedge_seconds, hedged) in requests.items():
            source = bx.open(f"{root}/{npy.name}", remote=bx.data.Remote(cache_bytes=0, hedge_seconds=hedge_seconds))
            make = functools.partial(systems.ours, source, size, threads=threads, hedged=hedged)
            running[name] = Timed(make, size, epoch=epoch, seconds=seconds)
        bench.measure(LATE, running, rounds=min(bench.scale.rounds, 3), at="object store")
    bench.claim("hedged", LATE, "braidax", ["braidax, nothing twice"], at_least=1)


class SlowNowAndThen:
    """Rows of an array, each after 5 ms, and one of 500 after half a second: whichever is asked for then."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self._rows = rows
        self._delays = store.late_now_and_then(_USUAL_SECONDS, _LATE_SECONDS, _LATE_EVERY)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            seconds = next(self._delays)
        time.sleep(seconds)
        return {"tokens": self._rows[index]}


def in_store(address: str, npy: Path) -> systems.Remote:
    """Returns the token records of an object."""
    array = np.load(npy, mmap_mode="r")
    record_bytes = array.dtype.itemsize * array.shape[1]
    first = npy.stat().st_size - array.nbytes
    return systems.Remote(address, npy.name, num_records=len(array), record_bytes=record_bytes, first=first)


def store_peers(bench: Bench, records: systems.Remote, size: int) -> dict[str, Make]:
    """Returns the peers that fetch ahead: a request a thread, or all requests of a batch from each thread."""
    peers: dict[str, Make] = {
        "asyncio, 2 batches at once": lambda n: systems.fetched(records.at_once, len(records), size, n, threads=2)
    }
    for threads in bench.scale.grain_threads:
        peers[f"Grain, elements, {threads} threads"] = functools.partial(
            systems.grain_elements, records, size, threads=threads
        )
    for threads in (2, bench.scale.grain_threads[0]):
        peers[f"Grain, batches by asyncio, {threads} threads"] = functools.partial(
            systems.grain_gather, records.at_once, len(records), size, threads=threads
        )
    return peers


def _one_epoch(bench: Bench, path: Path, make: Make, batch_size: int) -> Callable[[], float]:
    epoch = bench.scale.num_tokens // batch_size
    timed = Timed(make, batch_size, epoch=epoch, seconds=2 * bench.scale.seconds)
    return lambda: timed.first_epoch(functools.partial(inputs.drop_from_page_cache, path))
