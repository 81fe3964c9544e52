"""Megatron's indexed tokens: the ids in a `.bin` file, and where each sequence lies in the `.idx` file beside it.

The index, all little-endian: nine bytes of magic, version (uint64), code of the dtype (uint8), numbers of sequences and
of document borders (uint64 each); then for each sequence its length in tokens (int32), for each its first byte (int64),
the borders of documents (int64), and for data of several modalities a mode for each sequence (int8). Source: the
classes `_IndexWriter` and `_IndexReader` of Megatron Core.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.data.formats.arrays.fixed_width import FixedSource, Run
from braidax.data.formats.records.contents import loaded_array
from braidax.data.formats.records.index import Index
from braidax.data.formats.records.records import Decoder, RecordSource
from braidax.data.source import VARYING, Indices
from braidax.data.storage import Remote, open_files
from braidax.data.storage.files import Bytes, Files, Ranges
from braidax.errors import ArgumentError, FormatError

MAGIC = b"MMIDIDX\x00\x00"

_HEAD = struct.Struct("<QBQQ")
_HEAD_BYTES = len(MAGIC) + _HEAD.size
_VERSION = 1
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no tokens
_SUFFIX = ".idx"


class _Layout(NamedTuple):
    """What an index says. **Fields:** `offsets`, `num_tokens`: int64 `[sequences]`, of each; offsets in bytes."""

    dtype: np.dtype[Any]
    offsets: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_documents: int
    digest: str


class _Sequences(Index):
    """The places of sequences, in memory: 16 bytes for each."""

    def __init__(self, layouts: Sequence[_Layout]) -> None:
        self._offsets = np.concatenate([layout.offsets for layout in layouts])
        self._lengths = np.concatenate([layout.num_tokens * layout.dtype.itemsize for layout in layouts])
        self._starts = np.cumsum([0, *(len(layout.offsets) for layout in layouts)], dtype=np.int64)
        self._digest = _digest(layouts)

    @property
    def starts(self) -> NDArray[np.int64]:
        return self._starts

    def __len__(self) -> int:
        return len(self._offsets)

    def ranges(self, indices: Indices) -> Ranges:
        file = np.searchsorted(self._starts, indices, side="right") - 1
        return Ranges(file, self._offsets[indices], self._lengths[indices])

    def describe(self) -> str:
        return f"Megatron's own, {self._offsets.nbytes + self._lengths.nbytes:,} bytes in memory ({self._digest})"


class _Ids(Decoder):
    """Sequences as arrays of token ids."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype

    @property
    def sample_spec(self) -> Any:
        return {"tokens": VARYING}

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        for row, payload in enumerate(payloads):
            ids = np.frombuffer(payload, self._dtype)
            out["tokens"][row] = loaded_array(ids, int(indices[row]), where=where(row), leaf="tokens")


