"""Scans of files: each rank reads its even part of the rows."""

from braidax.frame.operators.alone import on_one_rank
from braidax.frame.plan.building import select, sliced
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import lazy_of
from braidax.frame.running import Runner, Table


def scan(runner: Runner, node: Node, ordered: bool) -> Table:
    """Reads a rank's part of files; rank 0 counts the rows, which files tell that know it."""
    if node.inputs:
        return on_one_rank(runner, node, ordered)
    count = b""
    if runner.ranks.rank == 0:
        count = str(lazy_of(select(node, ["Len"]), {}).collect().item()).encode()
    total = int(runner.ranks.from_first(count))
    begin, end = (total * rank // runner.ranks.size for rank in (runner.ranks.rank, runner.ranks.rank + 1))
    return Table(sliced(node, begin, end - begin), ({},))
