"""Rows between ranks: dealt by destination, gathered, shared with all, spread evenly."""

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.comm import Communicator
from braidax.errors import CommError
from braidax.frame.moving.columns import Buckets, Dealing, Offer
from braidax.frame.moving.splitting import split
from braidax.frame.moving.wire import Batches, Wire
from braidax.frame.polars import Schema, msgpack, pl
from braidax.frame.sight.measuring import UNMEASURED, Moved, Unmeasured


class Ranks:
    """Exchanges of rows, each of which all ranks take part in, in the same order.

    What comes from several ranks is in the order of these, and within each in the order in which it lay there.

    **Fields:** `rank`, `size`: of this one, and of all. `num_threads`: on which this one computes several things at
    once, as Polars has for each rank of this host. `max_buckets`: into which rows are put. `moved`, `meter`: what is
    sent, and what measures it.

    **Arguments:** `comm`: between the ranks. `window_bytes`: that an exchange keeps in memory for what is on its way.
    `meter`: measures what is done.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        window_bytes: int = 64 << 20,
        max_buckets: int = 128,
        meter: Unmeasured = UNMEASURED,
    ) -> None:
        self.max_buckets = max_buckets
        self.rank, self.size = comm.rank, comm.size
        self.num_threads = max(1, pl.thread_pool_size() // comm.hosts.count(comm.hosts[comm.rank]))
        self.moved = Moved()
        self.meter = meter
        self._comm = comm
        self._window_bytes = window_bytes

    def deal(self, frame: "pl.DataFrame", destinations: "pl.Series") -> "pl.DataFrame":
        """Sends each row to a rank. **Arguments:** `destinations`: `[rows]` uint16, a rank for each row."""
        return self.deal_in_buckets(frame, destinations.to_numpy(), 1)[0]

    def deal_in_buckets(
        self, frame: "pl.DataFrame", places: NDArray[np.uint16], num_buckets: int
    ) -> "list[pl.DataFrame]":
        """Sends each row to a bucket of a rank. **Arguments:** `places`: `[rows]`, `rank * num_buckets + bucket`.

        **Returns:** the buckets of this rank.
        """
        if self.size > 1 and (buckets := self._plain_buckets(frame, places, num_buckets)) is not None:
            for source, item in self.exchange(self._in_turn(buckets.num_leaving, buckets.leaving)):
                with self.meter.phase("serialize"):
                    buckets.add(source, item)
            return buckets.done()
        parts = split(frame, places, self.size * num_buckets, num_threads=self.num_threads)
        if self.size == 1:
            return parts
        came = self._swap_buckets([parts[i : i + num_buckets] for i in range(0, len(parts), num_buckets)], frame.schema)
        return [pl.concat(bucket, rechunk=False) for bucket in zip(*came, strict=True)]

    def gather(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        """Returns the rows of all ranks on rank 0, none elsewhere."""
        return self._swap([frame if rank == 0 else frame.clear() for rank in range(self.size)], frame.schema)

    def share(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        """Returns the rows of all ranks on each of them."""
        return self._swap([frame] * self.size, frame.schema)

    def spread(self, frame: "pl.DataFrame", *, first: int, total: int) -> "pl.DataFrame":
        """Returns the rows that each rank has when all lie evenly, in order.

        **Arguments:** `first`: where the first row here is in the order of all. `total`: the rows of all.
        """
        bounds = [min(max(total * rank // self.size - first, 0), frame.height) for rank in range(self.size + 1)]
        parts = [frame[begin:end] for begin, end in itertools.pairwise(bounds)]
        return self._swap(parts, frame.schema)

    def send_back(self, frame: "pl.DataFrame", lengths: Sequence[int]) -> "pl.DataFrame":
        """Returns rows to where they came from. **Arguments:** `lengths`: how many to each rank, in order."""
        ends = np.cumsum([0, *lengths]).tolist()
        return self._swap([frame[a:b] for a, b in itertools.pairwise(ends)], frame.schema)

    def all(self, numbers: Sequence[float]) -> NDArray[Any]:
        """Returns numbers of all ranks, `[size, len(numbers)]`."""
        mine = np.asarray(numbers)
        with self.meter.phase("wait"):
            every = self._comm.all_gather(mine)
        return np.stack([np.asarray(one) for one in every])

    def all_objects(self, value: bytes) -> list[bytes]:
        """Returns some bytes of all ranks, in their order."""
        with self.meter.phase("wait"):
            return [bytes(memoryview(one)) for one in self._comm.all_gather(value)]

    def from_first(self, value: bytes) -> bytes:
        """Returns some bytes of rank 0 on each rank."""
        with self.meter.phase("wait"):
            return bytes(memoryview(self._comm.broadcast(value, root=0)))

    def _swap(self, parts: "Sequence[pl.DataFrame]", schema: Schema) -> "pl.DataFrame":
        if self.size == 1:
            return parts[0]
        return pl.concat(self.swap(parts, schema), rechunk=False)

    def swap(self, parts: "Sequence[pl.DataFrame]", schema: Schema) -> "list[pl.DataFrame]":
        """Gives each rank its part. **Returns:** what came from each rank, in their order."""
        return [only for (only,) in self._swap_buckets([[part] for part in parts], schema)]

    def _swap_buckets(self, parts: "Sequence[Sequence[pl.DataFrame]]", schema: Schema) -> "list[list[pl.DataFrame]]":
        """Gives each rank its part, in buckets: as many for each. **Returns:** the buckets from each rank."""
        wire = self._agreed([bucket for part in parts for bucket in part], schema)
        came = [Batches(len(part)) for part in parts]
        for source, item in self.exchange(self._items(parts, wire)):
            came[source].add(item)
        with self.meter.phase("serialize"):
            return [
                [wire.own(bucket) for bucket in parts[rank]]
                if rank == self.rank
                else [wire.frame(bucket) for bucket in batches.done]
                for rank, batches in enumerate(came)
            ]

    def exchange(self, items: Iterator[tuple[int, list[Any]]]) -> Iterator[tuple[int, Any]]:
        """Streams items between all ranks. **Yields:** what comes, and from whom. See `Communicator.exchange`."""
        with self.meter.exchange(self.moved):
            yield from self._comm.exchange(items, window_bytes=self._window_bytes)
        self.moved.num_exchanges += 1

    def _agreed(self, parts: "Sequence[pl.DataFrame]", schema: Schema) -> Wire:
        """Returns how the rows of all ranks travel: the same for all.

        Columns that are null everywhere, as those are that nobody needs, stay where they are.

        **Raises:** as `agreed`.
        """
        nulls = [name for name in schema if all(part[name].null_count() == part.height for part in parts)]
        return Wire(*self.agreed(schema, num_rows=sum(part.height for part in parts), nulls=nulls))

    def agreed(self, schema: Schema, *, num_rows: int, nulls: Sequence[str] = ()) -> tuple[Schema, frozenset[str]]:
        """Returns the columns of the rows of all ranks, and those that are null everywhere: the same for all.

        A rank without rows cannot always know the dtypes of what it has none of.

        **Arguments:** `schema`, `num_rows`: of the rows here. `nulls`: columns that are null here.

        **Raises:** `CommError` for ranks whose rows have other columns.
        """
        told = [repr(list(schema.items())), num_rows, list(nulls)]
        every = [msgpack.decode(one) for one in self.all_objects(msgpack.encode(told))]
        absent = set(schema).intersection(*(one[2] for one in every))
        if len({one[0] for one in every}) > 1:
            full = [rank for rank, one in enumerate(every) if one[1]] or [0]
            if len({every[rank][0] for rank in full}) > 1:
                raise CommError(
                    f"ranks {full[0]} and {full[-1]} have other columns: {every[full[0]][0]} and {every[full[-1]][0]}; "
                    "expected the same dtypes on all ranks, as the return_dtype of a user's function says"
                )
            schema = pl.DataFrame.deserialize(io.BytesIO(self._of_rank(full[0], schema))).schema
        return schema, frozenset(absent)

    def _of_rank(self, rank: int, schema: Schema) -> bytes:
        mine = pl.DataFrame(schema=schema).serialize() if rank == self.rank else b""
        with self.meter.phase("wait"):
            return bytes(memoryview(self._comm.broadcast(mine, root=rank)))

    def _plain_buckets(self, frame: "pl.DataFrame", places: NDArray[np.uint16], num_buckets: int) -> Buckets | None:
        """Returns the buckets of this rank, for rows of numbers alone, which all ranks must have; None for others."""
        offer = Offer.of(frame, places, self.size * num_buckets)
        every = [msgpack.decode(one, type=Offer) for one in self.all_objects(msgpack.encode(offer))]
        dealing = Dealing.of(every, num_buckets)
        if dealing is None:
            return None
        return Buckets(frame, places, dealing, rank=self.rank, num_threads=self.num_threads)

    def _items(self, parts: "Sequence[Sequence[pl.DataFrame]]", wire: Wire) -> Iterator[tuple[int, list[Any]]]:
        """Yields what goes to the others."""

        def leaving(rank: int) -> Iterator[list[Any]]:
            return itertools.chain.from_iterable(wire.pieces(part, bucket) for bucket, part in enumerate(parts[rank]))

        return self._in_turn(lambda rank: sum(part.height for part in parts[rank]), leaving)

    def _in_turn(
        self, num_leaving: Callable[[int], int], leaving: Callable[[int], Iterator[list[Any]]]
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yields what goes to the others: first to the next one, so that not all send to the same.

        **Arguments:** `num_leaving`: returns how many rows go to one of them. `leaving`: yields them: each a mark and
        buffers.
        """
        self.moved.num_rows += sum(num_leaving(rank) for rank in range(self.size) if rank != self.rank)
        streams = [(rank, leaving(rank)) for rank in ((self.rank + hop) % self.size for hop in range(1, self.size))]
        while streams:
            for stream in list(streams):
                with self.meter.phase("serialize"):
                    item = next(stream[1], None)
                if item is None:
                    streams.remove(stream)
                else:
                    self.moved.num_bytes += sum(map(len, item[1:]))
                    yield stream[0], item
