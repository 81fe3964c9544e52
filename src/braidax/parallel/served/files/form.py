"""How published tables lie in files: a folder has numbered ones, the first of which has all rows.

```
published/
├── .lock                   held by the step that publishes here
├── tables-00000000.base    all rows of all tables
├── tables-00000001.delta   those that have changed since
└── tables-00000002.delta
```

A file begins with `braidaxT`, the length of its header and its checksum; the header is JSON. Behind it each table has
its rows, and which these are; of a table that grows also which are not there any more. The checksum of a header covers
that of the rows; each delta has that of the file before.
"""

import itertools
import json
import math
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import xxhash

from braidax.errors import FormatError

_MAGIC = b"braidaxT"
_FORM = 1  # of these files; another one is not read
_HEAD_BYTES = len(_MAGIC) + 8 + 16
_MOST_HEADER_BYTES = 1 << 24
_MOST_DIMS = 8
_MOST = 1 << 62  # what a number in a header may be
_IDS = ("", "uint32", "uint64")
_SEEN = ("", "there", "changed")
_NAME = re.compile(r"tables-(\d{8})\.(base|delta)")
_UNFINISHED = re.compile(r"\.tables-\d{8}\.[0-9a-f]{16}\.unfinished")
LOCK_FILE = ".lock"


class Found(NamedTuple):
    """A file that has the name of a published one: `number`, `kind`, `path`."""

    number: int
    kind: str
    path: Path


