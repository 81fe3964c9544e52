"""NumPy's own files: `.npy`, whose header NumPy reads, and `.npz`, a zip archive of them."""

import io
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.arrays import ArraySource
from braidax.data.storage.limits import refuse_larger
from braidax.data.storage.mapped import Mapped
from braidax.data.storage.progress import Progress
from braidax.errors import FormatError

MAGIC = b"\x93NUMPY"
HEAD_BYTES = 1 << 14  # holds every header: NumPy reads none of more than 10,000 bytes

_UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError, tokenize.TokenError)
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # the same, but that names of fields, which no leaf has, are UTF-8
}
_UNZIPPED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError)
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip's member, which its name and its extra field follow
_CHECKED_BYTES = 1 << 20


class NpyLayout(NamedTuple):
    """What the header of an npy file says, and where the array begins."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int


def npy_layout(head: bytes, *, where: str, size: int) -> NpyLayout:
    """Has NumPy read the header of an npy file.

    **Arguments:** `head`: its first `HEAD_BYTES`, or all of it. `where`: names the file, for errors. `size`: its bytes.

    **Raises:** `FormatError` for another file, a truncated one, or one of Python objects.
    """
    if len(head) < 8 or not head.startswith(MAGIC):
        raise FormatError(
            f"{where}: begins with {head[:6]!r}, expected {MAGIC!r}: it is no npy file, or a truncated one"
        )
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _READERS:
            raise ValueError(f"its version {version} is none of {list(_READERS)}")
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of files that Python 2 wrote
            shape, fortran_order, dtype = _READERS[version](file)
        if any(dim < 0 for dim in shape) or dtype.subdtype is not None:
            raise ValueError(f"an array of shape {shape} of {dtype} cannot be")
        if not dtype.hasobject:
            np.ndarray(shape, dtype, bytes(dtype.itemsize), 0, (0,) * len(shape))  # whether there can be such an array
    except _UNREADABLE as error:
        raise FormatError(f"{where}: the npy header is truncated or corrupt ({error}); write the file again") from error
    if dtype.hasobject:
        raise FormatError(
            f"{where}: holds Python objects (dtype {dtype}), which are pickles that could run code; expected numbers: "
            "save arrays of one shape as numbers, or pass the loaded object to open()"
        )
    offset = file.tell()
    expected = offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if size < expected:
        raise FormatError(
            f"{where}: truncated: {size:,} bytes, expected {expected:,} for shape {shape} of {dtype}; copy it again"
        )
    return NpyLayout(dtype, tuple(int(dim) for dim in shape), fortran_order, offset)


def open_npy(path: Path) -> ArraySource:
    """Opens a `.npy` file, memory-mapped, as the leaf `"data"`."""
    mapped = Mapped([path])
    layout = npy_layout(bytes(mapped.piece(0, 0, HEAD_BYTES)), where=str(path), size=mapped.sizes[0])
    facts = {"format": "npy", "files": path.name}
    return ArraySource({"data": _array(layout, mapped.array(0))}, where=str(path), facts=facts, mapped=mapped)


def open_npz(path: Path) -> ArraySource:
    """Opens an `.npz` file, a leaf per key; members stored without compression are memory-mapped, others loaded.

    The checksum of every member is verified, which reads the file once.

    **Raises:** `FormatError` for an archive that is damaged, holds other things than arrays, or becomes more in memory
    than `max_bytes`.
    """
    mapped = Mapped([path])
    size = mapped.sizes[0]
    try:
        with zipfile.ZipFile(path) as archive, Progress("checking", str(path), size) as progress:
            members = _members(archive, path)
            packed = {name for name, member in members.items() if member.compress_type != zipfile.ZIP_STORED}
            refuse_larger(str(path), sum(members[name].file_size for name in packed), size)
            leaves: dict[str, NDArray[Any]] = {}
            for name, member in members.items():
                where = f"{path}, member {member.filename!r}"
                if name in packed:
                    data = np.frombuffer(archive.read(member), np.uint8)
                else:
                    _check(archive, member, progress)
                    data = _stored(mapped, member, where=where)
                leaves[name] = _array(npy_layout(data[:HEAD_BYTES].tobytes(), where=where, size=len(data)), data)
    except _UNZIPPED as error:
        raise FormatError(
            f"{path}: the zip archive of {size:,} bytes is truncated or corrupt ({error}); copy or write it again"
        ) from error
    views = ", ".join(name for name in members if name not in packed) or "none"
    facts = {"format": "npz", "files": path.name, "memory-mapped": views}
    return ArraySource(leaves, where=str(path), facts=facts, mapped=mapped)


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    members = archive.infolist()
    for member in members:
        if not member.filename.endswith(".npy"):
            raise FormatError(
                f"{path}, member {member.filename!r}: expected .npy members only; if this is an npz file, remove the "
                "others"
            )
    twice = [name for name, count in Counter(member.filename for member in members).items() if count > 1]
    if twice:
        raise FormatError(f"{path}: has several members of the names {twice}; save each array once")
    return {member.filename.removesuffix(".npy"): member for member in members}


def _check(archive: zipfile.ZipFile, member: zipfile.ZipInfo, progress: Progress) -> None:
    """Reads a member to its end, where `zipfile` compares its checksum."""
    done = 0
    with archive.open(member) as file:
        while data := file.read(_CHECKED_BYTES):
            done += len(data)
            progress.show(member.header_offset, done)
    if done != member.file_size:
        raise zipfile.BadZipFile(f"{member.filename!r} has {done:,} bytes, expected {member.file_size:,}")


def _stored(mapped: Mapped, member: zipfile.ZipInfo, *, where: str) -> NDArray[np.uint8]:
    """Returns the bytes of a member that was checked, as they lie in the archive."""
    archive = mapped.array(0)
    name_length, extra_length = _LOCAL_HEADER.unpack_from(archive.data, member.header_offset)
    start = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    data = archive[start : start + member.file_size]
    if len(data) != member.file_size:
        raise FormatError(f"{where}: ends behind the end of the archive; copy or write it again")
    return data


def _array(layout: NpyLayout, data: NDArray[np.uint8]) -> NDArray[Any]:
    if 0 in layout.shape:
        return np.empty(layout.shape, layout.dtype)
    order = "F" if layout.fortran_order else "C"
    return np.ndarray(layout.shape, layout.dtype, data, layout.offset, order=order)
