"""Parquet files and folders of them: columns of numbers, text, bytes or lists, as leaves.

pyarrow can read a file's page index but has no way to read by it: the smallest thing that it decodes is a row group. So
row groups are decoded when a record of theirs is read, and shared as `blocks` says.
"""

import io
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from braidax.data.formats.tables.blocks import DEFAULT_CACHE_BYTES, Block, Blocks, BlockSource, Group
from braidax.data.formats.tables.columns import RAGGED, Leaf, with_lengths
from braidax.data.formats.tables.nulls import mask_of, masked
from braidax.data.formats.tables.pages import inflated_bytes
from braidax.data.formats.tables.tables import arrow_parquet, column_of, leaves_of, list_lengths, refusing
from braidax.data.source import listed
from braidax.data.storage import Files, LocalFiles, Ranges
from braidax.data.storage.files import Bytes
from braidax.data.storage.limits import refuse_larger
from braidax.errors import FormatError
from braidax.spans import span

MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"

_PROBED_ROWS = 1024  # records that say whether lists have one length
_SIGNATURE_BYTES = 28  # behind the footer of a file whose columns are encrypted: nonce and tag
_TAIL_BYTES = 1 << 16  # what is read first of a file's end: mostly the whole footer


class ParquetTable(Blocks):
    """The row groups of Parquet files.

    **Arguments:** `files`: in order. `columns`: names of columns or leaves, all when None.

    **Raises:** `FormatError` for files that are damaged, differ in their columns, or have columns of no use;
    `ArgumentError` for columns that are not there.
    """

    def __init__(self, files: Files, columns: Sequence[str] | None) -> None:
        self._files = files
        self._parquet = arrow_parquet()
        footers = [_footer(files, file) for file in range(len(files.names))]
        self._metadata = [metadata for metadata, _ in footers]
        schemas = [schema for _, schema in footers]
        if not any(metadata.num_rows for metadata in self._metadata):
            raise FormatError(f"{self.names[0]}: holds 0 records in {len(self.names)} file(s); expected at least one")
        self._schema = schemas[0]
        with refusing(lambda error: f"{self.names[0]}: its schema is corrupt ({error}); write or copy the file again"):
            first = self._metadata[0].schema
            self._paths = [first.column(number).path for number in range(len(first.names))]
        leaves = leaves_of(schemas[0], columns, where=self.names[0])
        self._columns = list(dict.fromkeys(schemas[0].names[leaf.column] for leaf in leaves))
        self._prefixes = tuple(f"{name}." for name in self._columns)
        self._check_schemas(schemas)
        self._leaves = leaves
        self._blocks = self._row_groups()
        self._leaves = self._found(leaves)
        self._blocks = self._row_groups()

    @property
    def names(self) -> Sequence[str]:
        return self._files.names

    @property
    def sizes(self) -> Sequence[int]:
        return self._files.sizes

    @property
    def stamps(self) -> Sequence[str]:
        return self._files.stamps

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def leaves(self) -> Sequence[Leaf]:
        return self._leaves

    def load(self, index: int) -> Any:
        block = self._blocks[index]
        with self._refusing(block), self._reader(index) as reader:
            table = reader.read_row_group(block.number, columns=self._columns, use_threads=False)
            table.validate()
            if table.num_rows != block.num_rows:
                raise ValueError(f"{table.num_rows:,} records in its pages")
            return table

    def decode(self, index: int) -> Group:
        with span("decode", "row group", num_bytes=self._blocks[index].num_bytes):
            table = self.load(index)
            return {leaf.name: column_of(table.column(self._name_of(leaf)), leaf) for leaf in self._leaves}

    def prepare(self, indices: Sequence[int]) -> None:
        if indices:
            chunks = [self._chunks(self._blocks[index]) for index in indices]
            self._files.prepare(Ranges(*(np.concatenate(field) for field in zip(*chunks, strict=True))))

    def _name_of(self, leaf: Leaf) -> str:
        return self._schema.names[leaf.column]

    def _check_schemas(self, schemas: Sequence[Any]) -> None:
        first = schemas[0]
        for path, schema in zip(self.names, schemas, strict=True):
            for name in self._columns:
                found = schema.field(name).type if name in schema.names else "missing"
                if found != first.field(name).type:
                    raise FormatError(
                        f"{path}: column {name!r} is {found}, expected {first.field(name).type} as in {self.names[0]}; "
                        "write the files with one schema"
                    )

    def _row_groups(self) -> list[Block]:
        found: list[Block] = []
        for file, metadata in enumerate(self._metadata):
            first_record = 0
            for number in range(metadata.num_row_groups):
                block = Block(file, number, first_record, metadata.row_group(number).num_rows, 0)
                with self._refusing(block):
                    num_bytes = self._checked_bytes(block)
                if block.num_rows:
                    found.append(block._replace(num_bytes=num_bytes))
                first_record += block.num_rows
            if first_record != metadata.num_rows:
                raise _miscounted(self.names[file], metadata.num_rows, first_record)
        return found

    def _checked_bytes(self, block: Block) -> int:
        """Returns the bytes of a row group when decoded, if it lies in its file."""
        group, ranges = self._metadata[block.file].row_group(block.number), self._chunks(block)
        ends = ranges.offset + ranges.length
        if block.num_rows < 0 or min(ranges.offset.min(), ranges.length.min()) < 0:
            raise ValueError(f"{block.num_rows:,} records cannot be, or lie before the file's beginning")
        if (ranges.length > self._files.sizes[block.file]).any() or ends.max() > self._files.sizes[block.file]:
            raise ValueError("a column lies behind the file's end")
        for number in range(group.num_columns):  # pyarrow ends the process when it is asked for such statistics
            stored, told = group.column(number).physical_type, self._metadata[block.file].schema.column(number)
            if stored != told.physical_type:
                raise ValueError(f"column {told.path!r} is {stored}, but its schema says {told.physical_type}")
        num_bytes = [self._decoded_bytes(group, leaf) for leaf in self._leaves]
        if min(num_bytes) < 0:
            raise ValueError("a column of fewer than 0 bytes cannot be")
        return sum(num_bytes)

    def _decoded_bytes(self, group: Any, leaf: Leaf) -> int:
        if leaf.kind == "valid":
            return group.num_rows
        chunk = self._chunk(group, leaf)
        if leaf.kind in ("text", "bytes"):
            return chunk.total_uncompressed_size + 8 * group.num_rows
        offsets = 8 * group.num_rows if leaf.is_varying else 0
        return offsets + chunk.num_values * leaf.value_bytes

    def _chunk(self, group: Any, leaf: Leaf) -> Any:
        """Returns a leaf's column chunk, by its path: another file may have the columns in another order."""
        path = self._paths[leaf.number]
        if leaf.number < group.num_columns and (chunk := group.column(leaf.number)).path_in_schema == path:
            return chunk
        for number in range(group.num_columns):
            chunk = group.column(number)
            if chunk.path_in_schema == path:
                return chunk
        raise ValueError(f"it has no column {path!r}")

    def _chunks(self, block: Block) -> Ranges:
        """Returns where the bytes of the columns of a row group are."""
        group = self._metadata[block.file].row_group(block.number)
        leaves = {leaf.number: leaf for leaf in self._leaves}  # a mask is read of what it masks
        chunks = [self._chunk(group, leaf) for leaf in leaves.values()]
        starts, lengths = zip(*(_place_of(chunk) for chunk in chunks), strict=True)
        return Ranges(np.full(len(chunks), block.file), np.array(starts), np.array(lengths))

    def _found(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Finds the lengths of lists, and which leaves have nulls: these get masks.

        Lists have one length if they do in the first records, and by number in all. Nulls are told by the statistics of
        the chunks, or, where these are missing or count empty lists too, by the first records.
        """
        is_list = {leaf.name: any(level.kind == "list" for level in leaf.levels) for leaf in leaves}
        told = {leaf.name: self._null_counts(leaf) for leaf in leaves}
        if not any(is_list.values()) and not any(None in counts for counts in told.values()):
            return masked(leaves, lambda leaf: any(told[leaf.name]), where=self.names[0])
        first = self._first_records()

        def has_nulls(leaf: Leaf) -> bool:
            if any(told[leaf.name]) and RAGGED not in leaf.lengths:
                return True
            return not column_of(first.column(self._name_of(leaf)), mask_of(leaf)).values.all()

        measured = [self._measured(leaf, first) if is_list[leaf.name] else leaf for leaf in leaves]
        return masked(measured, has_nulls, where=self.names[0])

    def _first_records(self) -> Any:
        """Returns a record batch of pyarrow."""
        block = self._blocks[0]
        with self._refusing(block), self._reader(0) as reader:
            batches = reader.iter_batches(
                _PROBED_ROWS, row_groups=[block.number], columns=self._columns, use_threads=False
            )
            first = next(batches, None)
            if first is None:
                raise ValueError("there is no record in it")
            first.validate()
        return first

    def _measured(self, leaf: Leaf, first: Any) -> Leaf:
        lengths = list_lengths(first.column(self._name_of(leaf)), leaf)
        measured = with_lengths(leaf, lengths, where=self.names[0])
        if measured.is_varying or self._agree(measured):
            return measured
        return with_lengths(leaf, [RAGGED, *lengths[1:]], where=self.names[0])

    def _null_counts(self, leaf: Leaf) -> list[int | None]:
        """Returns how many nulls each row group has, as its statistics say, or None where these do not."""
        chunks = [self._chunk(self._metadata[block.file].row_group(block.number), leaf) for block in self._blocks]
        return [None if chunk.statistics is None else chunk.statistics.null_count for chunk in chunks]

    def _agree(self, leaf: Leaf) -> bool:
        """Says whether every row group holds as many values as lists of these lengths have, nulls aside."""
        per_record = math.prod(leaf.dims)
        for block, nulls in zip(self._blocks, self._null_counts(leaf), strict=True):
            chunk = self._chunk(self._metadata[block.file].row_group(block.number), leaf)
            nulls = nulls or 0
            if chunk.num_values not in (block.num_rows * per_record, (block.num_rows - nulls) * per_record + nulls):
                return False
        return True

    def _reader(self, index: int) -> Any:
        block = self._blocks[index]
        segments = _Segments(self._files, self._chunks(block))
        self._limit(block, segments)
        return self._parquet.ParquetFile(
            segments, metadata=self._metadata[block.file], pre_buffer=False, page_checksum_verification=True
        )

    def _limit(self, block: Block, segments: "_Segments") -> None:
        """Raises `FormatError` for a row group whose pages become larger than they may."""
        group = self._metadata[block.file].row_group(block.number)
        inflated = stored = 0
        for number in range(group.num_columns):
            chunk = group.column(number)
            is_read = chunk.path_in_schema.startswith(self._prefixes) or chunk.path_in_schema in self._columns
            if is_read and chunk.compression != "UNCOMPRESSED":
                start, length = _place_of(chunk)
                inflated += inflated_bytes(segments.piece(start, start + length), chunk.num_values)
                stored += length
        refuse_larger(f"{self.names[block.file]}, row group {block.number}", inflated, stored)

    def _refusing(self, block: Block) -> AbstractContextManager[None]:
        return refusing(
            lambda error: (
                f"{self.names[block.file]}: row group {block.number} (records {block.first_record} to "
                f"{block.first_record + block.num_rows - 1}) is corrupt ({error}); write or copy the file again"
            )
        )


class _Segments(io.RawIOBase):
    """The bytes of a row group as a file that pyarrow reads: fetched together, at once."""

    def __init__(self, files: Files, ranges: Ranges) -> None:
        self._files = files
        self._file = int(ranges.file[0])
        self._starts: list[int] = ranges.offset.tolist()
        self._segments = [memoryview(segment) for segment in files.read(ranges)]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._files.sizes[self._file]}
        self._position = starts[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = self._position
        stop = self._files.sizes[self._file] if size < 0 else min(start + size, self._files.sizes[self._file])
        self._position = max(start, stop)
        return bytes(self.piece(start, self._position))

    def piece(self, start: int, stop: int) -> Bytes:
        """Returns some of the file's bytes, of those at hand without a copy."""
        for first, segment in zip(self._starts, self._segments, strict=True):
            if first <= start and stop <= first + len(segment):
                return segment[start - first : stop - first]
        return self._files.read(Ranges(np.array([self._file]), np.array([start]), np.array([stop - start])))[0]


def parquet_files(path: Path) -> list[Path]:
    """Returns the Parquet files of a folder, sorted by name."""
    return sorted(child for child in path.glob("*.parquet") if child.name[0] not in "._")


def parquet_contents(files: Files) -> list[tuple[int, list[str]]]:
    """Returns of each file how many records it has, and the names of its columns, by its footer.

    **Raises:** `FormatError` for a file that is damaged.
    """
    found: list[tuple[int, list[str]]] = []
    for file, name in enumerate(files.names):
        metadata, schema = _footer(files, file)
        counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
            raise _miscounted(name, metadata.num_rows, sum(counts))
        found.append((metadata.num_rows, list(schema.names)))
    return found


def open_parquet(
    where: Path | Files, *, columns: Sequence[str] | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
) -> BlockSource:
    """Opens a Parquet file, a folder of them in the order of their names, or files in an object store.

    **Arguments:** `where`: a path, or the files. `columns`: names of columns or leaves, all when None. `cache_bytes`:
    of decoded row groups kept in memory.

    **Raises:** `FormatError` and `ArgumentError` as `ParquetTable`.
    """
    if isinstance(where, Path):
        where = LocalFiles(parquet_files(where) if where.is_dir() else [where])
    facts = {
        "format": "Parquet",
        "files": listed([name.rpartition("/")[2] for name in where.names]),
        "bytes": f"{sum(where.sizes):,}",
    }
    return BlockSource(ParquetTable(where, columns), cache_bytes=cache_bytes, what="row groups", facts=facts)


def _place_of(chunk: Any) -> tuple[int, int]:
    """Returns the offset and the bytes of a column chunk."""
    start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
    return start, chunk.total_compressed_size


def _footer(files: Files, file: int) -> tuple[Any, Any]:
    """Returns the metadata and the schema of a file."""
    name, size = files.names[file], files.sizes[file]
    with refusing(
        lambda error: (
            f"{name}: {size:,} bytes that are no Parquet file, or a truncated one ({error}); write or copy it again"
        )
    ):
        tail = _read(files, file, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
        needed = 8 + int.from_bytes(tail[-8:-4], "little")
        if tail.endswith(ENCRYPTED_MAGIC):
            raise _encrypted(name)
        if not tail.endswith(MAGIC) or needed > size:
            raise OSError(f"it ends with {tail[-8:]!r}")
        if needed > len(tail):
            tail = _read(files, file, size - needed, needed)
        metadata = arrow_parquet().read_metadata(io.BytesIO(MAGIC + tail))
        if needed - 8 - metadata.serialized_size == _SIGNATURE_BYTES:
            raise _encrypted(name)
        return metadata, metadata.schema.to_arrow_schema()


def _encrypted(name: str) -> FormatError:
    return FormatError(
        f"{name}: columns or the footer of the Parquet file are encrypted, and there is no key for them here; "
        "decrypt it, and write it without encryption"
    )


def _miscounted(name: str, told: int, counted: int) -> FormatError:
    return FormatError(
        f"{name}: the footer speaks of {told:,} records, its row groups of {counted:,}; the file is corrupt: write or "
        "copy it again"
    )


def _read(files: Files, file: int, offset: int, length: int) -> bytes:
    return bytes(files.read(Ranges(np.array([file]), np.array([offset]), np.array([length])))[0])
