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

from braidax.data.sources.index import Chunk, RecordIndex
from braidax.data.sources.records import Decoder, RecordSource
from braidax.data.sources.source import VARYING, Indices, listed, loader_dtype, narrow
from braidax.data.sources.tar import Window, decompressor_of, members
from braidax.data.storage.files import Bytes, Files
from braidax.errors import ArgumentError, BraidaxError, FormatError, RecordError

KEY = "__key__"  # the leaf that holds the name which the members of a sample share
_INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn"})
_CHUNK_SAMPLES = 4096

Where = Callable[[int], str]
Place = Callable[[Sequence[Any], Indices, NDArray[Any], Where], None]
"""Makes one leaf: from the contents of its field in each sample, with the samples' numbers, into place."""


def open_webdataset(
    files: Files,
    *,
    fields: Sequence[str] | Mapping[str, str] | None = None,
    varying: Sequence[str] = (),
    cache: Path | None = None,
) -> RecordSource:
    """Opens tar shards as WebDataset packs them, without unpacking; samples are in the order of the shards.

    A field becomes a leaf by the last part of its extension. `cls`, `class`, `id`, `index` and the like: an integer.
    `txt`, `text`, `json`: text of varying size, not parsed. `npy`: an array. All else, images included: `bytes`.
    See the WebDataset documentation, "The WebDataset Format". Members without extension and those named `__…__` are
    passed over.

    **Arguments:** `files`: the shards. `fields`: extensions to load; by default those of the first sample. `"jpg;png"`
    takes the first of them that a sample has. A mapping names the leaves: `{"image": "jpg;png", "label": "cls"}`.
    `"__key__"` is the name that the members share. `varying`: leaves of `npy` fields whose arrays differ in shape from
    sample to sample. `cache`: a folder for the index, see `RecordIndex.build`.

    **Raises:** `FormatError` for a shard that is truncated, damaged or compressed; `ArgumentError` for fields that the
    first sample lacks.
    """
    index = RecordIndex.build(files, scan, kind="webdataset", cache=cache)
    if len(index) == 0:
        raise FormatError(
            f"{files.names[0]}: holds 0 samples in {len(files.names)} shard(s); expected members with an extension, "
            "such as 000001.jpg and 000001.cls"
        )
    first = files.read(index.ranges(np.zeros(1, np.int64)))[0]
    sample = _sample(first, lambda: f"{files.names[0]}, record 0")
    chosen = _chosen(fields, sample, files.names[0])
    wrong = [name for name in varying if name not in chosen or _kind(chosen[name][0]) != "npy"]
    if wrong:
        raise ArgumentError(f"varying={varying!r}: expected leaves that are arrays (.npy), which {wrong} are not")
    leaves = {name: _leaf(name, alternatives, sample, files, varying) for name, alternatives in chosen.items()}
    facts = {"format": "WebDataset (tar)", "fields": ", ".join(";".join(leaf.fields) for leaf in leaves.values())}
    if unused := [field for field in sample if all(field not in leaf.fields for leaf in leaves.values())]:
        facts["fields not loaded"] = ", ".join(field for field in unused if field != KEY) or "none"
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
    window = Window(file)
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
        f"{listed(has)}; pack it anew, or choose with fields= what every sample has"
    )


def _chosen(
    fields: Sequence[str] | Mapping[str, str] | None, sample: Mapping[str, Any], name: str
) -> dict[str, tuple[str, ...]]:
    """Returns the fields that each leaf is made of."""
    if fields is None:
        return {field: (field,) for field in sample if field != KEY}
    if isinstance(fields, str) or not fields:
        raise ArgumentError(f"fields={fields!r}: expected a list of extensions, such as ('jpg', 'cls')")
    given = dict(fields) if isinstance(fields, Mapping) else {field.partition(";")[0]: field for field in fields}
    chosen = {
        leaf: tuple(part.strip().lower().removeprefix(".") for part in names.split(";"))
        for leaf, names in given.items()
    }
    missing = [names for leaf, names in given.items() if not any(field in sample for field in chosen[leaf])]
    if missing:
        raise ArgumentError(
            f"fields={fields!r}: the first sample of {name} has no {' and no '.join(missing)}; it has "
            f"{listed([field for field in sample if field != KEY])}"
        )
    return chosen


def _kind(field: str) -> str:
    return field.rpartition(".")[2]


