"""Tables that are stored in blocks which can only be decoded whole: row groups of Parquet, compressed Arrow batches.

Blocks are kept in memory as far as they fit. Where all of them do, and leaves have one size a record, they are decoded
into arrays of the whole table, of which a window is one gather a leaf. Where the table is larger, a shuffled epoch
touches all blocks all the time; then a block that is decoded gives its records to every window that was announced by
`prepare`, so that each block is decoded once for all announced windows together, not once for every read.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.rows import Rows
from braidax.data.formats.tables.block_cache import BlockCache, DecodesInPlace, Group, InPlace, Whole, Window, Windows
from braidax.data.formats.tables.columns import Leaf, fill, flat_leaf
from braidax.data.leaves import Flat, Integers
from braidax.data.source import Indices, Source, check_indices
from braidax.data.storage.files import stamp_of_files
from braidax.errors import ArgumentError, RecordError

DEFAULT_CACHE_BYTES = 1 << 30


class Block(NamedTuple):
    """Where a block lies: its file, its number there, the first of its records in the file, how many, decoded bytes."""

    file: int
    number: int
    first_record: int
    num_rows: int
    num_bytes: int


@runtime_checkable
class Blocks(Protocol):
    """A table in blocks."""

    @property
    def names(self) -> Sequence[str]:
        """The files."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each file."""
        ...

    @property
    def stamps(self) -> Sequence[str]:
        """What becomes another when a file is written anew."""
        ...

    @property
    def blocks(self) -> Sequence[Block]:
        """All blocks, in order; none is empty."""
        ...

    @property
    def leaves(self) -> Sequence[Leaf]:
        """What is read of them."""
        ...

    def load(self, index: int) -> Any:
        """Returns the columns of a block as a table or a record batch of pyarrow. **Raises:** as `decode`."""
        ...

    def decode(self, index: int) -> Group:
        """Decodes a block on this thread. **Raises:** `FormatError` naming file and block."""
        ...

    def prepare(self, indices: Sequence[int]) -> None:
        """Says that these blocks will be decoded soon; returns at once."""
        ...


