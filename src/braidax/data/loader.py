"""The loader: a source and shardings in, global arrays on their devices out."""

import contextlib
import functools
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from braidax.data.batch_size import chosen_batch_size
from braidax.data.fetching.batch import Batch, Part
from braidax.data.fetching.depth import Depth
from braidax.data.fetching.fetch import Fetch
from braidax.data.given import Given, OnError, Workers
from braidax.data.knobs import Knobs, Stats
from braidax.data.multihost.meeting import ProcessGroup, agreeing, process_group
from braidax.data.multihost.reading_again import quickest
from braidax.data.multihost.replicas import Replicas
from braidax.data.multihost.rounds import Rounds, begin
from braidax.data.sampling.order import Cursor, Order, Remainder
from braidax.data.sharding.compiled_step import devices_of, specs_like
from braidax.data.sharding.explain import Explanation, explain
from braidax.data.sharding.host import host_mesh
from braidax.data.sharding.load_plan import Placed, plan_load
from braidax.data.sharding.load_sharding import device_grid
from braidax.data.sharding.masks import MASK, Mask, split_mask
from braidax.data.sharding.specs import completed, shared_batch_parts
from braidax.data.source import Sliced, Source, batch_spec, source_at, told_rows
from braidax.errors import ArgumentError, BraidaxError, WaitTimeout
from braidax.spans import LaneTotal, Trace

_LANES = {"wait": "wait", "read": "read", "decode": "decode", "collate": "collate", "transfer": "host-to-device"}
_INTERRUPTED_SECONDS = 2.0  # which reads under way have to end after Ctrl-C


