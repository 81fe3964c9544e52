"""Records of one width, whose places are computed: npy and raw tokens, in files or in an object store."""

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import DTypeLike, NDArray

from braidax.data.formats.arrays.arrays import ArraySource
from braidax.data.formats.arrays.npy import HEAD_BYTES, npy_layout
from braidax.data.formats.arrays.record_layout import RecordLayout, read_boxes
from braidax.data.leaves import Integers
from braidax.data.source import Box, Indices, Sliced, Source, check_indices, gather, listed, loader_dtype
from braidax.data.storage.files import Files, Ranges, stamp_of_files
from braidax.data.storage.inflate import Inflated
from braidax.data.storage.local import LocalFiles
from braidax.data.storage.mapped import Fetched, Mapped, Memory
from braidax.errors import ArgumentError, FormatError

_TOKEN_HEAD_BYTES = 12

# The header of llm.c: 256 little-endian int32, of which the first three are magic, version and number of tokens.
HEADER_BYTES = 256 * 4
_HEADERS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}


class Run(NamedTuple):
    """The records of one file: where the first one begins, in bytes, and how many there are."""

    offset: int
    num_records: int


class FixedSource(Source, Sliced):
    """Samples that are records of one width, one behind the other in each file.

    Where a record lies is computed: nothing is read or stored before it is asked for.

    **Arguments:** `files`: local or inflated ones, which are mapped, or remote ones. `runs`: one for each file. `leaf`:
    its name. `dtype`, `shape`: of one record as stored. `facts`: what `describe` shows first.

    **Raises:** `FormatError` when there is no record at all, or for a dtype that JAX does not have.
    """

    def __init__(
        self,
        files: Files,
        runs: Sequence[Run],
        *,
        leaf: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        facts: Mapping[str, str],
    ) -> None:
        self._files = files
        held = files.contents if isinstance(files, Inflated) else files
        self._memory: Memory = Mapped(held.names) if isinstance(held, LocalFiles) else Fetched(held)
        self._runs = list(runs)
        self._leaf = leaf
        self._layout = RecordLayout(shape, dtype)
        self._origins = self._memory.origins + np.array([run.offset for run in runs], np.int64)
        self._starts = np.cumsum([0, *(run.num_records for run in runs)], dtype=np.int64)
        self._facts = dict(facts)
        self._where = f"{files.names[0]} ({len(files.names)} file(s))"
        if not len(self):
            raise FormatError(f"{self._where}: holds 0 samples; expected at least one")
        self._spec = jax.ShapeDtypeStruct(shape, loader_dtype(dtype, where=files.names[0], leaf=leaf))

        self._array = self._as_array()
        self._integers: Integers = "loaded"
        self._narrow: Source | None = None  # whose files go when nothing holds it

    def __reduce__(self) -> tuple[Any, ...]:
        given = {"leaf": self._leaf, **self._layout._asdict(), "facts": self._facts}
        return functools.partial(_source_again, **given), (self._files, self._runs, self._integers)

    def widened(self) -> "FixedSource":
        """Returns the same with integers of 64 bits as they are stored."""
        found = copy.copy(self)
        found._integers, found._narrow = "stored", self
        if self._layout.dtype.kind in "iu":
            found._spec = jax.ShapeDtypeStruct(self._spec.shape, self._layout.dtype.newbyteorder("="))
        return found

    @property
    def sample_spec(self) -> Any:
        """A dict with one leaf."""
        return {self._leaf: self._spec}

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def cut_dims(self) -> Sequence[int]:
        """All dims of the leaf; where ranges are fetched, those along which a cut saves fetching."""
        return [self._layout.cut_dims(gap_bytes=self._memory.gap_bytes)]

    @property
    def is_at_hand(self) -> bool:
        """Whether reads are mere copies now, and wait for no disk."""
        return isinstance(self._memory, Mapped) and not self._memory.is_cold

    def read(self, indices: Indices, out: Any) -> None:
        """Copies the records of a window: one vectorized gather, or one fetch of all their ranges."""
        array, memory = self._array, self._memory
        if array is not None and isinstance(memory, Mapped):
            check_indices(indices, len(self), where=self._where)
            num_bytes = np.int64(self._layout.num_bytes)
            with memory.reading_found(len(indices), lambda: [(self._places(indices), num_bytes)]):
                gather(array, indices, out[self._leaf], where=self._where, leaf=self._leaf)
            return
        self.read_slices(indices, [self._layout.whole], [out[self._leaf]])

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Copies parts of records likewise: no other bytes are asked for."""
        check_indices(indices, len(self), where=self._where)
        (box,), (target,) = boxes, out
        if box is None or target is None:
            return
        read_boxes(
            self._memory.gather,
            self._places(indices),
            box,
            target,
            layout=self._layout,
            records=indices,
            where=self._where,
            leaf=self._leaf,
        )

    def prepare(self, indices: Indices) -> None:
        """Asks the storage to fetch these records ahead."""
        self.prepare_slices(indices, [self._layout.whole])

    def prepare_slices(self, indices: Indices, boxes: Sequence[Box | None]) -> None:
        """Asks the storage to fetch parts of records ahead."""
        if self.is_at_hand:
            return
        inside, (box,) = indices[(indices >= 0) & (indices < len(self))], boxes
        if box is not None:
            runs = self._layout.runs(box)
            places = (self._places(inside)[:, None] + runs.offsets).reshape(-1)
            self._memory.prepare(places, np.full(len(places), runs.num_bytes, np.int64))

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        return stamp_of_files(self._files, type(self).__name__, self.sample_spec, len(self), self._facts)

    def describe(self) -> Mapping[str, str]:
        """Returns format, files, samples and bytes."""
        return {
            **self._facts,
            "files": listed([name.rpartition("/")[2] for name in self._files.names]),
            "samples": f"{len(self):,}",
            "bytes": f"{len(self) * self._layout.num_bytes:,}",
        }

    def _as_array(self) -> NDArray[Any] | None:
        """Returns all records as one array, where they lie in one file that is mapped."""
        if not isinstance(self._memory, Mapped) or len(self._runs) != 1:
            return None
        (run,), (shape, dtype) = self._runs, self._layout
        return np.ndarray((run.num_records, *shape), dtype, self._memory.array(0), run.offset)

    def _places(self, indices: Indices) -> Indices:
        file = np.searchsorted(self._starts, indices, side="right") - 1
        return self._origins[file] + (indices - self._starts[file]) * self._layout.num_bytes


def _source_again(files: Files, runs: Sequence[Run], integers: Integers, **given: Any) -> FixedSource:
    """Makes a source in another process."""
    found = FixedSource(files, runs, **given)
    return found if integers == "loaded" else found.widened()


def open_npy_files(files: Files) -> FixedSource:
    """Opens npy files of one dtype and shape, but for their number of samples, as the leaf `"data"`.

    **Raises:** `FormatError` for files that differ, are truncated, or in Fortran order.
    """
    layouts = [
        npy_layout(head, where=name, size=size)
        for head, name, size in zip(_heads(files, HEAD_BYTES), files.names, files.sizes, strict=True)
    ]
    first = layouts[0]
    for layout, name in zip(layouts, files.names, strict=True):
        if not layout.shape or (layout.fortran_order and len(layout.shape) > 1):
            raise FormatError(
                f"{name}: holds an array of shape {layout.shape}{' in Fortran order' if layout.fortran_order else ''}; "
                "expected samples one behind the other: save np.ascontiguousarray of an array [num_samples, ...]"
            )
        if layout.dtype != first.dtype or layout.shape[1:] != first.shape[1:]:
            raise FormatError(
                f"{name}: holds samples of {layout.dtype}{list(layout.shape[1:])}, expected "
                f"{first.dtype}{list(first.shape[1:])} as in {files.names[0]}; open files of one kind together"
            )
    runs = [Run(layout.offset, layout.shape[0]) for layout in layouts]
    return FixedSource(files, runs, leaf="data", dtype=first.dtype, shape=first.shape[1:], facts={"format": "npy"})


def has_header(head: bytes) -> bool:
    """Says whether a file's first bytes are a header of llm.c."""
    return len(head) >= 4 and int.from_bytes(head[:4], "little") in _HEADERS


