"""Servers that are added and removed while training: not a bit of what they have changes, and what fails is undone."""

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.comm import Communicator
from braidax.errors import ArgumentError, CallFailed, PeerLost
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from braidax.parallel.served.layouts.layout import Layout
from braidax.parallel.served.on_servers.holder import Holder
from braidax.parallel.served.on_servers.moving import progressions
from braidax.parallel.served.wire import packed
from tests.support.parallel.models import assert_close, copied
from tests.support.parallel.served.losing import assert_equal, own_pid
from tests.support.parallel.served.models import ROWS, WIDTH, zipf_batches
from tests.support.parallel.served.resizing import (
    CASES,
    OPTIMIZERS,
    make_step,
    trained,
    trained_while_one_is_killed,
    undisturbed,
)

SLOW = pytest.mark.slow
SIZES = {3: 4, 7: 3}  # servers from a step on


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[4]


@pytest.fixture(scope="module")
def expected(gang: LocalGang) -> Any:
    return undisturbed(gang)


FAST = ("two copies",)  # test_resizing_ahead.py has rows that lag behind


@pytest.mark.parametrize("case", [name if name in FAST else pytest.param(name, marks=SLOW) for name in CASES])
def test_other_numbers_of_servers_change_no_bit(gang: LocalGang, case: str, expected: Any, tmp_path: Path) -> None:
    """2, 4, 3 and 1 of them; batches are prepared ahead over each change."""
    options = {**CASES[case], **({"disk": str(tmp_path)} if case == "disk" else {})}
    optimizer, ahead = OPTIMIZERS.get(case, OPTIMIZERS["adagrad"]), 1 if case == "late" else 2
    sizes = {**SIZES, 10: options.get("copies", 1)}
    with make_step(gang, optimizer, **options) as step:
        if case not in ("adagrad", "two copies", "disk"):
            expected = trained(step, ahead=ahead)
        found = trained(step, lambda number: step.resize(sizes[number]) if number in sizes else None, ahead=ahead)
        assert step._servers.num_servers == sizes[10]
    if case == "clipped":  # the norm is a sum over servers
        assert_close(found, expected, atol=1e-6)
    else:
        assert_equal(found, expected)


def test_only_rows_that_move_travel(gang: LocalGang, caplog: pytest.LogCaptureFixture) -> None:
    """Half of them from 2 to 4, and back; a row has its values, the sums of squares, and its last step."""
    with make_step(gang, OPTIMIZERS["adagrad"]) as step, caplog.at_level(logging.WARNING, "braidax"):
        step.init(jax.random.key(0))
        table = step.table("table")
        for size in (4, 4, 2):
            step.resize(size)
            np.testing.assert_array_equal(step.table("table"), table)
    half = ROWS // 2 * (2 * 4 * WIDTH + 8)
    found = [re.findall(r"^(\d) servers have .* place of (\d): ([\d,]+) bytes", line) for line in caplog.messages]
    assert found == [[("4", "2", f"{half:,}")], [("2", "4", f"{half:,}")]]


def test_numbers_that_cannot_be(gang: LocalGang, unchecked: None) -> None:
    cases: tuple[Any, ...] = (0, 5, True, "3")
    with make_step(gang, OPTIMIZERS["adagrad"]) as step:
        for number in cases:
            words = f"num_servers={number!r}: expected a whole number of servers"
            if type(number) is int:
                words = f"num_servers={number}: expected 1 to 4, as Served has copies=1, and 4 of the gang's 4 ranks"
            with pytest.raises(ArgumentError, match=re.escape(words)):
                step.resize(number)


def test_fewer_servers_than_copies(gang: LocalGang) -> None:
    with make_step(gang, OPTIMIZERS["adagrad"], copies=2) as step:
        with pytest.raises(ArgumentError, match="num_servers=1: expected 2 to 4, as Served has copies=2"):
            step.resize(1)
        assert step._servers.num_servers == 2


