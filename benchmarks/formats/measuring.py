"""One epoch from the opening of a file to the last batch, and when the first batch was there."""

import contextlib
import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

import braidax as bx
from benchmarks.formats.cases import Stream
from benchmarks.formats.readers import Open, Order
from benchmarks.formats.written import PHOTO, Arrays
from braidax.data import Knobs, Permutation

Begin = Callable[[], Iterator[Any]]
"""Opens a file, and returns an iterator over the batches of one epoch, which are on the device, or on their way."""

_NEAR = 2.0  # of 255: JPEG decoders round in several ways


def orders_of(num_samples: int, batch_size: int) -> list[Order]:
    """Returns which samples each batch of ours has, in the first epoch of seed 0."""
    order = Permutation(num_samples, seed=0, epoch=0)(np.arange(num_samples))
    return [order[start : start + batch_size] for start in range(0, num_samples - batch_size + 1, batch_size)]


def ours(source: Callable[[Path], Any], path: Path, batch_size: int, threads: int) -> Begin:
    """Returns what begins our loader: batches are on the device."""

    def begin() -> Iterator[Any]:
        loader = bx.DataLoader(source(path), batch_size=batch_size, seed=0, epochs=1, knobs=Knobs(threads=threads))
        with contextlib.closing(loader):
            yield from loader

    return begin


def theirs(opened: Open, path: Path, orders: Sequence[Order], threads: int) -> Begin:
    """Returns what begins a library that fetches batches by numbers, each by one of so many threads, in their order."""

    def begin() -> Iterator[Any]:
        fetch = opened(path, threads)
        if threads == 1:
            yield from map(jax.device_put, map(fetch, orders))
            return
        waiting = iter(orders)
        with ThreadPoolExecutor(threads) as pool:
            ahead: deque[Future[Arrays]] = deque(
                pool.submit(fetch, order) for order in itertools.islice(waiting, 2 * threads)
            )
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(pool.submit(fetch, order) for order in itertools.islice(waiting, 1))
                yield jax.device_put(batch)

    return begin


def streamed(stream: Stream, path: Path, orders: Sequence[Order], threads: int) -> Begin:
    """Returns what begins a library that goes through a file in its order."""
    return lambda: map(jax.device_put, stream(path, sum(map(len, orders)), len(orders[0]), threads))


class Epoch:
    """Goes through one epoch, anew each time.

    The clock runs from before the file is opened until the last batch is on the device. `first_seconds`: of each time,
    until the first batch was there.
    """

    def __init__(self, begin: Begin, num_samples: int) -> None:
        self._begin, self._num_samples = begin, num_samples
        self.first_seconds: list[float] = []

    def __call__(self) -> float:
        """Returns samples per second."""
        gc.collect()  # of what was read before
        first, start = 0.0, time.perf_counter()
        for batch in self._begin():
            jax.block_until_ready(batch)
            first = first or time.perf_counter() - start
        seconds = time.perf_counter() - start
        self.first_seconds.append(first)
        return self._num_samples / seconds


def looked_at(begin: Begin, *, in_order: bool) -> list[Arrays]:
    """Goes through an epoch, which warms indexes, imports and pages.

    **Arguments:** `in_order`: whether others have the same batches.

    **Returns:** what is compared: the first batch and the last, or else the sums of all.
    """
    first: Arrays = {}
    last: Arrays = {}
    sums: Arrays = {}
    for batch in begin():
        last = {leaf: np.asarray(array) for leaf, array in batch.items()}
        first = first or last
        if not in_order:
            added = {leaf: array.sum(axis=0, dtype=np.float64) for leaf, array in last.items()}
            sums = {leaf: sums.get(leaf, 0) + part for leaf, part in added.items()}
    return [first, last] if in_order else [sums]


def check_same(name: str, ours: Sequence[Arrays], theirs: Sequence[Arrays]) -> None:
    """Compares what two have delivered, as `looked_at` returns it.

    **Raises:** `ValueError` where a library delivers other leaves, dtypes, shapes or values.
    """
    for one, two in zip(ours, theirs, strict=True):
        if one.keys() != two.keys() or not all(_is_same(one[leaf], two[leaf]) for leaf in one):
            raise ValueError(f"{name}: ours delivers {_told(one)}, its library {_told(two)}, or other values")


def _told(batch: Arrays) -> dict[str, str]:
    return {leaf: f"{array.dtype}{list(array.shape)}" for leaf, array in batch.items()}


def _is_same(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.shape[1:] == (*PHOTO, 3):
        return float(np.abs(one.astype(np.int16) - other).mean()) < _NEAR
    return bool(np.allclose(one, other) if one.dtype == np.float64 else np.array_equal(one, other))
