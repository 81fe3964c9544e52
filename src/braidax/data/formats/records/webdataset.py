"""WebDataset: tar shards; neighboring members of one name, up to its first dot, are the fields of one sample."""

import functools
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.records.contents import Place, Where, loaded_array, place_bytes, place_integers, place_text
from braidax.data.formats.records.fields import readable
from braidax.data.formats.records.index import Chunk, RecordIndex
from braidax.data.formats.records.records import Decoder, RecordSource
from braidax.data.formats.records.tar import Window, decompressor_of, members
from braidax.data.source import VARYING, Indices, is_varying, listed, loader_dtype, narrow
from braidax.data.storage.files import Bytes, Files
from braidax.errors import ArgumentError, BraidaxError, FormatError, RecordError

KEY = "__key__"  # the leaf that holds the name which the members of a sample share
_INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn"})
_CHUNK_SAMPLES = 4096
_REMOTE_BYTES = 1 << 22  # of a remote shard cost less to read in order than a request more does
_NUM_LOOKED_AT = 16  # samples that tell which fields there are, and whether their arrays are of one shape


def open_webdataset(
    files: Files, *, columns: Sequence[str] | Mapping[str, Any] | None = None, cache: Path | None = None
) -> RecordSource:
    """Opens tar shards as WebDataset packs them, without unpacking; samples are in the order of the shards.

    A field becomes a leaf by the last part of its extension. `cls`, `class`, `id`, `index` and the like: an integer.
    `txt`, `text`, `json`: text of varying size, not parsed. `npy`: an array, of varying size where those of the samples
    that are looked at differ. All else, images included: `bytes`. Members without extension and those named `__…__` are
    passed over. The source is the documentation of WebDataset, "The WebDataset Format".

    **Arguments:** `files`: the shards, not compressed. `columns`: extensions of the fields to load; by default those
    that all samples that are looked at have. `"jpg;png"` takes the first of them that a sample has. A mapping names the
    leaves: `{"image": "jpg;png", "label": "cls"}`, or says that arrays differ in shape: `{"npy": VARYING}`. `"__key__"`
    is the name that the members of a sample share. `cache`: as `RecordIndex.build`.

    **Raises:** `FormatError` for a shard that is truncated, damaged or compressed, or without samples; `ArgumentError`
    for columns that no sample has.
    """
    index = RecordIndex.build(files, scan, kind="webdataset", cache=cache)
    if len(index) == 0:
        raise FormatError(
            f"{files.names[0]}: holds 0 samples in {len(files.names)} shard(s); expected members with an extension, "
            "such as 000001.jpg and 000001.cls"
        )
    samples = _looked_at(files, index)
    fields = list(dict.fromkeys(field for sample in samples for field in sample if field != KEY))
    where = f"{files.names[0]} ({len(files.names)} shard(s))"
    varying = set[str]()
    if isinstance(columns, Mapping):
        varying = {name for name, value in columns.items() if not isinstance(value, str) and is_varying(value)}
        columns = {name: name if name in varying else str(value) for name, value in columns.items()}
    chosen = _chosen(columns, samples, fields, where)
    leaves = {name: _leaf(name, given, samples, where, name in varying) for name, given in chosen.items()}
    facts = {"format": "WebDataset (tar)", "fields": ", ".join(";".join(given) for given in chosen.values())}
    used = {field for given in chosen.values() for field in given}
    if unused := [field for field in fields if field not in used]:
        facts["fields not loaded"] = ", ".join(unused)
    return RecordSource(files, index, _Decoder(leaves), facts)


@dataclass(frozen=True)
class _Leaf:
    """How a leaf is made: of the first of `fields` that a sample has, by `place`, as `spec` says."""

    fields: tuple[str, ...]
    spec: jax.ShapeDtypeStruct
    place: Place


@dataclass(frozen=True)
class _Decoder(Decoder):
    """Makes samples of pieces of a tar; the headers in them say which field lies where."""

    leaves: Mapping[str, _Leaf]

    @property
    def sample_spec(self) -> Any:
        return {name: leaf.spec for name, leaf in self.leaves.items()}

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Where) -> None:
        samples = [_sample(payload, lambda i=i: where(i)) for i, payload in enumerate(payloads)]
        for name, leaf in self.leaves.items():
            contents = [_field(sample, leaf.fields, where, i) for i, sample in enumerate(samples)]
            leaf.place(contents, indices, out[name], where)


