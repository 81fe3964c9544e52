"""What the systems share: the contract, and host batches that threads load ahead."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from benchmarks.parax.cases import Case
from benchmarks.parax.counting import Counted, Tally

PREFETCH = 8  # batches loaded ahead, in every system

HostBatch = dict[str, NDArray[Any]]
Arrays = dict[str, jax.Array]
Rows = tuple[int, int]
Order = Literal["in order", "shuffled"]


class System(Protocol):
    """A way to load batches, as one process of the job sees it."""

    @property
    def shardings(self) -> Mapping[str, NamedSharding]:
        """Of the arrays."""
        ...

    @property
    def tally(self) -> Tally:
        """What this process has read so far, or had read for all."""
        ...

    @property
    def received_bytes(self) -> int:
        """What came to this process so far by other ways than sockets."""
        ...

    def batches(self, epochs: int | None) -> Generator[Arrays]:
        """Yields the batches of so many epochs, and reads no other ones; None for ever."""
        ...


def numbers(case: Case, epochs: int | None) -> Iterator[int]:
    """Yields the numbers of batches, counted through so many epochs."""
    return itertools.count() if epochs is None else iter(range(case.num_batches * epochs))


def drawn(number: int, num_records: int, width: int, order: Order, *, first: int = 0) -> NDArray[np.int64]:
    """Returns the records of a batch of some.

    **Arguments:** `number`: of the batch, counted through the epochs. `num_records`: of an epoch, from `first` on.
    `width`: records in a batch.
    """
    epoch, place = divmod(number, num_records // width)
    begin = place * width
    if order == "in order":
        return np.arange(first + begin, first + begin + width)
    return first + _permutation(num_records, epoch)[begin : begin + width]


def loaded_ahead(load: Callable[[int], Callable[[], Any]], coming: Iterator[int]) -> Generator[Any]:
    """Yields what is loaded for each number, `PREFETCH` of them begun ahead.

    **Arguments:** `load`: begins one, and returns what waits for it.
    """
    ahead: deque[Callable[[], Any]] = deque(load(number) for number in itertools.islice(coming, PREFETCH))
    while ahead:
        wait = ahead.popleft()
        for number in itertools.islice(coming, 1):
            ahead.append(load(number))
        yield wait()


class Reader:
    """Threads that read records of some leaves into new arrays.

    **Arguments:** `source`; `leaves`: which; `threads`: how many.
    """

    def __init__(self, source: Counted, leaves: Sequence[str], threads: int) -> None:
        self._source = source
        self._spec: Mapping[str, Any] = source.sample_spec
        self._wanted = set(leaves)
        self._threads = ThreadPoolExecutor(threads)
        self._num_threads = threads

    def begin(self, records: NDArray[np.int64]) -> Callable[[], HostBatch]:
        """Begins to read records, `[n]`; returns what waits for them."""
        found = {
            name: np.empty((len(records), *leaf.shape), leaf.dtype)
            for name, leaf in self._spec.items()
            if name in self._wanted
        }
        edges = [len(records) * part // self._num_threads for part in range(self._num_threads + 1)]
        parts = [
            self._threads.submit(
                read, self._source, records[first:last], {name: leaf[first:last] for name, leaf in found.items()}
            )
            for first, last in itertools.pairwise(edges)
        ]
        return lambda: _all_done(parts, found)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(cancel_futures=True)


def read(source: Counted, records: NDArray[np.int64], out: Mapping[str, NDArray[Any]]) -> None:
    """Reads whole records of the leaves in `out`, each `[n, ...]`, and of no other ones."""
    spec: Mapping[str, Any] = source.sample_spec
    boxes = [tuple((0, size) for size in spec[name].shape) if name in out else None for name in sorted(spec)]
    source.read_slices(records, boxes, [out.get(name) for name in sorted(spec)])


def held_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> Rows | None:
    """Returns the range of rows that the devices of this process need any part of, None if none."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    bounds = [index[0].indices(shape[0]) for index in indices if index is not None]
    return (min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)) if bounds else None


def placed(
    rows: NDArray[Any] | None, first: int, shape: tuple[int, ...], dtype: Any, target: NamedSharding
) -> jax.Array:
    """Returns a global array whose shards are cut from the rows that this process has, `first` being the first."""
    if rows is None:
        return jax.make_array_from_single_device_arrays(shape, target, [], dtype=dtype)

    def cut(index: Any) -> NDArray[Any]:
        start, stop, _ = index[0].indices(shape[0])
        return rows[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback(shape, target, cut, dtype=dtype)


@functools.lru_cache(maxsize=4)
def _permutation(num_records: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng(epoch).permutation(num_records)


def _all_done(parts: Sequence[Future[None]], found: HostBatch) -> HostBatch:
    for part in parts:
        part.result()
    return found
