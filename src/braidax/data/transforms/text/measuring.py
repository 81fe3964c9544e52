"""How long the documents of a source are: known to it, kept from before, or measured in one pass."""

import io
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.data.source import Indices, Source, allocate, prepare, read_samples, stamp_of
from braidax.data.storage.derived import Derived, Kept, Write
from braidax.data.storage.locks import NotKept
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.data.transforms.text.ragged import lengths_of
from braidax.data.workers.threads import Threads
from braidax.errors import ArgumentError, WaitTimeout

_log = logging.getLogger("braidax")
_WINDOW = 128  # documents that one read measures
_PROBES = 64  # documents that are measured again before kept lengths are used that no stamp vouches for
_WAIT_SECONDS = 600.0

Show = Callable[[int], None]
"""Is told how many more documents are done."""


@runtime_checkable
class Measured(Protocol):
    """A source that knows how long its arrays are without reading them."""

    def lengths(self, leaf: str) -> NDArray[np.int64] | None:
        """Returns the length of a varying leaf in every sample, int64 `[num_samples]`; None: not known."""
        ...


def document_lengths(source: Source, leaf: str, room: Room, *, is_asked: bool) -> tuple[NDArray[np.int64], str]:
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
    with Progress(f"measuring {leaf!r} of", "", len(source), unit="documents") as work:

        def write(file: IO[bytes]) -> Mapping[str, Any]:
            return {"digest": _measure(source, leaf, work, file.write)}

        if is_asked or stamp is not None:
            identity: Any = dict(source.describe()) if stamp is None else stamp
            about = {"kind": "lengths", "source": identity, "leaf": leaf, "samples": len(source)}
            kept = keep(Derived.named(room.folder, about), write, work, room)
            if kept is not None and stamp is None and differing(source, leaf, _lengths(kept)) is not None:
                kept = keep(Derived.named(room.folder, about), write, work, room, is_new=True)
            if kept is not None:
                return _lengths(kept), kept.facts["digest"]
        file = io.BytesIO()
        digest = _measure(source, leaf, work, file.write)
    return np.frombuffer(file.getbuffer(), "<i8"), digest


def keep(derived: Derived, write: Write, work: Progress, room: Room, *, is_new: bool = False) -> Kept | None:
    """Opens numbers or makes them; where they cannot be written it says so in the log, and returns None."""
    room.claim([derived.path])
    try:
        kept = derived.numbers(write, work, is_new=is_new)
    except NotKept as error:
        path = derived.path
        _log.warning("packed: %s cannot be written (%s), so it will be made again each time; pass cache=", path, error)
        return None
    room.made(kept.data.nbytes)
    return kept


def _lengths(kept: Kept) -> NDArray[np.int64]:
    kept.check()
    return kept.data.view("<i8")


def _measure(source: Source, leaf: str, work: Progress, write: Callable[[Any], Any]) -> str:
    """Reads all of a source once, on several threads, and writes the lengths of one leaf; returns their digest."""
    digest = xxhash.xxh3_128()
    windows = deque(range(0, len(source), _WINDOW))
    num_threads = (os.cpu_count() or 1) + 1
    threads = Threads(num_threads, "braidax-measure")
    pending: deque[tuple[NDArray[np.int64], Future[NDArray[np.int64]]]] = deque()
    try:
        while windows or pending:
            while windows and len(pending) <= 2 * num_threads:
                start = windows.popleft()
                indices = np.arange(start, min(start + _WINDOW, len(source)), dtype=np.int64)
                prepare(source, indices)
                pending.append((indices, threads.submit(_measured, source, leaf, indices)))
            indices, future = pending.popleft()
            lengths = _result(future, f"the length of {leaf!r} in records {indices[0]} to {indices[-1]}")
            write(lengths.astype("<i8", copy=False).data)
            digest.update(lengths.data)
            work.show(0, int(indices[-1]) + 1)
    except WaitTimeout:
        threads.abandon()
        raise
    finally:
        threads.close(timeout_seconds=_WAIT_SECONDS)
    return digest.hexdigest()


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


def counting(work: Progress) -> Show:
    """Returns a function that counts what is done."""
    done = 0

    def show(num_documents: int) -> None:
        nonlocal done
        done += num_documents
        work.show(0, done)

    return show
