"""The columns of MosaicML's MDS format: how each encoding becomes a leaf, and samples are cut into columns.

The source is MosaicML Streaming 0.13: `MDSWriter.encode_sample`, and the class of each encoding.
"""

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.records.contents import Place, Where, loaded_array, place_bytes, place_integers, place_text
from braidax.data.formats.records.records import Decoder
from braidax.data.source import VARYING, Indices, loader_dtype, narrow
from braidax.data.storage.files import Bytes
from braidax.errors import ArgumentError, FormatError, RecordError

_NUMBERS = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_SCALARS = frozenset(_NUMBERS.values())
_BYTES = frozenset({"bytes", "jpeg", "png"})
_TEXTS = frozenset({"str", "json", "str_decimal"})
_BANDS: dict[str, tuple[str, int]] = {  # of the modes of Pillow: dtype and number of a pixel's bands
    "L": ("u1", 1), "P": ("u1", 1), "LA": ("u1", 2), "RGB": ("u1", 3), "YCbCr": ("u1", 3), "HSV": ("u1", 3),
    "LAB": ("u1", 3), "RGBA": ("u1", 4), "RGBX": ("u1", 4), "CMYK": ("u1", 4), "I;16": ("<u2", 1), "I": ("<i4", 1),
    "F": ("<f4", 1),
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of a shard.

    `size`: bytes of a value, or None where a sample's head says it. `spec`, `place`: of the leaf; None for a column
    that is not read. `num_bytes`: that every value must have, for arrays of one shape in a column whose size may vary.
    """

    name: str
    size: int | None
    spec: jax.ShapeDtypeStruct | None = None
    place: Place | None = None
    num_bytes: int | None = None


def column_of(name: str, size: int | None, encoding: str, *, where: str) -> Column:
    """Returns a column that is read.

    **Arguments:** `size`: of a value in bytes, None where it varies. `encoding`: of MDS, such as `"ndarray:int16:8,8"`.
    `where`: the file, for errors.

    **Raises:** `FormatError` for an encoding that cannot be read.
    """
    kind, _, details = encoding.partition(":")
    if kind in _BYTES:
        return Column(name, size, VARYING, place_bytes)
    if kind in _TEXTS:
        return Column(name, size, VARYING, place_text)
    if kind in _SCALARS | {"int"}:
        return _numbers(name, size, np.dtype("int64" if kind == "int" else kind), (), where)
    if kind == "str_int":
        return Column(name, size, jax.ShapeDtypeStruct((), _loaded(np.dtype(np.int64), where, name)), place_integers)
    if kind == "str_float":
        return Column(name, size, jax.ShapeDtypeStruct((), np.float32), _place_floats)
    if kind == "pil":
        return Column(name, size, VARYING, _Arrays(name, where, _pixels))
    if kind in ("jpeg_array", "jpegarray", "list[jpeg]", "list[png]"):
        skipped = 0 if kind.startswith("jpeg") else 4
        return Column(name, size, VARYING, _Arrays(name, where, functools.partial(_list, skipped=skipped)))
    if kind == "ndarray":
        return _array_column(name, size, encoding, details, where)
    remedy = "it runs code when it is read" if kind == "pkl" else "it is not known"
    raise FormatError(
        f"{where}: column {name!r} has the encoding {encoding!r}; {remedy}: write the column in another, or leave it "
        "out with columns="
    )


class ColumnDecoder(Decoder):
    """Cuts samples into columns: the sizes of those that vary stand first, then all values.

    **Arguments:** `columns`: as the shards have them. `order`: the names of the leaves.
    """

    def __init__(self, columns: Sequence[Column], order: Sequence[str]) -> None:
        self._columns = list(columns)
        by_name: Mapping[str, Column] = {column.name: column for column in columns}
        self._spec = {name: by_name[name].spec for name in order}
        self._varying = np.array([number for number, column in enumerate(columns) if column.size is None], np.intp)
        self._sizes = np.array([column.size or 0 for column in columns], np.int64)

    @property
    def sample_spec(self) -> Any:
        return dict(self._spec)

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Where) -> None:
        starts, ends = self._cuts(payloads, where)
        for number, column in enumerate(self._columns):
            if column.place is None:
                continue
            borders = zip(payloads, starts[:, number].tolist(), ends[:, number].tolist(), strict=True)
            if column.num_bytes is not None:
                self._check_sizes(column, ends[:, number] - starts[:, number], where)
            column.place([payload[start:end] for payload, start, end in borders], indices, out[column.name], where)

    def _cuts(self, payloads: Sequence[Bytes], where: Where) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns where each column begins and ends in each sample, int64 `[n, num_columns]`."""
        lengths = np.array([len(payload) for payload in payloads], np.int64)
        head = 4 * len(self._varying)
        sizes = np.tile(self._sizes, (len(payloads), 1))
        if short := np.flatnonzero(lengths < head).tolist():
            raise RecordError(f"{where(short[0])}: {lengths[short[0]]} bytes are no sample; copy the shard again")
        heads = np.frombuffer(b"".join([payload[:head] for payload in payloads]), "<u4")
        sizes[:, self._varying] = heads.reshape(len(payloads), -1)
        ends = head + np.cumsum(sizes, axis=1)
        if wrong := np.flatnonzero(ends[:, -1] != lengths).tolist():
            raise RecordError(
                f"{where(wrong[0])}: the columns take {ends[wrong[0], -1]:,} bytes, but the sample has "
                f"{lengths[wrong[0]]:,}; copy the shard again"
            )
        return ends - sizes, ends

    def _check_sizes(self, column: Column, sizes: NDArray[np.int64], where: Where) -> None:
        if wrong := np.flatnonzero(sizes != column.num_bytes).tolist():
            raise RecordError(
                f"{where(wrong[0])}: column {column.name!r} has {sizes[wrong[0]]:,} bytes, expected "
                f"{column.num_bytes:,} for the shape that columns= gives; give another, or none"
            )


def _loaded(dtype: np.dtype[Any], where: str, leaf: str) -> np.dtype[Any]:
    return loader_dtype(dtype, where=where, leaf=leaf)


def _numbers(name: str, size: int | None, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> Column:
    """Returns a column of arrays of one dtype and shape, stored without either."""
    stored = dtype.newbyteorder("<")
    num_bytes = stored.itemsize * math.prod(shape)
    if size is not None and size != num_bytes:
        raise FormatError(
            f"{where}: column {name!r} has {size} bytes a sample, expected {num_bytes} for {dtype}{list(shape)}; mend "
            "index.json, or give another encoding with columns="
        )
    spec = jax.ShapeDtypeStruct(shape, _loaded(dtype, where, name))
    return Column(name, size, spec, _Numbers(name, where, stored), num_bytes)


def _array_column(name: str, size: int | None, encoding: str, details: str, where: str) -> Column:
    dtype, _, dims = details.partition(":")
    if (details and dtype not in _SCALARS) or (dims and not all(dim.isdigit() for dim in dims.split(","))):
        raise ArgumentError(
            f"{where}: column {name!r} has the encoding {encoding!r}; expected 'ndarray', 'ndarray:int16' or "
            "'ndarray:int16:8,8'"
        )
    if dims:
        return _numbers(name, size, np.dtype(dtype), tuple(int(dim) for dim in dims.split(",")), where)
    return Column(name, size, VARYING, _Arrays(name, where, functools.partial(_array, dtype=dtype)))


@dataclass(frozen=True)
class _Numbers:
    """Makes a leaf of arrays of one shape, as `Place`. `leaf`, `where`: for errors. `stored`: dtype."""

    leaf: str
    where: str
    stored: np.dtype[Any]

    def __call__(self, contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
        values = np.frombuffer(b"".join(contents), self.stored).reshape(out.shape)
        narrow(values, out, indices, where=self.where, leaf=self.leaf)


@dataclass(frozen=True)
class _Arrays:
    """Makes a leaf of arrays whose shapes differ, as `Place`. `parse`: the contents of one sample."""

    leaf: str
    where: str
    parse: Callable[[Bytes], NDArray[Any]]

    def __call__(self, contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
        for i, content in enumerate(contents):
            try:
                value = self.parse(content)
            except (ValueError, IndexError, KeyError, struct.error) as error:
                raise RecordError(
                    f"{where(i)}: the {len(content):,} bytes of column {self.leaf!r} are not what its encoding says "
                    f"({type(error).__name__}: {error}); copy the shard again"
                ) from error
            is_list = value.dtype == np.dtype(object)
            out[i] = value if is_list else loaded_array(value, int(indices[i]), where=self.where, leaf=self.leaf)


def _array(content: Bytes, dtype: str) -> NDArray[Any]:
    """Parses an array that says its shape itself and, where `dtype` is empty, its dtype."""
    start = 0
    if not dtype:
        dtype, start = _NUMBERS[content[0]], 1
    num_dims, kind = content[start] >> 2, f"<u{1 << (content[start] & 3)}"
    stop = start + 1 + num_dims * np.dtype(kind).itemsize
    shape = tuple(np.frombuffer(content[start + 1 : stop], kind).tolist())
    return np.frombuffer(content[stop:], np.dtype(dtype).newbyteorder("<")).reshape(shape)


def _pixels(content: Bytes) -> NDArray[Any]:
    """Parses a raw image of Pillow: `[H, W]`, or `[H, W, bands]`."""
    width, height, length = struct.unpack_from("<3I", content)
    kind, bands = _BANDS[str(content[12 : 12 + length], "ascii")]
    return np.frombuffer(content[12 + length :], kind).reshape(
        (height, width) if bands == 1 else (height, width, bands)
    )


def _list(content: Bytes, skipped: int) -> NDArray[Any]:
    """Parses a list of encoded images: an object array of `bytes`."""
    (count,) = struct.unpack_from("<I", content, skipped)
    sizes = struct.unpack_from(f"<{count}I", content, skipped + 4)
    start = skipped + 4 + 4 * count
    if start + sum(sizes) != len(content):
        raise ValueError(f"{start + sum(sizes)} bytes for {count} images")
    found = np.empty(count, object)
    for number, size in enumerate(sizes):
        found[number] = bytes(content[start : start + size])
        start += size
    return found


def _place_floats(contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
    for i, content in enumerate(contents):
        try:
            out[i] = float(bytes(content))
        except ValueError as error:
            raise RecordError(
                f"{where(i)}: {bytes(content[:40])!r} is no number; expected one such as b'0.5'"
            ) from error
