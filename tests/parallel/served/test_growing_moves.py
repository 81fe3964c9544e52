"""Tables that grow on other servers than before: rows and counts go with their ids, and not a bit changes."""

import logging
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, CallFailed
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from braidax.parallel.rows import row_adagrad, row_optimizer
from braidax.parallel.served.on_servers.growing.seen_shard import SeenShard
from braidax.parallel.served.on_servers.server import TableServer
from braidax.parallel.served.wire import packed
from tests.support.parallel.models import copied, specs
from tests.support.parallel.served.losing import own_pid
from tests.support.parallel.served.models import init, loss, zipf_batches
from tests.support.parallel.served.resizing import NUM_STEPS, losses_of
from tests.support.parallel.served.seen import form_of

SEEN = bx.Seen(90)
SIZES = {3: 4, 7: 3, 10: 1}  # servers from a step on
SLOW = pytest.mark.slow
CASES: dict[str, tuple[bx.Seen, dict[str, Any]]] = {
    "counted and given up": (bx.Seen(400, admit_at=2, expire_after=4), {}),
    "all that were read": (bx.Seen(400), {}),
    "own rows": (bx.Seen(400, admit_at=2), {"own": row_adagrad(0.1)}),
    "late": (bx.Seen(400, expire_after=3), {"staleness": 1}),
    "disk": (bx.Seen(400, admit_at=2, expire_after=4), {"disk": "here"}),
    "two copies": (bx.Seen(400, admit_at=2, expire_after=5), {"copies": 2}),
}

FAST = ("disk",)


def make_step(gang: Any, seen: bx.Seen, *, own: Any = None, **served: Any) -> Any:
    served.setdefault("spares", 2)
    rows = {} if own is None else {"params/table": own}
    strategies = {"data": bx.Hybrid({"params/table": bx.Served(seen=seen, **served)}, row_optimizers=rows)}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    batch, optimizer = specs(zipf_batches(1)[0]), optax.adagrad(0.1)
    return bx.parallelize(loss, optimizer, mesh, strategies, init=init, batch=batch, servers=gang)


def trained(step: Any, before: Callable[[int], object] = lambda number: None, *, ahead: int = 2) -> list[Any]:
    """Trains, and returns losses, dense variables, and all that servers have of the table: rows, what is kept of them,
    when they were read last, and counts. **Arguments:** `before`: is told of each step."""
    state, losses = losses_of(step, before, ahead=ahead)
    lists = step.tables.checkpoint_state()["tables"]["table"]
    arrays = [(one.value, name) for which in ("rows", "counts") for name, one in sorted(lists[which].items())]
    assert len(arrays) > 5
    return [losses, *jax.tree.leaves(copied(state.params)), *(one for one, _ in arrays), *lists["shared"]]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[4]


@pytest.mark.parametrize("case", [name if name in FAST else pytest.param(name, marks=SLOW) for name in CASES])
def test_other_numbers_of_servers_change_no_bit(gang: LocalGang, case: str, tmp_path: Path) -> None:
    """2, 4, 3 and 1 of them; batches are prepared ahead over each change. On disk and in memory it is the same."""
    (seen, options), ahead = CASES[case], 1 if case == "late" else 2
    sizes = {**SIZES, 10: options.get("copies", 1)}
    with make_step(gang, seen, **{**options, "disk": None}) as step:
        expected = trained(step, ahead=ahead)
    if "disk" in options:
        options = {"disk": str(tmp_path)}
    with make_step(gang, seen, **options) as step:

        def change(number: int) -> None:
            if number == 5:  # of a table that grows nothing is copied ahead
                step.prepare_resize(sizes[7])
            if number in sizes:
                step.resize(sizes[number])

        found = trained(step, change, ahead=ahead)
        assert step._servers.num_servers == sizes[10]
    assert_equal(found, expected)


def evens(count: int) -> dict[str, np.ndarray]:
    """A batch whose ids are even."""
    ids = np.arange(0, 2 * count, 2, dtype=np.int32)
    return {"ids": np.resize(ids, 16), "target": np.ones(16, np.float32)}


