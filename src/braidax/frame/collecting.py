"""Plans computed by ranks: by those of a gang, or by all who call at once."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from braidax.comm import Communicator
from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.alone import on_one_rank, spread_of_first
from braidax.frame.operators.grouping import group
from braidax.frame.operators.joining import join
from braidax.frame.operators.placing import check_hashes
from braidax.frame.operators.reading.scanning import joins_large_tables, reads_little, survey
from braidax.frame.operators.reading.scanning import scan as read_files
from braidax.frame.operators.selecting import filter_, select, stack
from braidax.frame.operators.sorting import sort
from braidax.frame.operators.stacking import beside, function, slice_, union
from braidax.frame.operators.uniqueness import distinct
from braidax.frame.plan.nodes import Node, read, read_bytes, supplied, topological
from braidax.frame.plan.pushdown import pushed_down
from braidax.frame.plan.supplying import Reading, bytes_of, lazy_of, schema_of
from braidax.frame.plan.ways import WHOLE_PLAN
from braidax.frame.polars import Schema, pl
from braidax.frame.replaying import MAX_REPLAYS, replayed
from braidax.frame.running import Rule, Runner, Table
from braidax.frame.sight.bar import Show, check_show, drawn
from braidax.frame.sight.measuring import UNMEASURED, Measured, Meter, Unmeasured
from braidax.frame.sight.profiled import Profile, profile_of
from braidax.frame.sight.telling import Watcher, metered, telling
from braidax.frame.spilling.memory import Memory
from braidax.frame.spilling.rules import RULES as SPILLING_RULES
from braidax.frame.spilling.running import Spilling
from braidax.frame.spilling.store import Spill
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


def collect(
    lazy_frame: "pl.LazyFrame",
    gang: Gang,
    *,
    memory: Memory | None = None,
    max_replays: int = MAX_REPLAYS,
    show: Show = "nothing",
) -> "pl.DataFrame":
    """Computes a plan of Polars by the ranks of a gang.

    When a rank is lost, another process takes its place, and the plan is computed again from its sources; functions of
    yours that it calls are called again, too. Each replay is a warning in the log of `braidax`.

    **Arguments:** `lazy_frame`: any. Its tables in memory go to the ranks in parts, its files the ranks read in parts.
    `gang`: of one or more ranks. `memory`: bounds what each rank takes; the result, which is brought here, comes on top
    of it. `max_replays`: how often it is computed again when a rank is lost. `show`: `"bar"` draws a bar for each
    operation on stderr while it is computed, where that is a terminal and it takes longer than a second.

    **Returns:** what `lazy_frame.collect()` does: the same rows, in the same order where Polars defines one.

    **Raises:** what Polars does for a plan that cannot be; `CallFailed` with the rank and its traceback for one that
    fails on its rows, which is not computed again; `PeerLost`, `GangError` when more ranks are lost; `ArgumentError`
    for plans of a Polars that is not known.
    """
    parts = replayed(gang, lambda: run(lazy_frame, gang, _on_rank, memory=memory, show=show), max_replays=max_replays)
    return pl.concat([part.frame for part in parts])


def keep(
    lazy_frame: "pl.LazyFrame", gang: Gang, name: str, memory: Memory | None = None, *, show: Show = "nothing"
) -> Schema:
    """Computes a plan as `collect` does, and leaves the rows on the ranks, under a name. **Returns:** the columns."""
    run(lazy_frame, gang, _on_rank, memory=memory, name=name, show=show)
    return gang.run(_schema, gang.kept(name))[0]


def profile(
    lazy_frame: "pl.LazyFrame",
    gang: Gang,
    *,
    memory: Memory | None = None,
    max_replays: int = MAX_REPLAYS,
    show: Show = "nothing",
) -> "tuple[pl.DataFrame, Profile]":
    """Computes a plan as `collect` does, and measures it: `explain` with what was.

    **Arguments:** as of `collect`.

    **Returns:** the table, and what each rank did for each operation: rows, bytes, seconds; of a plan that was computed
    again, the last time.

    **Raises:** as `collect`.
    """

    def measure() -> tuple[float, list[Any]]:
        return time.perf_counter(), run(lazy_frame, gang, _on_rank_measured, memory=memory, show=show)

    start, found = replayed(gang, measure, max_replays=max_replays)
    seconds = time.perf_counter() - start
    table = pl.concat([part.frame for part, _, _ in found])
    return table, profile_of(read_bytes(found[0][1]), [measured for _, _, measured in found], seconds)


def run(
    lazy_frame: "pl.LazyFrame",
    gang: Gang,
    function: Callable[..., Any],
    *arguments: Any,
    memory: Memory | None = None,
    name: str | None = None,
    show: Show = "nothing",
) -> list[Any]:
    """Lets ranks compute a plan: each gets the plan, and its parts of the tables in memory.

    **Arguments:** `function`: called on each rank with its communicator, the plan as bytes, `arguments`, `memory`, the
    `Watcher` or None, the tables that it keeps, and its parts of those in memory. `name`: under which it keeps what
    that returns. `show`: as of `collect`.
    """
    check_show(show)
    root, here = read(lazy_frame)
    schema_of(root)  # raises what Polars does
    tables = {node.fields["table"].name for node in topological(root) if node.kind == "Supplied"}
    kept = {table: gang.kept(table) for table in tables if table not in here}
    parts = [{table: _part(frame, rank, gang.size) for table, frame in here.items()} for rank in range(gang.size)]
    plan = bytes_of(root)
    with contextlib.ExitStack() as stack:
        watcher = None
        if show == "bar":
            watcher = stack.enter_context(drawn(gang.hosts))
        return gang.run(function, plan, *arguments, memory, watcher, kept, per_rank=parts, keep=name)


def collect_partition(
    lazy_frame: "pl.LazyFrame", comm: Communicator, *, memory: Memory | None = None
) -> "pl.DataFrame":
    """Computes a plan together with all other ranks, which call this with the same plan.

    **Arguments:** `lazy_frame`: any of Polars. Of tables in memory, which each rank has, it takes its part; files it
    reads in parts. `memory`: as of `collect`; the rows of this rank come on top of it.

    **Returns:** the rows of this rank. Those of all, one rank after the other, are what `lazy_frame.collect()` gives,
    in its order where Polars defines one.

    **Raises:** what Polars does; `CommError` when ranks cannot talk, or hash otherwise; `ArgumentError` for plans of a
    Polars that is not known.
    """
    root, tables = read(lazy_frame)
    schema_of(root)
    parts = {name: Partition(_part(frame, comm.rank, comm.size)) for name, frame in tables.items()}
    try:
        return _computed(root, parts, comm, memory).frame
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        comm.abort(f"a frame failed on rank {comm.rank}: {error}")  # the others may wait for its rows
        raise


def _part(frame: "pl.DataFrame", rank: int, size: int) -> "pl.DataFrame":
    """Returns the rows that are a rank's."""
    begin, end = (frame.height * one // size for one in (rank, rank + 1))
    return frame[begin:end]


def _on_rank(
    comm: Communicator,
    plan: bytes,
    memory: Memory | None,
    watcher: Watcher | None,
    kept: "Mapping[str, Partition]",
    parts: "Mapping[str, pl.DataFrame]",
) -> Partition:
    with metered(watcher, comm.rank) as meter:
        return _computed(read_bytes(plan), partitions(kept, parts), comm, memory, meter)


def partitions(kept: "Mapping[str, Partition]", parts: "Mapping[str, pl.DataFrame]") -> "dict[str, Partition]":
    """Returns what a rank has of the tables that a plan reads."""
    return {**kept, **{name: Partition(frame) for name, frame in parts.items()}}


def _on_rank_measured(
    comm: Communicator,
    plan: bytes,
    memory: Memory | None,
    watcher: Watcher | None,
    kept: "Mapping[str, Partition]",
    parts: "Mapping[str, pl.DataFrame]",
) -> tuple[Partition, bytes, Measured]:
    part, pushed, found = measured(read_bytes(plan), partitions(kept, parts), comm, memory, watcher)
    return part, bytes_of(pushed), found


def measured(
    root: Node,
    tables: Mapping[str, Partition],
    comm: Communicator,
    memory: Memory | None = None,
    watcher: Watcher | None = None,
) -> tuple[Partition, Node, Measured]:
    """Computes a plan together with all other ranks, as `collect_partition` does.

    **Returns:** what this rank has of the result, the plan as it was computed, and what this rank did.
    """
    meter = Meter()
    with telling(meter, watcher, comm.rank):
        part = _computed(root, tables, comm, memory, meter)
    return part, meter.root or root, meter.measured()


def _schema(comm: Communicator, part: Partition) -> Schema:
    del comm
    return part.frame.schema


def _computed(
    root: Node,
    tables: Mapping[str, Partition],
    comm: Communicator,
    memory: Memory | None,
    meter: Unmeasured = UNMEASURED,
) -> Partition:
    if memory is not None:
        return _bounded(pushed_down(root), tables, comm, memory, meter)
    return computed_by(Ranks(comm, meter=meter), root, tables)


def _bounded(
    root: Node, tables: Mapping[str, Partition], comm: Communicator, memory: Memory, meter: Unmeasured
) -> Partition:
    with begun(root, tables, comm, memory, meter=meter) as (spilling, table):
        return _partition(spilling.runner.computed(table), table.keys)


def computed_by(ranks: Ranks, root: Node, tables: Mapping[str, Partition]) -> Partition:
    """Returns what this rank has of the result of a plan; all others call this, too."""
    if ranks.size == 1 and not any(joins_large_tables(node, _bytes_in(tables)) for node in topological(root)):
        return _whole(root, tables, ranks)
    scans = survey(ranks, root)
    runner = Runner(ranks, _known(tables), scans, _RULES, on_one_rank)
    if ranks.size > 1 and reads_little(root, scans):
        return _of_first(runner, root)
    check_hashes(ranks)
    return _partition(*runner.collect(pushed_down(root)))


def _bytes_in(tables: Mapping[str, Partition]) -> Callable[[Node], float]:
    """Returns what tells the bytes of a leaf of a plan that are in memory."""
    return lambda leaf: tables[leaf.fields["table"].name].frame.estimated_size() if leaf.kind == "Supplied" else 0.0


def _of_first(runner: Runner, root: Node) -> Partition:
    """Returns this rank's part of what rank 0 computes as one piece."""
    meter = runner.ranks.meter
    meter.begins(root)
    with meter.operation(root):
        meter.alone(lambda: WHOLE_PLAN)
        table = spread_of_first(runner, lambda: meter.whole(root, lambda: lazy_of(root, {}).collect()))
    frame = runner.computed(table)
    meter.gave(root, table.node, frame)
    return _partition(frame, None)


def _whole(root: Node, tables: Mapping[str, Partition], ranks: Ranks) -> Partition:
    """Returns what one rank computes, as one piece."""
    readings = {name: Reading(part.frame) for name, part in tables.items()}
    ranks.meter.begins(root)
    return Partition(ranks.meter.whole(root, lambda: lazy_of(root, readings).collect()))


@contextlib.contextmanager
def begun(
    root: Node,
    tables: Mapping[str, Partition],
    comm: Communicator,
    memory: Memory,
    *,
    meter: Unmeasured = UNMEASURED,
) -> Generator[tuple[Spilling, Table]]:
    """Yields the result of a plan in bounded memory, which can be read until the block ends.

    **Raises:** as `collect_partition`; `ArgumentError` for a limit that is too small for so many ranks, and for a
    folder that takes no files; `OSError` for a disk that is full.
    """
    with Spill(memory, comm.size, meter) as spill:
        ranks = Ranks(comm, window_bytes=spill.budget.window_bytes, max_buckets=1, meter=meter)
        check_hashes(ranks)
        scans = survey(ranks, root)
        spilling = Spilling(spill, ranks, _known(tables), scans, _RULES, on_one_rank, bounded=SPILLING_RULES)
        yield spilling, spilling.runner.begin(root)


def _known(tables: Mapping[str, Partition]) -> dict[str, Table]:
    return {
        name: Table(supplied(name, part.frame.schema), ({name: Reading(part.frame)},), part.keys)
        for name, part in tables.items()
    }


def _partition(frame: "pl.DataFrame", keys: tuple[str, ...] | None) -> Partition:
    if len(set(frame.n_chunks("all"))) > 1:
        frame = frame.rechunk()  # Polars 2.1 does not come back from pickling columns that are cut in other ways
    return Partition(frame, keys)
