"""The samples of a source that a predicate keeps, found once."""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.leaves import samples_of, too_wide, uncut
from braidax.data.source import (
    Indices,
    Source,
    allocate,
    chosen_rows,
    prepare,
    read_samples,
    source_at,
    stamp_of,
    widened,
)
from braidax.data.storage.derived import Derived
from braidax.data.storage.locks import NotKept
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.data.transforms.columns import select
from braidax.data.workers.threads import Threads, result_within
from braidax.errors import ArgumentError, RecordError, WaitTimeout

_WINDOW = 256  # samples that one read brings
_WAIT_SECONDS = 600.0

Predicate = Callable[[Any], Any]


def filter(
    source: Source,
    predicate: Predicate,
    *,
    by: Literal["sample", "window"] = "sample",
    columns: str | Sequence[str] | None = None,
    name: str | None = None,
) -> Source:
    """Returns a source of the samples that a predicate keeps, in their order.

    Which ones is found out here, in one pass over the source by several threads, with a progress bar if that takes
    longer than a second. As long as data and predicate are the same, so are the samples kept, in every process and
    after any restart: so a cursor stands where it stood.

    **Arguments:** `predicate`: with `by="sample"` it takes one sample, as `map` gives it, and says whether to
    keep it; with `by="window"`, many times as fast, it takes a PyTree of arrays `[n, *sample_shape]` and returns bools
    `[n]`. Called from many threads at once. `columns`: the leaves that it is given; formats that keep leaves apart read
    only these. `name`: of the predicate: what is kept is then stored in the cache folder, bound to the files of the
    source and this name, and the next run reads nothing for it. Another predicate needs another name.

    **Raises:** `ArgumentError` when nothing is kept; for a source whose samples are others in each epoch, such as an
    augmented one (filter first, then augment); and for a `name` where nothing tells whether the samples have changed.
    `RecordError` when the predicate raises, naming the record.
    """
    if by not in ("sample", "window"):
        raise ArgumentError(f"by={by!r} is not 'sample' or 'window'")
    if source_at(source, 0, 1) is not source:
        raise ArgumentError(
            f"source={source!r} has other samples in each epoch, so that no plan holds for all of them; filter the "
            "source first, then augment or mix what is left"
        )
    seen = widened(source if columns is None else select(source, columns))
    keeps = _Keeps(seen, predicate, by)
    kept = _found(keeps) if name is None else _stored(keeps, source, name)
    if not len(kept):
        raise ArgumentError(
            f"predicate={keeps.name} keeps none of the {len(source):,} samples; the first is {_first(seen)}: expected "
            "at least one to be kept"
        )
    return chosen_rows(source, kept)


class _Keeps:
    """Says which samples of a window are kept."""

    def __init__(self, source: Source, predicate: Predicate, by: str) -> None:
        self.source = source
        self._predicate = predicate
        self._by = by
        self.name = getattr(predicate, "__qualname__", None) or type(predicate).__name__

    def __call__(self, indices: Indices) -> Indices:
        """Returns those of the samples that are kept."""
        window = allocate(self.source.sample_spec, len(indices))
        read_samples(self.source, indices, window)
        if self._by == "window":
            return indices[self._of_window(window, indices)]
        samples = samples_of(window, len(indices))
        keeps = self._uncut if too_wide(window) else self._predicate
        kept = [
            self._of_sample(keeps, sample, record) for sample, record in zip(samples, indices.tolist(), strict=True)
        ]
        return indices[np.array(kept, np.bool_)]

    def _uncut(self, sample: Any) -> Any:
        return uncut(lambda: self._predicate(sample), sample)

    def _of_sample(self, keeps: Predicate, sample: Any, record: int) -> bool:
        try:
            answer = np.asarray(keeps(sample))
            if answer.shape == ():
                return bool(answer)
        except Exception as error:
            raise self._raised(error, f"record {record}") from error
        raise RecordError(
            f"predicate={self.name} returned {answer.dtype}{list(answer.shape)} for record {record}; expected one "
            'bool; with by="window" it takes whole windows'
        )

    def _of_window(self, window: Any, indices: Indices) -> NDArray[np.bool_]:
        try:
            answer = np.asarray(uncut(lambda: self._predicate(window), window))
        except Exception as error:
            raise self._raised(error, f"records {indices[0]} to {indices[-1]}") from error
        if answer.dtype != np.bool_ or answer.shape != indices.shape:
            raise RecordError(
                f"predicate={self.name} returned {answer.dtype}{list(answer.shape)} for the records {indices[0]} to "
                f"{indices[-1]}; expected bool[{len(indices)}], one for each sample of the window"
            )
        return answer

    def _raised(self, error: Exception, where: str) -> RecordError:
        return RecordError(
            f"predicate={self.name} raised {type(error).__name__}: {error}, on {where}; mend the predicate or the "
            "record"
        )


def _stored(keeps: _Keeps, source: Source, name: str) -> Indices:
    """Returns what is kept as an earlier run found it, or finds and stores it."""
    stamp = stamp_of(source)
    if stamp is None:
        raise ArgumentError(
            f"name={name!r}: nothing tells whether the samples of source={source!r} have changed since, so what is "
            "kept cannot be stored; leave name out, or filter before functions of your own are applied"
        )
    room = Room("filters")
    about = {"kind": "filter", "source": stamp, "predicate": name, "samples": len(source)}
    derived = Derived.named(room.folder, about)
    room.claim([derived.path])

    def write(file: IO[bytes]) -> Mapping[str, Any]:
        _find(keeps, work, lambda found: file.write(found.astype("<i8", copy=False).data))
        return {}

    with Progress("filtering", "", len(source), unit="samples") as work:
        try:
            stored = derived.numbers(write, work)
        except NotKept:  # nowhere to store it: found out each time
            return _found(keeps)
    stored.check()
    room.made(stored.data.nbytes)
    return stored.data.view("<i8")


def _found(keeps: _Keeps) -> Indices:
    found = [np.empty(0, np.int64)]
    with Progress("filtering", "", len(keeps.source), unit="samples") as work:
        _find(keeps, work, found.append)
    return np.concatenate(found)


def _find(keeps: _Keeps, work: Progress, write: Callable[[Indices], Any]) -> None:
    """Goes through a source once, on several threads, and writes which samples are kept, in their order."""
    num_samples, num_threads = len(keeps.source), (os.cpu_count() or 1) + 1
    threads = Threads(num_threads, "braidax-filter")
    starts = deque(range(0, num_samples, _WINDOW))
    pending: deque[tuple[Indices, Future[Indices]]] = deque()
    try:
        while starts or pending:
            while starts and len(pending) <= 2 * num_threads:
                start = starts.popleft()
                indices = np.arange(start, min(start + _WINDOW, num_samples), dtype=np.int64)
                prepare(keeps.source, indices)
                pending.append((indices, threads.submit(keeps, indices)))
            indices, future = pending.popleft()
            what = f"what filter keeps of the records {indices[0]} to {indices[-1]}"
            write(result_within(future, timeout_seconds=_WAIT_SECONDS, what=what))
            work.show(0, int(indices[-1]) + 1)
    except WaitTimeout:
        threads.abandon()
        raise
    finally:
        threads.close(timeout_seconds=_WAIT_SECONDS)


def _first(source: Source) -> str:
    return f"{jax.tree.map(str, source[0])}"[:200] if len(source) else "missing: the source is empty"
