"""The systems: each a function that returns an endless or long iterator of globally shuffled batches.

Every peer runs as its documentation says is fast: batched access where it has it, threads or processes at several
settings. Peers deliver NumPy arrays (or what their users get) on the host; ours delivers `jax.Array`s on a device.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from numpy.typing import NDArray

import braidax as bx
from benchmarks.shuffle.inputs import decoded
from braidax.data import Knobs

Batches = Iterator[Any]


def rate(make: Callable[[], Batches], batch_size: int, *, seconds: float, warmup: int = 3) -> float:
    """Returns samples per second: some batches drawn and thrown away, then as many as come within the time."""
    batches = make()
    try:
        for _ in range(warmup):
            jax.block_until_ready(next(batches))
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            jax.block_until_ready(next(batches))
            count += 1
        return count * batch_size / elapsed
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def ours(source: Any, batch_size: int, *, knobs: Knobs | None = None, **options: Any) -> Batches:
    """Our loader over one device."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    loader = bx.DataLoader(
        source, mesh, PartitionSpec("data"), batch_size=batch_size, epochs=None, knobs=knobs, **options
    )
    return iter(loader)


def hugging_face(path: Path, batch_size: int) -> Batches:
    """`dataset[indices]` in the NumPy format: one batched access a batch."""
    import datasets

    dataset = datasets.load_from_disk(str(path)).with_format("numpy")
    return (dataset[indices] for indices in _shuffled(len(dataset), batch_size))


def hugging_face_one_by_one(path: Path, batch_size: int) -> Batches:
    """`dataset[index]` in the NumPy format, stacked: serial ordered fetching."""
    import datasets

    dataset = datasets.load_from_disk(str(path)).with_format("numpy")
    for indices in _shuffled(len(dataset), batch_size):
        samples = [dataset[index] for index in indices]
        yield {name: _stacked([sample[name] for sample in samples]) for name in samples[0]}


def torch_loader(dataset: Any, batch_size: int, *, workers: int, collate: Any = None) -> Batches:
    """torch's DataLoader, shuffled; it calls `__getitems__` where the data set has it."""
    import torch.utils.data

    return _repeated(
        lambda: iter(
            torch.utils.data.DataLoader(
                dataset, batch_size, shuffle=True, num_workers=workers, collate_fn=collate, drop_last=True
            )
        )
    )


def grain_elements(source: Any, batch_size: int, *, threads: int) -> Batches:
    """Grain: elements read by many threads, then batched."""
    import grain

    data = grain.MapDataset.source(source).seed(0).shuffle().repeat()
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=500)  # its default; 4,096 is a tenth as fast
    return iter(data.to_iter_dataset(options).batch(batch_size))


def grain_batches(source: Any, batch_size: int, *, threads: int) -> Batches:
    """Grain: whole batches read by many threads, each batch by one."""
    import grain

    data = grain.MapDataset.source(source).seed(0).shuffle().repeat().batch(batch_size)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 1))))


def tf_gather(array: NDArray[Any], batch_size: int) -> Batches:
    """tf.data: shuffled indices, batches gathered from a tensor in memory."""
    import tensorflow as tf

    table = tf.constant(array)
    data = tf.data.Dataset.range(len(array)).shuffle(len(array)).repeat().batch(batch_size)
    return data.map(lambda i: tf.gather(table, i), num_parallel_calls=tf.data.AUTOTUNE).prefetch(2).as_numpy_iterator()


def tf_texts(path: Path, batch_size: int) -> Batches:
    """tf.data: texts in memory, shuffled as a whole."""
    import tensorflow as tf

    texts = path.read_text().splitlines()
    data = tf.data.Dataset.from_tensor_slices(texts).shuffle(len(texts)).repeat()
    return data.batch(batch_size).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def tf_photos(path: Path, batch_size: int, size: int) -> Batches:
    """tf.data: shuffled file names, decoded and resized in parallel, as its performance guide has it."""
    import tensorflow as tf

    files = sorted(str(file) for file in path.rglob("*.jpg"))

    def load(name: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(name), channels=3)
        return tf.cast(tf.image.resize(image, (size, size), antialias=True), tf.uint8)

    data = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
    data = data.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return data.batch(batch_size).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


class Rows:
    """The rows of an array, one by one: a data set for torch and a source for Grain."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> NDArray[Any]:
        return np.array(self._array[index])


class Photos:
    """JPEG files, decoded and resized by Pillow: a data set for torch and a source for Grain."""

    def __init__(self, path: Path, size: int) -> None:
        self._files = sorted(str(file) for file in path.rglob("*.jpg"))
        self._size = size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return decoded(self._files[index], self._size)


class Remote:
    """Records of one length in an object store, one request each, by the same client as ours."""

    def __init__(self, address: str, name: str, *, num_records: int, record_bytes: int, first: int) -> None:
        self._address = address
        self._name = name
        self._num_records = num_records
        self._record_bytes = record_bytes
        self._first = first
        self._store: Any = None

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        if self._store is None:
            from obstore.store import HTTPStore

            self._store = HTTPStore.from_url(self._address, client_options={"allow_http": True})
        import obstore

        start = self._first + int(index) * self._record_bytes
        reply: Any = obstore.get_range(self._store, self._name, start=start, length=self._record_bytes)
        return np.frombuffer(reply, np.uint8)


def serial(source: Any, batch_size: int) -> Batches:
    """Serial ordered fetching: the samples of a batch one by one, in order, then stacked."""
    for indices in _shuffled(len(source), batch_size):
        yield np.stack([source[index] for index in indices])


def _shuffled(num_samples: int, batch_size: int) -> Iterator[list[int]]:
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(num_samples)
        for start in range(0, num_samples - batch_size + 1, batch_size):
            yield order[start : start + batch_size].tolist()


def _repeated(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from make()


def _stacked(values: list[Any]) -> Any:
    return np.stack(values) if isinstance(values[0], np.ndarray) else values