def scan(file: IO[bytes], name: str) -> Iterator[Chunk]:
    """Finds the samples of a shard: from the first header of its first member to the end of its last member."""
    window = Window(file, read_bytes=_REMOTE_BYTES if "://" in name else 0)
    last = "none"

    def damaged(offset: int, reason: str) -> BraidaxError:
        at = window.size(offset) if "ends" in reason else offset
        command = decompressor_of(window.head)
        if command:
            return FormatError(
                f"{name}: a compressed tar, in which no sample can be found without reading all before it; decompress "
                f"it once ({command}) and open the .tar"
            )
        remedy = "copy it again, or write its end mark if its writer left it out" if "ends" in reason else "mend it"
        return FormatError(f"{name}: damaged at byte {at:,}: {reason}; the last whole sample is {last!r}: {remedy}")

    def found() -> Iterator[tuple[int, int]]:
        nonlocal last
        key, start, end = "", -1, 0
        for member in members(window.read, length=None, damaged=damaged):
            this = _split(member.name)
            if this is None:
                continue
            if this[0] != key:
                if start >= 0:
                    last = key
                    yield start, end - start
                key, start = this[0], member.start
            end = member.offset + member.size
        if start >= 0:
            yield start, end - start

    samples = found()
    while rows := list(itertools.islice(samples, _CHUNK_SAMPLES)):
        offsets, lengths = np.array(rows, np.int64).T
        yield offsets, lengths
    if not window.rest_is_empty():
        raise FormatError(
            f"{name}: there is data behind the end mark of the tar, which no reader would see; were tars joined with "
            "cat? keep them apart, or join them with tar -A"
        )


