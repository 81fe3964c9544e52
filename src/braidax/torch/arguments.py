"""Which arguments of torch's DataLoader go together."""

from typing import Any

from braidax.errors import ArgumentError


def check_order(
    dataset: Any,
    streams: bool,
    batch_size: Any,
    shuffle: Any,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
) -> None:
    """Raises `ArgumentError` if what says which samples make up a batch contradicts itself, or the data set."""
    kind = type(dataset).__name__
    if streams:
        for name, value in (("shuffle", shuffle or None), ("sampler", sampler), ("batch_sampler", batch_sampler)):
            if value is not None:
                raise ArgumentError(
                    f"dataset={kind} is an IterableDataset, whose order is its own, so {name}={value!r} has no effect; "
                    f"leave it out, and shuffle in the data set"
                )
    elif not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise ArgumentError(
            f"dataset={kind} has no __getitem__; give a map-style data set, or a torch.utils.data.IterableDataset"
        )
    elif sampler is None and batch_sampler is None and not hasattr(dataset, "__len__"):
        raise ArgumentError(f"dataset={kind} has no __len__; give it one, or pass a sampler of its indices")
    if batch_sampler is not None:
        if batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ArgumentError(
                f"batch_sampler says all about batches, so batch_size={batch_size!r}, shuffle={shuffle!r}, "
                f"sampler={sampler!r} and drop_last={drop_last!r} must be left out"
            )
    elif sampler is not None and shuffle:
        raise ArgumentError("sampler says the order, so shuffle=True must be left out; or leave out the sampler")
    if batch_size is None and drop_last:
        raise ArgumentError("batch_size=None yields single samples, so there is no last batch; leave drop_last out")
    if batch_size is not None and batch_size < 1:
        raise ArgumentError(
            f"batch_size={batch_size!r} is not a positive number of samples; None yields single samples"
        )
    if shuffle and not streams and len(dataset) == 0:
        raise ArgumentError(f"dataset={kind} has no samples to shuffle; give one that has some, or use shuffle=False")


def check_fetching(loader: Any, streams: bool) -> None:
    """Raises `ArgumentError` if what says how samples are fetched contradicts itself.

    **Arguments:** `loader`: has torch's arguments as attributes. `streams`: whether its data set has no indices.
    """
    if loader.num_workers < 0:
        raise ArgumentError(f"num_workers={loader.num_workers} is negative; 0 fetches by threads of this process")
    if loader.timeout < 0:
        raise ArgumentError(f"timeout={loader.timeout} is negative; 0 waits as long as it takes")
    if loader.prefetch_factor is not None and loader.prefetch_factor < 1:
        raise ArgumentError(f"prefetch_factor={loader.prefetch_factor} is not a positive number of batches")
    if loader.pin_memory_device:
        raise ArgumentError(
            f"pin_memory_device={loader.pin_memory_device!r} has no effect: batches are pinned for the current "
            f"accelerator, as by torch itself; leave it out, and use pin_memory=True"
        )
    if loader.threads is not None and loader.threads < 0:
        raise ArgumentError(f"threads={loader.threads} is negative; None finds out how many are best, 0 uses none")
    if loader.threads is not None and (loader.num_workers or streams):
        raise ArgumentError(
            f"threads={loader.threads} is for a data set that is indexed by threads: with num_workers=0, and not for "
            f"an IterableDataset; leave it out"
        )
    if loader.threads == 0 and (loader.timeout or loader.prefetch_factor is not None):
        raise ArgumentError(
            f"threads={loader.threads} fetches a batch when it is asked for, so timeout={loader.timeout} and "
            f"prefetch_factor={loader.prefetch_factor} have no effect; leave them out, or use threads=1"
        )
    if loader.num_workers:
        return
    if loader.persistent_workers:
        raise ArgumentError("persistent_workers=True needs worker processes; leave it out, or raise num_workers")
    if loader.multiprocessing_context is not None:
        raise ArgumentError(
            f"multiprocessing_context={loader.multiprocessing_context!r} needs worker processes; leave it out, or "
            f"raise num_workers"
        )
    if streams and (loader.timeout or loader.prefetch_factor is not None):
        raise ArgumentError(
            f"timeout={loader.timeout}, prefetch_factor={loader.prefetch_factor}: an IterableDataset is read ahead by "
            f"worker processes only; leave them out, or raise num_workers"
        )