def open_tokens(path: Path, *, sequence_length: int = 1024, dtype: DTypeLike | None = None) -> ArraySource:
    """Opens a file of token ids as samples `{"tokens": [sequence_length]}`.

    **Arguments:** `sequence_length`: tokens in one sample; what is left at the end of the file is not used, and
    `describe` says how much. `dtype`: of the stored ids; by default what the header says.

    **Raises:** `ArgumentError` for options that cannot work; `FormatError` for a file whose size does not fit.
    """
    if sequence_length < 1:
        raise ArgumentError(f"sequence_length={sequence_length}: expected at least 1 token in a sample")
    with path.open("rb") as file:
        head = file.read(12)
    stored, offset, num_tokens = token_layout(str(path), path.stat().st_size, head, dtype)
    num_samples, unused = divmod(num_tokens, sequence_length)
    if num_samples == 0:
        raise FormatError(
            f"{path}: holds {num_tokens:,} tokens of {stored}, fewer than one sample of sequence_length="
            f"{sequence_length}; expected at least that many: choose a smaller sequence_length"
        )
    mapped = Mapped([path])
    tokens: NDArray[Any] = np.ndarray((num_samples, sequence_length), stored, mapped.array(0), offset)
    facts = {
        "format": f"tokens, {stored}" + (", llm.c header" if offset else ""),
        "files": path.name,
        "tokens": f"{num_tokens:,}, of which the last {unused:,} are not used (sequence_length={sequence_length})",
    }
    return ArraySource({"tokens": tokens}, where=str(path), facts=facts, mapped=mapped)