def test_checkpoints_and_published_tables_behind_it(gang: LocalGang, tmp_path: Path) -> None:
    """A checkpoint restores to another number, and what is published is a delta with what has changed since."""
    with Checkpointer(tmp_path / "saved", Every(1)) as saver:
        with make_step(gang, OPTIMIZERS["adagrad"]) as step:
            placed = [place(batch, step.batch_shardings) for batch in zipf_batches(4)]
            state = step.init(jax.random.key(0))
            state, _ = step.update(state, placed[0])
            step.publish(tmp_path / "published")
            state, _ = step.update(state, placed[1])
            step.resize(3)
            state, _ = step.update(state, placed[2])
            step.publish(tmp_path / "published")
            found = bx.read_published(tmp_path / "published")
            np.testing.assert_array_equal(found["table"], step.table("table"))
            names = sorted(path.name for path in (tmp_path / "published").glob("tables-*"))
            assert names == ["tables-00000000.base", "tables-00000001.delta"]
            saver.update((state, step.tables))
            saver.wait()
            state, expected = step.update(state, placed[3])
            dense = copied(step.to_dense(state))
        with make_step(gang, OPTIMIZERS["adagrad"]) as step:
            step.resize(4)
            state, _ = saver.restore((step.state_specs, step.tables))
            state, metrics = step.update(state, placed[3])
            assert float(metrics["loss"]) == float(expected["loss"])
            for one, two in zip(jax.tree.leaves(copied(step.to_dense(state))), jax.tree.leaves(dense), strict=True):
                np.testing.assert_array_equal(one, two)


# What fails


def without_memory(comm: Communicator) -> None:
    """Lets the last rank have no memory for rows."""
    from braidax.parallel.served.on_servers import shard

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def zeros(self, *form: Any) -> Any:
            raise MemoryError

    if comm.rank == comm.size - 1:
        shard.np = Full()


def without_room(comm: Communicator) -> None:
    """Lets the last rank's disk be full."""
    from braidax.parallel.served.files import row_files

    found = os.statvfs(".")

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def statvfs(self, descriptor: int) -> Any:
            return os.statvfs_result((*found[:3], 0, 0, *found[5:]))

    if comm.rank == comm.size - 1:
        row_files.os = Full()


def as_they_were(comm: Communicator) -> None:
    """Lets a rank have memory and room again."""
    from braidax.parallel.served.files import row_files
    from braidax.parallel.served.on_servers import shard

    shard.np, row_files.os = np, os


@pytest.mark.parametrize(
    ("full", "words"),
    [
        (without_memory, "server 3 of 4 has no memory for its part of table, float32.*: give more servers"),
        pytest.param(
            without_room, "for table, float32.*, part 3 of 4: [\\d,]+ bytes are needed, and 0 are free", marks=SLOW
        ),
    ],
)
def test_a_server_without_room_changes_nothing(
    gang: LocalGang, full: Any, words: str, expected: Any, tmp_path: Path
) -> None:
    disk = str(tmp_path) if full is without_room else None
    gang.run(full)
    try:
        with make_step(gang, OPTIMIZERS["adagrad"], disk=disk) as step:

            def grow(number: int) -> None:
                if number in (2, 5):
                    with pytest.raises(CallFailed, match=f"not moved to 4 servers, they stay on 2 servers: .*{words}"):
                        step.resize(4)
                if number == 8:
                    step.resize(3)

            assert_equal(trained(step, grow), expected)
    finally:
        gang.run(as_they_were)


@SLOW
def test_without_copies_a_lost_part_ends_it() -> None:
    with LocalGang(3) as gang:
        pids = gang.run(own_pid)
        with make_step(gang, OPTIMIZERS["adagrad"], spares=1) as step:
            state = step.init(jax.random.key(0))
            step.resize(3)
            os.kill(pids[2], signal.SIGKILL)
            with pytest.raises(PeerLost, match="server 2 of 3 is lost, and its only copy of what it had"):
                for batch in zipf_batches(20):
                    state, _ = step.update(state, place(batch, step.batch_shardings))
                    step.finish()


