"""The systems: each a function that returns an iterator over so many globally shuffled batches.

Every peer runs as its documentation says is fast: batched access where it has it, threads or processes at several
settings. Peers deliver NumPy arrays (or what their users get) on the host; ours delivers `jax.Array`s on a device.
"""

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from numpy.typing import NDArray

import braidax as bx
from benchmarks.shuffle.inputs import decoded
from benchmarks.shuffle.timing import Batches
from braidax.data import Knobs

Order = NDArray[np.int64]
TEXT_BYTES = 2048  # of a text as all systems deliver it: longer ones are cut, others padded with zeros


def ours(source: Any, batch_size: int, num_batches: int, *, threads: int | None = None, hedged: bool = True) -> Batches:
    """Our loader over one device.

    **Arguments:** `threads`: that read; None leaves it to the loader. `hedged`: whether late reads are done twice.
    """
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    knobs = Knobs(threads=threads, hedge_seconds=None if hedged else math.inf)
    loader = bx.DataLoader(source, mesh, PartitionSpec("data"), batch_size=batch_size, epochs=None, knobs=knobs)
    with contextlib.closing(loader):
        yield from itertools.islice(loader, num_batches)


def taken_and_put(array: NDArray[Any], batch_size: int, num_batches: int) -> Batches:
    """The loop that a few lines make: gather a batch, put it on the device."""
    for order in _orders(len(array), batch_size, num_batches):
        yield jax.device_put(np.take(array, order, axis=0), jax.devices()[0])


def ours_for_torch(dataset: Any, batch_size: int, num_batches: int, *, collate: Any = None) -> Batches:
    """Our loader for torch, as its users call it."""
    from braidax.torch import DataLoader

    loader = DataLoader(dataset, batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    yield from itertools.islice(_repeated(lambda: iter(loader)), num_batches)


def fetched(
    fetch: Callable[[Order], Any], num_samples: int, batch_size: int, num_batches: int, *, threads: int = 0
) -> Batches:
    """Batches one after the other; by so many threads, each a batch, if there are any.

    **Arguments:** `fetch`: returns the batch of some records.
    """
    orders = _orders(num_samples, batch_size, num_batches)
    if not threads:
        yield from map(fetch, orders)
        return
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[Any]] = deque(pool.submit(fetch, order) for order in itertools.islice(orders, 2 * threads))
        while ahead:
            batch = ahead.popleft().result()
            ahead.extend(pool.submit(fetch, order) for order in itertools.islice(orders, 1))
            yield batch


def one_by_one(source: Any, batch_size: int, num_batches: int) -> Batches:
    """Serial ordered fetching: the samples of a batch one by one, in order, then stacked."""
    yield from fetched(
        lambda order: np.stack([source[index] for index in order.tolist()]), len(source), batch_size, num_batches
    )


def torch_loader(dataset: Any, batch_size: int, num_batches: int, *, workers: int, collate: Any = None) -> Batches:
    """torch's DataLoader, shuffled; it calls `__getitems__` where the data set has it."""
    import torch.utils.data

    sampler = torch.utils.data.RandomSampler(dataset, num_samples=num_batches * batch_size)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, collate_fn=collate, drop_last=True
    )
    yield from loader


def torch_whole_batches(dataset: Any, batch_size: int, num_batches: int) -> Batches:
    """torch's DataLoader asking its `TensorDataset` for whole batches of shuffled indices, its fastest way."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    order = RandomSampler(dataset, num_samples=num_batches * batch_size)
    yield from DataLoader(dataset, batch_size=None, sampler=BatchSampler(order, batch_size, drop_last=True))


def tensors(array: NDArray[Any]) -> Any:
    """Returns torch's `TensorDataset` of an array in memory, as int32."""
    import torch.utils.data

    return torch.utils.data.TensorDataset(torch.from_numpy(array.astype(np.int32)))


def grain_elements(source: Any, batch_size: int, num_batches: int, *, threads: int) -> Batches:
    """Grain: elements read by many threads, then batched."""
    import grain

    data: Any = grain.MapDataset.source(source).seed(0).shuffle().repeat()
    # 500 elements ahead are its default; 4,096 are a tenth as fast
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=500 if threads else 0)
    elements: Any = data.slice(slice(0, num_batches * batch_size)).to_iter_dataset(options)
    return iter(elements.batch(batch_size))


