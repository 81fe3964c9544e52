"""What is in a checkpoint: the manifest, and the header that makes its arrays a valid safetensors file."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from braidax.checkpoint.snapshot import Leaf
from braidax.errors import CheckpointError

DATA_FILE = "arrays-00000.safetensors"
MANIFEST_FILE = "manifest.json"
_FORMAT = 1

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


class Stored(NamedTuple):
    """How safetensors sees a dtype: its `name` there, dims to `append` to the shape, `alignment` in bytes."""

    name: str
    append: tuple[int, ...]
    alignment: int


def stored_as(dtype: np.dtype[Any]) -> Stored:
    """Returns how a dtype is stored; what safetensors has no name for becomes bytes, in one more dim."""
    name = _SAFETENSORS_DTYPES.get(dtype.name)
    return Stored(name, (), dtype.itemsize) if name else Stored("U8", (dtype.itemsize,), 1)


def safetensors_header(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns the bytes that stand before the arrays in a safetensors file.

    **Arguments:** `arrays`: by name, in the order in which they are written, without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "braidax"}}
    offset = 0
    for name, array in arrays.items():
        stored = stored_as(array.dtype)
        header[name] = {
            "dtype": stored.name,
            "shape": [*array.shape, *stored.append],
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Tensor:
    """Where an array lies in the data file: `offset` and `num_bytes`, NumPy `dtype`, `shape`, xxh3-64 `checksum`."""

    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True)
class Entry:
    """One leaf of a checkpoint: either a `tensor`, with `key_impl` for typed PRNG keys, or a Python `number`."""

    leaf: Leaf
    tensor: Tensor | None = None
    number: bool | int | float | None = None
    key_impl: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as JSON values; floats in hexadecimal, which is exact and knows infinities."""
        content: dict[str, Any] = {"path": self.leaf.path, "kind": self.leaf.kind}
        if self.tensor:
            content |= {"dtype": self.leaf.dtype, "shape": list(self.leaf.shape)}
            content["tensor"] = dataclasses.asdict(self.tensor) | {"shape": list(self.tensor.shape)}
            return content | ({"key_impl": self.key_impl} if self.key_impl else {})
        return content | {"number": self.number.hex() if isinstance(self.number, float) else self.number}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Entry":
        """The inverse of `to_json`."""
        leaf = Leaf(content["path"], content["kind"], content.get("dtype", ""), tuple(content.get("shape", ())))
        if "tensor" in content:
            tensor = Tensor(**content["tensor"] | {"shape": tuple(content["tensor"]["shape"])})
            return Entry(leaf, tensor=tensor, key_impl=content.get("key_impl", ""))
        number = content["number"]
        return Entry(leaf, number=float.fromhex(number) if leaf.kind == "float" else number)


@dataclass(frozen=True)
class DataFile:
    """The file of all arrays: `num_bytes` in all, `header_bytes` of them before the first array, and their checksum."""

    num_bytes: int
    header_bytes: int
    header_checksum: str
    name: str = DATA_FILE


@dataclass(frozen=True)
class Manifest:
    """A checkpoint in words: the `step`, the `version` of braidax that wrote it, the `data` file, the `entries`."""

    step: int
    version: str
    data: DataFile
    entries: tuple[Entry, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as JSON values, with a checksum over the rest."""
        content: dict[str, Any] = {
            "format": _FORMAT,
            "braidax": self.version,
            "step": self.step,
            "data": dataclasses.asdict(self.data),
            "leaves": [entry.to_json() for entry in self.entries],
        }
        return content | {"checksum": _checksum(content)}

    @staticmethod
    def from_json(text: bytes, *, name: str) -> "Manifest":
        """Reads and verifies what `to_json` gave.

        **Arguments:** `text`: the JSON. `name`: the file, for errors.

        **Raises:** `CheckpointError` when it is not what was written, or of another format.
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
            raise CheckpointError(
                f"{name}: is of format {content['format']}, written by braidax {content['braidax']}; expected format "
                f"{_FORMAT}: read it with that version"
            )
        entries = tuple(Entry.from_json(leaf) for leaf in content["leaves"])
        return Manifest(content["step"], content["braidax"], DataFile(**content["data"]), entries)


def _checksum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
