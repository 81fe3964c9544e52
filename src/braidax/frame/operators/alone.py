"""What cannot be spread: one rank computes it."""

import io
from collections.abc import Callable

from braidax.frame.plan.nodes import Node
from braidax.frame.plan.ways import WHOLE
from braidax.frame.polars import msgpack, pl
from braidax.frame.running import Runner, Table


def on_one_rank(runner: Runner, node: Node, ordered: bool) -> Table:
    """Gathers all inputs on rank 0, which computes the node; the result is spread over the ranks again."""
    del ordered
    runner.ranks.meter.alone(lambda: WHOLE)
    gathered = [runner.ranks.gather(runner.computed(runner.run(source, ordered=True))) for source in node.inputs]
    return compute_alone(runner, node, gathered)


def compute_alone(runner: Runner, node: Node, inputs: "list[pl.DataFrame]") -> Table:
    """Returns a node's result, which rank 0 computes, spread over the ranks. **Arguments:** as of `compute_first`."""
    return spread_of_first(runner, lambda: _computed(runner, node, inputs))


def spread_of_first(runner: Runner, compute: "Callable[[], pl.DataFrame]") -> Table:
    """Returns rows that rank 0 alone computes, spread evenly over all ranks, in order."""
    frame, total = _on_first(runner, compute)
    return runner.held(runner.ranks.spread(frame, first=0 if runner.ranks.rank == 0 else total, total=total))


def compute_first(runner: Runner, node: Node, inputs: "list[pl.DataFrame]") -> "pl.DataFrame":
    """Returns a node's result on rank 0, and no rows of the same columns elsewhere.

    **Arguments:** `inputs`: whole on rank 0.
    """
    return _on_first(runner, lambda: _computed(runner, node, inputs))[0]


def _computed(runner: Runner, node: Node, inputs: "list[pl.DataFrame]") -> "pl.DataFrame":
    whole = [runner.held(table.rechunk()) for table in inputs]  # some of Polars' functions panic on chunks
    return runner.computed(runner.local(node, *whole))


def _on_first(runner: Runner, compute: "Callable[[], pl.DataFrame]") -> "tuple[pl.DataFrame, int]":
    """Returns what a function gives on rank 0, which alone calls it, no rows elsewhere; and how many rows there are."""
    if runner.ranks.rank == 0:
        frame = compute()
        runner.ranks.from_first(msgpack.encode([_empty(frame), frame.height]))
        return frame, frame.height
    like, num_rows = msgpack.decode(runner.ranks.from_first(b""))
    return pl.read_ipc_stream(io.BytesIO(like)), int(num_rows)


def _empty(frame: "pl.DataFrame") -> bytes:
    file = io.BytesIO()
    frame.clear().write_ipc_stream(file)
    return file.getvalue()