def open_megatron(
    indexes: Files, *, sequence_length: int | None = None, remote: Remote | None = None
) -> RecordSource | FixedSource:
    """Opens what Megatron's tools wrote, on a disk or in an object store, by its indexes; the tokens lie beside them.

    **Arguments:** `indexes`: files `NAME.idx`, beside each of which lies `NAME.bin`. `sequence_length`: None for a
    sample `{"tokens": […]}` of varying length for each sequence (a document, mostly); else samples of so many tokens
    that do not overlap and go on over the borders of sequences. `remote`: how URLs are read.

    **Raises:** `FormatError` for an index that is damaged, or does not fit its tokens; `ArgumentError` for a
    `sequence_length` that is not positive.
    """
    if sequence_length is not None and sequence_length < 1:
        raise ArgumentError(f"sequence_length={sequence_length}: expected at least 1 token in a sample")
    tokens = open_files([_beside(name) for name in indexes.names], remote=remote)
    layouts = [
        _layout(indexes, number, tokens.names[number], tokens.sizes[number]) for number in range(len(indexes.names))
    ]
    dtype = layouts[0].dtype
    for layout, name in zip(layouts, indexes.names, strict=True):
        if layout.dtype != dtype:
            raise FormatError(
                f"{name}: says that its tokens are {layout.dtype}, expected {dtype} as in {indexes.names[0]}; open "
                "files of one kind together"
            )
    facts = {
        "format": f"Megatron indexed tokens, {dtype}",
        "documents": f"{sum(layout.num_documents for layout in layouts):,}",
        "sequences": f"{sum(len(layout.offsets) for layout in layouts):,} ({_digest(layouts)})",
    }
    if sequence_length is None:
        return RecordSource(tokens, _Sequences(layouts), _Ids(dtype), facts)
    runs = [
        Run(0, _in_a_row(layout, name) // sequence_length) for layout, name in zip(layouts, indexes.names, strict=True)
    ]
    if not any(run.num_records for run in runs):
        raise FormatError(
            f"{tokens.names[0]}: no file of {len(runs)} holds as many tokens of {dtype} as one sample of "
            f"sequence_length={sequence_length}; expected at least that many: choose a smaller sequence_length"
        )
    return FixedSource(tokens, runs, leaf="tokens", dtype=dtype, shape=(sequence_length,), facts=facts)


def _beside(name: str) -> str:
    if not name.endswith(_SUFFIX):
        raise FormatError(
            f"{name}: is an index of Megatron by its first bytes; expected a name that ends in {_SUFFIX}, with the "
            "tokens beside it in NAME.bin: rename both"
        )
    return f"{name.removesuffix(_SUFFIX)}.bin"


def _layout(indexes: Files, number: int, tokens: str, tokens_bytes: int) -> _Layout:
    """Reads an index, all of whose numbers are compared with the sizes of the two files."""
    name, size = indexes.names[number], indexes.sizes[number]
    data = indexes.read(Ranges(np.array([number]), np.zeros(1, np.int64), np.array([size])))[0]
    if size < _HEAD_BYTES or bytes(data[: len(MAGIC)]) != MAGIC:
        raise FormatError(
            f"{name}: {size:,} bytes that begin with {bytes(data[: len(MAGIC)])!r}, expected an index of Megatron, "
            f"{MAGIC!r} and a header of {_HEAD_BYTES} bytes in all; copy it again"
        )
    version, code, num_sequences, num_borders = _HEAD.unpack(data[len(MAGIC) : _HEAD_BYTES])
    if version != _VERSION or code not in _DTYPES:
        raise FormatError(
            f"{name}: has version {version} and dtype {code}; expected version {_VERSION} and one of the integers "
            f"{', '.join(map(str, _DTYPES))}: write it anew by Megatron's tools/preprocess_data.py"
        )
    told = _HEAD_BYTES + 12 * num_sequences + 8 * num_borders
    if size not in (told, told + num_sequences):
        raise FormatError(
            f"{name}: {num_sequences:,} sequences and {num_borders:,} borders of documents take {told:,} bytes, with "
            f"modes {told + num_sequences:,}; the file has {size:,}: copy it again"
        )
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(data, "<i4", num_sequences, _HEAD_BYTES).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", num_sequences, _HEAD_BYTES + 4 * num_sequences).astype(np.int64)
    last = tokens_bytes - lengths * dtype.itemsize  # an offset plus a length might overflow
    wrong = np.flatnonzero((lengths < 0) | (offsets < 0) | (offsets > last) | (offsets % dtype.itemsize != 0))
    if wrong.size:
        first = int(wrong[0])
        raise FormatError(
            f"{name}: sequence {first} is said to have {lengths[first]:,} tokens of {dtype} from byte "
            f"{offsets[first]:,} on, but {tokens} has {tokens_bytes:,} bytes; copy both files again"
        )
    return _Layout(dtype, offsets, lengths, max(0, num_borders - 1), xxhash.xxh3_64_hexdigest(data))


def _in_a_row(layout: _Layout, name: str) -> int:
    """Returns how many tokens there are, one sequence behind the other from the first byte on."""
    ends = np.cumsum(layout.num_tokens)
    begins = (ends - layout.num_tokens) * layout.dtype.itemsize
    wrong = np.flatnonzero(begins != layout.offsets)
    if wrong.size:
        first = int(wrong[0])
        raise FormatError(
            f"{name}: sequence {first} begins at byte {layout.offsets[first]:,}, and the ones before it end at "
            f"{begins[first]:,}; samples of sequence_length= tokens need sequences one behind the other: leave "
            "sequence_length out, and pack them with braidax.data.packed"
        )
    return int(ends[-1]) if len(ends) else 0


def _digest(layouts: Sequence[_Layout]) -> str:
    return xxhash.xxh3_64_hexdigest("".join(layout.digest for layout in layouts).encode())
