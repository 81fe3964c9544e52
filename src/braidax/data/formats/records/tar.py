"""Tar files, walked header by header: what is in them, and where."""

from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from braidax.errors import BraidaxError, FormatError

BLOCK_BYTES = 512
_WINDOW_BYTES = 1 << 14  # read for each header: neighbors of small members come along
_MAX_EXTENSION_BYTES = 1 << 20  # of a long name or of pax records; more than that is no header but garbage

Damage = Callable[[int, str], BraidaxError]
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}


class Member(NamedTuple):
    """A regular file in a tar.

    **Fields:** `name`: its path. `start`: the byte where the first of its headers begins. `offset`, `size`: of its
    contents, in bytes.
    """

    name: str
    start: int
    offset: int
    size: int


def members(read: Callable[[int, int], bytes], *, length: int | None, damaged: Damage) -> Iterator[Member]:
    """Walks over the regular files of a tar: ustar, GNU long names and sizes, pax.

    Folders, links and devices are passed over. The source is POSIX.1-2017, *pax*, "ustar Interchange Format" and
    "pax Header Block", and the GNU tar manual, "Basic Tar Format".

    **Arguments:** `read`: takes an offset and a number of bytes and returns them, or fewer at the end. `length`: bytes
    to walk over, for a piece of a tar that was walked over before; None to walk up to the end mark, which then must be
    there, and to check the checksum of every header. `damaged`: makes the error to raise, from the offset where the tar
    is no tar and the reason.
    """
    position = 0
    start = -1
    extension: dict[str, str] = {}
    while length is None or position < length:
        header = read(position, BLOCK_BYTES)
        if len(header) < BLOCK_BYTES:
            raise damaged(position + len(header), "it ends there, without the end mark of a tar (1,024 zero bytes)")
        if not any(header):
            return
        size, kind = _size(header, position, damaged), header[156:157]
        if length is None:
            _check(header, position, damaged)
        contents = position + BLOCK_BYTES
        position = contents + _padded(size)
        if kind in (b"x", b"L", b"K", b"g"):
            if kind in (b"x", b"L"):
                start = contents - BLOCK_BYTES if start < 0 else start
                extension |= _extension(read, kind, contents, size, damaged)
            continue
        start = contents - BLOCK_BYTES if start < 0 else start
        if kind == b"S" or any(key.startswith("GNU.sparse") for key in extension):
            raise damaged(start, "a sparse file is stored there, which has no contiguous bytes; pack it as a plain one")
        if kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
            position = contents
        else:
            size = int(extension.get("size", size))
            position = contents + _padded(size)
            name = extension.get("path") or _name(header)
            if kind in (b"0", b"\0", b"7") and not name.endswith("/"):  # as Version 7 writes a directory
                yield Member(name, start, contents, size)
        start, extension = -1, {}


def first_name(head: bytes) -> str | None:
    """Returns the name of the first member of a tar with these first bytes, `""` if they do not tell; None for no tar.

    A header is known by its checksum: tars of Version 7 have no other mark. Pax and GNU headers before it are read.
    """

    def damaged(position: int, reason: str) -> BraidaxError:
        return FormatError(f"byte {position}: {reason}")

    position, name = 0, ""
    try:
        while len(header := head[position : position + BLOCK_BYTES]) == BLOCK_BYTES:
            _check(header, position, damaged)
            size, kind = _size(header, position, damaged), header[156:157]
            position += BLOCK_BYTES
            if kind in (b"x", b"L"):
                said = _extension(lambda at, length: head[at : at + length], kind, position, size, damaged)
                name = said.get("path", name)
            elif kind not in (b"g", b"K"):
                return name or _name(header)
            position += _padded(size)
    except FormatError:
        return name if position else None
    return name if position else None