class BlockSource(Source):
    """Samples of a table in blocks.

    **Arguments:** `table`: the blocks. `cache_bytes`: for blocks that are being decoded, are read or are kept, and for
    announced windows: a thread that would need more waits for another. `what`: a block's name in the plural. `facts`:
    what `describe` shows besides.

    **Raises:** `ArgumentError` for a cache smaller than one block.
    """

    def __init__(self, table: Blocks, *, cache_bytes: int, what: str, facts: Mapping[str, str]) -> None:
        self._table = table
        self._integers: Integers = "loaded"
        self._narrow: Source | None = None  # whose files go when nothing holds it
        self._leaves = list(table.leaves)
        self._blocks = list(table.blocks)
        self._what = what
        self._facts = dict(facts)
        self._cache_bytes = cache_bytes
        self._starts = np.cumsum([0, *(block.num_rows for block in self._blocks)], dtype=np.int64)
        self._spec = {leaf.name: leaf.spec(table.names[0]) for leaf in self._leaves}
        block = max(self._blocks, key=lambda block: block.num_bytes)
        largest = block.num_bytes
        if cache_bytes < largest:
            raise ArgumentError(
                f"cache_bytes={cache_bytes:,}: the largest of the {what} takes {largest:,} bytes when decoded and "
                f"would be decoded anew for every read (number {block.number} of {table.names[block.file]}); give at "
                f"least that, or write the files with smaller {what}"
            )
        self._num_bytes = sum(block.num_bytes for block in self._blocks)
        self._fits = self._num_bytes <= cache_bytes
        self._windows = Windows(cache_bytes if self._fits else max(0, (cache_bytes - largest) // 2))
        is_sized = not any(leaf.is_varying for leaf in self._leaves)
        placing = table if self._fits and is_sized and isinstance(table, DecodesInPlace) else None
        is_whole = self._num_bytes + largest <= cache_bytes and is_sized and placing is None
        self._cache = BlockCache(cache_bytes - self._num_bytes if is_whole else cache_bytes, self._windows)
        sizes = [block.num_bytes for block in self._blocks]
        self._whole: Whole | InPlace | None = Whole(self._starts, sizes, self._cache) if is_whole else None
        if placing is not None:
            self._whole = InPlace(self._starts, placing, self._leaves)

    def __reduce__(self) -> tuple[Callable[..., "BlockSource"], tuple[Any, ...]]:
        return _source_again, (self._table, self._cache_bytes, self._what, self._facts, self._integers)

    def widened(self) -> "BlockSource":
        """Returns the same, of the same cache, with integers of 64 bits as they are stored."""
        found = copy.copy(self)
        found._integers, found._narrow = "stored", self
        found._leaves = [leaf.widened() for leaf in self._leaves]
        found._spec = {leaf.name: leaf.spec(self._table.names[0]) for leaf in found._leaves}
        return found

    @property
    def table(self) -> Blocks:
        """What it reads."""
        return self._table

    @property
    def sample_spec(self) -> Any:
        """A dict of `jax.ShapeDtypeStruct`, one per leaf."""
        return dict(self._spec)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def is_at_hand(self) -> bool:
        """Whether all of the table is decoded and kept, so that reads are mere copies."""
        return self._whole is not None and self._whole.is_complete

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns how the values of a leaf of varying size lie, as `Flattened`."""
        return flat_leaf(self._leaves, leaf)

    def read(self, indices: Indices, out: Any) -> None:
        """Reads records block by block: at hand first, then those to decode, then what others decode meanwhile."""
        check_indices(indices, len(self), where=f"{self._table.names[0]} ({len(self._table.names)} file(s))")
        if self._whole is not None:
            self._read_whole(self._whole, indices, out)
            return
        block_of = self._block_of(indices)
        order = np.argsort(block_of, kind="stable")
        blocks, first = np.unique(block_of[order], return_index=True)
        places = dict(zip(blocks.tolist(), np.split(order, first[1:]), strict=True)) if len(blocks) else {}
        for attempt in (self._at_hand, self._decoded_here, self._at_hand_or_decoded):
            for index in list(places):
                if attempt(index, indices, places[index], out):
                    del places[index]

    def prepare(self, indices: Indices) -> None:
        """Takes note of records that will be read soon, so that a block which is decoded for one serves them all."""
        if self._fits:
            return
        row_bytes = max(1, self._num_bytes // len(self))
        wanted = np.unique(indices[: self._windows.capacity_bytes // row_bytes])
        if not len(wanted):
            return
        block_of = self._block_of(wanted)
        blocks, first = np.unique(block_of, return_index=True)
        rows = np.split(wanted - self._starts[block_of], first[1:])
        self._windows.add(Window(dict(zip(blocks.tolist(), rows, strict=True)), len(wanted) * row_bytes))
        missing: list[int] = []
        for index in blocks.tolist():
            take = functools.partial(self._windows.take, index)  # before it gives way to others
            if not self._cache.use_kept(index, take):
                missing.append(index)
        self._table.prepare(missing)

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        return stamp_of_files(self._table, type(self).__name__, self.sample_spec, len(self), self._facts)

    def describe(self) -> Mapping[str, str]:
        """Returns format, files, samples, leaves, blocks, and what random access costs."""
        most = max(block.num_rows for block in self._blocks)
        return {
            **self._facts,
            "samples": f"{len(self):,}",
            "columns": ", ".join(leaf.name for leaf in self._leaves),
            self._what: f"{len(self._blocks):,} of at most {most:,} records",
            "random access": self._cost(),
        }

    def _cost(self) -> str:
        if self._fits:
            return f"every one of the {self._what} is decoded once and kept: {self._num_bytes:,} bytes"
        per_record = sum(block.num_rows * block.num_bytes for block in self._blocks) // len(self)
        return (
            f"up to {per_record:,} bytes are decoded for a record of a global shuffle, since the table's "
            f"{self._num_bytes:,} bytes exceed cache_bytes; raise it, write smaller {self._what}, or open the "
            "table with braidax.data.as_arrow, which converts it once"
        )

    def _read_whole(self, whole: Whole | InPlace, indices: Indices, out: Any) -> None:
        """Gathers records of all blocks at once, when theirs were decoded."""
        if not whole.is_complete:
            whole.bring(np.unique(self._block_of(indices)).tolist(), self._decode)
        if not len(indices):
            return
        try:
            for leaf in self._leaves:
                fill(
                    leaf, whole.columns[leaf.name], indices, out[leaf.name], records=indices, where=self._table.names[0]
                )
        except RecordError:
            block_of = self._block_of(indices)
            for index in np.unique(block_of).tolist():  # the record that raises is named by its file
                places = np.flatnonzero(block_of == index)
                self._fill(whole.group(index), index, indices[places] - self._starts[index], indices, places, out)
            raise

    def _block_of(self, indices: Indices) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, indices, side="right") - 1

    def _at_hand(self, index: int, indices: Indices, places: Indices, out: Any) -> bool:
        rows = indices[places] - self._starts[index]
        if self._cache.use_kept(index, lambda group: self._fill(group, index, rows, indices, places, out)):
            return True
        found = self._windows.find(index, rows)
        if found is not None:
            self._fill(found[0], index, found[1], indices, places, out)
        return found is not None

    def _decoded_here(self, index: int, indices: Indices, places: Indices, out: Any) -> bool:
        return self._decoded(index, indices, places, out, wait=False)

    def _decoded(self, index: int, indices: Indices, places: Indices, out: Any, *, wait: bool = True) -> bool:
        rows = indices[places] - self._starts[index]
        return self._cache.use_decoded(
            index,
            self._blocks[index].num_bytes,
            self._decode,
            lambda group: self._fill(group, index, rows, indices, places, out),
            wait=wait,
        )

    def _at_hand_or_decoded(self, index: int, indices: Indices, places: Indices, out: Any) -> bool:
        return self._at_hand(index, indices, places, out) or self._decoded(index, indices, places, out)

    def _fill(self, group: Group, index: int, rows: Indices, indices: Indices, places: Indices, out: Any) -> None:
        block = self._blocks[index]
        records = indices[places] - self._starts[index] + block.first_record
        whole = len(places) == len(indices)  # then the stable order is that of the window
        for leaf in self._leaves:
            target = out[leaf.name]
            where = self._table.names[block.file]
            put = functools.partial(fill, leaf, group[leaf.name], rows, records=records, where=where)
            if whole or isinstance(target, Rows):
                put(target if whole else target[places])
                continue
            part = np.empty((len(places), *target.shape[1:]), target.dtype)
            put(part)
            target[places] = part

    def _decode(self, index: int) -> Group:
        group = self._table.decode(index)
        self._windows.take(index, group)
        return group


def _source_again(
    table: Blocks, cache_bytes: int, what: str, facts: Mapping[str, str], integers: Integers
) -> BlockSource:
    """Makes a source in another process, with a cache of its own."""
    found = BlockSource(table, cache_bytes=cache_bytes, what=what, facts=facts)
    return found if integers == "loaded" else found.widened()