@SLOW
def test_a_new_server_that_is_lost_changes_nothing(expected: Any) -> None:
    """Of three one is spare and dead: it gets nothing, and two go on; who is lost takes no place."""
    with LocalGang(3) as gang:
        pids = gang.run(own_pid)
        with make_step(gang, OPTIMIZERS["adagrad"], spares=1) as step:

            def grow(number: int) -> None:
                if number == 3:
                    os.kill(pids[2], signal.SIGKILL)
                    with pytest.raises((PeerLost, ArgumentError), match=r"stay on 2 servers|expected 1 to 2"):
                        step.resize(3)
                    with pytest.raises(
                        ArgumentError, match=r"expected 1 to 2, .* 2 of the gang's 3 ranks are not lost"
                    ):
                        step.resize(3)

            assert_equal(trained(step, grow), expected)


@SLOW
def test_a_server_that_has_no_rows_any_more_takes_the_place_of_a_lost_one(expected: Any) -> None:
    """Three of which two are left with rows; then one of these is lost, and the third has all again."""
    with LocalGang(3) as gang:
        pids = gang.run(own_pid)
        with make_step(gang, OPTIMIZERS["adagrad"], copies=2, spares=0) as step:

            def shrink(number: int) -> None:
                if number == 2:
                    step.resize(2)
                if number == 5:
                    os.kill(pids[0], signal.SIGKILL)

            found = trained(step, shrink)
            assert step._servers._asking.having == [[2, 1], [1, 2]]
    assert_equal(found, expected)


@pytest.mark.usefixtures("mended")
def test_a_server_that_is_lost_while_others_come_or_go(gang: LocalGang, expected: Any) -> None:
    assert_equal(trained_while_one_is_killed(gang, 0, (2, 6), {2: 3, 6: 2}), expected)


@SLOW
@pytest.mark.parametrize("seed", range(30))
def test_a_server_that_is_lost_at_any_moment(seed: int, expected: Any) -> None:
    """With copies: before, during and behind a change, whichever it is."""
    with LocalGang(5) as gang:
        assert_equal(trained_while_one_is_killed(gang, seed, (2, 6), {2: 4, 6: 3}), expected)


# Where rows go


@pytest.mark.parametrize("former", range(1, 7))
@pytest.mark.parametrize("parts", range(1, 7))
def test_each_row_comes_from_where_it_was(former: int, parts: int) -> None:
    table = np.arange(53)
    for part in range(parts):
        rows = np.full(len(table[part::parts]), -1)
        for one in progressions(part, parts, former, len(rows)):
            source = table[one.source :: former][one.start :: one.every][: one.length]
            assert (rows[one.first :: one.step] == -1).all()
            rows[one.first :: one.step] = source
        np.testing.assert_array_equal(rows, table[part::parts])


def test_servers_keep_their_places() -> None:
    layout = Layout((0, 1), 1)
    assert layout.resized(4, [2, 3], []).ranks == (0, 1, 2, 3)
    assert Layout((0, 1, 2, 3), 2).resized(3, [], [1]).ranks == (0, 3, 2)
    assert layout.resized(3, [2, 3, 4], [0, 3]).ranks == (2, 1, 4)
    assert Layout((4, 1, 2), 2).having == [[4, 1], [1, 2], [2, 4]]
    assert Layout((4, 1, 2), 2).parts_of(2) == [1, 2]
    assert Layout((0, 1), 1).parts_of(5) == []


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("commit", {"own": [0]}, "server 1 was told to go on with the parts [0], and has all rows of []"),
        ("fill", {"part": 0, "having": [[0]]}, "part 0 of server 1 is not coming: expected it to be made"),
        ("make coming", {"part": 4, "parts": 4}, "part=4, parts=4: expected 0 <= part < parts"),
        ("pull", {"part": 0, "parts": 2}, "server 1 was asked for part 0 of 2, expected one of those that it has: []"),
    ],
)
def test_requests_that_cannot_be(kind: str, fields: Any, words: str, unchecked: None) -> None:
    holder: Any = Holder(1, 1, None)  # pyright: ignore[reportArgumentType]  # it asks nobody
    with pytest.raises(ArgumentError, match=re.escape(words)):
        holder.handle(2, packed(kind, {"run": "this", **fields}))
    holder.close()
