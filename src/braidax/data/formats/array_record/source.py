"""ArrayRecord files: records of chunks of their own are read by us, from any storage, all others by the library."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.array_record.chunks import chunk_places, record_contents
from braidax.data.formats.array_record.library import Library
from braidax.data.formats.records.contents import place_arrays, place_bytes
from braidax.data.formats.records.example import features
from braidax.data.formats.records.example_decoder import example_decoder
from braidax.data.formats.records.fields import Columns, readable, sampled_indices
from braidax.data.formats.records.records import Decoder
from braidax.data.source import VARYING, Indices, Source, check_indices, is_varying, listed, loader_dtype
from braidax.data.storage.files import Bytes, Files, Ranges, read_joined, stamp_of_files
from braidax.errors import ArgumentError, FormatError, RecordError
from braidax.spans import span

RECORD = "record"  # the leaf of a record as it is
_PARALLEL = 8  # files that are opened at a time
_ONLY_WHOLE = (
    "from a store records are read that were written with `group_size:1`, by zstd or uncompressed; write it so, or "
    "copy it to a disk, where the library of the format reads it"
)


class ArrayRecordSource(Source):
    """Samples of ArrayRecord files, in the order of the files.

    The places of all records are in memory as long as the source is, 8 bytes each. Of files that were written with
    `group_size:1`, records are read where they lie, in any storage, and compared with their checksums. Others are read
    by the library of the format: from local files, each group as a whole.

    **Arguments:** `files`: local or remote ones. `columns`: as `open_array_record`.

    **Raises:** `FormatError` for files that are truncated or no ArrayRecord files, or when there is no record at all;
    `ArgumentError` for remote files that only the library reads, and columns that are not there; `MissingExtra`.
    """

    def __init__(self, files: Files, columns: Columns | None) -> None:
        self._files = files
        self._columns = columns
        self._library = Library(files.names)
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-open") as pool:
            found = list(pool.map(self._places_of, range(len(files.names))))
        self._starts = np.cumsum([0, *(len(places) - 1 for places in found)], dtype=np.int64)
        self._places = np.concatenate(found) if found else np.zeros(0, np.int64)  # of each file one more than records
        if not len(self):
            raise FormatError(f"{files.names[0]}: holds 0 records in {len(files.names)} file(s); expected at least one")
        self._decoder = self._chosen_decoder()

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayRecordSource, (self._files, self._columns)

    @property
    def sample_spec(self) -> Any:
        """What the decoder makes of a record."""
        return self._decoder.sample_spec

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Indices, out: Any) -> None:
        """Reads the records of a window together, and decodes them into place."""
        check_indices(indices, len(self), where=f"{self._files.names[0]} ({len(self._files.names)} file(s))")
        payloads = self.payloads(indices)
        with span("decode", num_bytes=sum(map(len, payloads))):
            self._decoder.decode(payloads, indices, out, self.where(indices))

    def prepare(self, indices: Indices) -> None:
        """Asks the storage to fetch the bytes of these records ahead."""
        self._files.prepare(_with_bytes(self._ranges(indices[(indices >= 0) & (indices < len(self))])))

    def payloads(self, indices: Indices) -> list[Bytes]:
        """Returns the bytes of records, int64 `[n]`, that are known to be there."""
        ranges = self._ranges(indices)
        ours = _with_bytes(ranges)
        contents = iter(record_contents(read_joined(self._files, ours), ours.offset))
        found = [next(contents) if length else None for length in ranges.length.tolist()]
        left = [row for row, content in enumerate(found) if content is None]
        if left:
            self._read_by_library(indices, ranges.file, np.array(left), found)
        return cast("list[Bytes]", found)

    def where(self, indices: Indices) -> Callable[[int], str]:
        """Returns what names the file and the record of an element of `indices`, for errors."""

        def name(number: int) -> str:
            file = int(np.searchsorted(self._starts, indices[number], side="right")) - 1
            return f"{self._files.names[file]}, record {indices[number] - self._starts[file]}"

        return name

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        return stamp_of_files(self._files, type(self).__name__, self.sample_spec, len(self))

    def describe(self) -> Mapping[str, str]:
        """Returns format, files, samples and bytes."""
        return {
            "format": "ArrayRecord" + (" of tf.train.Example" if not isinstance(self._decoder, RawRecords) else ""),
            "files": listed([name.rpartition("/")[2] for name in self._files.names]),
            "samples": f"{len(self):,}",
            "bytes": f"{sum(self._files.sizes):,}",
        }

    def _places_of(self, file: int) -> NDArray[np.int64]:
        """Returns where the records of a file begin, and the last one ends: zeros, where only the library knows."""
        found = chunk_places(self._files, file)
        if found is not None:
            return found
        if "://" in (name := self._files.names[file]):
            raise ArgumentError(f"{name}: is no ArrayRecord file, a truncated one, or one of groups: {_ONLY_WHOLE}")
        return np.zeros(self._library.num_records(file) + 1, np.int64)

    def _ranges(self, indices: Indices) -> Ranges:
        file = np.searchsorted(self._starts, indices, side="right") - 1
        offset = self._places[indices + file]
        return Ranges(file, offset, self._places[indices + file + 1] - offset)

    def _read_by_library(
        self, indices: Indices, files: NDArray[np.int64], left: NDArray[np.intp], found: list[Bytes | None]
    ) -> None:
        """Reads what is left, the records of a file in one call and each once."""
        for file in cast("list[int]", np.unique(files[left]).tolist()):
            rows = left[files[left] == file]
            if "://" in self._files.names[file]:
                raise RecordError(f"{self.where(indices)(int(rows[0]))}: is corrupt, or in a group: {_ONLY_WHOLE}")
            places, inverse = np.unique(indices[rows] - self._starts[file], return_inverse=True)
            records = self._library.read(file, places.tolist())
            for row, place in zip(rows.tolist(), inverse.tolist(), strict=True):
                found[row] = records[place]

    def _chosen_decoder(self) -> Decoder:
        """Looks at some records, from the first to the last; those that cannot be read are left to their reads."""
        if self._columns is not None and list(self._columns) == [RECORD]:
            spec = self._columns[RECORD] if isinstance(self._columns, Mapping) else VARYING
            return RawRecords(spec, name=self._files.names[0])
        records = readable(
            lambda number: (number, *map(bytes, self.payloads(np.array([number])))),
            sampled_indices(len(self)).tolist(),
        )
        kept, found = [number for number, _ in records], [payload for _, payload in records]
        if self._columns is None and not all(map(_is_example, found)):
            return RawRecords()
        return example_decoder(found, self._columns, _whole, self.where(np.array(kept)), name=self._files.names[0])


class RawRecords(Decoder):
    """Makes samples of records as they are: the leaf `"record"`, of bytes or of arrays of one shape.

    **Arguments:** `spec`: of a record: `VARYING` for bytes. `name`: of the file, for errors.

    **Raises:** `ArgumentError` for a spec without a fixed shape; `FormatError` for a dtype that is none of JAX.
    """

    def __init__(self, spec: Any = VARYING, *, name: str = "") -> None:
        self._place, self._spec = place_bytes, VARYING
        if spec is None or (isinstance(spec, jax.ShapeDtypeStruct) and is_varying(spec)):
            return
        if not isinstance(spec, jax.ShapeDtypeStruct) or None in spec.shape:
            raise ArgumentError(
                f"columns={{{RECORD!r}: {spec!r}}}: expected braidax.data.VARYING, for bytes, or a "
                "jax.ShapeDtypeStruct with the shape of one record"
            )
        dtype = np.dtype(spec.dtype)
        self._spec = jax.ShapeDtypeStruct(spec.shape, loader_dtype(dtype, where=name, leaf=RECORD))
        self._place = place_arrays(dtype, name=name, leaf=RECORD)

    @property
    def sample_spec(self) -> Any:
        return {RECORD: self._spec}

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        self._place(payloads, indices, out[RECORD], where)


def open_array_record(files: Files, *, columns: Columns | None = None) -> ArrayRecordSource:
    """Opens ArrayRecord files: of tf.train.Example as `open_tfrecord` does, of others as samples `{"record": bytes}`.

    **Arguments:** `files`: local or remote ones. `columns`: features to read, in order, or what each of them holds (see
    `Columns`); by default all, where all records that are looked at are tf.train.Example. `["record"]` reads records as
    they are; `{"record": jax.ShapeDtypeStruct((32, 32, 3), "uint8")}` as arrays, whose bytes they are.

    **Raises:** as `ArrayRecordSource`.
    """
    return ArrayRecordSource(files, columns)


def _with_bytes(ranges: Ranges) -> Ranges:
    """Returns the ranges that the library is not needed for."""
    return ranges if ranges.length.all() else Ranges(*(part[ranges.length > 0] for part in ranges))


def _whole(payload: Bytes, where: Callable[[], str]) -> bytes:
    return bytes(payload)


def _is_example(record: bytes) -> bool:
    try:
        return bool(features(record))
    except ValueError:
        return False