def test_parts_without_room_are_refused_before_anything_moves(
    gang: LocalGang, caplog: pytest.LogCaptureFixture
) -> None:
    """11 even ids have room on one server of 20, and on two of 10 not; on three of 7 they do."""
    ends = list[Any]()
    with make_step(gang, bx.Seen(20), spares=3) as step:
        for is_resized in (False, True):
            state, batch = step.init(jax.random.key(0)), place(evens(11), step.batch_shardings)
            state, _ = step.update(state, batch)
            if is_resized:
                told = "they stay on 1 servers: .*table grows as seen, with capacity=20, and rows of 11 ids would be in"
                with pytest.raises(CallFailed, match=f"not moved to 2 servers, {told} part 0 of 2, where 10 have room"):
                    step.resize(2)
                with caplog.at_level(logging.WARNING, "braidax"):
                    step.resize(3)
                width = step._forms["table"].width
                bytes_moved = 7 * (2 * 8 + 4 * 2 * width)  # ids that are not 0 mod 3, with sums of squares
                assert re.findall(r"place of 1: ([\d,]+) bytes", caplog.text) == [f"{bytes_moved:,}"]
            state, metrics = step.update(state, batch)
            ends.append([float(metrics["loss"]), *step.seen_rows("table")])
    assert_equal(*ends)


def test_files_go_on_with_deltas(gang: LocalGang, tmp_path: Path) -> None:
    """A change of servers is no reason to write rows again that have not moved."""
    with make_step(gang, bx.Seen(400, expire_after=3)) as step:
        state = step.init(jax.random.key(0))
        for number, batch in enumerate(zipf_batches(6)):
            state, _ = step.update(state, place(batch, step.batch_shardings))
            if number == 3:
                step.resize(3)
            step.publish(tmp_path)
            found = bx.Published(tmp_path).seen["table"]
            ids, rows = step.seen_rows("table")
            np.testing.assert_array_equal(found.ids, ids)
            assert found.rows.tobytes() == rows.tobytes()
    kinds = [path.suffix for path in sorted(tmp_path.glob("tables-*"))]
    assert kinds == [".base", *[".delta"] * 5]


@SLOW
@pytest.mark.parametrize("seed", range(12))
def test_spare_servers_take_the_place_of_lost_ones(gang: LocalGang, seed: int) -> None:
    """Both servers with parts are lost, one after the other, behind steps that the seed draws."""
    drawn, seen = random.Random(seed), bx.Seen(400, admit_at=2, expire_after=5)
    with make_step(gang, seen) as step:
        expected = trained(step)
    steps, order = sorted(drawn.sample(range(1, NUM_STEPS - 3, 4), 2)), drawn.sample(range(2), 2)
    with LocalGang(4) as other:
        pids = other.run(own_pid)

        def kill(number: int) -> None:
            if number in steps:
                os.kill(pids[order[steps.index(number)]], signal.SIGKILL)

        with make_step(other, seen, copies=2) as step:
            found = trained(step, kill)
            assert {rank for ranks in step._servers._asking.having for rank in ranks} == {2, 3}
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", ["count seen", "copy seen"])
@pytest.mark.parametrize("of", [[3, 3], [-1, 2]])
def test_parts_that_cannot_be(kind: str, of: list[int]) -> None:
    server = TableServer(0, 1)
    server.shards["table"] = SeenShard(form_of(SEEN), 0, 1)
    with pytest.raises(ArgumentError, match=rf"of={re.escape(str(of))}: expected 0 <= part < parts"):
        server.handle(0, packed(kind, {"run": "", "table": "table", "which": "rows", "of": of, "start": 0, "stop": 9}))


def test_lists_that_are_none() -> None:
    """A server of another version: nothing of it is put."""
    shard = SeenShard(form_of(SEEN, row_adagrad(0.1)), 0, 1)
    whole = shard.listed("rows", 0, 200, 200)
    for other in (
        {name: one for name, one in whole.items() if name != "kept/0"},
        {**whole, "kept/0": whole["kept/0"].astype(np.float64)},
        {**whole, "ids": np.zeros(1, np.int64)},
    ):
        with pytest.raises(ArgumentError, match=r"rows of table came as .*, expected as many of each of"):
            shard.check_list("rows", other)
    moving = SeenShard(form_of(SEEN, row_optimizer(optax.adamw(0.1))), 0, 1)
    state = moving.state()
    for ids in ([1], [0, 0]):
        told = {**state, "changes/ids": np.array(ids)}
        with pytest.raises(ArgumentError, match=rf"changes {re.escape(str(ids))} of what moves table came as"):
            moving.follow(told, 3)
