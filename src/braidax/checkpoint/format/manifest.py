"""What is in a checkpoint: the manifests, and the headers that make each process's arrays a valid safetensors file."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from braidax.checkpoint.snapshot.leaves import Leaf
from braidax.errors import CheckpointError

CHUNK_BYTES = 4 * 2**20
"""How much of a tensor one checksum is for: what is read of it at least."""

PAGE_BYTES = 4096
"""What the memory, the place and the length of a write past the page cache are multiples of."""

_FORMAT = 2
_FILES = re.compile(r"(?:arrays-\d{5,}\.safetensors|manifest(?:-(?P<part>\d{5,}))?\.json)")
_OWN_HEADER = b'{"__metadata__":{"format":"braidax"}'

_SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


class OtherFormat(CheckpointError):
    """A checkpoint was written by a version of braidax that this one cannot read: it is not invalid."""


def data_file(process: int) -> str:
    """Returns the name of the file with the arrays that a process wrote."""
    return f"arrays-{process:05d}.safetensors"


def manifest_file(process: int) -> str:
    """Returns the name of a process's manifest; that of process 0 describes the tree as well."""
    return f"manifest-{process:05d}.json" if process else "manifest.json"


def is_name_of_file(name: str) -> bool:
    """Says whether a file of a checkpoint would have that name."""
    return _FILES.fullmatch(name) is not None


def part_of_manifest(name: str) -> int | None:
    """Returns whose manifest a file of that name is, None if it is no manifest."""
    match = _FILES.fullmatch(name)
    return int(match["part"] or 0) if match is not None and name.startswith("manifest") else None


def is_own_header(start: bytes) -> bool:
    """Says whether a safetensors file that begins so was written by `safetensors_header`."""
    return start[8:].startswith(_OWN_HEADER)


class Stored(NamedTuple):
    """How safetensors sees a dtype: its `name` there, dims to `append` to the shape, `alignment` in bytes."""

    name: str
    append: tuple[int, ...]
    alignment: int


def stored_as(dtype: np.dtype[Any]) -> Stored:
    """Returns how a dtype is stored; what safetensors has no name for becomes bytes, in one more dim."""
    name = _SAFETENSORS_DTYPES.get(dtype.name)
    return Stored(name, (), dtype.itemsize) if name else Stored("U8", (dtype.itemsize,), 1)


