"""The peers: loops as a user writes them who knows the format, with as many threads as ours, and two batches ahead."""

import collections
import gzip
import pickle
import struct
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

AHEAD = 2  # batches, as flax's `prefetch_to_device` has them by default

Image = NDArray[np.uint8]
Resize = Callable[[Image, tuple[int, int]], Image]
"""Resizes one image, bilinearly: `[H, W, C]` or `[H, W]` to `[*size, C]`."""


@dataclass(frozen=True)
class Images:
    """A whole training set in memory. **Fields:** `pixels`: `[N, H, W, C]` or `[N, H, W]`; `labels`: `[N]`."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int32]


def read(path: Path) -> Images:
    """Reads the training set of an archive of CIFAR-100, or of a folder of MNIST."""
    if path.is_file():
        with tarfile.open(path) as archive:
            member = archive.extractfile("cifar-100-python/train")
            assert member is not None, "the archive has a training set"
            content = pickle.load(member, encoding="bytes")
        pixels = np.asarray(content[b"data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return Images(np.ascontiguousarray(pixels), np.asarray(content[b"fine_labels"], np.int32))
    with gzip.open(path / "train-images-idx3-ubyte.gz") as file:
        _, num, height, width = struct.unpack(">4I", file.read(16))
        pixels = np.frombuffer(file.read(), np.uint8).reshape(num, height, width)
    with gzip.open(path / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read()[8:], np.uint8).astype(np.int32)
    return Images(pixels, labels)


def by_pillow() -> Resize:
    """Returns what torchvision's `Resize` does to an image."""
    import PIL.Image

    def resize(image: Image, size: tuple[int, int]) -> Image:
        resized = PIL.Image.fromarray(image).resize((size[1], size[0]), PIL.Image.Resampling.BILINEAR)
        return np.asarray(resized).reshape(*size, -1)

    return resize


def by_opencv() -> Resize:
    """Returns OpenCV's, each call in the thread that makes it."""
    import cv2

    cv2.setNumThreads(0)

    def resize(image: Image, size: tuple[int, int]) -> Image:
        resized: Any = cv2.resize(image, (size[1], size[0]), interpolation=cv2.INTER_LINEAR)
        return resized.reshape(*size, -1)

    return resize


def host_batches(
    images: Images, resize: Resize, size: tuple[int, int], batch_size: int, threads: int
) -> Generator[dict[str, NDArray[Any]]]:
    """Yields shuffled batches for ever; each thread of a pool resizes a part of each, two batches ahead."""
    channels = resize(images.pixels[0], size).shape[-1]

    def fill(out: NDArray[np.uint8], chosen: NDArray[np.int64]) -> None:
        for row, number in enumerate(chosen):
            out[row] = resize(images.pixels[number], size)

    def orders() -> Iterator[NDArray[np.int64]]:
        rng = np.random.default_rng(0)
        while True:
            order = rng.permutation(len(images.labels))
            for start in range(0, len(order) - batch_size + 1, batch_size):
                yield order[start : start + batch_size]

    coming: collections.deque[tuple[dict[str, NDArray[Any]], list[Future[None]]]] = collections.deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for chosen in orders():
            pixels = np.empty((batch_size, *size, channels), np.uint8)
            parts = zip(np.array_split(pixels, threads), np.array_split(chosen, threads), strict=True)
            futures = [pool.submit(fill, out, part) for out, part in parts]
            coming.append(({"image": pixels, "label": images.labels[chosen]}, futures))
            if len(coming) > AHEAD:
                ready, futures = coming.popleft()
                for future in futures:
                    future.result()
                yield ready
    finally:
        pool.shutdown(cancel_futures=True)


def to_replicas(batches: Generator[Mapping[str, NDArray[Any]]], devices: list[Any]) -> Generator[Any]:
    """Yields batches as `pmap` wants them, leaves `[devices, batch / devices, ...]`, by flax's `prefetch_to_device`."""
    import flax.jax_utils

    def replicas() -> Iterator[Any]:
        for batch in batches:
            yield jax.tree.map(lambda leaf: leaf.reshape(len(devices), -1, *leaf.shape[1:]), batch)

    try:
        yield from flax.jax_utils.prefetch_to_device(replicas(), AHEAD, devices=devices)
    finally:
        batches.close()


def to_shardings(batches: Generator[Mapping[str, NDArray[Any]]], shardings: Any) -> Generator[Any]:
    """Yields global arrays by `jax.device_put` with the shardings of a step, two batches ahead.

    **Arguments:** `shardings`: of each leaf, or one for all.
    """
    coming: collections.deque[Any] = collections.deque()
    try:
        for batch in batches:
            coming.append(jax.device_put(dict(batch), shardings))
            if len(coming) > AHEAD:
                yield coming.popleft()
    finally:
        batches.close()
