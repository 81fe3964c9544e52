"""ArrayRecord files, read by the library that defines them: many records in one call, without the GIL."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from braidax.data.formats.records.contents import place_arrays, place_bytes
from braidax.data.formats.records.example import features
from braidax.data.formats.records.example_decoder import example_decoder
from braidax.data.formats.records.fields import Columns, readable, sampled_indices
from braidax.data.formats.records.records import Decoder
from braidax.data.source import VARYING, Indices, Source, check_indices, is_varying, listed, loader_dtype
from braidax.data.storage.files import Bytes, Files, stamp_of_files
from braidax.errors import ArgumentError, FormatError, RecordError, import_extra
from braidax.spans import span

RECORD = "record"  # the leaf of a record as it is
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # for reads at random, in the thread that asks
_BUFFER_BYTES = 1 << 12  # it is read anew for each record: of a larger one most is copied for nothing
_PARALLEL = 8  # files that are opened at a time


class ArrayRecordSource(Source):
    """Samples of ArrayRecord files, in the order of the files.

    The places of all records of a file are in memory as long as the source is: 8 bytes for each group of records. Files
    written with `group_size:1` read fastest at random; of larger groups each is decompressed as a whole.

    **Arguments:** `files`: local ones. `columns`: as `open_array_record`.

    **Raises:** `FormatError` for files that are truncated or no ArrayRecord files, or when there is no record at all;
    `ArgumentError` for remote files, and columns that are not there; `MissingExtra`.
    """

    def __init__(self, files: Files, columns: Columns | None) -> None:
        if remote := [name for name in files.names if "://" in name]:
            raise ArgumentError(
                f"{remote[0]}: ArrayRecord files are read by a library that knows local files only; copy them to a disk"
            )
        self._module: Any = import_extra(
            "array_record.python.array_record_module", "array-record", purpose="reading ArrayRecord"
        )
        self._files = files
        self._columns = columns
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-open") as pool:
            self._readers = list(pool.map(self._open, files.names))
        weakref.finalize(self, _close, self._readers)
        self._states = [_state(name) for name in files.names]
        self._starts = np.cumsum([0, *(reader.num_records() for reader in self._readers)], dtype=np.int64)
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
        """Reads the records of a window, those of a file in one call and each once, and decodes them into place."""
        check_indices(indices, len(self), where=f"{self._files.names[0]} ({len(self._files.names)} file(s))")
        payloads = self.payloads(indices)
        with span("decode", num_bytes=sum(map(len, payloads))):
            self._decoder.decode(payloads, indices, out, self.where(indices))

    def payloads(self, indices: Indices) -> list[bytes]:
        """Returns the bytes of records, int64 `[n]`, that are known to be there."""
        wanted: list[int] = indices.tolist()
        if len(self._readers) == 1 and len(set(wanted)) == len(wanted):
            return self._read(0, wanted)
        found: list[bytes] = [b""] * len(indices)
        file_of = np.searchsorted(self._starts, indices, side="right") - 1
        for file in cast("list[int]", np.unique(file_of).tolist()):
            rows = np.flatnonzero(file_of == file)
            places, inverse = np.unique(indices[rows] - self._starts[file], return_inverse=True)
            records = self._read(file, places.tolist())
            for row, place in zip(rows.tolist(), inverse.tolist(), strict=True):
                found[row] = records[place]
        return found

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

    def _chosen_decoder(self) -> Decoder:
        """Looks at some records, from the first to the last; those that cannot be read are left to their reads."""
        if self._columns is not None and list(self._columns) == [RECORD]:
            spec = self._columns[RECORD] if isinstance(self._columns, Mapping) else VARYING
            return RawRecords(spec, name=self._files.names[0])
        records = readable(
            lambda number: (number, *self.payloads(np.array([number]))), sampled_indices(len(self)).tolist()
        )
        kept, found = [number for number, _ in records], [payload for _, payload in records]
        if self._columns is None and not all(map(_is_example, found)):
            return RawRecords()
        return example_decoder(found, self._columns, _whole, self.where(np.array(kept)), name=self._files.names[0])

    def _open(self, name: str) -> Any:
        reader = self._module.ArrayRecordReader(name, options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES)
        if not reader.ok():
            raise FormatError(
                f"{name}: is no ArrayRecord file, or a truncated one (the list of its records, at its end, cannot be "
                "read); copy or write it again"
            )
        return reader

    def _read(self, file: int, places: list[int]) -> list[bytes]:
        name = self._files.names[file]
        if _state(name) != self._states[file]:
            raise FormatError(f"{name}: changed since it was opened, or is gone; open it again")
        try:
            return self._readers[file].read(places)
        except RuntimeError as error:
            for place in places:
                self._read_alone(file, place)
            raise RecordError(
                f"{name}: the records {places[:8]} cannot be read together, but each alone ({error}); check the disk"
            ) from error

    def _read_alone(self, file: int, place: int) -> None:
        """Raises `RecordError` for a record that cannot be read."""
        try:
            self._readers[file].read([place])
        except RuntimeError as error:
            raise RecordError(
                f"{self._files.names[file]}, record {place}: cannot be read ({error}); copy or write the file again"
            ) from error


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

    **Arguments:** `files`: local ones. `columns`: features to read, in order, or what each of them holds (see
    `Columns`); by default all, where all records that are looked at are tf.train.Example. `["record"]` reads records as
    they are; `{"record": jax.ShapeDtypeStruct((32, 32, 3), "uint8")}` as arrays, whose bytes they are.

    **Raises:** as `ArrayRecordSource`.
    """
    return ArrayRecordSource(files, columns)


def _whole(payload: Bytes, where: Callable[[], str]) -> bytes:
    return bytes(payload)


def _is_example(record: bytes) -> bool:
    try:
        return bool(features(record))
    except ValueError:
        return False


def _state(name: str) -> tuple[int, int, int] | None:
    try:
        state = Path(name).stat()
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


def _close(readers: list[Any]) -> None:
    for reader in readers:
        reader.close()