@dataclass(frozen=True)
class PublishedRows:
    """What a file has of a table.

    **Fields:** `name`. `dtype`, `shape`: of the whole table. `num_rows`: in the file. `ids`: dtype of their numbers,
    which lie behind them; empty where all rows are there, in order. `seen`: of a table that grows, "there": the rows
    are all that are there; "changed": those that have changed, and behind their numbers are those of `num_gone` rows
    that are not there any more. Empty of others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_rows: int
    ids: str
    seen: str = ""
    num_gone: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing of files before is needed."""
        return self.seen == "there" if self.seen else not self.ids

    @property
    def row_bytes(self) -> int:
        """Of the values of a row."""
        return jnp.dtype(self.dtype).itemsize * math.prod(self.shape[1:])

    @property
    def num_bytes(self) -> int:
        """Of rows and numbers."""
        of_id = np.dtype(self.ids).itemsize if self.ids else 0
        return self.num_rows * (self.row_bytes + of_id) + self.num_gone * of_id


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    **Fields:** `number`: of the file. `run`: what `parallelize` had made that wrote it. `step`: how many updates the
    tables have seen. `previous`: checksum of the file before; empty where there is none. `checksum`: of all behind the
    header. `tables`.
    """

    number: int
    run: str
    step: int
    previous: str
    checksum: str
    tables: tuple[PublishedRows, ...]

    @property
    def kind(self) -> str:
        """`base` where all rows of all tables are there, otherwise `delta`."""
        return "base" if all(one.is_whole for one in self.tables) else "delta"

    @property
    def file_name(self) -> str:
        """Of the file."""
        return f"tables-{self.number:08d}.{self.kind}"

    def checksum_in(self, length: int) -> str:
        """Returns the checksum of this, by which the next file names it. **Arguments:** `length`: as of `to_bytes`."""
        return self.to_bytes(length)[16:_HEAD_BYTES].hex()

    def to_bytes(self, length: int = 0) -> bytes:
        """Returns what a file begins with. **Arguments:** `length`: at least so many bytes."""
        text = json.dumps({"form": _FORM, **asdict(self)}, separators=(",", ":")).encode().ljust(length - _HEAD_BYTES)
        return _MAGIC + len(text).to_bytes(8, "little") + xxhash.xxh3_128_digest(text) + text


class Opened(NamedTuple):
    """A published file whose header was read. **Fields:** `file`, `path`, `header`; `identity`: its checksum; `start`:
    of the rows."""

    file: IO[bytes]
    path: Path
    header: Header
    identity: str
    start: int


def unfinished_name(number: int, token: str) -> str:
    """Returns the name of a file that is being written. **Arguments:** `token`: 16 hexadecimal digits."""
    return f".tables-{number:08d}.{token}.unfinished"


def listed(folder: Path) -> tuple[list[Found], list[Path], list[str]]:
    """Returns what is in a folder: published files by number, unfinished ones, and the names of all others.

    **Raises:** `OSError`.
    """
    found, unfinished, others = list[Found](), list[Path](), list[str]()
    for path in sorted(folder.iterdir()):
        is_file = stat.S_ISREG(path.lstat().st_mode)
        if is_file and (match := _NAME.fullmatch(path.name)):
            found.append(Found(int(match[1]), match[2], path))
        elif is_file and _UNFINISHED.fullmatch(path.name):
            unfinished.append(path)
        elif not (is_file and path.name == LOCK_FILE):
            others.append(path.name)
    for one, two in itertools.pairwise(found):
        if one.number == two.number:
            raise damaged(two.path, f"{one.path.name} has the same number")
    return found, unfinished, others


def opened(found: Found) -> Opened:
    """Opens a published file, for the caller to close, and reads its header, which is checked.

    **Raises:** `FormatError`.
    """
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
        file = os.fdopen(os.open(found.path, flags), "rb", buffering=0)
    except OSError as error:
        raise damaged(found.path, f"it cannot be opened: {error}") from error
    try:
        header, identity, start = _read_header(file, found)
    except OSError as error:
        file.close()
        raise damaged(found.path, f"it cannot be read: {error}") from error
    except BaseException:
        file.close()
        raise
    return Opened(file, found.path, header, identity, start)


def damaged(path: Path, why: str) -> FormatError:
    """Returns the error of a file that cannot be used."""
    return FormatError(
        f"{path}: {why}; expected a file as ServedStep.publish has written it: copy it once more from where it was "
        f"published, or remove this file and all with higher numbers, and publish into the folder anew"
    )


def _read_header(file: IO[bytes], found: Found) -> tuple[Header, str, int]:
    size = os.fstat(file.fileno()).st_size
    head = os.pread(file.fileno(), _HEAD_BYTES, 0)
    length = int.from_bytes(head[8:16], "little")
    if head[:8] != _MAGIC[: len(head)]:
        raise damaged(found.path, "it does not begin as one")
    if len(head) < _HEAD_BYTES or length > min(_MOST_HEADER_BYTES, size - _HEAD_BYTES):
        raise damaged(found.path, f"it has {size} bytes and ends within its header: it is torn")
    text = os.pread(file.fileno(), length, _HEAD_BYTES)
    if xxhash.xxh3_128_digest(text) != head[16:]:
        raise damaged(found.path, "its header does not have its checksum: it was changed")
    try:
        header = _header(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(found.path, f"its header is none: {error}") from error
    if header.file_name != found.path.name:
        raise damaged(found.path, f"it was published as {header.file_name}: it was renamed")
    expected = _HEAD_BYTES + length + sum(one.num_bytes for one in header.tables)
    if size != expected:
        raise damaged(found.path, f"it has {size} bytes, and its header tells of {expected}: it is torn")
    return header, head[16:].hex(), _HEAD_BYTES + length


def _header(told: Any) -> Header:
    if told["form"] != _FORM:
        raise ValueError(f"form {told['form']!r}, and this version of braidax reads form {_FORM}")
    texts, numbers = ("run", "previous", "checksum"), ("number", "step")
    given: dict[str, Any] = {one: _text(told[one]) for one in texts} | {one: _number(told[one]) for one in numbers}
    tables = tuple(_rows(one) for one in told["tables"])
    if len({one.name for one in tables}) < len(tables) or not tables:
        raise ValueError(f"tables {[one.name for one in tables]}")
    return Header(**given, tables=tables)


def _rows(told: Any) -> PublishedRows:
    shape, dtype = tuple(_number(size) for size in told["shape"]), jnp.dtype(_text(told["dtype"]))
    of_seen = _text(told.get("seen", "")), _number(told.get("num_gone", 0))  # older files tell nothing of it
    of_rows = _number(told["num_rows"]), _text(told["ids"])
    rows = PublishedRows(_text(told["name"]), str(dtype), shape, *of_rows, *of_seen)
    if dtype.hasobject or not dtype.itemsize or not 0 < len(shape) <= _MOST_DIMS or rows.ids not in _IDS:
        raise ValueError(f"a table {rows}")
    if rows.seen not in _SEEN or (rows.seen and not rows.ids) or (rows.num_gone and rows.seen != "changed"):
        raise ValueError(f"a table {rows}")
    if (
        max(rows.num_rows, rows.num_gone) > shape[0]
        or (not rows.ids and rows.num_rows != shape[0])
        or rows.num_bytes > _MOST
        or _most(rows) > _MOST
    ):
        raise ValueError(f"{rows.num_rows} rows of {list(shape)}")
    return rows


def _most(rows: PublishedRows) -> int:
    """Returns how many bytes a table would have if no dim of it were 0."""
    return jnp.dtype(rows.dtype).itemsize * math.prod(max(1, size) for size in rows.shape)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"the number {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the text {value!r}")
    return value