def safetensors_header(arrays: Iterable[tuple[str, np.ndarray]], about: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes that stand before the arrays in a safetensors file: whole pages, so that they begin on one.

    **Arguments:** `arrays`: with their names, in the order in which they are written, without gaps. `about`: the
    metadata of a file that is no checkpoint's.

    **Raises:** `CheckpointError` when two have one name.
    """
    header: dict[str, Any] = {
        "__metadata__": {"format": "braidax"} if about is None else dict(about)
    }  # see `is_own_header`
    offset = 0
    for name, array in arrays:
        if name in header:
            raise CheckpointError(
                f"leaf {name!r}: its path is also the name of a part of another leaf; expected a name of its own for "
                "every tensor; rename a key"
            )
        stored = stored_as(array.dtype)
        header[name] = {
            "dtype": stored.name,
            "shape": [*array.shape, *stored.append],
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)  # as the format allows
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Tensor:
    """Where a part of a leaf lies in a data file.

    **Arguments:** `name`: in that file. `path`: of the leaf. `start`: where the part begins in the leaf. `shape`: of
    the part. `offset`, `num_bytes`: in the file. `checksums`: xxh3-64 of each chunk of it.
    """

    name: str
    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksums: tuple[str, ...]

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Tensor":
        """Reads what `dataclasses.asdict` and JSON made of a tensor."""
        values: dict[str, Any] = {
            name: tuple(cast(Any, value)) if isinstance(value, list) else value for name, value in content.items()
        }
        return Tensor(**values)


@dataclass(frozen=True)
class Entry:
    """One leaf of a checkpoint.

    **Arguments:** `leaf`: what it is. `dtype`, `shape`: of what is stored of an array: for typed PRNG keys that of
    their data. `number`: the Python number. `key_impl`: the kind of PRNG keys. `padded_rows`: V of a table that is
    stored as `[ceil(V / N), N, ...]`.
    """

    leaf: Leaf
    dtype: str = ""
    shape: tuple[int, ...] = ()
    number: bool | int | float | None = None
    key_impl: str = ""
    padded_rows: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as JSON values; floats in hexadecimal, which is exact and knows infinities."""
        content: dict[str, Any] = {"path": self.leaf.path, "kind": self.leaf.kind}
        if not self.leaf.dtype:
            return content | {"number": self.number.hex() if isinstance(self.number, float) else self.number}
        content |= {"dtype": self.leaf.dtype, "shape": list(self.leaf.shape)}
        if self.key_impl:
            content |= {"key_impl": self.key_impl, "data_dtype": self.dtype, "data_shape": list(self.shape)}
        return content | ({} if self.padded_rows is None else {"padded_rows": self.padded_rows})

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Entry":
        """The inverse of `to_json`."""
        leaf = Leaf(content["path"], content["kind"], content.get("dtype", ""), tuple(content.get("shape", ())))
        if not leaf.dtype:
            number = content["number"]
            return Entry(leaf, number=float.fromhex(number) if leaf.kind == "float" else number)
        return Entry(
            leaf,
            content.get("data_dtype", leaf.dtype),
            tuple(content.get("data_shape", leaf.shape)),
            key_impl=content.get("key_impl", ""),
            padded_rows=content.get("padded_rows"),
        )


@dataclass(frozen=True)
class DataFile:
    """The arrays of one process.

    **Arguments:** `num_bytes`: of the file, `header_bytes` of them before the first array, and `header_checksum` of
    those. `chunk_bytes`: how much of a tensor one checksum is for.
    """

    num_bytes: int
    header_bytes: int
    header_checksum: str
    chunk_bytes: int


class About(NamedTuple):
    """What the manifests of one checkpoint agree in.

    **Fields:** `step`: how many updates the tree has seen. `token`: of this checkpoint alone. `num_processes`: that
    wrote it. `metric`: of the tree, lower is better. `version`: of braidax.
    """

    step: int
    token: str
    num_processes: int
    metric: float | None
    version: str


@dataclass(frozen=True)
class Manifest:
    """What one process wrote: its `tensors`, in its `data` file.

    That of process 0 has all `entries` of the tree as well, and `notes`: texts by name.
    """

    about: About
    process: int
    data: DataFile
    tensors: tuple[Tensor, ...]
    entries: tuple[Entry, ...]
    notes: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as JSON values, with a checksum over the rest."""
        metric = self.about.metric
        content: dict[str, Any] = {
            "format": _FORMAT,
            "braidax": self.about.version,
            "step": self.about.step,
            "metric": None if metric is None else metric.hex(),
            "token": self.about.token,
            "num_processes": self.about.num_processes,
            "process": self.process,
            "data": dataclasses.asdict(self.data),
            "tensors": [dataclasses.asdict(tensor) for tensor in self.tensors],
            "leaves": [entry.to_json() for entry in self.entries],
            "notes": dict(self.notes),
        }
        return content | {"checksum": _checksum(content)}

    @staticmethod
    def from_json(text: bytes, *, name: str) -> "Manifest":
        """Reads and verifies what `to_json` gave.

        **Arguments:** `text`: the JSON. `name`: the file, for errors.

        **Raises:** `CheckpointError` when it is not what was written; `OtherFormat`.
        """
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{name}: is no JSON ({error}): it was truncated or changed") from error
        content: dict[str, Any] = cast(Any, parsed) if isinstance(parsed, dict) else {}
        checksum = content.pop("checksum", None)
        if checksum is None or checksum != _checksum(content):
            raise CheckpointError(f"{name}: does not match its own checksum: it was changed")
        if content["format"] != _FORMAT:
            raise OtherFormat(
                f"{name}: is of format {content['format']}, written by braidax {content['braidax']}; expected format "
                f"{_FORMAT}: read it with that version, or give another path"
            )
        metric = content["metric"]
        about = About(
            content["step"],
            content["token"],
            content["num_processes"],
            None if metric is None else float.fromhex(metric),
            content["braidax"],
        )
        tensors = tuple(Tensor.from_json(tensor) for tensor in content["tensors"])
        entries = tuple(Entry.from_json(leaf) for leaf in content["leaves"])
        notes = content.get("notes", {})  # there were none at first
        return Manifest(about, content["process"], DataFile(**content["data"]), tensors, entries, notes)


def _checksum(content: Any) -> str:
    # Tuples and lists are one to JSON.
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
