"""How a loss reads its parameters, and the loss without those whose rows are fetched ahead of it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from braidax.parallel.compute.metrics import BATCH
from braidax.program import (
    LeafUses,
    Path,
    Program,
    RowProgram,
    find_batch_dims,
    find_uses,
    reads_argument,
    without_tables,
)

from .options import OutOfRange

LATE = "its ids are computed from parameters or by callbacks with effects, so that they are not known before"
"""Why the rows of a variable cannot be exchanged though it is read by rows only."""

_BATCH = {BATCH: 0}  # the dim of its samples


class RowReads(NamedTuple):
    """How a loss reads its parameters.

    **Fields:** `params`: PyTree of specs. `uses`: of each leaf. `sparse`: by name, of those whose rows can be fetched
    before the loss is computed. `shared`: by name, how many of their ids no dim of which is the batch.
    """

    params: Any
    uses: tuple[LeafUses, ...]
    sparse: Mapping[str, LeafUses]
    shared: Mapping[str, int]


def row_reads(
    program: Program, *, microbatches: int = 1, divided: Mapping[int, Sequence[int | None] | int] = _BATCH
) -> RowReads:
    """Finds out which parameters a traced loss reads by rows, and whether that can be done ahead.

    **Arguments:** `program`: of `(params, variables, key, batch)`, or of parameters and whatever else. `microbatches`:
    with several, ids may not depend on `variables`, which change from one to the next. `divided`: as of
    `find_batch_dims`.
    """
    uses = find_uses(program)
    sparse = {found.name: found for found in uses if found.verdict == "sparse"}
    while sparse:
        rows = without_tables(program, list(sparse.values()))
        late = {lookup.name for lookup in rows.lookups if lookup.late}
        if not late and microbatches > 1 and reads_argument(rows.ids, 1):
            late = set(sparse)
        if not late:
            break
        sparse = {name: found for name, found in sparse.items() if name not in late}
    dims = dims_of_ids(program, list(sparse.values()), divided)
    shared = {
        name: sum(use.rows.num_ids for use in found.uses if use.rows is not None and dims[use.path] is None)
        for name, found in sparse.items()
    }
    return RowReads(program.in_specs[0], uses, sparse, shared)


def without_rows(program: Program, tables: Sequence[LeafUses], out_of_range: OutOfRange) -> RowProgram:
    """Takes tables out of a traced loss; ids are laid flat sample by sample, so that none leaves its device."""
    leading = {path: dim or 0 for path, dim in dims_of_ids(program, tables, _BATCH).items()}
    return without_tables(
        program, tables, leading=leading, out_of_range="mark" if out_of_range == "raise" else "as read"
    )


def dims_of_ids(
    program: Program, tables: Sequence[LeafUses], divided: Mapping[int, Sequence[int | None] | int]
) -> dict[Path, int | None]:
    """Returns which dim of the ids of each use is the batch. **Arguments:** `divided`: as of `find_batch_dims`."""
    paths = [use.path for uses in tables for use in uses.uses]
    return {path: found[1] for path, found in find_batch_dims(program, paths, divided).items()}
