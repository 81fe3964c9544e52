"""Tables of text whose columns are all numbers, parsed once: a batch is then one gather of rows, and no parsing.

The rows are a derived file in the cache folder. A row has the numbers of one record, integers of 64 bits as they are
stored, and a byte that says which readers may take them: what a reader may not take, it reads as text, and so raises
what that does.
"""

import functools
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.cores import usable_cores
from braidax.data.leaves import Integers, allocate, check_indices, is_varying, widened
from braidax.data.source import Indices, Source, read_samples, stamp_of
from braidax.data.storage.derived import Derived, Kept
from braidax.data.storage.files import Files, Ranges
from braidax.data.storage.inflate import Inflated
from braidax.data.storage.local import LocalFiles
from braidax.data.storage.locks import NoPlace, NotKept
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.errors import FormatError, RecordError

LEAST_BYTES, MOST_BYTES = 1 << 16, 1 << 28  # of text that is parsed when it is opened: it pays, and takes seconds

_log = logging.getLogger("braidax")
_VERSION = 1  # of what is kept of a record; another one is made anew
_MOST_THREADS = 4
_WINDOW_RECORDS, _WINDOW_BYTES = 1 << 14, 1 << 23  # that a thread parses at once, as text and as rows
_BLOCK_BYTES = 1 << 12  # that have a checksum
_MOST_ROW_BYTES = 1 << 30
_CHECK_SHARE = 20  # checking files takes at most this part of the time
_FINE, _WIDE, _AS_TEXT = 0, 1, 2  # of a row: for all; for those alone who take integers of 64 bits; for none


class _Leaf(NamedTuple):
    """A leaf.

    **Fields:** `loaded`, `stored`: its spec, as it is loaded, and with 64 bits. `field`, `kept`: of a row, which field
    it is, and of which dtype.
    """

    loaded: jax.ShapeDtypeStruct
    stored: jax.ShapeDtypeStruct
    field: str
    kept: np.dtype[Any]

    def facts(self, name: str) -> list[Any]:
        """Returns what JSON can hold of it."""
        dtypes = self.loaded.dtype, self.stored.dtype, self.kept
        return [name, list(self.loaded.shape), *(dtype.name for dtype in dtypes)]

    @classmethod
    def of(cls, facts: Sequence[Any], number: int) -> "_Leaf":
        """Returns the leaf of such facts."""
        shape, (loaded, stored, kept) = tuple(facts[1]), (jax.numpy.dtype(name) for name in facts[2:])
        return cls(jax.ShapeDtypeStruct(shape, loaded), jax.ShapeDtypeStruct(shape, stored), f"leaf{number}", kept)


_Leaves = Mapping[str, _Leaf]


def parsed_once(files: Files, opened: Callable[[], Source], options: Mapping[str, Any]) -> Source:
    """Returns the samples of text files, as rows that were parsed before or are now, where they can be.

    They can be where all leaves are numbers of one shape, in files of this host of 64 KiB to 256 MiB, of which the rows
    take at most 1 GiB. They are made anew when a file has changed, with a progress bar. Of several processes that want
    them at once, one makes them.

    **Arguments:** `files`: that are read. `opened`: opens them as text; it can be sent to other processes. `options`:
    what that depends on besides.

    **Returns:** what `opened` does, for other tables, and, with a warning, where the cache folder cannot be written.

    **Raises:** `FormatError` where there is no room, and what opening and reading the files raises.
    """
    is_here = isinstance(files, LocalFiles | Inflated) and all(files.stamps)
    if not is_here or not LEAST_BYTES <= sum(files.sizes) <= MOST_BYTES:
        return opened()
    room = Room("parsed")
    derived = _target(files, options, room.folder)
    if derived.path.exists():
        room.claim([derived.path])
        if (kept := derived.load()) is not None:
            return Parsed(files, opened, kept, derived, room=room)
    source = opened()
    leaves = _leaves_of(source)
    if leaves is None:
        return source
    room.claim([derived.path])
    try:
        with Progress("parsing of", files.names[0], sum(files.sizes)) as work:
            kept = derived.numbers(functools.partial(_write, source, leaves, sum(files.sizes), work), work)
    except NoPlace as error:
        room.release()
        _log.warning(
            "%s: its records are parsed anew in each epoch, since their rows cannot be kept in %s (%s); set the "
            "environment variable BRAIDAX_CACHE to a folder that can be written",
            files.names[0],
            derived.path.parent,
            error.strerror or error,
        )
        return source
    except NotKept as error:
        raise FormatError(
            f"{derived.path}: the rows of {files.names[0]} cannot be written ({error}); make room there, or set the "
            "environment variable BRAIDAX_CACHE to another folder"
        ) from error
    room.forget(derived.path.parent, derived.path)  # of an earlier state of the files
    room.made(kept.data.nbytes)
    return Parsed(files, opened, kept, derived, room=room)


