"""Scans of files: each rank reads whole files where these are many, else its even part of the lines or of the rows.

A rank that reads whole files leaves it to Polars which of their row groups a filter needs. What small files alone give
each rank can compute for itself, so that nothing crosses between ranks for it.
"""

import glob
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.alone import on_one_rank
from braidax.frame.operators.reading.lines import lines_of, read_lines
from braidax.frame.plan.building import select, sliced
from braidax.frame.plan.expressions import calls_python, is_rowwise, is_scalar, kind_of
from braidax.frame.plan.locality import is_local
from braidax.frame.plan.nodes import Node, read, topological
from braidax.frame.plan.supplying import Reading, lazy_of, schema_of
from braidax.frame.polars import Schema, msgpack, pl
from braidax.frame.running import Runner, Table

_FILES_PER_RANK = 2  # of which there must be as many, so that whole files are an even part
_UNEVEN = 1.25  # how many bytes more than an even part a rank may read
_SMALL_BYTES = 1 << 20  # of files which every rank reads in full
_LITTLE_BYTES = 256 << 20  # of files, which a rank reads while several would tell one another what they do
_LARGE_BYTES = 32 << 20
_ALL_ROWS = ("Supplied", "Scan", "Select", "HStack", "MapFunction")  # that give as many rows as they read
_COPIED_JOINS = ("Inner", "Left", "Semi", "Anti")


