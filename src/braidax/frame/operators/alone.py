"""What cannot be spread: one rank computes it."""

import io
from collections.abc import Callable

from braidax.frame.plan.nodes import Node
from braidax.frame.plan.ways import WHOLE
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table


def on_one_rank(runner: Runner, node: Node, ordered: bool) -> Table:
    """Gathers all inputs on rank 0, which computes the node; the result is spread over the ranks again."""
    del ordered
    runner.ranks.meter.alone(lambda: WHOLE)
    gathered = [runner.ranks.gather(runner.computed(runner.run(source, ordered=True))) for source in node.inputs]
    return spread(runner, compute_first(runner, node, gathered))


def compute_first(runner: Runner, node: Node, inputs: "list[pl.DataFrame]") -> "pl.DataFrame":
    """Returns a node's result on rank 0, and no rows of the same columns elsewhere.

    **Arguments:** `inputs`: whole on rank 0.
    """

    def compute() -> "pl.DataFrame":
        whole = [runner.held(table.rechunk()) for table in inputs]  # some of Polars' functions panic on chunks
        return runner.computed(runner.local(node, *whole))

    return on_first(runner, compute)


def on_first(runner: Runner, compute: Callable[[], "pl.DataFrame"]) -> "pl.DataFrame":
    """Returns what a function gives on rank 0, which alone calls it, and no rows of the same columns elsewhere."""
    like = b""
    frame: pl.DataFrame | None = None
    if runner.ranks.rank == 0:
        frame = compute()
        like = _empty(frame)
    like = runner.ranks.from_first(like)
    return frame if frame is not None else pl.read_ipc_stream(io.BytesIO(like))


def spread(runner: Runner, frame: "pl.DataFrame") -> Table:
    """Returns rows of rank 0 spread evenly, in order."""
    total = int(runner.ranks.all([frame.height])[0, 0])
    return runner.held(runner.ranks.spread(frame, first=0 if runner.ranks.rank == 0 else total, total=total))


def _empty(frame: "pl.DataFrame") -> bytes:
    file = io.BytesIO()
    frame.clear().write_ipc_stream(file)
    return file.getvalue()