class Window:
    """Bytes of a file around one position, so that neighboring headers are read in one call.

    **Arguments:** `file`: at its beginning; where it can seek, what lies between headers is not read. `read_bytes`: but
    what is shorter than that is read nevertheless, so that a remote file is read in order, ahead of need.
    """

    def __init__(self, file: IO[bytes], *, read_bytes: int = 0) -> None:
        self._file = file
        self._seeks = file.seekable()
        self._read_bytes = read_bytes
        self._start = 0
        self._data = b""
        self._last = 0
        self.head = b""  # of the file

    def read(self, offset: int, length: int) -> bytes:
        """Returns bytes, fewer at the end of the file. Offsets never go back."""
        self._last = offset
        if offset + length > self._start + len(self._data):
            self._advance(offset, max(length, _WINDOW_BYTES))
        return self._data[offset - self._start : offset - self._start + length]

    def size(self, at_least: int) -> int:
        """Returns the bytes in the file, which ends before byte `at_least`."""
        return self._file.seek(0, 2) if self._seeks else min(at_least, self._start + len(self._data))

    def rest_is_empty(self) -> bool:
        """Says whether nothing but zeros lies behind the bytes that were read last."""
        rest = self._data[self._last - self._start :]
        while rest.count(0) == len(rest):
            rest = self._file.read(1 << 20)
            if not rest:
                return True
        return False

    def _advance(self, offset: int, length: int) -> None:
        position = self._start + len(self._data)
        kept = self._data[max(0, offset - self._start) :] if offset < position else b""
        if offset - position > self._read_bytes and self._seeks:
            position = self._file.seek(offset)
        while offset > position:
            skipped = len(self._file.read(min(offset - position, 1 << 20)))
            position += skipped
            if not skipped:
                self._start, self._data = position, b""
                return
        self._start, self._data = offset, kept + _read_fully(self._file, length - len(kept))
        self.head = self.head or self._data[:8]


def decompressor_of(head: bytes) -> str | None:
    """Returns the command that decompresses a file with these first bytes; None when it is not compressed."""
    return next((command for magic, command in _COMPRESSED.items() if head.startswith(magic)), None)


def _size(header: bytes, position: int, damaged: Damage) -> int:
    try:
        return _number(header[124:136])
    except ValueError as error:
        raise damaged(position, f"no header of a tar is there ({error})") from error


def _check(header: bytes, position: int, damaged: Damage) -> None:
    computed = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    stored = header[148:156].strip(b" \0")
    if stored.lstrip(b"0") != f"{computed:o}".encode():
        raise damaged(position, f"no header of a tar is there (its checksum is {computed:o}, not {stored!r})")


def _number(digits: bytes) -> int:
    if digits[0] & 0x80:  # GNU: binary, for sizes from 8 GiB on
        return int.from_bytes(bytes([digits[0] & 0x7F]) + digits[1:], "big")
    number = int(digits.partition(b"\0")[0].strip() or b"0", 8)
    if number < 0:
        raise ValueError(f"a size of {number} bytes")
    return number


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _extension(
    read: Callable[[int, int], bytes], kind: bytes, offset: int, size: int, damaged: Damage
) -> dict[str, str]:
    """Returns what a long name (`L`) or pax records (`x`) say about the member behind them."""
    data = read(offset, size) if size <= _MAX_EXTENSION_BYTES else b""
    if len(data) < size:
        raise damaged(offset + len(data), "it ends inside the header of a long name")
    if kind == b"L":
        return {"path": _text(data)}
    found: dict[str, str] = {}
    while data.strip(b"\0"):
        digits, _, _ = data.partition(b" ")
        if not digits.isdigit() or int(digits) <= len(digits) + 1:
            raise damaged(offset, "no pax records are there, though a header announces them")
        key, _, value = data[len(digits) + 1 : int(digits) - 1].partition(b"=")
        found[_text(key)] = _text(value)
        data = data[int(digits) :]
    if not found.get("size", "0").isdigit():
        raise damaged(offset, f"the pax record size={found['size']} is no number of bytes")
    return found


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _read_fully(file: IO[bytes], length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0 and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