@dataclass(frozen=True)
class Scanned:
    """What a scan reads.

    **Fields:** `files`, `sizes`: in order, in bytes; none if not known. `lines`: from where to where those of a file
    lie of which each rank reads its part; none for others.
    """

    files: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()

    def files_of(self, rank: int, size: int) -> tuple[str, ...] | None:
        """Returns the files of a rank, which follow those of the rank before; None where they are too few, or uneven.

        A file is read by the rank in whose even part of the bytes its middle lies.
        """
        total = sum(self.sizes)
        if len(self.files) < _FILES_PER_RANK * size or not total:
            return None
        parts: list[list[str]] = [[] for _ in range(size)]
        loads = [0] * size
        before = 0
        for file, num_bytes in zip(self.files, self.sizes, strict=True):
            owner = min((2 * before + num_bytes) * size // (2 * total), size - 1)
            parts[owner].append(file)
            loads[owner] += num_bytes
            before += num_bytes
        return tuple(parts[rank]) if all(parts) and max(loads) * size <= _UNEVEN * total else None


def survey(ranks: Ranks, root: Node) -> dict[Node, Scanned]:
    """Returns what the scans of a plan read: rank 0 looks, so that all ranks know the same."""
    scans = [node for node in topological(root) if _is_scan(node)]
    if not scans:
        return {}
    found = b""
    if ranks.rank == 0:
        looked = [_looked(node) for node in scans]
        found = msgpack.encode([[one.files, one.sizes, one.lines] for one in looked])
    told = msgpack.decode(ranks.from_first(found))
    return {node: Scanned(*map(tuple, fields)) for node, fields in zip(scans, told, strict=True)}


def scan(runner: Runner, node: Node, ordered: bool) -> Table:
    """Reads a rank's part of files."""
    scanned = runner.scans.get(node)
    if scanned is None:
        return on_one_rank(runner, node, ordered)
    if scanned.lines:
        return read_lines(runner, node, (scanned.lines[0], scanned.lines[1]))
    rank, size = runner.ranks.rank, runner.ranks.size
    files = scanned.files_of(rank, size)
    if files is not None:
        return Table(_of_files(node, files), ({},))
    counted = b"" if rank else msgpack.encode(_num_rows(node))
    num_rows = int(msgpack.decode(runner.ranks.from_first(counted)))
    begin, end = (num_rows * one // size for one in (rank, rank + 1))
    return Table(sliced(node, begin, end - begin), ({},))


def source_bytes(node: Node) -> float:
    """Returns the bytes of the files of a scan; infinity where they are not known."""
    sizes = _sizes(_files(node)) if node.kind == "Scan" else None
    return math.inf if sizes is None else float(sum(sizes))


def beginning(table: Table, num_rows: int) -> "pl.DataFrame | None":
    """Returns some of the rows here: what comes of the first rows of the largest table that is read for them.

    **Returns:** None where all rows are computed, and where a user's function would be called.
    """
    nodes = topological(table.node)
    if table.node.kind == "Supplied" or any(calls_python(node.fields) for node in nodes):
        return None
    readings = table.buckets[0]
    largest = max((node for node in nodes if not node.inputs), key=lambda node: _leaf_bytes(node, readings))
    return lazy_of(_replaced(table.node, largest, sliced(largest, 0, num_rows)), readings).collect()


def _leaf_bytes(leaf: Node, readings: Mapping[str, Reading]) -> float:
    if leaf.kind == "Supplied":
        return readings[leaf.fields["table"].name].num_bytes
    return source_bytes(leaf)


def _replaced(node: Node, leaf: Node, other: Node) -> Node:
    """Returns a plan with another node in place of a leaf."""
    return other if node is leaf else node.on(*(_replaced(source, leaf, other) for source in node.inputs))


def reads_little(root: Node, scans: Mapping[Node, Scanned]) -> bool:
    """Returns whether one rank computes a plan sooner than several could share it: few bytes, and no long work."""
    if _file_bytes(root, scans) > _LITTLE_BYTES:
        return False
    return not any(
        _may_take_long(node) or joins_large_tables(node, lambda leaf: _file_bytes(leaf, scans))
        for node in topological(root)
    )


def is_little(root: Node) -> bool:
    """Returns whether a plan `reads_little`, as the files look from here."""
    return reads_little(root, {node: _looked(node) for node in topological(root) if _is_scan(node)})


def _is_scan(node: Node) -> bool:
    return node.kind == "Scan" and not node.inputs


def _may_take_long(node: Node) -> bool:
    """Returns whether the bytes that a node reads do not tell what it takes: it calls Python, or joins all with all."""
    if calls_python(node.fields):
        return True
    if node.kind != "Join" or any(map(_gives_one_row, node.inputs)):
        return False
    condition = node.fields["condition"]
    return kind_of(condition) != "Equi" or not condition["Equi"]["left_on"]


def joins_large_tables(node: Node, num_bytes: Callable[[Node], float]) -> bool:
    """Returns whether a node joins all rows of two large tables, which goes faster in buckets that fit into caches.

    **Arguments:** `num_bytes`: of a leaf of the plan.
    """
    return node.kind == "Join" and all(
        all(one.kind in _ALL_ROWS for one in topological(source))
        and sum(num_bytes(leaf) for leaf in topological(source) if not leaf.inputs) >= _LARGE_BYTES
        for source in node.inputs
    )


def _gives_one_row(node: Node) -> bool:
    """Returns whether a node gives one row at most, as far as the plan tells."""
    if node.kind == "Select" and all(map(is_scalar, node.fields["expr"])):
        return True
    passes = is_local(node) and node.kind != "MapFunction"
    return (passes or node.kind == "Join") and bool(node.inputs) and all(map(_gives_one_row, node.inputs))


def copied(runner: Runner, node: Node) -> Table | None:
    """Returns what small files give, in full on each rank; None where a node reads anything else."""
    is_small = _file_bytes(node, runner.scans) <= _SMALL_BYTES
    return Table(node, ({},)) if is_small and all(map(_may_be_copied, topological(node))) else None


def _file_bytes(root: Node, scans: Mapping[Node, Scanned]) -> float:
    """Returns the bytes of all files that a plan reads; infinity where it reads what is not known."""
    leaves = [node for node in topological(root) if not node.inputs]
    known = all(node in scans and scans[node].files for node in leaves)
    return float(sum(sum(scans[node].sizes) for node in leaves)) if known else math.inf


def _may_be_copied(node: Node) -> bool:
    """Returns whether all ranks compute the same rows of the same input, in any order."""
    if calls_python(node.fields):
        return False
    if node.kind != "Join":
        return not node.inputs or is_local(node)
    args, condition = node.fields["options"]["args"], node.fields["condition"]
    if kind_of(condition) != "Equi" or kind_of(args["how"]) not in _COPIED_JOINS or args["slice"] is not None:
        return False
    return all(map(is_rowwise, [*condition["Equi"]["left_on"], *condition["Equi"]["right_on"]]))


def _looked(node: Node) -> Scanned:
    lines = lines_of(node)
    if lines is not None:
        return Scanned(lines=lines)
    files = _files(node)
    sizes = _sizes(files)
    return Scanned() if sizes is None else Scanned(tuple(files), tuple(sizes))


def _num_rows(node: Node) -> int:
    return int(lazy_of(select(node, ["Len"]), {}).collect().item())


def _files(node: Node) -> list[str]:
    """Returns the local files of a scan of Parquet whose parts mean the same alone; none for any other scan."""
    fields = node.fields
    args = fields["unified_scan_args"]
    sources = fields["sources"]
    alone = all(args[name] is None for name in ("row_index", "pre_slice", "deletion_files", "table_statistics"))
    if kind_of(fields["scan_type"]) != "Parquet" or kind_of(sources) != "Paths" or not alone:
        return []
    if args["hive_options"]["enabled"]:
        return []
    found: list[str] = []
    for source in sources["Paths"]:
        path = source["inner"]
        files = _expanded(path) if args["glob"] else [path]
        if not files:
            return []
        found += files
    return found


def _expanded(path: str) -> list[str]:
    """Returns the files of a path; none for a pattern that is more than stars in a name."""
    if not glob.has_magic(path):
        return [path]
    folder, pattern = os.path.split(path)
    if glob.has_magic(folder) or "**" in pattern or "?" in pattern or "[" in pattern or not Path(folder).is_dir():
        return []
    parts = pattern.split("*")
    found = [path for path in Path(folder).iterdir() if _fits(path.name, parts)]
    return sorted(map(str, found), key=os.fsencode)


def _fits(name: str, parts: Sequence[str]) -> bool:
    """Returns whether a name is these parts with anything between them."""
    first, *middle, last = parts
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    rest = name[len(first) : len(name) - len(last)]
    for part in middle:
        _, found, rest = rest.partition(part)
        if part and not found:
            return False
    return True


def _sizes(files: Sequence[str]) -> list[int] | None:
    """Returns the bytes of each file; None where one is none, which Polars then says."""
    found: list[int] = []
    for file in files:
        try:
            status = Path(file).stat()
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        found.append(status.st_size)
    return found or None


def _of_files(node: Node, files: Sequence[str]) -> Node:
    """Returns a scan of some of the files, with the columns of all."""
    args = {**node.fields["unified_scan_args"], "glob": False}
    options = dict(node.fields["scan_type"]["Parquet"]["options"])
    if options["schema"] is None:
        added = args["include_file_paths"]  # no column of the files
        own = {name: dtype for name, dtype in schema_of(node).items() if name != added}
        options["schema"] = _written_schema(pl.Schema(own))
    return node.but(
        sources={"Paths": [{"inner": file} for file in files]},
        unified_scan_args=args,
        scan_type={"Parquet": {"options": options}},
    )


def _written_schema(schema: Schema) -> Any:
    like, _ = read(pl.scan_parquet("x.parquet", schema=dict(schema)))
    return like.fields["scan_type"]["Parquet"]["options"]["schema"]
