"""Plans computed by ranks: by those of a gang, or by all who call at once."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from braidax.comm import Communicator
from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.alone import on_first, on_one_rank, spread
from braidax.frame.operators.grouping import group
from braidax.frame.operators.joining import join
from braidax.frame.operators.placing import check_hashes
from braidax.frame.operators.scanning import reads_little, survey
from braidax.frame.operators.scanning import scan as read_files
from braidax.frame.operators.selecting import filter_, select, stack
from braidax.frame.operators.sorting import sort
from braidax.frame.operators.stacking import beside, function, slice_, union
from braidax.frame.operators.uniqueness import distinct
from braidax.frame.plan.nodes import Node, read, read_bytes, supplied, topological
from braidax.frame.plan.pushdown import pushed_down
from braidax.frame.plan.supplying import Reading, bytes_of, lazy_of, schema_of
from braidax.frame.polars import Schema, pl
from braidax.frame.replaying import MAX_REPLAYS, replayed
from braidax.frame.running import Rule, Runner, Table
from braidax.frame.sight.measuring import Measured, Meter
from braidax.frame.sight.profiled import Profile, profile_of
from braidax.gang import Gang

_RULES: Mapping[str, Rule] = {
    "Distinct": distinct,
    "Filter": filter_,
    "GroupBy": group,
    "HConcat": beside,
    "HStack": stack,
    "Join": join,
    "MapFunction": function,
    "Scan": read_files,
    "Select": select,
    "Slice": slice_,
    "Sort": sort,
    "Union": union,
}


@dataclass(frozen=True)
class Partition:
    """What a rank has of a table. **Fields:** `keys`: rows that are equal in these columns lie on one rank, or None."""

    frame: "pl.DataFrame"
    keys: tuple[str, ...] | None = None


def collect(lazy_frame: "pl.LazyFrame", gang: Gang, *, max_replays: int = MAX_REPLAYS) -> "pl.DataFrame":
    """Computes a plan of Polars by the ranks of a gang.

    When a rank is lost, another process takes its place, and the plan is computed again from its sources; functions of
    yours that it calls are called again, too. Each replay is a warning in the log of `braidax`.

    **Arguments:** `lazy_frame`: any. Its tables in memory go to the ranks in parts, its files the ranks read in parts.
    `gang`: of one or more ranks. `max_replays`: how often it is computed again when a rank is lost.

    **Returns:** what `lazy_frame.collect()` does: the same rows, in the same order where Polars defines one.

    **Raises:** what Polars does for a plan that cannot be; `CallFailed` with the rank and its traceback for one that
    fails on its rows, which is not computed again; `PeerLost`, `GangError` when more ranks are lost; `ArgumentError`
    for plans of a Polars that is not known.
    """
    parts = replayed(gang, lambda: _run(lazy_frame, gang), max_replays=max_replays)
    return pl.concat([part.frame for part in parts])


def keep(lazy_frame: "pl.LazyFrame", gang: Gang, name: str) -> Schema:
    """Computes a plan as `collect` does, and leaves the rows on the ranks, under a name. **Returns:** the columns."""
    _run(lazy_frame, gang, name)
    return gang.run(_schema, gang.kept(name))[0]


def _run(lazy_frame: "pl.LazyFrame", gang: Gang, name: str | None = None) -> list[Any]:
    """Lets ranks compute a plan: each gets the plan, and its parts of the tables in memory."""
    return _run_by(_on_rank, _as_it_is, lazy_frame, gang, name)[1]


def profile(
    lazy_frame: "pl.LazyFrame", gang: Gang, *, max_replays: int = MAX_REPLAYS
) -> "tuple[pl.DataFrame, Profile]":
    """Computes a plan as `collect` does, and measures it: `explain` with what was.

    **Arguments:** as of `collect`.

    **Returns:** the table, and what each rank did for each operation: rows, bytes, seconds; of a plan that was computed
    again, the last time.

    **Raises:** as `collect`.
    """

    def measure() -> tuple[float, bytes, list[Any]]:
        return time.perf_counter(), *_run_by(_on_rank_measured, pushed_down, lazy_frame, gang)

    start, plan, found = replayed(gang, measure, max_replays=max_replays)
    table = pl.concat([part.frame for part, _ in found])
    return table, profile_of(read_bytes(plan), [measured for _, measured in found], time.perf_counter() - start)


def _run_by(
    function: Callable[..., Any],
    push: Callable[[Node], Node],
    lazy_frame: "pl.LazyFrame",
    gang: Gang,
    name: str | None = None,
) -> tuple[bytes, list[Any]]:
    """Returns the plan as the ranks got it, and what `function` returned there."""
    root, memory = read(lazy_frame)
    schema_of(root)  # raises what Polars does
    tables = {node.fields["table"].name for node in topological(root) if node.kind == "Supplied"}
    kept = {table: gang.kept(table) for table in tables if table not in memory}
    parts = [{table: _part(frame, rank, gang.size) for table, frame in memory.items()} for rank in range(gang.size)]
    plan = bytes_of(push(root))
    return plan, gang.run(function, plan, kept, per_rank=parts, keep=name)


def collect_partition(lazy_frame: "pl.LazyFrame", comm: Communicator) -> "pl.DataFrame":
    """Computes a plan together with all other ranks, which call this with the same plan.

    **Arguments:** `lazy_frame`: any of Polars. Of tables in memory, which each rank has, it takes its part; files it
    reads in parts.

    **Returns:** the rows of this rank. Those of all, one rank after the other, are what `lazy_frame.collect()` gives,
    in its order where Polars defines one.

    **Raises:** what Polars does; `CommError` when ranks cannot talk, or hash otherwise; `ArgumentError` for plans of a
    Polars that is not known.
    """
    root, memory = read(lazy_frame)
    ranks = Ranks(comm)
    tables = {name: Partition(_part(frame, ranks.rank, ranks.size)) for name, frame in memory.items()}
    schema_of(root)
    try:
        return _computed(root, tables, ranks).frame
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        comm.abort(f"a frame failed on rank {comm.rank}: {error}")  # the others may wait for its rows
        raise


def _part(frame: "pl.DataFrame", rank: int, size: int) -> "pl.DataFrame":
    """Returns the rows that are a rank's."""
    begin, end = (frame.height * one // size for one in (rank, rank + 1))
    return frame[begin:end]


def _on_rank(
    comm: Communicator, plan: bytes, kept: "Mapping[str, Partition]", parts: "Mapping[str, pl.DataFrame]"
) -> Partition:
    tables = {**kept, **{name: Partition(frame) for name, frame in parts.items()}}
    return _computed(read_bytes(plan), tables, Ranks(comm))


def _on_rank_measured(
    comm: Communicator, plan: bytes, kept: "Mapping[str, Partition]", parts: "Mapping[str, pl.DataFrame]"
) -> tuple[Partition, Measured]:
    tables = {**kept, **{name: Partition(frame) for name, frame in parts.items()}}
    root = read_bytes(plan)
    meter = Meter(root)
    part = _computed(root, tables, Ranks(comm, meter=meter), push=_as_it_is)
    return part, meter.measured()


def _schema(comm: Communicator, part: Partition) -> Schema:
    del comm
    return part.frame.schema


def _as_it_is(root: Node) -> Node:
    """Returns the same plan: it is pushed down elsewhere."""
    return root


def _computed(
    root: Node, tables: Mapping[str, Partition], ranks: Ranks, *, push: Callable[[Node], Node] = pushed_down
) -> Partition:
    if ranks.size == 1:
        readings = {name: Reading(part.frame) for name, part in tables.items()}
        return Partition(ranks.meter.whole(root, lambda: lazy_of(root, readings).collect()))
    check_hashes(ranks)
    scans = survey(ranks, root)
    known = {
        name: Table(supplied(name, part.frame.schema), ({name: Reading(part.frame)},), part.keys)
        for name, part in tables.items()
    }
    runner = Runner(ranks, known, scans, _RULES, on_one_rank)
    if reads_little(root, scans):
        whole = on_first(runner, lambda: ranks.meter.whole(root, lambda: lazy_of(root, {}).collect()))
        frame, keys = runner.computed(spread(runner, whole)), None
    else:
        frame, keys = runner.collect(push(root))
    if len(set(frame.n_chunks("all"))) > 1:
        frame = frame.rechunk()  # Polars 2.1 does not come back from pickling columns that are cut in other ways
    return Partition(frame, keys)
