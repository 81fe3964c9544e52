"""Sources whose samples are records: ranges of bytes in files, found through an index and made into leaves."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from braidax.data.formats.records.index import Index
from braidax.data.leaves import Flat, flat_of
from braidax.data.source import Indices, Source, check_indices, listed, widened
from braidax.data.storage.files import Bytes, Files, Joined, read_joined, stamp_of_files
from braidax.data.storage.local import LocalFiles
from braidax.errors import FormatError
from braidax.spans import span


@runtime_checkable
class Decoder(Protocol):
    """Makes samples of the bytes of records."""

    @property
    def sample_spec(self) -> Any:
        """The shape and dtype of every leaf of one sample, as `Source.sample_spec`."""
        ...

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        """Makes samples of records, in place; called from many threads at once.

        **Arguments:** `payloads`: the bytes of each record; they may be a view of a larger buffer and are not to be
        kept. `indices`: int64 `[n]`, the numbers of the records in the source. `out`: as `Source.read` gets it.
        `where`: names the file and the record of the payload with a number, for errors.

        **Raises:** `RecordError` for a record that cannot be decoded.
        """
        ...


@runtime_checkable
class WindowDecoder(Decoder, Protocol):
    """A decoder that makes samples of a whole window at once."""

    def decode_joined(self, records: Joined, indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        """Makes samples of records that lie in one piece of memory, as `decode`."""
        ...


class RecordSource(Source):
    """Samples that are ranges of bytes in files, local or remote.

    **Arguments:** `files`: local or remote ones. `index`: where the records lie. `decoder`: makes samples of them.
    `facts`: what `describe` shows first, beginning with `"format"`.

    **Raises:** `FormatError` when there is no record at all.
    """

    def __init__(self, files: Files, index: Index, decoder: Decoder, facts: Mapping[str, str]) -> None:
        if len(index) == 0:
            raise FormatError(f"{files.names[0]}: holds 0 records in {len(files.names)} file(s); expected at least one")
        self._files = files
        self._index = index
        self._decoder = decoder
        self._decodes = "windows" if isinstance(decoder, WindowDecoder) else "records"
        self._facts = dict(facts)
        self._narrow: Source | None = None  # whose files go when nothing holds it

    @property
    def sample_spec(self) -> Any:
        """What the decoder makes of a record."""
        return self._decoder.sample_spec

    def __len__(self) -> int:
        return len(self._index)

    def widened(self) -> "RecordSource":
        """Returns the same records with integers of 64 bits as they are stored."""
        found = copy.copy(self)
        found._decoder, found._narrow = widened(self._decoder), self
        return found

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns how the decoder holds the values of a leaf, as `Flattened`."""
        return flat_of(self._decoder, leaf)

    def read(self, indices: Indices, out: Any) -> None:
        """Reads the records of a window together, and decodes them into place."""
        check_indices(indices, len(self), where=f"{self._files.names[0]} ({len(self._files.names)} file(s))")
        if not len(indices):
            return
        ranges = self._index.ranges(indices)

        def where(number: int) -> str:
            file = int(ranges.file[number])
            record = int(indices[number] - self._index.starts[file])
            return f"{self._files.names[file]}, record {record} (at byte {int(ranges.offset[number]):,})"

        if self._decodes == "windows":
            records = read_joined(self._files, ranges)
            with span("decode", num_bytes=len(records.data)):
                cast(WindowDecoder, self._decoder).decode_joined(records, indices, out, where)
            return
        payloads = self._files.read(ranges)
        with span("decode", num_bytes=int(ranges.length.sum())):
            self._decoder.decode(payloads, indices, out, where)

    def prepare(self, indices: Indices) -> None:
        """Asks the storage to fetch the bytes of these records ahead."""
        if isinstance(self._files, LocalFiles) and not self._files.is_cold:
            return  # then there is no need to look up where they lie
        inside = indices[(indices >= 0) & (indices < len(self))]
        self._files.prepare(self._index.ranges(inside))

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        return stamp_of_files(self._files, type(self).__name__, self.sample_spec, len(self), self._facts)

    def describe(self) -> Mapping[str, str]:
        """Returns format, files, samples, bytes and index."""
        return {
            **self._facts,
            "files": listed([name.rpartition("/")[2] for name in self._files.names]),
            "samples": f"{len(self):,}",
            "bytes": f"{sum(self._files.sizes):,}",
            "index": self._index.describe(),
        }