def _split(name: str) -> tuple[str, str] | None:
    """Splits a member's name into the key of its sample and the field; None for what belongs to no sample."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    if not stem or not extension or (not slash and file.startswith("__") and file.endswith("__")):
        return None
    return folder + slash + stem, extension.lower()


def _sample(payload: Bytes, where: Callable[[], str]) -> dict[str, Any]:
    """Returns the contents of each field of a sample."""

    def damaged(offset: int, reason: str) -> BraidaxError:
        return RecordError(f"{where()}: damaged {offset:,} bytes into the sample: {reason}; copy the file again")

    def read(offset: int, length: int) -> bytes:
        return bytes(payload[offset : offset + length])

    sample: dict[str, Any] = {}
    for member in members(read, length=len(payload), damaged=damaged):
        split = _split(member.name)
        if split is not None:
            key, field = split
            if field in sample:
                raise RecordError(
                    f"{where()}: sample {key!r} has two members {member.name!r}; expected one for each field: rename "
                    "one of them"
                )
            if member.offset + member.size > len(payload):
                raise damaged(member.offset, f"{member.name!r} has other bytes than when the shard was indexed")
            sample[field] = payload[member.offset : member.offset + member.size]
            sample[KEY] = key.encode("utf-8", "surrogateescape")
    return sample


def _field(sample: Mapping[str, Any], fields: Sequence[str], where: Where, number: int) -> Any:
    for field in fields:
        if field in sample:
            return sample[field]
    has = [field for field in sample if field != KEY]
    raise RecordError(
        f"{where(number)}: sample {sample[KEY].decode('utf-8', 'replace')!r} has no field {' or '.join(fields)}, only "
        f"{listed(has)}; pack it anew, or choose with columns= what every sample has"
    )


def _looked_at(files: Files, index: RecordIndex) -> list[dict[str, Any]]:
    """Returns some samples, from the first to the last; those that cannot be read are left to the reads of them."""
    numbers = np.unique(np.linspace(0, len(index) - 1, _NUM_LOOKED_AT).astype(np.int64))
    ranges = index.ranges(numbers)
    payloads = files.read(ranges)

    def read(row: int) -> dict[str, Any]:
        return _sample(payloads[row], lambda: f"{files.names[ranges.file[row]]}, at byte {ranges.offset[row]:,}")

    return readable(read, range(len(payloads)))


def _chosen(
    columns: Sequence[str] | Mapping[str, str] | None,
    samples: Sequence[Mapping[str, Any]],
    fields: Sequence[str],
    where: str,
) -> dict[str, tuple[str, ...]]:
    """Returns the fields that each leaf is made of."""
    if columns is None:
        shared = [field for field in fields if all(field in sample for sample in samples)]
        if not shared:
            raise FormatError(
                f"{where}: its samples share no field; they have {listed(fields)}: choose with columns=, where "
                "'jpg;png' takes the first of them that a sample has"
            )
        return {field: (field,) for field in shared}
    if isinstance(columns, str) or not columns:
        raise ArgumentError(f"columns={columns!r}: expected a list of extensions, such as ('jpg', 'cls')")
    given = columns if isinstance(columns, Mapping) else {names.partition(";")[0]: names for names in columns}
    chosen = {
        leaf: tuple(part.strip().lower().removeprefix(".") for part in names.split(";"))
        for leaf, names in given.items()
    }
    missing = [given[leaf] for leaf, any_of in chosen.items() if not {*any_of} & {*fields, KEY}]
    if missing:
        raise ArgumentError(
            f"columns={columns!r}: expected fields of {where}, whose samples have {listed(fields)} and no "
            f"{' and no '.join(missing)}"
        )
    return chosen


def _leaf(
    name: str, fields: tuple[str, ...], samples: Sequence[Mapping[str, Any]], where: str, is_ragged: bool
) -> _Leaf:
    kinds = {field.rpartition(".")[2] for field in fields}
    if kinds <= _INTEGERS:
        dtype = loader_dtype(np.dtype(np.int64), where=where, leaf=name)
        return _Leaf(fields, jax.ShapeDtypeStruct((), dtype), place_integers)
    if kinds <= _TEXTS | {KEY}:
        return _Leaf(fields, VARYING, place_text)
    if kinds != {"npy"}:
        return _Leaf(fields, VARYING, place_bytes)
    arrays = _Arrays(name, where)
    found = arrays.looked_at(samples, fields)
    if is_ragged or len({value.shape for value in found}) > 1:
        return _Leaf(fields, VARYING, arrays.place_varying)
    dtype = loader_dtype(found[0].dtype, where=where, leaf=name)
    return _Leaf(fields, jax.ShapeDtypeStruct(found[0].shape, dtype), arrays.place)


class _Arrays:
    """Arrays in `.npy` fields. `leaf`, `where`: names for errors."""

    def __init__(self, leaf: str, where: str) -> None:
        self._leaf = leaf
        self._where = where

    def looked_at(self, samples: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> list[NDArray[Any]]:
        """Returns the arrays of some samples. **Raises:** `RecordError` when none of them can be read."""
        found: list[NDArray[Any]] = []
        error: RecordError | None = None
        for content in (sample[field] for sample in samples for field in fields if field in sample):
            try:
                found.append(self._parse(content, lambda _: self._where, 0))
            except RecordError as raised:
                error = error or raised
        if not found and error is not None:
            raise error
        return found

    def place(self, contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
        """Makes a leaf of arrays of one shape, as `Place`."""
        for i, content in enumerate(contents):
            value = self._parse(content, where, i)
            if value.shape != out.shape[1:] or loader_dtype(value.dtype, where=where(i), leaf=self._leaf) != out.dtype:
                raise RecordError(
                    f"{where(i)}: leaf {self._leaf!r} is {value.dtype}{list(value.shape)}, expected {out.dtype}"
                    f"{list(out.shape[1:])} as in others; store one shape, or say that they differ: "
                    f"columns={{{self._leaf!r}: braidax.data.VARYING}}"
                )
            narrow(value[None], out[i : i + 1], indices[i : i + 1], where=self._where, leaf=self._leaf)

    def place_varying(self, contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
        """Makes a leaf of arrays whose shapes differ, as `Place`."""
        for i, content in enumerate(contents):
            value = self._parse(content, where, i)
            out[i] = loaded_array(value, int(indices[i]), where=self._where, leaf=self._leaf)

    def _parse(self, content: Bytes, where: Where, number: int) -> NDArray[Any]:
        try:
            width = 2 if content[6] == 1 else 4
            start = 8 + width + int.from_bytes(content[8 : 8 + width], "little")
            shape, order, dtype = _npy_header(bytes(content[:start]))
            return np.frombuffer(content[start:], dtype).reshape(shape, order=order)
        except (ValueError, IndexError) as error:
            raise RecordError(
                f"{where(number)}: field {self._leaf!r} holds no array as np.save writes it ({error}); expected "
                "numbers: pack it anew"
            ) from error


@functools.lru_cache(64)  # few differ, and to parse one takes longer than all else
def _npy_header(head: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"version {version} of the format")
    shape, is_fortran, dtype = read[version](file)
    if dtype.hasobject:
        raise ValueError("Python objects")
    return shape, "F" if is_fortran else "C", dtype