class Parsed(Source):
    """Samples that are rows of numbers, and text where a record has no row.

    **Arguments:** `files`, `opened`: as of `parsed_once`. `kept`: the rows, of `derived`, which `room` keeps from being
    removed. `integers`: how those of 64 bits are given.
    """

    def __init__(
        self,
        files: Files,
        opened: Callable[[], Source],
        kept: Kept,
        derived: Derived,
        *,
        room: Room | None = None,
        integers: Integers = "loaded",
    ) -> None:
        self._files = files
        self._opened = opened
        self._kept = kept
        self._derived = derived
        self._room = room
        self._integers: Integers = integers
        self._most = _FINE if integers == "loaded" else _WIDE
        self._leaves = {facts[0]: _Leaf.of(facts, number) for number, facts in enumerate(kept.facts["leaves"])}
        self._spec = {name: leaf.loaded if integers == "loaded" else leaf.stored for name, leaf in self._leaves.items()}
        self._row = _row_dtype(self._leaves)
        self._rows: NDArray[np.uint8] = kept.data.reshape(-1, self._row.itemsize)
        self._next_check = 0.0

    def __reduce__(self) -> tuple[Callable[..., Source], tuple[Any, ...]]:
        return _parsed_again, (self._files, self._opened, self._derived, self._integers)

    def widened(self) -> "Parsed":
        """Returns the same with integers of 64 bits as they are stored."""
        return Parsed(self._files, self._opened, self._kept, self._derived, room=self._room, integers="stored")

    @functools.cached_property
    def _text(self) -> Source:
        """What reads records as text, opened when it is needed."""
        source = self._opened()
        return source if self._integers == "loaded" else widened(source)

    @property
    def sample_spec(self) -> Any:
        """A dict of `jax.ShapeDtypeStruct`, one per leaf."""
        return dict(self._spec)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_at_hand(self) -> bool:
        """True: rows are copied from a mapped file."""
        return True

    def read(self, indices: Indices, out: Any) -> None:
        """Gathers the rows of records, and reads those as text that have none."""
        check_indices(indices, len(self), where=self._files.names[0])
        if not len(indices):
            return
        self._check_unchanged()
        self._check_rows(indices)
        rows = self._rows.take(indices, axis=0).view(self._row)[:, 0]
        for name, leaf in self._leaves.items():
            np.copyto(out[name], rows[leaf.field], casting="same_kind")
        others = np.flatnonzero(rows["for"] > self._most)
        if others.size:
            found = allocate(self.sample_spec, len(others))
            self._text.read(indices[others], found)
            for name in self._leaves:
                out[name][others] = found[name]

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        return stamp_of(self._text)

    def describe(self) -> Mapping[str, str]:
        """Returns what the source of text does, and where the rows are."""
        told = f"parsed once, into {self._rows.nbytes:,} bytes of {self._derived.path}"
        return {**self._text.describe(), "rows": told}

    def _check_rows(self, indices: Indices) -> None:
        """Compares the rows with their checksums, those that are read for the first time."""
        width = self._row.itemsize
        first = indices * width
        for step in range(0, width - 1, _BLOCK_BYTES):
            self._kept.check(first + step)
        self._kept.check(first + (width - 1))

    def _check_unchanged(self) -> None:
        """Raises `FormatError` for a text file that is another by now."""
        started = time.monotonic()
        if started < self._next_check:
            return
        files, nothing = np.arange(len(self._files.names)), np.zeros(len(self._files.names), np.int64)
        self._files.read(Ranges(files, nothing, nothing))
        ended = time.monotonic()
        self._next_check = ended + _CHECK_SHARE * (ended - started)


def _parsed_again(files: Files, opened: Callable[[], Source], derived: Derived, integers: Integers) -> Parsed:
    """Opens rows in another process."""
    kept = derived.load()
    if kept is None:
        raise FormatError(f"{derived.path}: the rows are gone, or others by now; open {files.names[0]} again")
    return Parsed(files, opened, kept, derived, integers=integers)


def _leaves_of(source: Source) -> _Leaves | None:
    """Returns the leaves, integers of 64 bits kept as stored; None where they are not such as are parsed once."""
    loaded, stored = source.sample_spec, widened(source).sample_spec
    if any(map(is_varying, loaded.values())):
        return None
    found = {
        name: _Leaf(leaf, stored[name], f"leaf{number}", stored[name].dtype)
        for number, (name, leaf) in enumerate(loaded.items())
    }
    return found if len(source) * _row_dtype(found).itemsize <= _MOST_ROW_BYTES else None


