"""The data loader: a source and shardings in, global arrays on their devices out."""

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from braidax.data.depth import Depth
from braidax.data.fetch import Batch, Fetch
from braidax.data.load_plan import LoadPlan, plan_load
from braidax.data.order import Cursor, Order, Remainder
from braidax.data.processes import in_processes
from braidax.data.sharding_specs import resolve_shardings, shared_batch_parts
from braidax.data.skipping import skipping
from braidax.data.sources import open as open_source
from braidax.data.sources.source import Source, batch_spec, is_varying, source_at
from braidax.errors import ArgumentError, BraidaxError, WaitTimeout
from braidax.spans import LaneTotal, Trace

_log = logging.getLogger("braidax")
_DEFAULT_BATCH_SIZE = 128
_MASK = "mask"
_LANES = {"wait": "wait", "read": "read", "decode": "decode", "collate": "collate", "transfer": "host-to-device"}

_LEDGER = "skipped.jsonl"

OnError = Literal["raise", "skip"]
Workers = Literal["threads", "processes"]


@dataclass(frozen=True)
class Knobs:
    """What may change while a loader runs.

    **Fields:** `threads`: that read, decode and transform. `prefetch`: batches in flight ahead of the one in use. None
    for either leaves it to `loader.depth`, which adapts it. `timeout_seconds`: the longest wait for one batch.
    `max_bytes`: of batches in flight, which holds `prefetch` down to 1 at least. `hedge_seconds`: when a read that is
    waited for is done a second time; None: when it takes much longer than the others; 0: always; infinity: never.
    """

    threads: int | None = None
    prefetch: int | None = None
    timeout_seconds: float = 300.0
    max_bytes: int = 1 << 30
    hedge_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("threads", "prefetch"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ArgumentError(f"{name}={number!r} is not a positive integer; None lets the loader adapt it")
        if not 0 < self.timeout_seconds < threading.TIMEOUT_MAX:
            raise ArgumentError(f"timeout_seconds={self.timeout_seconds!r} is not a finite, positive number of seconds")
        if self.max_bytes < 1:
            raise ArgumentError(f"max_bytes={self.max_bytes!r} is not a positive number of bytes")
        if self.hedge_seconds is not None and not self.hedge_seconds >= 0:
            raise ArgumentError(f"hedge_seconds={self.hedge_seconds!r} is not a number of seconds from 0 on, or None")


@dataclass(frozen=True)
class Stats:
    """Where a loader's time went, and what moved, since the loader was made or its `trace` was set.

    **Fields:** `seconds`: `"wait"`, of the consumer for batches; and summed over the threads `"read"`, for fetching
    bytes, `"decode"`, for decoding and transforming, `"collate"`, for putting samples together, `"transfer"`, for
    sending batches to the devices. `num_bytes`: by the same names. `num_batches`: handed out. `num_hedges`: reads done
    a second time in the latest pass. `threads`, `prefetch`: at present.
    """

    seconds: Mapping[str, float]
    num_bytes: Mapping[str, int]
    num_batches: int
    num_hedges: int
    threads: int
    prefetch: int


class DataLoader:
    """Batches of a source as global `jax.Array`s, globally shuffled, prefetched onto their devices.

    A batch is a pure function of `(seed, epoch, position)`: the same for any number of threads or devices and after any
    restart. One `for` runs from the cursor to the end of the epoch, or of the next `epochs` epochs.

    **Arguments:** `source`: a `Source`, a path that `braidax.open` knows, or any object with `__len__` and
    `__getitem__`. `mesh`: what `PartitionSpec`s refer to; None if `specs` holds none. `specs`: a `PartitionSpec` or
    `NamedSharding`, or a PyTree of them like the batch; dim 0 is the batch. `batch_size`: samples in a global batch; by
    default about 128, divisible by the sharding (and logged). `seed`: of the shuffle; None keeps the source's order.
    `epochs`: a `for` ends when the cursor's epoch is a multiple of it; None never ends. `remainder`: `"drop"` leaves
    out the last samples of an epoch that fill no batch; `"pad"` fills up with zeros and adds to every batch the leaf
    `"mask"`, bool `[batch_size]`, true for real samples. `on_error`: `"skip"` replaces records that cannot be read and
    lists them in `skipped.jsonl` in the current folder, 100 at most; `skipping` has options. `workers`: what reads;
    `"processes"` is for user code in the source that holds the GIL, see `in_processes`. `knobs`: threads, prefetch and
    limits.

    **Raises:** `FormatError`, `SpecError`, `ArgumentError` before anything is read; while iterating, `RecordError` at
    the batch that holds the record, and `WaitTimeout`.
    """

    def __init__(
        self,
        source: Source | str | Path | Any,
        mesh: Mesh | None,
        specs: Any,
        *,
        batch_size: int | None = None,
        seed: int | None = 0,
        epochs: int | None = 1,
        remainder: Remainder = "drop",
        on_error: OnError = "raise",
        workers: Workers = "threads",
        knobs: Knobs | None = None,
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ArgumentError(f"epochs={epochs!r} is not a positive integer; None runs for ever")
        if workers not in ("threads", "processes"):
            raise ArgumentError(f"workers={workers!r} is not 'threads' or 'processes'")
        opened: Source = source if isinstance(source, Source) else open_source(source)
        _check_fixed(opened)
        self._knobs = knobs or Knobs()
        limit = self._knobs.timeout_seconds
        self._processes = in_processes(opened, timeout_seconds=limit) if workers == "processes" else None
        self.source: Source = _skipping(self._processes or opened, on_error)
        if batch_size is None:
            batch_size = _default_batch_size(len(self.source), shared_batch_parts(mesh, specs), remainder)
        self._order = Order(len(self.source), batch_size, remainder)
        specs, mask_spec = _split_mask(self.source.sample_spec, specs, remainder)
        self._plan = plan_load(batch_spec(self.source.sample_spec, batch_size), mesh, specs)
        self._mask = _mask_sharding(self._plan, mesh, mask_spec) if remainder == "pad" else None
        self._source_at = functools.lru_cache(maxsize=4)(functools.partial(source_at, self.source))
        self.epochs = epochs
        self.trace = Trace()
        self.depth = Depth()
        self.cursor = Cursor(seed)
        self._fetch: Fetch | None = None
        self._running: object = None  # the iteration that owns the cursor

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
        """The PyTree of `NamedSharding` that batches have."""
        return self._plan.shardings if self._mask is None else {**self._plan.shardings, _MASK: self._mask}

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

    def __iter__(self) -> Iterator[Any]:
        end = None if self.epochs is None else (self._cursor.epoch // self.epochs + 1) * self.epochs
        self._running = own = object()
        while end is None or self._cursor.epoch < end:
            with contextlib.closing(self._stream(end)) as batches:
                for batch in batches:
                    yield batch
                    if self._running is not own:
                        raise BraidaxError(
                            "this DataLoader was closed, or another for was started over it, while this one was under "
                            "way; a cursor can serve one loop only: make a second DataLoader"
                        )
                    if self._moved:
                        break

    def _stream(self, end: int | None) -> Generator[Any, None, None]:
        """Yields the batches from the cursor to the epoch `end`, the coming ones in flight."""
        knobs = self._knobs
        fetch = Fetch(self._plan, threads=self._threads, trace=self.trace, hedge_seconds=knobs.hedge_seconds)
        coming: deque[tuple[Cursor, Cursor, Batch]] = deque()
        ahead = self._cursor
        self._fetch, self._moved = fetch, False
        try:
            while True:
                fetch.resize(threads=self._threads, prefetch=self._prefetch)
                while len(coming) <= self._prefetch and (end is None or ahead.epoch < end):
                    start, ahead = ahead, self._order.after(ahead)
                    coming.append((start, ahead, fetch.start(functools.partial(self._draw, start))))
                    if self._order.begins_window(start):
                        fetch.run(self._order.look_ahead, start)
                if not coming:
                    return
                start, after, batch = coming.popleft()
                what = f"the batch at {start} of {type(self.source).__name__}"
                begun = time.perf_counter()
                arrays = fetch.result(batch, timeout_seconds=self._knobs.timeout_seconds, what=what)
                self.depth.saw(wait_seconds=time.perf_counter() - begun)
                self._cursor = after
                yield arrays if self._mask is None else self._masked(arrays, self._mask, self._order.num_valid(start))
        except WaitTimeout:
            fetch.abandon()
            raise
        finally:
            fetch.close(timeout_seconds=self._knobs.timeout_seconds)

    def _draw(self, cursor: Cursor) -> tuple[Source, NDArray[np.int64]]:
        return self._source_at(cursor.seed, cursor.epoch), self._order.indices(cursor)

    @property
    def _threads(self) -> int:
        return self._knobs.threads or self.depth.threads

    @property
    def _prefetch(self) -> int:
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
            threads=self._threads,
            prefetch=self._prefetch,
        )

    def _masked(self, batch: Any, sharding: NamedSharding, num_valid: int) -> Any:
        mask = np.arange(self.batch_size) < num_valid
        array = jax.make_array_from_callback(mask.shape, sharding, lambda index: mask[index], dtype=np.bool_)
        return {**batch, _MASK: array}

    def close(self) -> None:
        """Ends a `for` that is under way: its threads are joined, batches in flight are dropped, processes ended.

        May be called twice. **Raises:** `WaitTimeout` if a read does not end in time.
        """
        self._running = None
        try:
            if self._fetch is not None:
                self._fetch.close(timeout_seconds=self._knobs.timeout_seconds)
                self._fetch = None
        finally:
            if self._processes is not None:
                self._processes.close()

    def __enter__(self) -> "DataLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"DataLoader({type(self.source).__name__} of {self.num_samples} samples, batch_size={self.batch_size}, "
            f"epochs={self.epochs}, cursor={self._cursor}, knobs={self._knobs})"
        )


def _skipping(source: Source, on_error: OnError) -> Source:
    if on_error not in ("raise", "skip"):
        raise ArgumentError(f"on_error={on_error!r} is not 'raise' or 'skip'")
    return skipping(source, ledger=_LEDGER) if on_error == "skip" else source


def _check_fixed(source: Source) -> None:
    """Raises `ArgumentError` when samples have a leaf of varying size."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(source.sample_spec):
        if is_varying(leaf):
            raise ArgumentError(
                f"source={type(source).__name__} has the leaf {jax.tree_util.keystr(path)}, whose size varies from "
                "sample to sample, but the arrays of a batch have one shape: tokenize, pad, pack or decode it "
                "(braidax.data.tokenized, padded, packed, decoded), turn it into arrays of one shape with "
                "open(transform=...), or leave it out with open(columns=...)"
            )


def _default_batch_size(num_samples: int, parts: int, remainder: Remainder) -> int:
    size = max(_DEFAULT_BATCH_SIZE // parts, 1) * parts
    if remainder == "drop" and num_samples < size:
        size = max(num_samples // parts, 1) * parts
    _log.warning("DataLoader: batch_size was not given; using %d (a multiple of the %d parts of dim 0)", size, parts)
    return size


def _split_mask(sample_spec: Any, specs: Any, remainder: Remainder) -> tuple[Any, Any]:
    """Takes the spec of the mask, if the user gave one, out of the specs of the batch."""
    if remainder == "drop":
        return specs, None
    if not isinstance(sample_spec, Mapping) or _MASK in sample_spec:
        raise ArgumentError(
            f"remainder='pad' adds the leaf {_MASK!r} to every batch, so samples must be mappings without one, got "
            f"{jax.tree.structure(sample_spec)}; return a dict from a transform, or use remainder='drop'"
        )
    if isinstance(specs, Mapping) and _MASK in specs:
        rest = {name: spec for name, spec in cast(Mapping[str, Any], specs).items() if name != _MASK}
        return rest, specs[_MASK]
    return specs, None


def _mask_sharding(plan: LoadPlan, mesh: Mesh | None, spec: Any) -> NamedSharding:
    """The sharding of the mask: the user's, or else as the batch dim of the first leaf."""
    first = plan.leaves[0].sharding
    chosen = spec if spec is not None else NamedSharding(first.mesh, PartitionSpec(*first.spec[:1]))
    return resolve_shardings(jax.ShapeDtypeStruct((plan.batch_size,), np.bool_), mesh, chosen)[0]
