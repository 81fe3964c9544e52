"""Arrow IPC files and streams: records gathered from the files as they are, or from decoded batches if compressed."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.rows import Target
from braidax.data.formats.tables.blocks import DEFAULT_CACHE_BYTES, Block, Blocks, BlockSource, Group
from braidax.data.formats.tables.columns import RAGGED, Leaf, flat_leaf, with_lengths
from braidax.data.formats.tables.direct import Direct, direct_leaf
from braidax.data.formats.tables.huggingface import is_huggingface, read_folder, selected
from braidax.data.formats.tables.ipc import Batch, Layout, Starts, inflated_bytes, read_layout
from braidax.data.formats.tables.schemas import opened, read_schema
from braidax.data.formats.tables.tables import (
    arrow,
    arrow_ipc,
    column_of,
    list_lengths,
    refusing,
    validated,
)
from braidax.data.leaves import Flat, Integers
from braidax.data.source import Box, Indices, Sliced, Source, check_indices, listed, widened
from braidax.data.storage import Files, LocalFiles
from braidax.data.storage.files import stamp_of_files
from braidax.data.storage.limits import refuse_larger
from braidax.data.storage.mapped import Fetched, Mapped, Memory
from braidax.errors import ArgumentError, FormatError, RecordError
from braidax.spans import span

SUFFIXES = frozenset({".arrow", ".feather", ".ipc"})


class ArrowSource(Source, Sliced):
    """Records gathered straight from the buffers of uncompressed batches, mapped into memory or fetched by ranges.

    **Arguments:** `memory`: holds the files. `layouts`: theirs; every batch holds records. `leaves`: what is read, with
    how it lies there. `facts`: what `describe` shows besides.
    """

    def __init__(
        self, memory: Memory, layouts: Sequence[Layout], leaves: Sequence[Direct], *, facts: Mapping[str, str]
    ) -> None:
        self._memory = memory
        self._integers: Integers = "loaded"
        self._narrow: Source | None = None  # whose files go when nothing holds it
        self._facts = dict(facts)
        rows = [[batch.num_rows for batch in layout.batches] for layout in layouts]
        self._batches = Starts([count for counts in rows for count in counts])
        self._files = np.cumsum([0, *(sum(counts) for counts in rows)], dtype=np.int64)
        self._take(leaves)

    def _take(self, leaves: Sequence[Direct]) -> None:
        from braidax.data.formats.tables.items import as_items  # not with `import braidax`

        self._leaves = list(leaves)
        self._items, self._others = as_items(self._memory, self._leaves)
        self._sorted = sorted(leaves, key=lambda direct: direct.leaf.name)  # as in a PyTree
        self._spec = {direct.leaf.name: direct.leaf.spec(self._memory.names[0]) for direct in self._leaves}

    def __reduce__(self) -> tuple[Callable[..., Source], tuple[Any, ...]]:
        return _source_again, (self._memory, list(self._spec), self._facts, self._integers)

    def widened(self) -> Source:
        """Returns the same with integers of 64 bits as they are stored."""
        found = copy.copy(self)
        found._integers, found._narrow = "stored", self
        found._take([widened(direct) for direct in self._leaves])
        return found

    @property
    def sample_spec(self) -> Any:
        """A dict of `jax.ShapeDtypeStruct`, one per leaf."""
        return dict(self._spec)

    def __len__(self) -> int:
        return int(self._files[-1])

    @property
    def cut_dims(self) -> Sequence[int]:
        """Of lists of numbers that have one length, their dims; of all else 0."""
        return [direct.cut_dims(self._memory) for direct in self._sorted]

    @property
    def is_at_hand(self) -> bool:
        """Whether reads are mere copies now, of leaves of varying size into rows, and wait for no disk."""
        return isinstance(self._memory, Mapped) and not self._memory.is_cold

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns how the values of a leaf of varying size lie, as `Flattened`."""
        return flat_leaf([direct.leaf for direct in self._leaves], leaf)

    def read(self, indices: Indices, out: Any) -> None:
        """Gathers records: one vectorized copy per leaf, however many batches and files they lie in."""
        batches, rows = self._located(indices)
        others = self._others
        if self._items is not None:
            try:
                self._items.read(batches, rows, out)
            except RecordError:
                others = self._leaves  # one of which names the file and the record
        self._read(indices, batches, rows, [(direct, None, out[direct.leaf.name]) for direct in others])

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[Target | None]) -> None:
        """Gathers parts of records likewise; leaves that are not wanted are not touched."""
        every = zip(self._sorted, boxes, out, strict=True)
        self._read(indices, *self._located(indices), [part for part in every if part[1] is not None])

    def prepare(self, indices: Indices) -> None:
        """Asks for the bytes of records ahead: of a local disk while it is what reads wait for, of a store always."""
        if isinstance(self._memory, Mapped) and not self._memory.is_cold:
            return
        batches, rows = self._batches.locate(indices)
        for direct in self._leaves:
            direct.prepare(self._memory, batches, rows)

    def prepare_slices(self, indices: Indices, boxes: Sequence[Box | None]) -> None:
        """Asks for the bytes of parts of records ahead."""
        batches, rows = self._batches.locate(indices)
        for direct, box in zip(self._sorted, boxes, strict=True):
            if box is not None:
                direct.prepare(self._memory, batches, rows, box)

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        return stamp_of_files(self._memory, type(self).__name__, self.sample_spec, len(self), self._facts)

    def describe(self) -> Mapping[str, str]:
        """Returns format, files, samples, columns and record batches."""
        kind = "memory-mapped" if isinstance(self._memory, Mapped) else "read by ranges"
        return {
            **self._facts,
            "samples": f"{len(self):,}",
            "columns": ", ".join(self._spec),
            "record batches": f"{len(self._batches):,}, not compressed: {kind}",
        }

    def _located(self, indices: Indices) -> tuple[Indices, Indices]:
        """Returns the batch of each record, and its number in the batch. **Raises:** as `check_indices`."""
        check_indices(indices, len(self), where=f"{self._memory.names[0]} ({len(self._memory.names)} file(s))")
        return self._batches.locate(indices)

    def _read(
        self,
        indices: Indices,
        batches: Indices,
        rows: Indices,
        parts: Sequence[tuple[Direct, Box | None, Target | None]],
    ) -> None:
        for direct, box, target in parts:
            assert target is not None, "a leaf that is wanted has a place"
            try:
                direct.read(self._memory, batches, rows, target, box=box, records=indices, where=self._memory.names[0])
            except RecordError:
                self._name_the_file(direct, box, batches, rows, target, indices)
                raise

    def _name_the_file(
        self,
        direct: Direct,
        box: Box | None,
        batches: Indices,
        rows: Indices,
        target: Any,
        indices: Indices,
    ) -> None:
        """Reads one record after another: the one that raises is named by its file and its number there."""
        file = np.searchsorted(self._files, indices, side="right") - 1
        for place in range(len(indices)):
            one = slice(place, place + 1)
            records, where = (indices - self._files[file])[one], self._memory.names[int(file[place])]
            direct.read(self._memory, batches[one], rows[one], target[one], box=box, records=records, where=where)


