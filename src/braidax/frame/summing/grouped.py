"""Groups of a plan that are computed here and not by Polars: those by one integer, of sums, counts and the like."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from braidax.frame.moving.threads import each
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.expressions import kind_of, polars_of
from braidax.frame.plan.nodes import Node, supplied, topological
from braidax.frame.plan.supplying import Reading, lazy_of, lazy_of_each
from braidax.frame.polars import pl
from braidax.frame.summing.groups import MAX_ROWS, compiled, groups_of
from braidax.frame.summing.parts import COUNT, KEY, Parts, parts_of

Tables = Mapping[str, Reading]


def with_groups(node: Node, buckets: Sequence[Tables], *, num_threads: int) -> tuple[Node, Sequence[Tables]]:
    """Returns a plan and what it reads, with tables in place of the group-bys that are computed here.

    A bucket is grouped by one thread, so that fewer of them than threads are left to Polars.

    **Arguments:** `buckets`: what the plan reads, of each part of the rows that is computed on its own.
    """
    if compiled() is None or len(buckets) < num_threads or any(one.is_streamed for one in buckets[0].values()):
        return node, buckets
    given = [dict(tables) for tables in buckets]
    made: dict[int, Node] = {}
    for one in topological(node):
        here = one.on(*(made[id(source)] for source in one.inputs))
        parts = parts_of(here)
        if parts is not None:
            name = f"{HIDDEN}groups-{len(made)}"
            frames = _computed(here, parts, given, num_threads)
            for tables, frame in zip(given, frames, strict=True):
                tables[name] = Reading(frame)
            here = supplied(name, frames[0].schema)
        made[id(one)] = here
    return made[id(node)], given


def _computed(node: Node, parts: Parts, buckets: Sequence[Tables], num_threads: int) -> "list[pl.DataFrame]":
    def computed(given: "tuple[Tables, Sequence[pl.DataFrame | pl.LazyFrame]]") -> "pl.DataFrame":
        tables, read = given
        found = summed(parts, [one.collect() if isinstance(one, pl.LazyFrame) else one for one in read])
        return lazy_of(node, tables).collect() if found is None else found

    read = [_read(one, buckets) for one in parts.read]
    return each(computed, zip(buckets, zip(*read, strict=True), strict=True), num_threads)


def _read(node: Node, buckets: Sequence[Tables]) -> "Iterable[pl.DataFrame | pl.LazyFrame]":
    """Yields what is read of a table of each bucket: columns as they lie in memory, if it is no more, else a plan."""
    (source,), wanted = node.inputs, [one["Alias"] for one in node.fields["expr"]]
    if source.kind != "Supplied" or any(kind_of(one) != "Column" for one, _ in wanted):
        return lazy_of_each(node, buckets)
    name, columns = source.fields["table"].name, [(one["Column"], to) for one, to in wanted]
    return (pl.DataFrame([tables[name].whole()[at].alias(to) for at, to in columns]) for tables in buckets)


def summed(parts: Parts, frames: "Sequence[pl.DataFrame]") -> "pl.DataFrame | None":
    """Returns the rows of a group-by.

    **Arguments:** `frames`: what it reads of its tables.

    **Returns:** in the order of their keys, where these are no much fewer than the numbers between them. None where
    something is null, or there are too many rows: that is Polars'.
    """
    if any(frame.height > MAX_ROWS or sum(frame.null_count().row(0)) for frame in frames):
        return None
    groups = groups_of([_numbers(frame[KEY]) for frame in frames])
    key = pl.Series(KEY, groups.keys).cast(parts.key)
    columns = [key.set_sorted() if groups.is_ascending else key]
    for part in parts.parts:
        if part.what == COUNT:
            columns.append(pl.Series(part.name, groups.sizes).cast(part.dtype))
            continue
        found = groups.combined(part.what, _numbers(frames[part.table][part.column]), part.table)
        columns.append(pl.Series(part.name, found).cast(part.dtype, wrap_numerical=True))
    return pl.DataFrame(columns).select([polars_of(one) for one in parts.results])


def _numbers(series: "pl.Series") -> NDArray[Any]:
    """Returns a column without nulls as int64 or float64, `[rows]`."""
    numbers = series if series.dtype == pl.Float64 else series.to_physical().cast(pl.Int64)
    return numbers.rechunk().to_numpy()