def _leaf(name: str, fields: tuple[str, ...], sample: Mapping[str, Any], files: Files, varying: Sequence[str]) -> _Leaf:
    kinds = {_kind(field) for field in fields}
    where = f"{files.names[0]} ({len(files.names)} shard(s))"
    if kinds <= _INTEGERS:
        dtype = loader_dtype(np.dtype(np.int64), where=where, leaf=name)
        return _Leaf(fields, jax.ShapeDtypeStruct((), dtype), _integers)
    if kinds <= _TEXTS | {KEY}:
        return _Leaf(fields, VARYING, _texts)
    if kinds != {"npy"}:
        return _Leaf(fields, VARYING, _raw)
    arrays = _Arrays(name, where)
    if name in varying:
        return _Leaf(fields, VARYING, arrays.place_varying)
    first = arrays.parse(_field(sample, fields, lambda _: where, 0), lambda: f"{where}, record 0")
    dtype = loader_dtype(first.dtype, where=where, leaf=name)
    return _Leaf(fields, jax.ShapeDtypeStruct(first.shape, dtype), arrays.place)


def _raw(contents: Sequence[Any], indices: Indices, out: NDArray[Any], where: Where) -> None:
    for i, content in enumerate(contents):
        out[i] = bytes(content)


def _texts(contents: Sequence[Any], indices: Indices, out: NDArray[Any], where: Where) -> None:
    for i, content in enumerate(contents):
        try:
            out[i] = str(content, "utf-8")
        except UnicodeDecodeError as error:
            raise RecordError(f"{where(i)}: the text is not UTF-8 ({error}); store it in UTF-8") from error


def _integers(contents: Sequence[Any], indices: Indices, out: NDArray[Any], where: Where) -> None:
    limits = np.iinfo(out.dtype)
    for i, content in enumerate(contents):
        try:
            value = int(bytes(content))
        except ValueError as error:
            raise RecordError(
                f"{where(i)}: the label {bytes(content[:40])!r} is no integer; expected digits, such as b'17'"
            ) from error
        if not limits.min <= value <= limits.max:
            raise RecordError(
                f"{where(i)}: the label {value} does not fit in {out.dtype}; store smaller ones, or keep 64 bits with "
                "jax.config.update('jax_enable_x64', True)"
            )
        out[i] = value


class _Arrays:
    """Arrays in `.npy` fields. `leaf`, `where`: names for errors."""

    def __init__(self, leaf: str, where: str) -> None:
        self.leaf = leaf
        self.where = where
        self._header = functools.lru_cache(64)(_npy_header)  # few differ, and to parse one takes longer than all else

    def place(self, contents: Sequence[Any], indices: Indices, out: NDArray[Any], where: Where) -> None:
        """Makes a leaf of arrays of one shape."""
        for i, content in enumerate(contents):
            value = self.parse(content, lambda i=i: where(i))
            if value.shape != out.shape[1:] or loader_dtype(value.dtype, where=where(i), leaf=self.leaf) != out.dtype:
                raise RecordError(
                    f"{where(i)}: leaf {self.leaf!r} is {value.dtype}{list(value.shape)}, expected {out.dtype}"
                    f"{list(out.shape[1:])} as in the first sample; store one shape, or give varying=({self.leaf!r},)"
                )
            narrow(value[None], out[i : i + 1], indices[i : i + 1], where=self.where, leaf=self.leaf)

    def place_varying(self, contents: Sequence[Any], indices: Indices, out: NDArray[Any], where: Where) -> None:
        """Makes a leaf of arrays whose shapes differ."""
        for i, content in enumerate(contents):
            value = self.parse(content, lambda i=i: where(i))
            loaded = np.empty(value.shape, loader_dtype(value.dtype, where=where(i), leaf=self.leaf))
            narrow(value[None], loaded[None], indices[i : i + 1], where=self.where, leaf=self.leaf)
            out[i] = loaded

    def parse(self, content: Any, where: Callable[[], str]) -> NDArray[Any]:
        """Returns the array in a field."""
        try:
            width = 2 if content[6] == 1 else 4
            start = 8 + width + int.from_bytes(content[8 : 8 + width], "little")
            shape, order, dtype = self._header(bytes(content[:start]))
            return np.frombuffer(content[start:], dtype).reshape(shape, order=order)
        except (ValueError, IndexError) as error:
            raise RecordError(
                f"{where()}: field {self.leaf!r} holds no array as np.save writes it ({error}); expected numbers: "
                "pack it anew"
            ) from error


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