def open_token_files(files: Files, *, sequence_length: int = 1024, dtype: DTypeLike | None = None) -> FixedSource:
    """Opens files of token ids as samples `{"tokens": [sequence_length]}`, none of which reaches from file to file.

    **Arguments:** as `open_tokens`. **Raises:** as `open_tokens`, and for files of different dtypes.
    """
    if sequence_length < 1:
        raise ArgumentError(f"sequence_length={sequence_length}: expected at least 1 token in a sample")
    layouts = [
        token_layout(name, size, head, dtype)
        for name, size, head in zip(files.names, files.sizes, _heads(files, _TOKEN_HEAD_BYTES), strict=True)
    ]
    stored = layouts[0][0]
    for (found, _, _), name in zip(layouts, files.names, strict=True):
        if found != stored:
            raise FormatError(
                f"{name}: holds tokens of {found}, expected {stored} as in {files.names[0]}; open files of one kind "
                "together"
            )
    runs = [Run(offset, num_tokens // sequence_length) for _, offset, num_tokens in layouts]
    num_tokens = sum(layout[2] for layout in layouts)
    unused = num_tokens - sum(run.num_records for run in runs) * sequence_length
    if not any(run.num_records for run in runs):
        raise FormatError(
            f"{files.names[0]}: no file of {len(runs)} holds as many tokens of {stored} as one sample of "
            f"sequence_length={sequence_length}; expected at least that many: choose a smaller sequence_length"
        )
    facts = {
        "format": f"tokens, {stored}" + (", llm.c header" if layouts[0][1] else ""),
        "tokens": f"{num_tokens:,}, of which {unused:,} at the ends of the files are not used "
        f"(sequence_length={sequence_length})",
    }
    return FixedSource(files, runs, leaf="tokens", dtype=stored, shape=(sequence_length,), facts=facts)


def token_layout(name: str, size: int, head: bytes, dtype: DTypeLike | None) -> tuple[np.dtype[Any], int, int]:
    """Returns how a file holds its tokens: their dtype, the offset of the first one in bytes, and their number.

    **Arguments:** `name`: the file, for errors. `size`: its bytes. `head`: its first 12 bytes. `dtype`: as
    `open_tokens`.

    **Raises:** as `open_tokens`.
    """
    offset = HEADER_BYTES if has_header(head) else 0
    stored = _stored_dtype(name, head, dtype)
    if (size - offset) % stored.itemsize or size < offset:
        raise FormatError(
            f"{name}: {size:,} bytes, of which {offset:,} are a header, are no whole number of {stored} tokens of "
            f"{stored.itemsize} bytes; it is truncated, or dtype= is another"
        )
    num_tokens = (size - offset) // stored.itemsize
    if offset and num_tokens != int.from_bytes(head[8:12], "little"):
        promised = int.from_bytes(head[8:12], "little")
        raise FormatError(
            f"{name}: the header promises {promised:,} tokens, the file holds {num_tokens:,}; copy it again"
        )
    return stored, offset, num_tokens


def _stored_dtype(name: str, head: bytes, dtype: DTypeLike | None) -> np.dtype[Any]:
    try:
        asked = None if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"dtype={dtype!r}: {error}; expected an integer dtype such as 'uint16'") from error
    if asked is not None and asked.kind not in "iu":
        raise ArgumentError(f"dtype={dtype!r}: expected an integer dtype such as 'uint16', tokens are ids")
    if not has_header(head):
        if asked is None:
            raise ArgumentError(
                f"{name}: holds tokens without a header, and nothing tells how they are stored; expected a dtype: "
                f"braidax.data.open_tokens({name!r}, dtype='uint16'), for one"
            )
        return asked
    if len(head) < 12:
        raise FormatError(f"{name}: truncated inside the header of {HEADER_BYTES} bytes; copy it again")
    magic, version = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:8], "little")
    known, stored = _HEADERS[magic]
    if version != known:
        raise FormatError(f"{name}: header {magic} has version {version}, expected {known}: this layout is not known")
    if asked is not None and asked != stored:
        raise ArgumentError(f"dtype={dtype!r}: the header of {name} says {stored}; leave dtype out")
    return stored


def _heads(files: Files, num_bytes: int) -> list[bytes]:
    sizes = np.array(files.sizes, np.int64)
    every = np.arange(len(sizes))
    heads = files.read(Ranges(every, np.zeros_like(every), np.minimum(sizes, num_bytes)))
    return [bytes(head) for head in heads]
