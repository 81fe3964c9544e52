"""Ours, and the rules of Alpa, Grain and MaxText: all read with the same decoder and the same number of threads."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, final

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

import braidax as bx
from benchmarks.parax.cases import Case, on_one_mesh
from benchmarks.parax.counting import Counted, Tally
from benchmarks.parax.system import (
    PREFETCH,
    Arrays,
    HostBatch,
    Order,
    Reader,
    drawn,
    held_rows,
    loaded_ahead,
    numbers,
    placed,
    read,
)
from braidax.data import Cursor, Knobs


class _Reading:
    """A system that reads in every process, and sends nothing but by JAX."""

    def __init__(self, case: Case, shardings: Mapping[str, NamedSharding]) -> None:
        self._case = case
        self._source = case.source()
        self.shardings = shardings
        self.received_bytes = 0

    @property
    def tally(self) -> Tally:
        """What this process has read so far."""
        return self._source.tally

    def _held(self) -> tuple[list[str], int, int]:
        """Returns the leaves that devices of this process hold something of, and the first and the last of its rows."""
        held = {name: held_rows(sharding, self._shape(name)) for name, sharding in self.shardings.items()}
        first, last = next(rows for rows in held.values() if rows is not None)
        return [name for name, rows in held.items() if rows is not None], first, last

    def _shape(self, name: str) -> tuple[int, ...]:
        return (self._case.batch_size, *self._source.sample_spec[name].shape)

    def _dtype(self, name: str) -> Any:
        return self._source.sample_spec[name].dtype


@final
class Ours(_Reading):
    """Our loader. Reads are not hedged, so that one thread is one thread."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, case.shardings())
        knobs = Knobs(threads=case.threads, prefetch=PREFETCH, hedge_seconds=math.inf)
        self.loader = bx.DataLoader(
            self._source, None, self.shardings, batch_size=case.batch_size, epochs=None, knobs=knobs
        )

    def batches(self, epochs: int | None) -> Generator[Arrays]:
        """As `System.batches`, globally shuffled."""
        self.loader.epochs = epochs
        self.loader.cursor = Cursor(0)
        with contextlib.closing(self.loader):
            yield from self.loader