def _row_dtype(leaves: _Leaves) -> np.dtype[Any]:
    fields = [(leaf.field, leaf.kept, leaf.loaded.shape) for leaf in leaves.values()]
    return np.dtype([*fields, ("for", np.uint8)], align=True)


def _target(files: Files, options: Mapping[str, Any], folder: Path) -> Derived:
    """Returns where the rows lie: in a folder for the files and options, under a name for the state of the files."""
    what = {
        "version": _VERSION,
        "files": [str(Path(name).absolute()) for name in files.names],
        "bits": jax.dtypes.canonicalize_dtype(np.int64).itemsize * 8,
        "options": {name: repr(value) for name, value in options.items()},
    }
    digest = xxhash.xxh3_64_hexdigest(json.dumps(what).encode())
    about = {"kind": "rows", "sizes": list(files.sizes), "stamps": list(files.stamps), **what}
    return Derived.named(folder / digest, about)


def _write(source: Source, leaves: _Leaves, num_bytes: int, work: Progress, target: IO[bytes]) -> Mapping[str, Any]:
    """Parses the records, several windows at a time, and writes their rows in order.

    Integers of 64 bits are kept so where they do not all fit in fewer in the first window.
    """
    text, num_records = widened(source), len(source)
    record_bytes = max(_row_dtype(leaves).itemsize, num_bytes // num_records)
    each = max(1, min(_WINDOW_RECORDS, _WINDOW_BYTES // record_bytes))
    starts = range(0, num_records, each)
    threads = min(_MOST_THREADS, usable_cores())
    pool = ThreadPoolExecutor(threads, thread_name_prefix="braidax-parse")

    def parse(start: int) -> "Future[_Window]":
        return pool.submit(_parsed_text, text, np.arange(start, min(start + each, num_records)))

    try:
        pending = deque(map(parse, starts[:threads]))
        for number in range(len(starts)):
            window = pending.popleft().result()
            if number + threads < len(starts):
                pending.append(parse(starts[number + threads]))
            if not number:
                leaves = {
                    name: leaf._replace(kept=leaf.loaded.dtype) if window.fits(name, leaf).all() else leaf
                    for name, leaf in leaves.items()
                }
            target.write(window.rows(leaves).data)
            work.show(0, num_bytes * (starts[number] + len(window.is_text)) // num_records)
    finally:
        pool.shutdown(cancel_futures=True)
    return {"leaves": [leaf.facts(name) for name, leaf in leaves.items()]}


class _Window(NamedTuple):
    """Records that were parsed. **Fields:** `leaves`: of each the values, as stored. `is_text`: which did not parse."""

    leaves: Mapping[str, NDArray[Any]]
    is_text: NDArray[np.bool_]

    def fits(self, name: str, leaf: _Leaf) -> NDArray[np.bool_]:
        """Says of each record whether the numbers of a leaf fit in the dtype in which they are loaded."""
        values = self.leaves[name]
        if values.dtype == leaf.loaded.dtype:
            return np.ones(len(values), np.bool_)
        limits = np.iinfo(leaf.loaded.dtype)
        fits: NDArray[np.bool_] = (values >= limits.min) & (values <= limits.max)
        return np.all(fits.reshape(len(values), -1), axis=1)

    def rows(self, leaves: _Leaves) -> NDArray[Any]:
        """Returns the rows of the records."""
        rows = np.zeros(len(self.is_text), _row_dtype(leaves))
        for name, leaf in leaves.items():
            np.copyto(rows[leaf.field], self.leaves[name], casting="same_kind")
            if not (fits := self.fits(name, leaf)).all():
                least = _WIDE if leaf.kept == leaf.stored.dtype else _AS_TEXT
                rows["for"][~fits] = np.maximum(rows["for"][~fits], least)
        rows["for"][self.is_text] = _AS_TEXT
        return rows


def _parsed_text(text: Source, indices: Indices) -> _Window:
    """Parses records; those that cannot be parsed are found by halves."""
    found = _Window(allocate(text.sample_spec, len(indices)), np.zeros(len(indices), np.bool_))
    waiting = [(0, len(indices))]
    while waiting:
        start, stop = waiting.pop()
        try:
            read_samples(text, indices[start:stop], {name: leaf[start:stop] for name, leaf in found.leaves.items()})
        except RecordError:
            middle = (start + stop) // 2
            if middle > start:
                waiting += [(start, middle), (middle, stop)]
                continue
            found.is_text[start] = True
            for leaf in found.leaves.values():
                leaf[start] = 0
    return found