def grain_gather(
    fetch: Callable[[Order], Any], num_samples: int, batch_size: int, num_batches: int, *, threads: int
) -> Batches:
    """Grain: shuffled indices, batches fetched as a whole by many threads, each batch by one."""
    import grain

    data: Any = grain.MapDataset.range(num_samples).seed(0).shuffle().repeat()
    data = data.slice(slice(0, num_batches * batch_size)).batch(batch_size).map(fetch)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)))


def tf_gather(array: NDArray[Any]) -> Callable[[int, int], Batches]:
    """tf.data: shuffled indices, batches gathered from a tensor in memory."""
    import tensorflow as tf

    table = tf.constant(array)

    def batches(batch_size: int, num_batches: int) -> Batches:
        data = tf.data.Dataset.range(len(array)).shuffle(len(array)).repeat().batch(batch_size).take(num_batches)
        data = data.map(lambda i: tf.gather(table, i), num_parallel_calls=tf.data.AUTOTUNE)
        return data.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    return batches


def tf_texts(texts: list[str]) -> Callable[[int, int], Batches]:
    """tf.data: texts in memory, shuffled as a whole, delivered as padded bytes."""
    import tensorflow as tf

    table = tf.constant(texts)

    def batches(batch_size: int, num_batches: int) -> Batches:
        data = tf.data.Dataset.range(len(texts)).shuffle(len(texts)).repeat().batch(batch_size).take(num_batches)
        data = data.map(
            lambda i: tf.io.decode_raw(tf.gather(table, i), tf.uint8, fixed_length=TEXT_BYTES),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        return data.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    return batches


def tf_photos(path: Path, batch_size: int, num_batches: int, *, size: int) -> Batches:
    """tf.data: shuffled file names, decoded in full and resized in parallel, as its performance guide has it."""
    import tensorflow as tf

    files = sorted(str(file) for file in path.rglob("*.jpg"))

    def load(name: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(name), channels=3)
        return tf.cast(tf.image.resize(image, (size, size), antialias=True), tf.uint8)

    data = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat().take(num_batches * batch_size)
    data = data.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return data.batch(batch_size).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


class Rows:
    """The rows of an array, one by one: a source for Grain."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> NDArray[Any]:
        return np.array(self._array[index])


class Gathered(Rows):
    """The rows of an array, a batch at once: a data set for torch, whose collate function is `as_it_is`."""

    def __getitems__(self, indices: list[int]) -> NDArray[Any]:
        return np.take(self._array, indices, axis=0)


class Photos:
    """JPEG files, decoded in full and resized by Pillow: a data set for torch and a source for Grain."""

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
        import obstore

        reply: Any = obstore.get_range(self._opened(), self._name, start=self._start(index), length=self._record_bytes)
        return np.frombuffer(reply, np.uint8)

    def at_once(self, order: Order) -> NDArray[np.uint8]:
        """Returns records of which all are asked for at the same time."""
        import obstore

        store = self._opened()

        async def replies() -> list[Any]:
            asked = [
                obstore.get_range_async(store, self._name, start=self._start(index), length=self._record_bytes)
                for index in order.tolist()
            ]
            return await asyncio.gather(*asked)

        return np.stack([np.frombuffer(reply, np.uint8) for reply in asyncio.run(replies())])

    def _start(self, index: int) -> int:
        return self._first + int(index) * self._record_bytes

    def _opened(self) -> Any:
        if self._store is None:
            from obstore.store import HTTPStore

            self._store = HTTPStore.from_url(self._address, client_options={"allow_http": True})
        return self._store


def padded(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Returns texts as bytes, uint8 `[n, TEXT_BYTES]`."""
    found = np.array([text.encode() for text in texts], f"S{TEXT_BYTES}")
    return found.view(np.uint8).reshape(len(found), TEXT_BYTES)


def as_it_is(batch: Any) -> Any:
    """Collates what is a batch already."""
    return batch


def _orders(num_samples: int, batch_size: int, num_batches: int) -> Iterator[Order]:
    """Yields the records of so many batches, shuffled anew in each epoch."""

    def endless() -> Generator[Order]:
        for epoch in itertools.count():
            order = np.random.default_rng(epoch).permutation(num_samples)
            for start in range(0, num_samples - batch_size + 1, batch_size):
                yield order[start : start + batch_size]

    return itertools.islice(endless(), num_batches)


def _repeated(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from make()
