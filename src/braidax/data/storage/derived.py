"""Derived files: what was made of others once, by one process for all: indexes, contents of compressed files, lengths.

There are two kinds. *Numbers* (`Derived.numbers`) are memory-mapped by us alone: behind them lie a checksum for each
4 KiB, and a footer that says what they depend on. *Contents* (`Derived.contents`) are files that others could read,
byte for byte; the footer is a file of its own beside them. Either is there whole or not at all: it is written under
another name, and gets its own when it is durable. What has no footer of ours is never overwritten and never removed.
"""

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.data.storage.locks import Held, NoPlace, NotKept, locked
from braidax.data.storage.progress import Progress
from braidax.errors import BraidaxError, FormatError

_MAGIC = b"braidax made 02\n"  # the last bytes; before them the footer, its length and its checksum
_FORMER_MAGICS = (b"braidax index 01", b"braidax kept 01\n")
_TAIL_BYTES = 16 + len(_MAGIC)
_BLOCK_BYTES = 1 << 12  # a page of memory: checking what is read costs no read more
_BESIDE = ".made"
_TOUCH_SECONDS = 60.0  # how exactly it is known when a file was used

Write = Callable[[IO[bytes]], Mapping[str, Any]]
"""Writes a derived file, and returns facts about it."""


def cache_folder() -> Path:
    """Returns the folder for what can be made again: `$BRAIDAX_CACHE`, or else `~/.cache/braidax`."""
    if given := os.environ.get("BRAIDAX_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "braidax"


class Kept:
    """Numbers that were kept, or that are in memory.

    **Arguments:** `data`: uint8 `[bytes]`. `facts`: about them. `sums`: uint64, of each block of 4 KiB; none for what
    is in memory. `path`: of the file.
    """

    def __init__(
        self,
        data: NDArray[np.uint8],
        facts: Mapping[str, Any],
        sums: NDArray[np.uint64] | None = None,
        path: Path | None = None,
    ) -> None:
        self.data = data
        self.facts = facts
        self.path = path
        self._sums = sums
        self._is_right = np.zeros(0 if sums is None else len(sums), np.bool_)

    def check(self, places: NDArray[np.int64] | None = None) -> None:
        """Compares the blocks that bytes lie in with their checksums, each the first time.

        **Arguments:** `places`: int64 `[n]`, offsets of items that do not cross blocks; None for all.

        **Raises:** `FormatError` for a file that was damaged.
        """
        if self._sums is None:
            return
        blocks = np.arange(len(self._sums)) if places is None else places // _BLOCK_BYTES
        fresh = blocks[~self._is_right[blocks]]
        if fresh.size:
            fresh = np.unique(fresh)
            wrong = np.flatnonzero(_sums(self.data, fresh) != self._sums[fresh])
            if wrong.size:
                start = int(fresh[wrong[0]]) * _BLOCK_BYTES
                raise FormatError(
                    f"{self.path}: the {_BLOCK_BYTES:,} bytes from byte {start:,} on are not those that were written; "
                    "delete it, and it is made again"
                )
            self._is_right[fresh] = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (np.asarray(self.data), self.facts)


class Derived(NamedTuple):
    """A derived file that there may be.

    **Fields:** `path`: where it lies. `about`: what it depends on, which becomes JSON; whatever is kept about something
    else is made anew.
    """

    path: Path
    about: Mapping[str, Any]

    @classmethod
    def named(cls, folder: Path, about: Mapping[str, Any]) -> "Derived":
        """Returns one whose name in a folder is a digest of all that it depends on."""
        return cls(folder / f"{xxhash.xxh3_128_hexdigest(_json(about))}.{about['kind']}", about)

    def load(self) -> Kept | None:
        """Memory-maps numbers if they are there, whole, and depend on the same."""
        footer = _footer(self.path)
        if footer is None or footer["about"] != json.loads(_json(self.about)) or "contents" in footer:
            return None
        num_bytes, num_blocks = footer["bytes"], -(-footer["bytes"] // _BLOCK_BYTES)
        try:
            with self.path.open("rb") as file:
                sums = np.fromfile(file, "<u8", num_blocks, offset=num_bytes)
                if len(sums) < num_blocks or _digest(sums) != footer["sums"]:
                    return None
                data = np.memmap(file, np.uint8, "r", shape=(num_bytes,)) if num_bytes else np.empty(0, np.uint8)
        except (OSError, ValueError):
            return None
        _touch(self.path)
        return Kept(data.view(np.ndarray), footer["facts"], sums, self.path)

    def numbers(self, write: Write, work: Progress, *, is_new: bool = False) -> Kept:
        """Memory-maps numbers, which are made where they are not there; other processes wait meanwhile.

        **Arguments:** `write`: writes them. `work`: shows the progress. `is_new`: they are made anew even if they are
        there, for nothing tells whether they still are what they should be.

        **Raises:** `NoPlace` where they cannot be put; `NotKept` while they are written; `WaitTimeout`.
        """
        if not is_new and (found := self.load()) is not None:
            return found
        with locked(self.path, work) as held:
            if not is_new and (found := self.load()) is not None:
                return found
            if held is not None:
                self._check_place(_is_ours(self.path))
                with held.part() as part:
                    _fill(part, lambda file: _write_numbers(file, self.about, write))
                    part.replace(self.path)
        if (found := self.load()) is None:
            raise NoPlace(errno.ESTALE, "what was written there was changed at once by another program")
        return found

    def has_contents(self) -> bool:
        """Says whether contents are there, whole, and depend on the same."""
        footer = _footer(self._beside)
        return footer is not None and _fits(footer, self.path) and footer["about"] == json.loads(_json(self.about))

    def contents(self, write: Write, work: Progress, number: int = 0, *, is_new: bool = False) -> None:
        """Makes contents where they are not there; other processes wait meanwhile.

        **Arguments:** `write`, `work`, `is_new`: as those of `numbers`. `number`: of the file in `work`.

        **Raises:** as `numbers`.
        """
        if not is_new and self.has_contents():
            _touch(self._beside)
            return
        with locked(self.path, work, number) as held:
            if held is None or (not is_new and self.has_contents()):
                return
            self._put_contents(write, held)

    @property
    def _beside(self) -> Path:
        return self.path.with_name(self.path.name + _BESIDE)

    def _put_contents(self, write: Write, held: Held) -> None:
        footer = _footer(self._beside)
        self._check_place(footer is not None and _fits(footer, self.path))
        if self._beside.exists() and not _is_ours(self._beside):
            raise NoPlace(errno.EEXIST, f"{self._beside} was not written by Braidax; move it away")
        with held.part() as part, held.part() as beside:
            facts = _fill(part, write)
            state = part.stat()
            told = {"about": self.about, "facts": facts, "contents": [state.st_size, state.st_mtime_ns]}
            _fill(beside, lambda file: _write_footer(file, told))
            self.path.unlink(missing_ok=True)  # first: what lies there without its footer is nobody's of us
            beside.replace(self._beside)
            part.replace(self.path)

    def _check_place(self, is_ours: bool) -> None:
        """Raises `NoPlace` where something lies that was not written here."""
        if not is_ours and (self.path.exists() or self.path.is_symlink()):
            raise NoPlace(errno.EEXIST, f"{self.path} was not written by Braidax, or is damaged; move it away")


class Entry(NamedTuple):
    """A derived file as it lies in a folder, of which its footer proves that it was made here.

    **Fields:** `used`: when it was used last. `num_bytes`: that it takes. `path`: of it. `all_paths`: to remove, the
    footer the last.
    """

    used: float
    num_bytes: int
    path: Path
    all_paths: tuple[Path, ...]


def entry_of(path: Path) -> Entry | None:
    """Returns the derived file whose footer is in a file, or is that file; None for everything else."""
    footer = _footer(path)
    if footer is None:
        return None
    state = path.lstat()
    if "contents" not in footer:
        return Entry(state.st_mtime, state.st_blocks * 512, path, (path,))
    if not path.name.endswith(_BESIDE):
        return None
    target = path.with_name(path.name.removesuffix(_BESIDE))
    if not _fits(footer, target):
        return Entry(state.st_mtime, state.st_blocks * 512, target, (path,))
    return Entry(state.st_mtime, (state.st_blocks + target.lstat().st_blocks) * 512, target, (target, path))


def _footer(path: Path) -> dict[str, Any] | None:
    """Reads the footer at the end of a regular file, if there is one and it is whole."""
    try:
        with _opened(path) as file:
            size = _regular_size(file)
            tail = os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
            length = int.from_bytes(tail[:8], "little")
            start = size - _TAIL_BYTES - length
            if tail[16:] != _MAGIC or start < 0:
                return None
            text = os.pread(file.fileno(), length, start)
            if xxhash.xxh3_64_digest(text) != tail[8:16]:
                return None
            found = dict(json.loads(text))
            return found if found["bytes"] + 8 * -(-found["bytes"] // _BLOCK_BYTES) == start else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_ours(path: Path) -> bool:
    """Says whether a file ends as only ours do, be it damaged, or of an earlier version."""
    try:
        with _opened(path) as file:
            return os.pread(file.fileno(), 16, max(0, _regular_size(file) - 16)) in (_MAGIC, *_FORMER_MAGICS)
    except OSError:
        return False


def _opened(path: Path) -> IO[bytes]:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags), "rb")


def _regular_size(file: IO[bytes]) -> int:
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    return state.st_size


def _fits(footer: Mapping[str, Any], target: Path) -> bool:
    """Says whether the contents that a footer beside them tells of are those that lie there."""
    try:
        state = target.lstat()
    except OSError:
        return False
    return stat.S_ISREG(state.st_mode) and footer.get("contents") == [state.st_size, state.st_mtime_ns]


def _fill(part: Path, write: Callable[[IO[bytes]], Any]) -> Any:
    """Writes a file, durably."""
    try:
        with part.open("w+b") as file:
            found = write(file)
            file.flush()
            part.chmod(0o644)
            os.fsync(file.fileno())
    except (BraidaxError, InterruptedError):
        raise
    except OSError as error:
        raise NotKept(error.errno, f"{error.strerror or error}, after {_size(part):,} bytes of it") from error
    return found


def _size(part: Path) -> int:
    try:
        return part.stat().st_size
    except OSError:
        return 0


def _write_numbers(file: IO[bytes], about: Mapping[str, Any], write: Write) -> None:
    facts = write(file)
    file.flush()
    num_bytes = file.tell()
    data = np.memmap(file, np.uint8, "r", shape=(num_bytes,)) if num_bytes else np.empty(0, np.uint8)
    sums = _sums(data, np.arange(-(-num_bytes // _BLOCK_BYTES)))
    file.seek(num_bytes)
    file.write(sums.data)
    _write_footer(file, {"about": about, "facts": facts, "bytes": num_bytes, "sums": _digest(sums)})


def _write_footer(file: IO[bytes], footer: Mapping[str, Any]) -> None:
    text = _json({"bytes": 0, **footer})
    file.write(text + len(text).to_bytes(8, "little") + xxhash.xxh3_64_digest(text) + _MAGIC)


def _sums(data: NDArray[np.uint8], blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the checksums of blocks, each seeded by its place."""
    view = data.data
    starts = (blocks * _BLOCK_BYTES).tolist()
    sums = (xxhash.xxh3_64_intdigest(view[start : start + _BLOCK_BYTES], start) for start in starts)
    return np.fromiter(sums, np.dtype("<u8"), len(starts))


def _digest(sums: NDArray[np.uint64]) -> str:
    return xxhash.xxh3_64_hexdigest(sums.data)


def _touch(path: Path) -> None:
    """Takes note that a file is used."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _TOUCH_SECONDS:
            os.utime(path)


def _json(about: Mapping[str, Any]) -> bytes:
    return json.dumps(about, sort_keys=True).encode()
