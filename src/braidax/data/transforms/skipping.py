"""Bad records: replaced by others, always the same ones, and written to a ledger that has a budget."""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
import xxhash

from braidax.data.sampling.splitmix import GOLDEN, mixed
from braidax.data.source import (
    Indices,
    Source,
    allocate,
    check_indices,
    is_outage,
    prepare,
    read_samples,
    source_at,
    stamp_of,
    widened,
)
from braidax.errors import ArgumentError, FormatError, RecordError, WaitTimeout
from braidax.spans import span

_MAX_ATTEMPTS = 64  # others that are tried in place of a bad record
_LOCK_SECONDS = 60.0  # a line is written in far less
_VERSION = 2

Epoch = tuple[int | None, int]
"""Seed and epoch, of a source whose samples are others in each epoch."""


def skipping(source: Source, *, ledger: str | Path | None = None, budget: int = 100) -> Source:
    """Returns a source that reads another record in place of one that cannot be read.

    Which one is a function of the number of the bad record and of the data alone: hashes of the number say which others
    to try, and the first that can be read is taken. So batches are the same for any number of threads and processes and
    after any restart. A record is bad when its own bytes show it: its read raises `RecordError`, or an error that
    Python or a decoder raises for wrong values. An error that a disk, a server, a connection or the memory may have
    caused is raised as ever, also where it is the cause of a `RecordError`. When a window cannot be read, its halves
    are, and theirs, until the bad records are found.

    Each bad record is one line of JSON in the ledger: `record`, `error`, `replaced_by`. A ledger belongs to one source,
    as its files are: names, sizes and stamps. Then records that are in it are replaced without being read. Nothing
    tells whether a source without a stamp has changed, such as an object in memory: of such a one they are read once
    more. Several threads, processes and hosts may share a ledger. Of a source whose samples are others in each epoch
    the line also has `seed` and `epoch`, only they are skipped unread, and records count as different when their errors
    differ. Each replaced sample is a span on the lane `skip`, which `loader.stats()` counts.

    **Arguments:** `source`: to read from. `ledger`: a file, made if it is not there; None: `skipped-DIGEST.jsonl` in
    the current folder, the digest being that of the source. `budget`: of different bad records in the ledger; one more
    raises.

    **Raises:** `RecordError` when there are more bad records than `budget`, also at once, or when none is found that
    can be read; `ReadError` as the source; `ArgumentError` for a ledger of another source.
    """
    if budget < 0:
        raise ArgumentError(f"budget={budget}: expected the number of bad records that may be skipped, 0 or more")
    identity = _Identity(len(source), stamp_of(source), dict(source.describe()))
    book = _Ledger(Path(f"skipped-{identity.digest}.jsonl") if ledger is None else Path(ledger), budget, identity)
    book.check_budget()
    return _Skipping(source, book, None)