class DataLoader:
    """Batches of a source as global `jax.Array`s, globally shuffled, prefetched onto their devices.

    A batch is a pure function of `(seed, epoch, position)`: the same for any number of threads or devices and after any
    restart. One `for` runs from the cursor to the end of the epoch, or of the next `epochs` epochs.

    **Arguments:** `source`: a `Source`, a path that `braidax.open` knows, any object with `__len__` and
    `__getitem__`, or a `braidax.frame.Frame`, which is computed now. `mesh`: what `PartitionSpec`s refer to; by
    default that of `jax.set_mesh`, else one device. `specs`: a `PartitionSpec` or `NamedSharding`, or a PyTree of them
    like the batch; dim 0 is the batch, by default split over all axes of the mesh. `batch_size`: samples in a global
    batch, over all devices, processes and microbatches; by default about 128 (the rule is that of
    `braidax.data.batch_size`). `seed`: of the shuffle; None keeps the source's order.
    `epochs`: a `for` ends when the cursor's epoch is a multiple of it; None never ends. `remainder`: `"drop"` leaves
    out the last samples of an epoch that fill no batch; `"pad"` fills up with zeros and adds to every batch the leaf
    `"mask"`, bool `[batch_size]`, true for real samples. `on_error`: `"skip"` replaces records that cannot be read and
    lists them in a ledger in the current folder, 100 at most; `skipping` has options. `workers`: what reads;
    `"processes"` is for user code in the source that holds the GIL, see `in_processes`. `knobs`: threads, prefetch and
    limits. `microbatches`: makes every leaf a stack of so many microbatches, `[microbatches, batch, …]`, of which
    `specs` describe one. `like`: a compiled step, whose input shardings stand in for `mesh`, `specs` and `batch_size`.
    `checksum_every`: after so many batches the processes compare what they hold copies of; None: never. `placement`:
    `"host"` gives batches of NumPy arrays, for those who place them on devices themselves; each process has whole ones.

    Under `jax.distributed` every process makes the same loader and goes through it: each reads its part, nothing of any
    size is read twice, and what several need is exchanged between devices (`explain` tells). They begin and end epochs
    together, and an error on one of them is raised on all.

    **Raises:** `FormatError`, `SpecError`, `ArgumentError` before anything is read, also where processes were given
    different things; while iterating, `RecordError` at the batch that holds the record, `CallFailed` where another
    process raised, `PeerLost` where one has left or ended, and `WaitTimeout`.
    """

    _given: Given | None = None
    _fetch: Fetch | None = None  # the latest
    _running: object = None  # the iteration that owns the cursor
    _num_closed = 0

    def __init__(
        self,
        source: Source | str | Path | Any,
        mesh: Mesh | None = None,
        specs: Any = None,
        *,
        batch_size: int | None = None,
        seed: int | None = 0,
        epochs: int | None = 1,
        remainder: Remainder = "drop",
        on_error: OnError = "raise",
        workers: Workers = "threads",
        knobs: Knobs | None = None,
        microbatches: int | None = None,
        like: Any = None,
        checksum_every: int | None = None,
        placement: Placed = "devices",
    ) -> None:
        self._knobs = knobs or Knobs()
        self._workers: Workers = workers
        limit = self._knobs.timeout_seconds
        self._open: list[Fetch] = []
        if placement == "host":
            mesh, specs = host_mesh(mesh, specs, like)
        elif like is None:
            mesh, specs = completed(mesh, specs)
        self._group = process_group(devices_of(mesh, specs, like))
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with agreeing(self._group, timeout_seconds=limit) as facts:
                _check(workers, placement, epochs=epochs, microbatches=microbatches, checksum_every=checksum_every)
                self._given = Given(source, self._group, workers=workers, on_error=on_error, timeout_seconds=limit)
                self.source: Source = self._given.source
                if like is not None:
                    specs, batch_size = _like(like, self.source, mesh, specs, batch_size, microbatches)
                parts, num_samples = shared_batch_parts(mesh, specs), len(self.source)
                size = chosen_batch_size(batch_size, num_samples, remainder, parts=parts, microbatches=microbatches)
                self._order = Order(num_samples, size, remainder)
                spec, mask_spec = self.source.sample_spec, None
                if remainder == "pad":
                    specs, mask_spec = split_mask(spec, specs)
                cut_dims = self.source.cut_dims if isinstance(self.source, Sliced) else None
                plan = functools.partial(plan_load, batch_spec(spec, size), mesh, specs, reads="once")
                plan = functools.partial(plan, cut_dims=cut_dims, microbatches=microbatches, placement=placement)
                self._plan = plan()
                self._mask = Mask(self._plan, mesh, mask_spec) if remainder == "pad" else None
                self.cursor = Cursor(seed)
                facts.update(self._facts(epochs, remainder))
            if self._group is not None:
                deadline = time.monotonic() + limit
                self._plan = quickest(self._plan, plan, self.source, self._group, deadline=deadline)
            undo.pop_all()
        self._source_at = functools.lru_cache(maxsize=4)(functools.partial(source_at, self.source))
        self._checksum_every, self.epochs = checksum_every, epochs
        self.trace = Trace()
        self.depth = Depth(batch_size=size)

    @property
    def batch_size(self) -> int:
        """Samples in a global batch."""
        return self._order.batch_size

    @property
    def num_samples(self) -> int:
        """Samples in the source."""
        return self._order.num_samples

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one whole epoch."""
        return self._order.batches_per_epoch

    @property
    def shardings(self) -> Any:
        """The PyTree of `NamedSharding` that batches have. **Raises:** `ArgumentError` for batches on the host."""
        if self._plan.placement == "host":
            raise ArgumentError("placement='host' makes NumPy arrays, which have no shardings; leave placement out")
        return self._plan.shardings if self._mask is None else {**self._plan.shardings, MASK: self._mask.sharding}

    @property
    def cursor(self) -> Cursor:
        """What has been consumed: the whole state of the loader. Setting it resumes exactly there, also inside a `for`.

        **Raises:** `ArgumentError` when it is set to a place that this source does not have.
        """
        return self._cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        seed, epoch, position = cursor
        plain = Cursor(None if seed is None else int(seed), int(epoch), int(position))
        self._cursor = self._order.settle(plain)
        self._moved = True  # since the last batch

    @property
    def knobs(self) -> Knobs:
        """Threads, prefetch and limits. May be set at any time; the next batch goes by them."""
        return self._knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        self._moved = self._moved or knobs.hedge_seconds != self._knobs.hedge_seconds
        self._knobs = knobs

    @property
    def workers(self) -> Workers:
        """What reads: `"threads"` or `"processes"`, as it was given."""
        return self._workers

    def __len__(self) -> int:
        """The number of batches in a full pass of one `for`: `epochs` epochs."""
        if self.epochs is None:
            raise TypeError("a DataLoader with epochs=None has no length; batches_per_epoch is the length of an epoch")
        return self.epochs * self.batches_per_epoch

    def peek(self, num_batches: int) -> list[NDArray[np.int64]]:
        """Returns the sample indices of the coming batches, each int64 `[batch_size]` (fewer in a padded one)."""
        cursor, coming = self._cursor, list[NDArray[np.int64]]()
        for _ in range(num_batches):
            coming.append(self._order.indices(cursor))
            cursor = self._order.after(cursor)
        return coming

    def explain(self) -> Explanation:
        """Returns what each process reads of a batch, and how the leaves get to their devices; reads nothing.

        A process that has none of these devices does not know what the others chose to read again.
        """
        return explain(self._plan)

    def __iter__(self) -> Iterator[Any]:
        end = None if self.epochs is None else (self._cursor.epoch // self.epochs + 1) * self.epochs
        self._running = own = object()
        while end is None or self._cursor.epoch < end:
            self._moved = False
            with contextlib.closing(self._stream(self._cursor, end)) as batches:
                for self._cursor, batch in batches:
                    yield batch
                    if self._running is not own:
                        raise BraidaxError(
                            "this DataLoader was closed, or another for was started over it, while this one was under "
                            "way; a cursor can serve one loop only: make a second DataLoader"
                        )
                    if self._moved:
                        break

    def epoch(self, number: int | None = None) -> Iterator[Any]:
        """Returns the batches of one whole epoch, from its start; the cursor stays, also of a `for` that is under way.

        **Arguments:** `number`: of the epoch, from 0 on; by default the one that the cursor is in. **Raises:** as the
        constructor says; `ArgumentError` for a number below 0.
        """
        start = self._order.settle(Cursor(self._cursor.seed, self._cursor.epoch if number is None else number, 0))
        return self._pass(start)

    def _pass(self, start: Cursor) -> Iterator[Any]:
        num_closed = self._num_closed
        with contextlib.closing(self._stream(start, start.epoch + 1)) as batches:
            for _, batch in batches:
                yield batch
                if self._num_closed > num_closed:
                    raise BraidaxError("this DataLoader was closed while an epoch() of it was under way; go on before")

    def _stream(self, cursor: Cursor, end: int | None) -> Generator[tuple[Cursor, Any], None, None]:
        """Yields the batches from a cursor to the epoch `end`, each with the cursor behind it; others are in flight."""
        from braidax.data.fetching import several

        self._plan.find_devices()
        fetch = Fetch(self._plan, threads=self._threads, trace=self.trace, hedge_seconds=self._knobs.hedge_seconds)
        coming = several.Coming(fetch, self._order, self._draw, cursor, end)
        made: deque[tuple[Cursor, Any]] = deque()  # the next one too, where devices exchange: under the step
        num_made = 2 if self._plan.reshard.members else 1
        rounds, self._fetch = None, fetch
        self._open.append(fetch)
        try:
            while True:
                if len(coming) + len(made) <= coming.most:
                    begun = coming.num_begun
                    far = several.how_far(
                        self.source, self._plan, self._knobs, self._prefetch, num_begun=begun, is_alone=not self._group
                    )
                    fetch.resize(threads=self._threads, prefetch=far.in_flight, read_bytes=self._knobs.read_bytes)
                    fresh = coming.begin(far, num_made=len(made), num_to_make=num_made)
                    if self._group is not None:  # the processes meet while the first batches are read
                        rounds = rounds or self._begin(self._group, cursor, self._knobs.timeout_seconds)
                        rounds.confirm(fresh)
                while coming and len(made) < num_made:
                    start, after, batch = coming.take()
                    made.append((after, self._made(fetch, rounds, start, batch)))
                if not made:
                    break
                after, arrays = made.popleft()
                if isinstance(arrays, BraidaxError):
                    raise arrays
                yield after, arrays
            if rounds is not None:
                rounds.finish()
        except WaitTimeout:
            fetch.abandon()
            raise
        except (KeyboardInterrupt, SystemExit):  # reads that hang cannot keep the program from ending
            with contextlib.suppress(WaitTimeout):
                fetch.close(timeout_seconds=min(self._knobs.timeout_seconds, _INTERRUPTED_SECONDS))
            raise
        finally:
            if rounds is not None:
                rounds.close()
            self._open.remove(fetch)
            fetch.close(timeout_seconds=self._knobs.timeout_seconds)

    def _begin(self, group: ProcessGroup, cursor: Cursor, timeout_seconds: float) -> Rounds:
        replicas = None if self._checksum_every is None else Replicas(self._plan, self._checksum_every)
        return begin(group, str(cursor), timeout_seconds, replicas)

    def _made(self, fetch: Fetch, rounds: Rounds | None, cursor: Cursor, batch: Batch | Part) -> Any:
        """Returns the batch at a cursor as the step takes it, or the error to raise in its place."""
        what = functools.partial("the batch at {} of {}".format, cursor, type(self.source).__name__)
        begun = time.perf_counter()
        try:
            loaded = fetch.result(batch, timeout_seconds=self._knobs.timeout_seconds, what=what)
            self.depth.saw(wait_seconds=time.perf_counter() - begun)
            with self.trace.active():
                arrays = self._plan.batch(loaded)
            if rounds is not None:
                rounds.check(arrays)
        except BraidaxError as error:
            return error
        return arrays if self._mask is None else self._mask.added(arrays, self._order.num_valid(cursor))

    def _draw(self, cursor: Cursor, num_batches: int) -> tuple[Source, NDArray[np.int64]]:
        return self._source_at(cursor.seed, cursor.epoch), self._order.indices(cursor, num_batches)

    @property
    def _threads(self) -> int:
        return self._knobs.threads or self.depth.threads

    @property
    def _prefetch(self) -> int:
        if self._knobs.prefetch == 0:
            return 0
        wanted = self._knobs.prefetch or self.depth.prefetch
        return max(1, min(wanted, self._knobs.max_bytes // max(self._plan.num_bytes, 1)))

    def stats(self) -> Stats:
        """Returns where the time went: the reason for a stall."""
        totals = self.trace.totals()
        lanes = {name: totals.get(lane, LaneTotal(0, 0.0, 0)) for name, lane in _LANES.items()}
        return Stats(
            seconds={name: total.seconds for name, total in lanes.items()},
            num_bytes={name: total.num_bytes for name, total in lanes.items()},
            num_batches=lanes["wait"].num_spans,
            num_hedges=0 if self._fetch is None else self._fetch.num_hedges,
            num_skipped=totals.get("skip", LaneTotal()).num_spans,
            threads=self._threads,
            prefetch=self._prefetch,
        )

    def _facts(self, epochs: int | None, remainder: Remainder) -> dict[str, str]:
        """Returns what all processes must mean alike, by what to call it."""
        leaves = self._plan.leaves
        found = {
            "the number of samples": f"{self.num_samples:,}",
            "which samples were chosen": told_rows(self.source),
            "the samples": ", ".join(f"{leaf.path} {leaf.dtype}{list(leaf.sample_shape)}" for leaf in leaves),
            "batch_size=": str(self.batch_size),
            "remainder=": remainder,
            "epochs=": str(epochs),
        }
        for leaf in leaves:
            mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
            ids = ",".join(str(device.id) for device in device_grid(mesh).flat)
            found[f"the sharding of leaf {leaf.path}"] = f"{spec} on the mesh {dict(mesh.shape)} of the devices {ids}"
        return found

    def close(self) -> None:
        """Ends a `for` that is under way: its threads are joined, batches in flight are dropped, processes ended.

        The rows of a frame are gone then. May be called twice.

        **Raises:** `WaitTimeout` if a read does not end in time.
        """
        self._running, self._fetch = None, None
        self._num_closed += 1
        try:
            for fetch in self._open:
                fetch.close(timeout_seconds=self._knobs.timeout_seconds)
        finally:
            if self._given is not None:
                self._given.close()

    def __enter__(self) -> "DataLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"DataLoader({type(self.source).__name__} of {self.num_samples} samples, batch_size={self.batch_size}, "
            f"epochs={self.epochs}, cursor={self._cursor}, knobs={self._knobs})"
        )


def _check(workers: str, placement: str, **numbers: int | None) -> None:
    none = {"epochs": "runs for ever", "microbatches": "splits nothing", "checksum_every": "compares nothing"}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ArgumentError(f"{name}={number!r} is not a positive integer; None {none[name]}")
    if placement not in ("devices", "host"):
        raise ArgumentError(f"placement={placement!r} is not 'devices' or 'host'")
    if workers not in ("threads", "processes"):
        raise ArgumentError(f"workers={workers!r} is not 'threads' or 'processes'")


def _like(
    like: Any, source: Source, mesh: Mesh | None, specs: Any, batch_size: int | None, microbatches: int | None
) -> tuple[Any, int]:
    if mesh is not None or specs is not None:
        raise ArgumentError("like= was given beside mesh= or specs=; expected one or the other: leave the others out")
    lead = 0 if microbatches is None else 1
    specs, found = specs_like(like, source.sample_spec, lead=lead)
    if batch_size not in (None, found):
        raise ArgumentError(f"batch_size={batch_size}, but the step of like= was compiled for {found}; leave it out")
    return specs, found