class ArrowTable(Blocks):
    """The record batches of Arrow IPC files as blocks that are decoded whole.

    **Arguments:** `memory`: holds the files. `layouts`: theirs. `leaves`: what is read, without lengths of lists.
    """

    def __init__(self, memory: Memory, layouts: Sequence[Layout], leaves: Sequence[Leaf]) -> None:
        self._memory = memory
        self._layouts = list(layouts)
        self._ipc = arrow_ipc()
        self._columns = sorted({leaf.column for leaf in leaves})
        self._batches = [batch for layout in layouts for batch in layout.batches]
        self._leaves = list(leaves)
        self._blocks = self._found_blocks()
        self._leaves = self._measured(leaves)
        self._blocks = self._found_blocks()

    def __reduce__(self) -> tuple[Callable[..., "ArrowTable"], tuple[Any, ...]]:
        return _table_again, (self._memory, [leaf.name for leaf in self._leaves])

    @property
    def names(self) -> Sequence[str]:
        return self._memory.names

    @property
    def sizes(self) -> Sequence[int]:
        return self._memory.sizes

    @property
    def stamps(self) -> Sequence[str]:
        return self._memory.stamps

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def leaves(self) -> Sequence[Leaf]:
        return self._leaves

    def decode(self, index: int) -> Group:
        block = self._blocks[index]
        with span("decode", "record batch", num_bytes=block.num_bytes):
            batch = self.load(index)
            return {leaf.name: column_of(batch.column(self._columns.index(leaf.column)), leaf) for leaf in self._leaves}

    def prepare(self, indices: Sequence[int]) -> None:
        batches = [self._batches[index] for index in indices]
        if batches:
            places, lengths = zip(*((batch.place, batch.num_bytes) for batch in batches), strict=True)
            self._memory.prepare(np.array(places), np.array(lengths))

    def load(self, index: int) -> Any:
        # pyarrow reads schema, dictionaries and batch as a stream of their own
        block, batch = self._blocks[index], self._batches[index]
        layout = self._layouts[block.file]
        wanted = [*(values for values, before in layout.dictionaries if before <= block.number), batch]
        places, lengths = zip(*((one.place, one.num_bytes) for one in wanted), strict=True)
        pieces = self._memory.slices(np.array(places), np.array(lengths))
        become = sum(inflated_bytes(one, piece) for one, piece in zip(wanted, pieces, strict=True))
        refuse_larger(f"{self.names[block.file]}, record batch {block.number}", become, sum(lengths))
        options = self._ipc.IpcReadOptions(included_fields=self._columns, use_threads=False)
        message = (
            f"{self.names[block.file]}: record batch {block.number} (records {block.first_record} to "
            f"{block.first_record + block.num_rows - 1}) is corrupt"
        )
        with (
            refusing(lambda error: f"{message} ({error}); write or copy the file again"),
            self._ipc.open_stream(b"".join([layout.schema, *pieces]), options=options) as reader,
        ):
            return validated(reader.read_next_batch())

    def _found_blocks(self) -> list[Block]:
        found: list[Block] = []
        for file, layout in enumerate(self._layouts):
            first_record = 0
            for number, batch in enumerate(layout.batches):
                num_bytes = sum(_decoded_bytes(batch, leaf) for leaf in self._leaves)
                found.append(Block(file, number, first_record, batch.num_rows, num_bytes))
                first_record += batch.num_rows
        return found

    def _measured(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Finds the lengths of lists: of one length are those that are so in the first batch, and in number in all."""
        if not any(level.kind == "list" for leaf in leaves for level in leaf.levels):
            return list(leaves)
        first, found = self.load(0), list[Leaf]()
        for leaf in leaves:
            lengths = list_lengths(first.column(self._columns.index(leaf.column)), leaf)
            measured = with_lengths(leaf, lengths, where=self.names[0])
            if lengths and not measured.is_varying and not all(_agrees(batch, measured) for batch in self._batches):
                measured = with_lengths(leaf, [RAGGED, *lengths[1:]], where=self.names[0])
            found.append(measured)
        return found


def arrow_contents(files: Files) -> list[tuple[int, list[str]]]:
    """Returns of each file how many records it has, and the names of its columns.

    **Raises:** `FormatError` for a file that is damaged.
    """
    memory = _memory_of(files)
    found: list[tuple[int, list[str]]] = []
    for file, name in enumerate(memory.names):
        layout = read_layout(memory, file)
        found.append(
            (sum(batch.num_rows for batch in layout.batches), list(read_schema(layout.schema, name).schema.names))
        )
    return found


def arrow_source(
    memory: Memory, *, columns: Sequence[str] | None, cache_bytes: int, facts: Mapping[str, str]
) -> Source:
    """Opens Arrow IPC files.

    **Arguments:** `memory`: holds them. `columns`: names of columns or leaves, all when None. `cache_bytes`: of decoded
    batches kept in memory, where the files are compressed. `facts`: what `describe` shows first.

    **Raises:** `FormatError` for files that are damaged, differ in their columns, or have columns of no use;
    `ArgumentError` for columns that are not there.
    """
    layouts, leaves = opened(memory, columns)
    facts = {**facts, "bytes": f"{sum(memory.sizes):,}"}
    batches = [batch for layout in layouts for batch in layout.batches]
    if all(leaf.is_direct for leaf in leaves) and not any(batch.is_compressed for batch in batches):
        found = [direct_leaf(memory, batches, leaf) for leaf in leaves]
        direct = [one for one in found if one is not None]
        if len(direct) == len(found):
            return ArrowSource(memory, layouts, direct, facts=facts)
    table = ArrowTable(memory, layouts, leaves)
    return BlockSource(table, cache_bytes=cache_bytes, what="record batches", facts=facts)


def _source_again(memory: Memory, columns: list[str], facts: Mapping[str, str], integers: Integers) -> Source:
    """Opens files in another process, where they are mapped to other places."""
    found = arrow_source(memory, columns=columns, cache_bytes=DEFAULT_CACHE_BYTES, facts=facts)
    return found if integers == "loaded" else widened(found)


def _table_again(memory: Memory, columns: list[str]) -> ArrowTable:
    return ArrowTable(memory, *opened(memory, columns))


def open_arrow(
    where: Path | Files,
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> Source:
    """Opens an Arrow IPC file or stream (`.arrow`, `.feather`), a folder of them, or files in an object store.

    **Arguments:** `where`: a path, or the files. `split`: of a folder that Hugging Face `datasets` wrote. `columns`:
    names of columns or leaves, all when None. `cache_bytes`: of decoded batches kept in memory, if they are compressed.

    **Raises:** `FormatError` and `ArgumentError` as `arrow_source`.
    """
    if isinstance(where, Path) and is_huggingface(where):
        return _open_huggingface(where, split, columns, cache_bytes)
    if split is not None:
        raise ArgumentError(f"split={split!r}: only folders that Hugging Face datasets wrote have splits; leave it out")
    memory = _memory_of(where)
    facts = {"format": "Arrow", "files": listed([name.rpartition("/")[2] for name in memory.names])}
    return arrow_source(memory, columns=columns, cache_bytes=cache_bytes, facts=facts)


def _memory_of(where: Path | Files) -> Memory:
    if isinstance(where, Path):
        return Mapped(arrow_files(where) if where.is_dir() else [where])
    return Mapped(where.names) if isinstance(where, LocalFiles) else Fetched(where)


def _open_huggingface(path: Path, split: str | None, columns: Sequence[str] | None, cache_bytes: int) -> Source:
    folder = read_folder(path, split)
    if not folder.files:
        raise FormatError(f"{path}: the dataset has no data files; expected at least one record")
    facts = {
        "format": "Hugging Face dataset" + (f", split {folder.split!r}" if folder.split else ""),
        "files": listed([file.name for file in folder.files]),
    }
    chosen = folder.columns if columns is None else columns
    source = arrow_source(Mapped(folder.files), columns=chosen, cache_bytes=cache_bytes, facts=facts)
    return selected(source, folder.indices[0], _rows(folder.indices)) if folder.indices else source


def _rows(indices: Sequence[Path]) -> NDArray[np.int64]:
    """Reads the indices mapping of a data set: one column, of the rows that it selects."""
    memory = Mapped(indices)
    table = ArrowTable(memory, *opened(memory, None))
    parts = [table.load(index).column(0) for index in range(len(table.blocks))]
    for block, part in zip(table.blocks, parts, strict=True):
        if not arrow().types.is_integer(part.type) or part.null_count:
            raise FormatError(
                f"{memory.names[block.file]}: the indices mapping holds {part.type} and {part.null_count} nulls; "
                "expected the numbers of rows: save the dataset again, with flatten_indices() before"
            )
    return np.concatenate([part.to_numpy().astype(np.int64) for part in parts])


def arrow_files(path: Path) -> list[Path]:
    """Returns the Arrow files of a folder, sorted by name."""
    return sorted(child for child in path.iterdir() if child.suffix in SUFFIXES and child.name[0] not in "._")


def _decoded_bytes(batch: Batch, leaf: Leaf) -> int:
    count = int(batch.nodes[leaf.value.node, 0]) if leaf.kind != "valid" else batch.num_rows
    if leaf.kind not in ("text", "bytes"):
        return count * leaf.value_bytes
    return batch.num_bytes  # how long the text is, only decoding tells


def _agrees(batch: Batch, leaf: Leaf) -> bool:
    """Says whether a batch holds as many values as lists of these lengths have, nulls aside."""
    count, lengths = batch.num_rows, iter(leaf.lengths)
    for level in leaf.levels:
        if level.kind != "struct":
            count -= int(batch.nodes[level.node, 1]) if level.kind == "list" else 0
            count *= level.length if level.kind == "fixed" else next(lengths)
    return count == int(batch.nodes[leaf.value.node, 0])
