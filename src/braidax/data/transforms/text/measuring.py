"""How long the documents of a source are: known to it, kept from before, or measured in one pass."""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.data.source import Indices, Source, allocate, prepare, read_samples, stamp_of
from braidax.data.storage import derived as stored
from braidax.data.transforms.text.ragged import lengths_of
from braidax.data.workers.threads import Threads
from braidax.errors import ArgumentError, WaitTimeout

_log = logging.getLogger("braidax")
_WINDOW = 128  # documents that one read measures
_PROBES = 64  # documents that are measured again before kept lengths are used that no stamp vouches for
_WAIT_SECONDS = 600.0
_QUIET_SECONDS = 1.0

Show = Callable[[int], None]
"""Is told how many more documents are done."""


@runtime_checkable
class Measured(Protocol):
    """A source that knows how long its arrays are without reading them."""

    def lengths(self, leaf: str) -> NDArray[np.int64] | None:
        """Returns the length of a varying leaf in every sample, int64 `[num_samples]`; None: not known."""
        ...


def document_lengths(source: Source, leaf: str, folder: Path, *, is_asked: bool) -> tuple[NDArray[np.int64], str]:
    """Returns the lengths of all documents, int64 `[n]`, and their digest: known, kept from before, or measured."""
    known = source.lengths(leaf) if isinstance(source, Measured) else None
    if known is not None:
        known = np.ascontiguousarray(known, np.int64)
        if known.shape != (len(source),):
            raise ArgumentError(
                f"source={type(source).__name__}: its method lengths gives {list(known.shape)} numbers for "
                f"leaf={leaf!r}, expected one for each of its {len(source)} samples"
            )
        return known, xxhash.xxh3_128_hexdigest(known.data)
    stamp = stamp_of(source)
    identity: Any = dict(source.describe()) if stamp is None else stamp
    about = {"kind": "lengths", "source": identity, "leaf": leaf, "samples": len(source)}
    path = stored.place(folder, about)
    may_keep = is_asked or stamp is not None
    if may_keep and (kept := stored.load(path, about)) is not None:
        lengths = kept.data.view("<i8")
        if stamp is not None or differing(source, leaf, lengths) is None:
            return lengths, kept.facts["digest"]
    lengths = _measure(source, leaf)
    digest = xxhash.xxh3_128_hexdigest(lengths.data)

    def write(file: IO[bytes]) -> Mapping[str, Any]:
        file.write(lengths.astype("<i8", copy=False).data)
        return {"digest": digest}

    if may_keep:
        keep(path, about, write)
    return lengths, digest


def keep(path: Path, about: Mapping[str, Any], write: stored.Write) -> bool:
    """Writes a file that can be made again; where that fails it says so in the log, and returns False."""
    try:
        stored.store(path, about, write)
    except OSError as error:
        _log.warning("packed: %s cannot be written (%s), so it will be made again each time; pass cache=", path, error)
        return False
    return True


def _measure(source: Source, leaf: str) -> NDArray[np.int64]:
    """Reads all of a source once, on several threads, for the lengths of one leaf."""
    lengths = np.empty(len(source), np.int64)
    windows = deque(range(0, len(source), _WINDOW))
    num_threads = (os.cpu_count() or 1) + 1
    threads = Threads(num_threads, "braidax-measure")
    pending: deque[tuple[NDArray[np.int64], Future[NDArray[np.int64]]]] = deque()
    try:
        with progress(f"measuring {leaf!r} of", len(source)) as show:
            while windows or pending:
                while windows and len(pending) <= 2 * num_threads:
                    start = windows.popleft()
                    indices = np.arange(start, min(start + _WINDOW, len(source)), dtype=np.int64)
                    prepare(source, indices)
                    pending.append((indices, threads.submit(_measured, source, leaf, indices)))
                indices, future = pending.popleft()
                lengths[indices] = _result(future, f"the length of {leaf!r} in records {indices[0]} to {indices[-1]}")
                show(len(indices))
    except WaitTimeout:
        threads.abandon()
        raise
    finally:
        threads.close(timeout_seconds=_WAIT_SECONDS)
    return lengths


def _measured(source: Source, leaf: str, indices: Indices) -> NDArray[np.int64]:
    window = allocate(source.sample_spec, len(indices))
    read_samples(source, indices, window)
    return lengths_of(window[leaf])


def _result(future: "Future[NDArray[np.int64]]", what: str) -> NDArray[np.int64]:
    try:
        return future.result(_WAIT_SECONDS)
    except TimeoutError as error:
        if future.done():
            raise
        raise WaitTimeout(f"{what} did not come within {_WAIT_SECONDS:.0f} s; the source hangs") from error


def differing(source: Source, leaf: str, lengths: NDArray[np.int64]) -> str | None:
    """Measures a few documents again; returns what differs, or None."""
    indices = np.unique(np.linspace(0, len(source) - 1, _PROBES).astype(np.int64))
    now = _measured(source, leaf, indices)
    wrong = np.flatnonzero(now != lengths[indices])
    if not wrong.size:
        return None
    return f"record {indices[wrong[0]]} has {now[wrong[0]]} tokens, and had {lengths[indices[wrong[0]]]}"


@contextlib.contextmanager
def progress(what: str, total: int) -> Generator[Show]:
    """Gives a function that counts documents; work that takes longer than a second shows a bar on stderr."""
    begun, bar, done = time.monotonic(), None, 0

    def show(num_documents: int) -> None:
        nonlocal bar, done
        done += num_documents
        if bar is None and time.monotonic() > begun + _QUIET_SECONDS:
            bar = _bar(what, total)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)
            bar.refresh()

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()


def _bar(what: str, total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description} documents"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    bar.add_task(what, total=total)
    bar.start()
    return bar
