"""The library that defines ArrayRecord: it reads groups of records, transposed ones, and says what is wrong."""

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braidax.errors import FormatError, RecordError, import_extra

_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # for reads at random, in the thread that asks
_BUFFER_BYTES = 1 << 12  # it is read anew for each record: of a larger one most is copied for nothing


class Library:
    """Local ArrayRecord files, each opened by the library when it is first needed.

    The places of all groups of such a file are in memory as long as this is: 8 bytes each.

    **Arguments:** `names`: paths.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._states = [_state(name) for name in names]
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._readers)

    def num_records(self, file: int) -> int:
        """Returns how many records a file holds.

        **Raises:** `FormatError` for a file that is no ArrayRecord file, or a truncated one; `MissingExtra`.
        """
        return int(self._reader(file).num_records())

    def read(self, file: int, places: list[int]) -> list[bytes]:
        """Returns records of a file, all in one call.

        **Raises:** as `num_records`; `FormatError` for a file that changed; `RecordError` for one that is corrupt.
        """
        name = self._names[file]
        if _state(name) != self._states[file]:
            raise FormatError(f"{name}: changed since it was opened, or is gone; open it again")
        try:
            return list(self._reader(file).read(places))
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
                f"{self._names[file]}, record {place}: cannot be read ({error}); copy or write the file again"
            ) from error

    def _reader(self, file: int) -> Any:
        found = self._readers.get(file)
        if found is None:
            opened = self._open(self._names[file])
            with self._lock:
                found = self._readers.setdefault(file, opened)
            if found is not opened:
                opened.close()
        return found

    def _open(self, name: str) -> Any:
        module: Any = import_extra(
            "array_record.python.array_record_module", "array-record", purpose="reading ArrayRecord"
        )
        reader = module.ArrayRecordReader(name, options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES)
        if not reader.ok():
            raise FormatError(
                f"{name}: is no ArrayRecord file, or a truncated one (the list of its records, at its end, cannot be "
                "read); copy or write it again"
            )
        return reader


def _state(name: str) -> tuple[int, int, int] | None:
    try:
        state = Path(name).stat()
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


def _close(readers: dict[int, Any]) -> None:
    for reader in readers.values():
        reader.close()
