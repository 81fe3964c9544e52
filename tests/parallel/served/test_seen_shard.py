"""Tables that grow, server by server, against NumPy: which rows get room, which are given up, and what is read."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from jax import random

from braidax.errors import ArgumentError
from braidax.parallel import Seen
from braidax.parallel.rows import row_adagrad, row_optimizer
from braidax.parallel.served.files.disk_rows import OnDisk
from braidax.parallel.served.on_servers.growing import slot_map
from braidax.parallel.served.on_servers.growing.entries import Entries
from braidax.parallel.served.on_servers.growing.seen_shard import SeenShard
from braidax.parallel.served.on_servers.shard import Shard
from braidax.parallel.served.programs import TableForm
from tests.support.parallel.served.seen import FIRST, RATE, ROWS, WIDTH, Told, form_of, updates

SLOW = pytest.mark.slow
KEY = np.asarray(random.key_data(random.key(4)))
ADAGRAD = row_adagrad(0.1)


class Team:
    """All servers of a table."""

    def __init__(self, form: TableForm, size: int, disk: OnDisk | None = None) -> None:
        self.size, self.shards = size, [SeenShard(form, rank, size, disk=disk) for rank in range(size)]
        for shard in self.shards:
            shard.bear(KEY)

    def push(self, ids: Any, gradients: Any, step: int) -> None:
        for rank, shard in enumerate(self.shards):
            own = ids % self.size == rank
            shard.push(ids[own] // self.size, gradients[own], [], step)

    def pull(self) -> np.ndarray:
        rows = np.empty((ROWS, WIDTH), np.float32)
        for rank, shard in enumerate(self.shards):
            rows[rank :: self.size] = shard.pull(np.arange(shard.num_rows))
        return rows


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW), 3])  # on disk it is two
@pytest.mark.parametrize(
    ("admit_at", "expire_after"),
    [pytest.param(1, None, marks=SLOW), (3, None), (1, 4), pytest.param(2, 1, marks=SLOW), (3, 7)],
)
def test_rows_are_what_is_said(size: int, admit_at: int, expire_after: int | None) -> None:
    check_rows(size, Seen(ROWS, admit_at=admit_at, expire_after=expire_after))


def check_rows(size: int, seen: Seen, disk: OnDisk | None = None) -> None:
    team, told = Team(form_of(seen), size, disk), Told(seen)
    for step, ids, gradients in updates(60):
        team.push(ids, gradients, step)
        told.push(ids, gradients, step)
        np.testing.assert_array_equal(team.pull(), told.pull())
        found = [shard.listed("rows", 0, ROWS, ROWS) for shard in team.shards]
        assert sorted(np.concatenate([one["ids"] for one in found]).tolist()) == sorted(told.rows)
        counted = [shard.listed("counts", 0, ROWS, ROWS) for shard in team.shards]
        pairs = {(i, c) for one in counted for i, c in zip(one["ids"].tolist(), one["counts"].tolist(), strict=True)}
        assert pairs == {(one, count) for one, (count, _) in told.counts.items()}
    assert 0 < len(told.rows) < ROWS
    for shard in team.shards:
        shard.close()


def test_rows_are_what_is_said_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_map, "compiled", lambda: None)
    check_rows(2, Seen(ROWS, admit_at=2, expire_after=5))


def test_rows_on_disk_are_what_is_said(tmp_path: Path) -> None:
    """Also behind a checkpoint: rows that lie there still are not there."""
    check_rows(2, Seen(ROWS, admit_at=2, expire_after=5), OnDisk(str(tmp_path), 1 << 20))
    team = Team(form_of(Seen(9)), 1, OnDisk(str(tmp_path), 1 << 20))
    (shard,), ids = team.shards, np.arange(9)
    shard.push(ids, np.ones((9, WIDTH), np.float32), [], 0)
    np.testing.assert_array_equal(shard.pull(ids), FIRST[:9] - np.float32(RATE))
    shard.restart(KEY, shard.shared, 1)
    np.testing.assert_array_equal(shard.pull(ids), FIRST[:9])
    shard.push(ids[::-1], np.ones((9, WIDTH), np.float32), [], 1)
    np.testing.assert_array_equal(shard.pull(ids), FIRST[:9] - np.float32(RATE))
    shard.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_has_room_for_all_rows_that_there_may_be(tmp_path: Path) -> None:
    told = r"for table, as seen by server 0 of 2, .*: [\d,]+ bytes are needed, and [\d,]+ are free"
    with pytest.raises(OSError, match=told):
        SeenShard(form_of(Seen(1 << 46)), 0, 2, disk=OnDisk(str(tmp_path), 1 << 30))


def test_rows_that_change_are_known_to_have_changed() -> None:
    """A batch that was pulled ahead is corrected by these alone, also where rows were given up."""
    team = Team(form_of(Seen(40, expire_after=3)), 1)
    (shard,), before = team.shards, [(0, team.pull())]
    for step, ids, gradients in updates(30):
        team.push(ids, gradients, step)
        now = team.pull()
        for since, old in before[-8:]:
            corrected = old.copy()
            changed = shard.moved_since(np.arange(ROWS), since)
            corrected[changed] = now[changed]
            np.testing.assert_array_equal(corrected, now)
        before.append((step + 1, now))


@pytest.mark.parametrize("size", [1, 3])
def test_rows_move_as_those_of_a_whole_table(size: int) -> None:
    """Bit by bit, with what the optimizer keeps."""
    team, whole = Team(form_of(Seen(ROWS), ADAGRAD), size), Shard(form_of(None, ADAGRAD), 0, 1)
    whole.bear(KEY)
    for step, ids, gradients in updates(20):
        team.push(ids, gradients, step)
        whole.push(ids, gradients, [], step)
        assert team.pull().tobytes() == whole.pull(np.arange(ROWS)).tobytes()
    for shard in team.shards:
        found = shard.listed("rows", 0, ROWS, ROWS)
        np.testing.assert_array_equal(found["kept/0"], whole.kept[0][found["ids"]])


MOVING = {
    "momentum": optax.sgd(0.1, 0.9),
    "adam": optax.adam(0.1),
    "decay": optax.adamw(0.1, weight_decay=0.1),
    "schedule": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(optax.linear_schedule(0.5, 0.1, 20), 0.9)),
}


@pytest.mark.parametrize("name", ["decay", *(pytest.param(one, marks=SLOW) for one in MOVING if one != "decay")])
@pytest.mark.parametrize(
    ("size", "admit_at", "expire_after"),
    [(2, 2, 4), *(pytest.param(*one, marks=SLOW) for one in [(1, 1, None), (3, 1, 2)])],
)
def test_rows_that_are_not_there_are_those_that_no_gradient_has_moved(
    name: str, size: int, admit_at: int, expire_after: int | None
) -> None:
    """Bit by bit those of a whole table, which is given no gradient before, and begins a row anew that is given up."""
    seen, every = Seen(ROWS, admit_at=admit_at, expire_after=expire_after), np.arange(ROWS)
    optimizer = row_optimizer(MOVING[name])
    team, told = Team(form_of(seen, optimizer), size), Told(seen)
    whole = Shard(form_of(None, optimizer), 0, 1)
    whole.bear(KEY)
    first, num_given_up = [one.copy() for one in (whole.values, *whole.kept)], 0
    for step, ids, gradients in updates(40):
        team.push(ids, gradients, step)
        before = {*told.rows}
        told.push(ids, gradients, step)
        there = np.array([one in told.rows for one in ids.tolist()], bool)
        whole.push(ids[there], gradients[there], [], step)
        gone = np.array(sorted(before - {*told.rows}), np.int64)
        whole.put_at(gone, [leaf[gone] for leaf in first])
        num_given_up += len(gone)
        assert team.pull().tobytes() == whole.pull(every).tobytes()
        for shard in team.shards:
            listed = shard.listed("values", 0, ROWS, ROWS)
            assert listed["values"].tobytes() == whole.pull(listed["ids"]).tobytes()
    assert (num_given_up > 10) is (expire_after is not None)
    moved = not np.array_equal(team.pull()[~np.isin(every, [*told.rows])], FIRST[~np.isin(every, [*told.rows])])
    assert moved is (name in ("decay", "schedule"))


@pytest.mark.parametrize(("admit_at", "what", "more"), [(1, "rows of", 2), (2, "counts of", 1)])
def test_more_than_has_room_is_refused_and_changes_nothing(admit_at: int, what: str, more: int) -> None:
    """One of three is there already; where they are counted, it is admitted, and its count makes room."""
    team = Team(form_of(Seen(6, admit_at=admit_at)), 2)
    shard, ones = team.shards[1], np.ones((3, WIDTH), np.float32)
    shard.push(np.array([0, 5, 9]), ones, [], 0)
    before = shard.pull(np.arange(shard.num_rows))
    told = rf"capacity=6, and server 1 of 2 has {what} 3 ids, where 3 have room; an update has {more} more, and nothing"
    for refused in (shard.admitted, lambda ids, gradients: shard.push(ids, gradients, [], 1)):
        with pytest.raises(ArgumentError, match=told):
            refused(np.array([2, 5, 7]), ones)
        np.testing.assert_array_equal(shard.pull(np.arange(shard.num_rows)), before)
    shard.push(np.array([0, 5, 9]), ones, [], 1)  # these have room


def test_rows_that_are_due_make_room() -> None:
    team = Team(form_of(Seen(3, expire_after=2)), 1)
    (shard,) = team.shards
    for step in range(40):
        shard.push(np.array([step % 20]), np.ones((1, WIDTH), np.float32), [], step)
    with pytest.raises(ArgumentError, match="has rows of 2 ids"):
        shard.push(np.arange(50, 52), np.ones((2, WIDTH), np.float32), [], 40)


def test_gradients_that_are_dropped_are_in_no_sum() -> None:
    team = Team(form_of(Seen(9, admit_at=2)), 1)
    (shard,), gradients = team.shards, np.arange(6, dtype=np.float32).reshape(2, WIDTH)
    shard.push(np.array([3]), gradients[:1], [], 0)
    np.testing.assert_array_equal(shard.admitted(np.array([3, 4]), gradients), gradients[:1])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_listed_goes_to_any_number_of_servers(size: int) -> None:
    seen = Seen(90, admit_at=2, expire_after=9)
    old, new = Team(form_of(seen, ADAGRAD), 2), Team(form_of(seen, ADAGRAD), size)
    for step, ids, gradients in updates(30):
        old.push(ids, gradients, step)
    for shard in new.shards:
        shard.restart(KEY, old.shards[0].shared, 30)
    for which in ("rows", "counts"):
        parts = [shard.listed(which, 0, ROWS, ROWS) for shard in old.shards]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(joined["ids"])
        for rank, shard in enumerate(new.shards):
            own = order[joined["ids"][order] % size == rank]
            shard.put_listed(which, {name: one[own] for name, one in joined.items()})
    for step, ids, gradients in updates(60):
        if step >= 30:
            for team in (old, new):
                team.push(ids, gradients, step)
            assert old.pull().tobytes() == new.pull().tobytes()


def test_lists_come_in_parts() -> None:
    team = Team(form_of(Seen(ROWS)), 1)
    (shard,) = team.shards
    ids = np.random.default_rng(0).permutation(ROWS)[:50]
    shard.push(ids, np.ones((50, WIDTH), np.float32), [], 0)
    found, start = list[int](), 0
    while len(some := shard.listed("rows", start, ROWS, 7)["ids"]):
        found += some.tolist()
        start = found[-1] + 1
    assert found == sorted(ids.tolist())


def test_entries_grow_to_what_has_room_and_no_further() -> None:
    sizes = list[int]()
    entries = Entries(5000, None, sizes.append)
    for start in range(0, 5000, 500):
        assert entries.fits(500, 0)
        entries.add(np.arange(start, start + 500), 0)
    assert sizes == [1024, 2048, 4096, 5000]
    assert not entries.fits(1, 0)