class _Skipping(Source):
    """Samples of another source. `epoch`: the one that `source` is of; None where all are the same."""

    def __init__(self, source: Source, ledger: "_Ledger", epoch: Epoch | None) -> None:
        self.source = source
        self._ledger = ledger
        self._epoch = epoch
        self._lock = threading.Lock()
        # Both are replaced, never changed: other threads are reading them.
        self._replaced: Mapping[int, int] = ledger.replaced(epoch)
        self._bad = frozenset(self._replaced)

    @property
    def sample_spec(self) -> Any:
        return self.source.sample_spec

    def __len__(self) -> int:
        return len(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Skipping, (self.source, self._ledger, self._epoch)

    def read(self, indices: Indices, out: Any) -> None:
        check_indices(indices, len(self), where="the source")
        pending = [(0, len(indices))]
        while pending:
            start, stop = pending.pop()
            rows = jax.tree.map(lambda leaf, start=start, stop=stop: leaf[start:stop], out)
            chosen = self._chosen(indices[start:stop])
            error = self._read(chosen, rows)
            if error is not None and len(chosen) > 1:
                middle = (start + stop) // 2
                pending += [(middle, stop), (start, middle)]
            elif error is not None:
                self._settle(int(chosen[0]), error)
                pending.append((start, stop))
            else:
                for _ in range(np.count_nonzero(chosen != indices[start:stop])):
                    with span("skip", "bad record"):
                        pass

    def widened(self) -> Source:
        """Returns the same of the source with its integers of 64 bits as they are stored."""
        return _Skipping(widened(self.source), self._ledger, self._epoch)

    def at(self, seed: int | None, epoch: int) -> Source:
        """Returns the source as it is in an epoch; what is bad in one epoch need not be so in another."""
        source = source_at(self.source, seed, epoch)
        return self if source is self.source else _Skipping(source, self._ledger, (seed, epoch))

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples, or which of them are skipped, do."""
        inside = stamp_of(self.source)
        return None if inside is None else f"{inside}/skipping {sorted(self._replaced.items())}"

    def prepare(self, indices: Indices) -> None:
        """Asks the source to fetch the samples ahead that will be read."""
        prepare(self.source, self._chosen(indices))

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "bad records": f"skipped, {self._ledger.describe()}"}

    def _chosen(self, indices: Indices) -> Indices:
        """Returns the samples to read: others in place of those that are known to be bad."""
        replaced = self._replaced
        if not replaced:
            return indices
        known = np.isin(indices, np.fromiter(replaced, np.int64, len(replaced)))
        chosen = indices.copy()
        for place in np.flatnonzero(known).tolist():
            chosen[place] = replaced[int(indices[place])]
        return chosen

    def _read(self, indices: Indices, out: Any) -> RecordError | None:
        """Reads samples; returns the error when one of them is bad."""
        try:
            read_samples(self.source, indices, out)
        except RecordError as error:
            if is_outage(error):
                raise
            return error
        return None

    def _settle(self, record: int, error: RecordError) -> None:
        """Finds what a bad record is replaced by, and writes it down, and the same for bad ones found on the way."""
        scratch = allocate(self.sample_spec, 1)
        open_cases = {record: error}
        try:
            self._mark(record, error)
            while open_cases:
                bad, error = next(reversed(open_cases.items()))
                for attempt in range(_MAX_ATTEMPTS):
                    other = candidate(bad, attempt, len(self))
                    if other in self._bad:
                        continue
                    found = self._read(np.array([other]), scratch)
                    if found is None:
                        break
                    open_cases[other] = found
                    self._mark(other, found)
                else:
                    raise RecordError(
                        f"record {bad} is bad ({error}), and so are the {_MAX_ATTEMPTS} that were tried in its place; "
                        f"mend the data; ledger={str(self._ledger.path)!r} lists them"
                    )
                self._ledger.write(_Entry(bad, str(error), other, self._epoch))
                with self._locked():
                    moved = {record: other if to == bad else to for record, to in self._replaced.items()}
                    self._replaced = {**moved, bad: other}
                del open_cases[bad]
                self._ledger.check_budget()  # with what other processes wrote
        except RecordError:
            for bad, found in open_cases.items():
                self._ledger.write(_Entry(bad, str(found), None, self._epoch))
            raise

    def _mark(self, record: int, error: RecordError) -> None:
        with self._locked():
            self._bad |= {record}
        self._ledger.check_budget(_Entry(record, str(error), None, self._epoch))

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            raise WaitTimeout("the list of bad records was not free within a minute; another thread hangs in it")
        try:
            yield
        finally:
            self._lock.release()


class _Entry(NamedTuple):
    """A bad record. `replaced_by` is None when the search for another was given up."""

    record: int
    error: str
    replaced_by: int | None
    epoch: Epoch | None

    @property
    def identity(self) -> int | str:
        """What tells it from others: its number or, where a number is another sample in each epoch, its error."""
        return self.record if self.epoch is None else self.error

    def fields(self) -> dict[str, Any]:
        """Returns the entry as it stands in the ledger."""
        fields: dict[str, Any] = {"record": self.record, "error": self.error, "replaced_by": self.replaced_by}
        if self.epoch is not None:
            fields |= {"seed": self.epoch[0], "epoch": self.epoch[1]}
        return fields


def _entry_of(fields: Mapping[str, Any]) -> _Entry:
    epoch = (fields["seed"], int(fields["epoch"])) if "epoch" in fields else None
    return _Entry(int(fields["record"]), str(fields["error"]), fields["replaced_by"], epoch)


class _Identity(NamedTuple):
    """Which source a ledger is of.

    **Fields:** `num_samples`, `stamp`: of the source; without a stamp nothing tells whether it has changed. `facts`:
    what describes it.
    """

    num_samples: int
    stamp: str | None
    facts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Names the source in a file's name."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.told()).encode())[:8]

    def told(self) -> dict[str, Any]:
        """Returns what has to be the same for a ledger to be that of the source."""
        stamp = None if self.stamp is None else xxhash.xxh3_128_hexdigest(self.stamp.encode())
        return {"samples": self.num_samples, "stamp": stamp, "files": self.facts.get("files")}


class _Ledger:
    """The file of bad records: lines of JSON, the first of which says of which source they are.

    Lines are read, and added, under the file's lock; a line that a writer who died left unfinished is removed.
    """

    def __init__(self, path: Path, budget: int, identity: _Identity) -> None:
        self.path = path.absolute()  # a worker process may stand in another folder
        self._budget = budget
        self._identity = identity
        self._lock = threading.Lock()
        self._entries: dict[int | str, _Entry] = {}
        self._marked: dict[int | str, str] = {}  # bad, and not yet in the file
        self._offset = 0  # up to where the file was read
        with self._locked() as file:
            self._read(file)
            if self._offset == 0:
                self._write(file, {"ledger": _VERSION, **identity.told(), "source": dict(identity.facts)})

    def __reduce__(self) -> tuple[Any, ...]:
        return _Ledger, (self.path, self._budget, self._identity)

    def replaced(self, epoch: Epoch | None) -> dict[int, int]:
        """Returns what the bad records of an epoch are replaced by, as far as that is known without reading them."""
        if self._identity.stamp is None:
            return {}
        with self._guarded():
            entries = [entry for entry in self._entries.values() if entry.epoch == epoch]
        bad = {entry.record for entry in entries}
        found = [(entry.record, entry.replaced_by) for entry in entries]
        return {record: other for record, other in found if other is not None and other not in bad}

    def check_budget(self, entry: _Entry | None = None) -> None:
        """Counts a record that was found to be bad. **Raises:** `RecordError` when there are more than the budget."""
        with self._guarded():
            if entry is not None and entry.identity not in self._entries:
                self._marked[entry.identity] = entry.error
            count = len(self._entries) + len(self._marked)
            if count > self._budget:
                last = entry.error if entry else list(self._entries.values())[-1].error
                raise RecordError(
                    f"{count} records are bad, more than budget={self._budget}; ledger={str(self.path)!r} lists them, "
                    f"the last is: {last}: mend the data, or raise the budget"
                )

    def write(self, entry: _Entry) -> None:
        """Adds a line to the file, unless the record is in it already."""
        with self._locked() as file:
            self._read(file)
            self._marked.pop(entry.identity, None)
            if entry.identity in self._entries:
                return
            self._write(file, entry.fields())
            self._entries[entry.identity] = entry

    def describe(self) -> str:
        """Returns how many bad records there are, and where they are listed."""
        return f"{len(self._entries):,} of at most {self._budget:,} in {self.path}"

    def _write(self, file: IO[bytes], fields: Mapping[str, Any]) -> None:
        file.write(json.dumps(fields).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        self._offset = file.tell()

    def _read(self, file: IO[bytes]) -> None:
        """Reads the lines that were added since the file was last read."""
        file.seek(self._offset)
        added = file.read()
        whole = added.rfind(b"\n") + 1
        if whole < len(added):
            file.truncate(self._offset + whole)
        for line in added[:whole].splitlines():
            try:
                fields = json.loads(line)
                entry = None if "ledger" in fields else _entry_of(fields)
                then = {name: fields.get(name) for name in self._identity.told()} if entry is None else None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise FormatError(
                    f"{self.path}: the line {line[:80]!r} is none of a ledger ({type(error).__name__}: {error}); mend "
                    "or delete the file, or give another with ledger="
                ) from error
            if entry is not None:
                self._entries.setdefault(entry.identity, entry)
                self._marked.pop(entry.identity, None)
            elif then != self._identity.told() or fields["ledger"] != _VERSION:
                raise ArgumentError(
                    f"ledger={str(self.path)!r}: belongs to another source or version: {fields}, expected "
                    f"{self._identity.told()} of {dict(self._identity.facts)}; give each source a ledger of its own, "
                    "and a new one when its files change"
                )
        self._offset += whole
        file.seek(self._offset)

    @contextlib.contextmanager
    def _guarded(self) -> Generator[None]:
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            raise WaitTimeout(f"{self.path}: the ledger was not free within {_LOCK_SECONDS:g} s; another thread hangs")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _locked(self) -> Generator[IO[bytes]]:
        """Gives the file to this thread alone, of all threads and processes."""
        with self._guarded():
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise FormatError(
                    f"{self.path}: the ledger cannot be opened ({error}); give one that can be written with ledger="
                ) from error
            with os.fdopen(descriptor, "r+b") as file:
                self._lock_file(file)
                yield file

    def _lock_file(self, file: IO[bytes]) -> None:
        give_up = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise WaitTimeout(
                        f"{self.path}: another process holds the ledger's lock for {_LOCK_SECONDS:g} s; end it"
                    ) from error
                time.sleep(0.005)


def candidate(record: int, attempt: int, num_samples: int) -> int:
    """Returns the record to try in place of a bad one.

    **Arguments:** `record`: the bad one. `attempt`: from 0 on. `num_samples`: of the source.

    **Returns:** a number in `[0, num_samples)`: a hash of the first two, by SplitMix64.
    """
    bits = (1 << 64) - 1
    value = (record * GOLDEN + (attempt + 1) * 0xD1342543DE82EF95) & bits
    return int(mixed(np.array([value], np.uint64))[0]) * num_samples >> 64
