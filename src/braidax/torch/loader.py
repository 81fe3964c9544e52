"""The drop-in: torch's DataLoader as users know it, fetched by threads."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from braidax.errors import ArgumentError
from braidax.torch.arguments import check_fetching, check_order
from braidax.torch.fetch import Fetch
from braidax.torch.gathering import GatheredItems
from braidax.torch.items import Items
from braidax.torch.library import consumer_modes, pinning, torch_library
from braidax.torch.order import Order, RankSampler, SampledOrder, Stream
from braidax.torch.passes import ProcessPass, Progress, StreamPass, ThreadOptions, ThreadPass
from braidax.torch.tempo import Tempo
from braidax.torch.tensors import columns_of, first_threads

_LASTING = frozenset({"dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "persistent_workers"})


class DataLoader:
    """A drop-in for `torch.utils.data.DataLoader`: same arguments, same batches, fetched in parallel and ahead.

    Samples arrive in any order, each in its own place of its batch, so that batches are the same for any number of
    threads. With `shuffle=True` every epoch has a permutation of its own, computed index by index. Under
    torch.distributed, and without a sampler, every rank gets its own part of each global batch.

    **Arguments:** as of torch's, with its meaning; what differs: `shuffle`: the order is a function of one seed, drawn
    from `generator` (by default torch's global one) at the first `iter`, and of the epoch, which counts the calls of
    `iter`. `num_workers`: 0 fetches by threads of this process, more by that many of torch's worker processes.
    `timeout`, in seconds, and `prefetch_factor`, in batches ahead, work with threads too. `threads`: how many fetch: 1
    for a data set that cannot be called by several at once, 0 for one that must not leave the caller's thread; by
    default as many as make it faster, at most 64.

    **Raises:** `ArgumentError` for arguments that do not fit; while iterating, `RecordError` naming the index whose
    item cannot be had, at its batch, and `WaitTimeout`. `MissingExtra` without torch.
    """

    __class_getitem__ = classmethod(types.GenericAlias)  # DataLoader[...] in annotations, as torch allows

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        threads: int | None = None,
    ) -> None:
        data = torch_library().utils.data
        self.dataset, self.generator = dataset, generator
        self.num_workers, self.prefetch_factor, self.threads = num_workers, prefetch_factor, threads
        self.worker_init_fn, self.multiprocessing_context = worker_init_fn, multiprocessing_context
        self.persistent_workers, self.timeout, self.in_order = persistent_workers, timeout, in_order
        self.pin_memory, self.pin_memory_device = pin_memory, pin_memory_device
        streams = isinstance(dataset, data.IterableDataset)
        check_order(dataset, streams, batch_size, shuffle, sampler, batch_sampler, drop_last)
        check_fetching(self, streams)
        self._batched = batch_size is not None
        self.batch_size = None if batch_sampler is not None else batch_size
        self.drop_last = drop_last
        self.collate_fn = collate_fn or (data.default_collate if self._batched else data.default_convert)
        own = RankSampler(dataset, batch_size, shuffle=bool(shuffle), drop_last=drop_last, generator=generator)
        self.sampler: Any = own if sampler is None and batch_sampler is None and not streams else sampler
        self.batch_sampler: Any = batch_sampler
        if self.sampler is not None and batch_size is not None:
            self.batch_sampler = data.BatchSampler(self.sampler, batch_size, drop_last)
        self._order: Order = own
        if streams:
            self._order = Stream(dataset)
        elif batch_sampler is not None:
            self._order = SampledOrder(batch_sampler, getattr(batch_sampler, "sampler", None))
        elif sampler is not None:
            self._order = SampledOrder(self.batch_sampler, sampler) if self._batched else SampledOrder(sampler)
        self._latest: Progress | None = None
        self._tempo = Tempo(threads, first_threads(dataset))
        self._feed = _Feed()
        self._gathered: GatheredItems | None = None  # what the latest epoch was gathered by
        self._workers: Any = None
        self._sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LASTING and getattr(self, "_sealed", False):
            raise ArgumentError(f"{name} cannot be set after a DataLoader was made; make a new one")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        """The number of batches of a whole epoch, for this rank."""
        if isinstance(self._order, RankSampler):
            return self._order.num_batches
        if not isinstance(self._order, Stream):
            return len(self.batch_sampler if self._batched else self.sampler)
        full, rest = divmod(len(self.dataset), self.batch_size or 1)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        state = self._order.start()
        self._latest = progress = Progress(state, exact=self.in_order or not self.num_workers)
        if isinstance(self._order, Stream):
            return StreamPass(iter(self._torch_loader()), progress)
        coming = self._order.batches(state)
        if self.num_workers:
            return ProcessPass(self._begin, coming, progress, timeout=self.timeout)
        items = self._items(pinning() if self.pin_memory else None)
        options = ThreadOptions(self.threads, self.prefetch_factor, self.timeout, self._batched)
        return ThreadPass(coming, progress, items, self._threads_for(items), options)

    def state_dict(self) -> dict[str, Any]:
        """Returns how far the latest `iter` has come: batches handed out count, those fetched ahead do not.

        **Raises:** `ArgumentError` where that cannot be known: with workers and `in_order=False`.
        """
        if self._latest is None or self._latest.ended:
            return dict(self._order.state())
        if not self._latest.exact:
            raise ArgumentError(
                f"in_order={self.in_order} with num_workers={self.num_workers} hands batches out in an order that no "
                f"state can tell; use in_order=True"
            )
        return dict(self._latest.state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next `iter` go on where `state_dict` was taken; of the epoch's batches only the rest come.

        **Raises:** `ArgumentError` if it was taken from a loader of another kind or over other data.
        """
        expected = self._order.state()
        if state_dict.keys() != expected.keys():
            raise ArgumentError(
                f"state_dict has the entries {sorted(state_dict)}, expected {sorted(expected)}; load it into a loader "
                f"with the same kind of dataset, sampler and batch_sampler as the one it was taken from"
            )
        self._order.restore(dict(state_dict))
        self._latest = None

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next `iter` runs, and tells the sampler or the data set if it has a `set_epoch`.

        Not needed with `shuffle=True`: the epoch counts the calls of `iter` by itself. In an epoch that was resumed in
        its middle it changes nothing.
        """
        self._order.set_epoch(epoch)

    def __repr__(self) -> str:
        return (
            f"DataLoader({type(self.dataset).__name__}, batch_size={self.batch_size}, num_workers={self.num_workers}, "
            f"epoch={self._order.epoch})"
        )

    def _items(self, pin: Callable[[Any], Any] | None) -> Items:
        table = None
        if self._batched and self.collate_fn is torch_library().utils.data.default_collate:
            table = columns_of(self.dataset)
        if table is None:
            return Items(self.dataset, self.collate_fn, batched=self._batched, pin=pin)
        self._gathered = GatheredItems(self.dataset, self.collate_fn, pin=pin, table=table, former=self._gathered)
        return self._gathered

    def _threads_for(self, items: Items) -> Callable[[], Fetch]:
        data = torch_library().utils.data
        ordered = self.collate_fn not in (data.default_collate, data.default_convert)
        modes, tempo = consumer_modes(), self._tempo
        return lambda: Fetch(items, tempo.again(), modes=modes, ordered=ordered)

    def _begin(self, coming: Iterator[Any]) -> Iterator[Any]:
        self._feed.coming = coming
        return iter(self._torch_loader())

    def _torch_loader(self) -> Any:
        """Returns torch's own loader: over our batches, or over a data set that has no indices."""
        if self._workers is not None:
            return self._workers
        chosen: dict[str, Any] = {"sampler": self._feed, "batch_size": None}
        if isinstance(self._order, Stream):
            chosen = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        elif self._batched:
            chosen = {"batch_sampler": self._feed}
        workers = torch_library().utils.data.DataLoader(
            self.dataset,
            **chosen,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            generator=self.generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            in_order=self.in_order,
        )
        if self.persistent_workers:
            self._workers = workers
        return workers


class _Feed:
    """The batches of the pass under way, as torch's loader asks for them."""

    coming: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.coming
