"""The schema of Arrow IPC files: one for all of them, which every record batch fits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from braidax.data.formats.tables.columns import Leaf
from braidax.data.formats.tables.ipc import Batch, Layout, read_layout
from braidax.data.formats.tables.nulls import masked
from braidax.data.formats.tables.tables import Counts, arrow, arrow_ipc, counts_of, leaves_of, refusing
from braidax.data.storage.mapped import Memory
from braidax.errors import FormatError


def opened(memory: Memory, columns: Sequence[str] | None) -> tuple[list[Layout], list[Leaf]]:
    """Reads the layouts of files whose batches all fit one schema, and what is read of them.

    **Arguments:** `columns`: names of columns or leaves, all when None. **Returns:** the layouts without empty batches,
    and the leaves, with masks of those that hold nulls; their lists have no lengths yet.

    **Raises:** `FormatError` for files that are damaged, differ in their columns, hold no record, or have columns of no
    use; `ArgumentError` for columns that are not there.
    """
    layouts = [read_layout(memory, file) for file in range(len(memory.names))]
    schema = _one_schema(memory, layouts)
    layouts = [_without_empty(layout) for layout in layouts]
    if not any(layout.batches for layout in layouts):
        raise FormatError(f"{memory.names[0]}: holds 0 records in {len(memory.names)} file(s); expected at least one")
    leaves = leaves_of(schema, columns, where=memory.names[0])
    nodes = np.any([batch.nodes[:, 1] for layout in layouts for batch in layout.batches], axis=0)
    in_dictionary = any(held.nodes[:, 1].any() for layout in layouts for held, _ in layout.dictionaries)

    def has_nulls(leaf: Leaf) -> bool:
        found = nodes[[leaf.value.node, *(level.node for level in leaf.levels)]].any()
        return bool(found) or (in_dictionary and not leaf.is_direct)  # which dictionary is whose, decoding tells

    return layouts, masked(leaves, has_nulls, where=memory.names[0])


def _without_empty(layout: Layout) -> Layout:
    kept = [batch for batch in layout.batches if batch.num_rows]
    if layout.dictionaries and len(kept) < len(layout.batches):
        before = np.cumsum([0, *(batch.num_rows > 0 for batch in layout.batches)])
        moved = [(values, int(before[number])) for values, number in layout.dictionaries]
        return Layout(layout.schema, kept, moved)
    return Layout(layout.schema, kept, layout.dictionaries)


class Schema(NamedTuple):
    """A schema of pyarrow, its columns in words, and what its batches have."""

    schema: Any
    columns: list[str]
    counts: Counts


def read_schema(message: bytes, name: str) -> Schema:
    """Reads the message of a schema. **Arguments:** `name`: of its file. **Raises:** `FormatError` if it is corrupt."""
    with refusing(lambda error: f"{name}: its schema is corrupt ({error}); write or copy the file again"):
        schema = arrow_ipc().read_schema(arrow().py_buffer(message))
        return Schema(schema, [f"{field.name}: {field.type}" for field in schema], counts_of(schema))


def _one_schema(memory: Memory, layouts: Sequence[Layout]) -> Any:
    """Returns the schema of all files, of which every batch has the nodes and buffers.

    **Raises:** `FormatError` for a file whose schema is corrupt or another, or whose batches do not fit it.
    """
    schemas: dict[bytes, Schema] = {}
    for name, layout in zip(memory.names, layouts, strict=True):
        if layout.schema not in schemas:
            schemas[layout.schema] = read_schema(layout.schema, name)
        first, found = next(iter(schemas.values())), schemas[layout.schema]
        if found.columns != first.columns:
            raise FormatError(
                f"{name}: its columns are {found.columns}, expected {first.columns} as in {memory.names[0]}; write the "
                "files with one schema"
            )
        for number, batch in enumerate(layout.batches):
            if not _fits(batch, found.counts):
                raise FormatError(
                    f"{name}: record batch {number} of {batch.num_rows} records has other columns, fields or buffers "
                    "than the schema says; the file is corrupt: write or copy it again"
                )
    return next(iter(schemas.values())).schema


def _fits(batch: Batch, counts: Counts) -> bool:
    if len(batch.nodes) != counts.nodes or counts.buffers not in (None, len(batch.buffers)):
        return False
    return bool((batch.nodes[counts.columns, 0] == batch.num_rows).all())