@final
class Alpa(_Reading):
    """Alpa's rule: each process reads the rows that any of its devices needs, whole, from a range of its own.

    Rows that several processes need are read by each of them. A thread loads ahead, which Alpa's loader does not.

    **Arguments:** `order`: of records within a range; Alpa's loader reads in order.
    """

    def __init__(self, case: Case, order: Order) -> None:
        super().__init__(case, case.shardings())
        self._leaves, self._first, self._last = self._held()
        self._order: Order = order

    def batches(self, epochs: int | None) -> Generator[Arrays]:
        """As `System.batches`."""
        reader = Reader(self._source, self._leaves, self._case.threads)
        with contextlib.closing(reader):
            coming = numbers(self._case, epochs)
            for batch in loaded_ahead(lambda number: reader.begin(self._records(number)), coming):
                yield {
                    name: placed(batch.get(name), self._first, self._shape(name), self._dtype(name), sharding)
                    for name, sharding in self.shardings.items()
                }

    def _records(self, number: int) -> NDArray[np.int64]:
        width = self._last - self._first
        parts = self._case.batch_size // width
        num_records = len(self._source) // parts
        return drawn(number, num_records, width, self._order, first=self._first // width * num_records)


@final
class Grain(_Reading):
    """Grain's DataLoader and `make_array_from_process_local_data`: processes that hold the same rows read the same."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, case.shardings())
        self._leaves, self._first, self._last = self._held()

    def batches(self, epochs: int | None) -> Generator[Arrays]:
        """As `System.batches`, globally shuffled by Grain."""
        import grain

        width = self._last - self._first
        parts = self._case.batch_size // width
        shard = (
            grain.sharding.ShardByJaxProcess()
            if parts == jax.process_count()
            else grain.sharding.ShardOptions(self._first // width, parts)
        )
        for batch in _grain_batches(self._case, self._source, self._leaves, shard, width, epochs):
            yield {name: self._array(name, batch.get(name)) for name in self.shardings}

    def _array(self, name: str, rows: NDArray[Any] | None) -> jax.Array:
        shape, sharding = self._shape(name), self.shardings[name]
        if rows is None:
            return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=self._dtype(name))
        inner = [
            slice(min(bound[0] for bound in bounds), max(bound[1] for bound in bounds))
            for bounds in zip(
                *map(_inner(shape), sharding.addressable_devices_indices_map(shape).values()), strict=True
            )
        ]
        return jax.make_array_from_process_local_data(sharding, rows[(slice(None), *inner)], shape)


@final
class MaxText(_Reading):
    """MaxText's rule: each process reads rows of its own, the batch over all axes; then the devices exchange.

    Grain reads, as there. It knows one mesh: stages are an axis of it, and all of them get all leaves.
    """

    def __init__(self, case: Case) -> None:
        source = case.source()
        super().__init__(case, on_one_mesh(case.strategy, sorted(source.sample_spec)))
        self.load_shardings = {
            name: NamedSharding(sharding.mesh, PartitionSpec(sharding.mesh.axis_names))
            for name, sharding in self.shardings.items()
        }
        # what `jax.device_put` of global arrays compiles to, without its checks on every call
        self._reshard: Callable[[Arrays], Arrays] = jax.jit(_same, out_shardings=dict(self.shardings))

    def batches(self, epochs: int | None) -> Generator[Arrays]:
        """As `System.batches`, globally shuffled by Grain."""
        import grain

        shard, width = grain.sharding.ShardByJaxProcess(), self._case.batch_size // jax.process_count()
        names = sorted(self.shardings)
        for batch in _grain_batches(self._case, self._source, names, shard, width, epochs):
            yield self._reshard({name: self._formed(name, rows) for name, rows in batch.items()})

    def _formed(self, name: str, rows: NDArray[Any]) -> jax.Array:
        devices = jax.local_devices()
        parts = jax.device_put(np.split(rows, len(devices)), devices)
        return jax.make_array_from_single_device_arrays(self._shape(name), self.load_shardings[name], parts)


class _Records:
    """What Grain reads: record after record, decoded by the thread that reads it; rows of arrays, where there are."""

    def __init__(self, case: Case, source: Counted, leaves: list[str]) -> None:
        self._source = source
        self._spec = {name: leaf for name, leaf in source.sample_spec.items() if name in leaves}
        self._arrays = case.arrays()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> HostBatch:
        if self._arrays is not None:
            rows = {name: self._arrays[name][index] for name in self._spec}
            self._source.count(np.array([index]), [rows.get(name) for name in sorted(self._arrays)])
            return rows
        found = {name: np.empty((1, *leaf.shape), leaf.dtype) for name, leaf in self._spec.items()}
        read(self._source, np.array([index]), found)
        return {name: leaf[0] for name, leaf in found.items()}


def _grain_batches(
    case: Case, source: Counted, leaves: list[str], shard: Any, rows: int, epochs: int | None
) -> Iterator[HostBatch]:
    """Returns batches of a process; Grain ends its threads when they are dropped."""
    import grain

    sampler = grain.samplers.IndexSampler(len(source), shuffle=True, seed=0, num_epochs=epochs)
    loader = grain.DataLoader(
        data_source=_Records(case, source, leaves),
        sampler=sampler,
        operations=[grain.transforms.Batch(rows, drop_remainder=True)],
        shard_options=shard,
        read_options=grain.ReadOptions(num_threads=case.threads, prefetch_buffer_size=PREFETCH * rows),
    )
    return iter(loader)


def _inner(shape: tuple[int, ...]) -> Callable[[Any], list[tuple[int, int, int]]]:
    return lambda index: [part.indices(size) for part, size in zip(index[1:], shape[1:], strict=True)]


def _same(arrays: Arrays) -> Arrays:
    return arrays
