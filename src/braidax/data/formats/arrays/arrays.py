"""Arrays that lie row by row in memory or in a file: `.npy`, `.npz`, and whatever else can be seen as such."""

import ast
import functools
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.record_layout import RecordLayout, read_boxes
from braidax.data.source import Box, Indices, Sliced, Source, check_indices, gather, loader_dtype
from braidax.data.storage.files import stamp_of_files
from braidax.data.storage.mapped import Mapped, gather_held
from braidax.errors import ArgumentError, FormatError

NPY_MAGIC = b"\x93NUMPY"


class ArraySource(Source, Sliced):
    """Samples that are the rows of arrays, in memory or memory-mapped.

    **Arguments:** `leaves`: name → `[num_samples, *sample_shape]`. `where`: the file or object, for errors. `facts`:
    what `describe` shows besides the samples and the sizes. `mapped`: the file that leaves are views of, if any.

    **Raises:** `FormatError` for leaves without a dim of samples, of different lengths, empty, or of no JAX dtype.
    """

    def __init__(
        self, leaves: Mapping[str, NDArray[Any]], *, where: str, facts: Mapping[str, str], mapped: Mapped | None = None
    ) -> None:
        self._leaves = dict(leaves)
        self._mapped = mapped
        self._places = {name: mapped.place_of(array) if mapped else None for name, array in self._leaves.items()}
        self._where = where
        self._facts = dict(facts)
        lengths = {name: len(array) if array.ndim else None for name, array in self._leaves.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            found = ", ".join(f"{name!r} {array.shape}" for name, array in self._leaves.items()) or "no array at all"
            raise FormatError(
                f"{where}: expected arrays with one and the same number of samples as their first dim; found {found}: "
                "store arrays of equal length, and scalars elsewhere"
            )
        self._num_samples = len(next(iter(self._leaves.values())))
        if self._num_samples == 0:
            raise FormatError(f"{where}: it holds 0 samples; expected at least one")
        self._spec = {
            name: jax.ShapeDtypeStruct(array.shape[1:], loader_dtype(array.dtype, where=where, leaf=name))
            for name, array in self._leaves.items()
        }
        self._layouts = {
            name: RecordLayout(self._leaves[name].shape[1:], self._leaves[name].dtype) for name in sorted(self._leaves)
        }

    @property
    def sample_spec(self) -> Any:
        """A dict of `jax.ShapeDtypeStruct`, one per leaf."""
        return dict(self._spec)

    def __len__(self) -> int:
        return self._num_samples

    @property
    def cut_dims(self) -> Sequence[int]:
        """All dims of each leaf."""
        return [layout.cut_dims(gap_bytes=0) for layout in self._layouts.values()]

    def read(self, indices: Indices, out: Any) -> None:
        """Copies rows into place: one vectorised copy per leaf."""
        boxes = [layout.whole for layout in self._layouts.values()]
        self.read_slices(indices, boxes, [out[name] for name in self._layouts])

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Copies parts of rows into place: one vectorised copy per leaf, which touches nothing else of the array."""
        check_indices(indices, self._num_samples, where=self._where)
        for name, box, target in zip(self._layouts, boxes, out, strict=True):
            if box is not None and target is not None:
                self._read_leaf(name, indices, box, target)

    def prepare(self, indices: Indices) -> None:
        """Asks the kernel ahead for the bytes of these samples, while the disk is what reads wait for."""
        for name in self._leaves:
            places, row_bytes = self._rows(name, indices)
            if self._mapped is not None and len(places):
                self._mapped.prepare(places, np.full(len(places), row_bytes))

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        if self._mapped is None:
            return None
        return stamp_of_files(self._mapped, type(self).__name__, self.sample_spec, len(self), self._facts)

    def describe(self) -> Mapping[str, str]:
        """Returns format, files, samples and bytes."""
        num_bytes = sum(array.nbytes for array in self._leaves.values())
        return {**self._facts, "samples": f"{self._num_samples:,}", "bytes": f"{num_bytes:,}"}

    def __reduce__(self) -> tuple[Callable[..., "ArraySource"], tuple[Any, ...]]:
        if self._mapped is None:
            return _source_again, (self._leaves, {}, self._where, self._facts, None)
        kept = {name: array for name, array in self._leaves.items() if self._places[name] is None}
        views = {
            name: (int(place - self._mapped.origins[0]), array.dtype, array.shape, array.strides)
            for name, array in self._leaves.items()
            if (place := self._places[name]) is not None
        }
        return _source_again, (kept, views, self._where, self._facts, self._mapped)

    def _read_leaf(self, name: str, indices: Indices, box: Box, target: NDArray[Any]) -> None:
        array, place, layout = self._leaves[name], self._places[name], self._layouts[name]
        if box == layout.whole or not array.flags.c_contiguous:
            part = array[(slice(None), *(slice(start, stop) for start, stop in box))]
            with self._reading(name, indices):
                gather(part, indices, target, where=self._where, leaf=name)
            return
        if self._mapped is None or place is None:
            copy, first = functools.partial(gather_held, array.reshape(-1).view(np.uint8)), 0
        else:
            copy, first = self._mapped.gather, place
        starts = first + indices * layout.num_bytes
        read_boxes(copy, starts, box, target, layout=layout, records=indices, where=self._where, leaf=name)

    def _reading(self, name: str, indices: Indices) -> AbstractContextManager[None]:
        return nullcontext() if self._mapped is None else self._mapped.reading(*self._rows(name, indices))

    def _rows(self, name: str, indices: Indices) -> tuple[Indices, np.int64]:
        """Returns the places of some samples of a leaf, and their bytes: none where they are not mapped row by row."""
        array, place = self._leaves[name], self._places[name]
        if place is None or not array.flags.c_contiguous:
            return indices[:0], np.int64(0)
        return place + indices * array[0].nbytes, np.int64(array[0].nbytes)


def _source_again(
    kept: dict[str, NDArray[Any]],
    views: dict[str, tuple[int, Any, Any, Any]],
    where: str,
    facts: Mapping[str, str],
    mapped: Mapped | None,
) -> ArraySource:
    """Makes a source in another process: what is mapped is not copied there, but mapped again."""
    leaves = dict(kept)
    for name, (offset, dtype, shape, strides) in views.items():
        assert mapped is not None
        leaves[name] = np.ndarray(shape, dtype, mapped.array(0), offset, strides)
    return ArraySource(leaves, where=where, facts=facts, mapped=mapped)


def from_arrays(arrays: Mapping[str, Any]) -> ArraySource:
    """Returns a source over arrays in memory, which are not copied.

    **Arguments:** `arrays`: name → NumPy or JAX array `[num_samples, ...]`.

    **Raises:** `ArgumentError` for a value that is no array; `FormatError` as `ArraySource`.
    """
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray | jax.Array):
            raise ArgumentError(
                f"path_or_object: the dict's entry {name!r} is a {type(value).__name__}; expected an array "
                "[num_samples, ...]: np.asarray() it first, or open this entry alone"
            )
    leaves = {name: np.asarray(value) for name, value in arrays.items()}
    return ArraySource(leaves, where="arrays in memory", facts={"format": "arrays in memory"})


def open_npy(path: Path) -> ArraySource:
    """Opens a `.npy` file, memory-mapped, as the leaf `"data"`."""
    with path.open("rb") as file:
        layout = npy_layout(file, where=str(path), size=path.stat().st_size)
    mapped = Mapped([path])
    facts = {"format": "npy", "files": path.name}
    return ArraySource({"data": _view(mapped, layout)}, where=str(path), facts=facts, mapped=mapped)


def open_npz(path: Path) -> ArraySource:
    """Opens an `.npz` file, a leaf per key; members stored without compression are memory-mapped, others loaded."""
    leaves: dict[str, NDArray[Any]] = {}
    views: list[str] = []
    mapped = Mapped([path])
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                where = f"{path}, member {member.filename!r}"
                if name == member.filename:
                    raise FormatError(f"{where}: expected .npy members only; if this is an npz file, remove the others")
                if member.compress_type == zipfile.ZIP_STORED:
                    leaves[name] = _view(mapped, _stored_layout(path, member, where=where))
                    views.append(name)
                else:
                    leaves[name] = _inflate(archive, member, where=where)
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error) as error:
        raise FormatError(
            f"{path}: the zip archive of {path.stat().st_size:,} bytes is truncated or corrupt ({error}); "
            "copy or write it again"
        ) from error
    facts = {"format": "npz", "files": path.name, "memory-mapped": ", ".join(views) or "none"}
    return ArraySource(leaves, where=str(path), facts=facts, mapped=mapped)


class NpyLayout(NamedTuple):
    """What the header of an npy file says, and where the array begins."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int


def npy_layout(file: io.BufferedIOBase, *, where: str, size: int) -> NpyLayout:
    """Reads the npy header at the file's position.

    **Arguments:** `where`: names the file, for errors. `size`: bytes from there on, header included.

    **Raises:** `FormatError` for another file, a truncated one, or one of Python objects.
    """
    start = file.tell()
    prefix = file.read(8)
    if len(prefix) < 8 or not prefix.startswith(NPY_MAGIC):
        raise FormatError(
            f"{where}: begins with {prefix[:6]!r}, expected {NPY_MAGIC!r}: it is no npy file, or a truncated one"
        )
    width = 2 if prefix[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    try:
        header = ast.literal_eval(file.read(length).decode("latin1" if prefix[6] < 3 else "utf8"))
        dtype = np.dtype(np.lib.format.descr_to_dtype(header["descr"]))
        shape = tuple(int(dim) for dim in header["shape"])
        fortran_order = bool(header["fortran_order"])
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{where}: the npy header is truncated or corrupt ({error}); write the file again") from error
    if dtype.hasobject:
        raise FormatError(
            f"{where}: holds Python objects (dtype {dtype}), which are pickles that could run code; expected numbers: "
            "save arrays of one shape as numbers, or pass the loaded object to open()"
        )
    offset = file.tell()
    expected = offset - start + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if size < expected:
        raise FormatError(
            f"{where}: truncated: {size:,} bytes, expected {expected:,} for shape {shape} of {dtype}; copy it again"
        )
    return NpyLayout(dtype, shape, fortran_order, offset)


def _stored_layout(path: Path, member: zipfile.ZipInfo, *, where: str) -> NpyLayout:
    """Finds the array inside the archive's own bytes: behind the member's local header of 30 bytes, name and extra."""
    with path.open("rb") as file:
        file.seek(member.header_offset)
        name_length, extra_length = struct.unpack("<26xHH", file.read(30))
        file.seek(name_length + extra_length, 1)
        return npy_layout(file, where=where, size=member.file_size)


def _inflate(archive: zipfile.ZipFile, member: zipfile.ZipInfo, *, where: str) -> NDArray[Any]:
    data = archive.read(member)
    layout = npy_layout(io.BytesIO(data), where=where, size=len(data))
    order = "F" if layout.fortran_order else "C"
    return np.ndarray(layout.shape, layout.dtype, data, layout.offset, order=order)


def _view(mapped: Mapped, layout: NpyLayout) -> NDArray[Any]:
    if 0 in layout.shape:
        return np.empty(layout.shape, layout.dtype)
    order = "F" if layout.fortran_order else "C"
    return np.ndarray(layout.shape, layout.dtype, mapped.array(0), layout.offset, order=order)
