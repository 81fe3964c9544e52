"""What a step publishes: base and deltas are the tables, to the bit, and a delta has the rows that were moved."""

import errno
import io
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError
from braidax.gang import LocalGang
from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from braidax.parallel.rows import row_adagrad
from braidax.parallel.served.files import publishing
from braidax.parallel.served.files.fingerprints import Fingerprints, fingerprints
from braidax.parallel.served.files.form import Header, listed, opened
from braidax.parallel.served.on_servers import shard as shards
from braidax.parallel.served.on_servers.shard import Shard
from tests.support.parallel.models import specs
from tests.support.parallel.served.models import ROWS, init, loss
from tests.support.parallel.served.publishing import BATCHES, make_step
from tests.support.parallel.served.server import OPTIMIZERS, form_of
from tests.support.tree import ROOT


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[3]


def headers(folder: Path) -> list[Header]:
    found = [opened(one) for one in listed(folder)[0]]
    for one in found:
        one.file.close()
    return [one.header for one in found]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def assert_published(folder: Path, step: Any, *followers: bx.Published) -> None:
    expected = step.table("table")
    for follower in followers:
        follower.refresh()
        np.testing.assert_array_equal(follower.tables["table"], expected)
    found = bx.read_published(folder)
    assert [*found] == ["table"]
    assert found["table"].dtype == expected.dtype
    np.testing.assert_array_equal(found["table"], expected)


@pytest.mark.parametrize("block_bytes", [pytest.param(16 << 20, marks=pytest.mark.slow), 64])
def test_files_are_the_tables(
    gang: LocalGang, tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in many messages; deltas have the rows that batches have read, once each."""
    monkeypatch.setattr(publishing, "_BLOCK_BYTES", block_bytes)
    folder = tmp_path / "a" / "b"
    with make_step(gang, own={"params/table": row_adagrad(0.1)}) as step:
        state = step.init(jax.random.key(0))
        step.publish(folder)
        follower = bx.Published(folder)
        assert (follower.version, follower.step) == (0, 0)
        touched = [ROWS]
        for some in (BATCHES[:1], BATCHES[1:4], []):
            for batch in some:
                state, _ = step.update(state, batch)
            step.publish(folder)
            touched.append(len(np.unique([batch["ids"] for batch in some])))
            assert_published(folder, step, follower)
        assert follower.refresh() == 0
        assert (follower.version, follower.step) == (3, 4)
    assert [one.tables[0].num_rows for one in headers(folder)] == touched
    assert [one.kind for one in headers(folder)] == ["base", "delta", "delta", "delta"]
    assert names(folder) == [f"tables-0000000{one}" for one in ("0.base", "1.delta", "2.delta", "3.delta")]


def test_a_delta_is_hardly_larger_than_its_rows(gang: LocalGang, tmp_path: Path) -> None:
    with make_step(gang) as step:
        state = step.init(jax.random.key(0))
        step.publish(tmp_path)
        for batch in BATCHES:
            state, _ = step.update(state, batch)
        step.publish(tmp_path)
    (rows,) = headers(tmp_path)[1].tables
    assert rows.num_rows < 150
    assert (tmp_path / "tables-00000001.delta").stat().st_size < rows.num_rows * (rows.row_bytes + 4) + 512


@pytest.mark.parametrize(
    "name",  # where most rows move, all are written: so they are where tables grow, below
    ["momentum", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "decay"))],
)
def test_rows_that_moved_without_gradients_are_written_too(
    gang: LocalGang, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are others than in the file before, and no others; all of them where most are."""
    monkeypatch.setattr(publishing, "_BLOCK_BYTES", 256)
    optimizer = {"adam": optax.adam(0.1), "momentum": optax.sgd(0.1, 0.9), "decay": optax.adamw(0.1)}[name]
    with make_step(gang, optimizer=optimizer, spares=1) as step:
        state, expected = step.init(jax.random.key(0)), list[int]()
        step.publish(tmp_path)
        follower = bx.Published(tmp_path)
        before, touched = follower.tables["table"].copy(), set[int]()
        for number, batch in enumerate([*BATCHES[:5], BATCHES[4]]):
            state, _ = step.update(state, batch)
            touched |= {*batch["ids"].tolist()}
            if number == 2:
                step.resize(3)
            step.publish(tmp_path)
            assert_published(tmp_path, step, follower)
            expected.append(int((step.table("table") != before).any(1).sum()))
            before = step.table("table")
    found, kinds = [one.tables[0].num_rows for one in headers(tmp_path)[1:]], [one.kind for one in headers(tmp_path)]
    if name == "decay":
        assert kinds == ["base", "delta", *["base"] * 5]
        assert found == [ROWS] * 6
    else:
        assert kinds == ["base", *["delta"] * 6]
        assert found == expected
        assert 16 < max(found) <= len(touched) < ROWS // 2


def test_rows_that_rest_by_now_are_not_written_again(gang: LocalGang, tmp_path: Path) -> None:
    """What momentum makes of a row without gradients is less than a bit of it after some time."""
    with make_step(gang, optimizer=optax.sgd(0.1, 0.5)) as step:
        state, _ = step.update(step.init(jax.random.key(0)), BATCHES[0])
        step.publish(tmp_path)
        for _ in range(40):
            state, _ = step.update(state, BATCHES[1])
        step.publish(tmp_path)
        for _ in range(3):
            state, _ = step.update(state, BATCHES[1])
        step.publish(tmp_path)
        assert_published(tmp_path, step)
    num_both = len(np.unique([one["ids"] for one in BATCHES[:2]]))
    last = len(np.unique(BATCHES[1]["ids"]))
    assert [one.tables[0].num_rows for one in headers(tmp_path)] == [ROWS, num_both, last]
    assert last < num_both


def test_rows_that_grow_and_move_are_written_as_they_change(gang: LocalGang, tmp_path: Path) -> None:
    """Rows that are there, those that are others than before, and those that are gone."""
    with make_step(gang, optimizer=optax.adam(0.1), seen=bx.Seen(ROWS, expire_after=3)) as step:
        state, before = step.init(jax.random.key(0)), dict[int, bytes]()
        step.publish(tmp_path)
        follower, changed = bx.Published(tmp_path), list[tuple[int, int]]()
        for batch in [*BATCHES[:6], BATCHES[5], BATCHES[5], BATCHES[5], BATCHES[5]]:
            state, _ = step.update(state, batch)
            step.publish(tmp_path)
            ids, rows = step.seen_rows("table")
            now = {one: row.tobytes() for one, row in zip(ids.tolist(), rows, strict=True)}
            changed.append((sum(before.get(one) != row for one, row in now.items()), len({*before} - {*now})))
            before = now
            follower.refresh()
            for found in (follower, bx.Published(tmp_path)):
                np.testing.assert_array_equal(found.seen["table"].ids, ids)
                assert found.seen["table"].rows.tobytes() == rows.tobytes()
    told = [(one.kind, one.tables[0].num_rows, one.tables[0].num_gone) for one in headers(tmp_path)[1:]]
    kinds = [kind for kind, _, _ in told]
    assert {"base", "delta"} == {*kinds}
    assert [(rows, gone) for kind, rows, gone in told if kind == "delta"] == [
        one for one, kind in zip(changed, kinds, strict=True) if kind == "delta"
    ]


def test_fingerprints_tell_rows_apart() -> None:
    rows = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    first = Fingerprints(None)
    order = np.random.default_rng(1).permutation(1000)
    assert first.differ(order[:600], rows[order[:600]]).all()
    assert first.differ(order[600:], rows[order[600:]]).all()
    again, others = Fingerprints(first.known()), rows.copy()
    others[7, 1] = np.nextafter(others[7, 1], np.float32(9))
    np.testing.assert_array_equal(np.flatnonzero(again.differ(np.arange(1000), others)), [7])
    assert Fingerprints(again.known()).differ(np.array([7, 2000]), others[[7, 7]]).tolist() == [False, True]
    assert len(np.unique(fingerprints(rows), axis=0)) == 1000


def test_rows_that_were_put_anew_are_all_written(gang: LocalGang, tmp_path: Path) -> None:
    """By `init`, a dense state, a checkpoint, or another step; who follows goes on from there."""
    folder = tmp_path / "published"
    with make_step(gang, disk=str(tmp_path)) as step, Checkpointer(tmp_path / "saved", Every(1)) as saver:
        state, _ = step.update(step.init(jax.random.key(0)), BATCHES[0])
        saver.save((state, step.tables))
        step.publish(folder)
        follower = bx.Published(folder)
        dense = step.to_dense(state)
        for restored in (
            lambda: step.init(jax.random.key(1)),
            lambda: step.from_dense(dense),
            lambda: saver.restore((step.state_specs, step.tables))[0],
        ):
            state = restored()
            step.publish(folder)
            assert_published(folder, step, follower)
            state, _ = step.update(state, BATCHES[1])
            step.publish(folder)
            assert_published(folder, step, follower)
    with make_step(gang) as step:
        step.init(jax.random.key(2))
        step.publish(folder)
        assert_published(folder, step, follower)
    assert [one.kind for one in headers(folder)] == [
        *["base", "base", "delta", "base", "delta", "base", "delta", "base"]
    ]
    assert len({one.run for one in headers(folder)}) == 2


def test_folders_know_of_one_another_nothing(gang: LocalGang, tmp_path: Path) -> None:
    """Each has what has changed since its own last file."""
    with make_step(gang) as step:
        state = step.init(jax.random.key(0))
        for number, batch in enumerate(BATCHES[:6]):
            state, _ = step.update(state, batch)
            step.publish(tmp_path / ("two" if number % 2 else "three" if number % 3 else "one"))
        for folder in ("one", "two", "three"):
            step.publish(tmp_path / folder)
            assert_published(tmp_path / folder, step)


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("spares", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_lost_server_changes_nothing(gangs: dict[int, LocalGang], tmp_path: Path, spares: int) -> None:
    """Its copy knows what has changed, and so does a spare server in its place."""
    gang = gangs[2 + spares]
    pids = gang.run(own_pid)
    with make_step(gang, copies=2, spares=spares) as step:
        state = step.init(jax.random.key(0))
        step.publish(tmp_path)
        state, _ = step.update(state, BATCHES[0])
        step.finish()
        os.kill(pids[0], signal.SIGKILL)
        for batch in BATCHES[1:3]:
            state, _ = step.update(state, batch)
            step.finish()
        if spares:
            os.kill(pids[1], signal.SIGKILL)  # so that the spare one is asked
            state, _ = step.update(state, BATCHES[3])
        step.publish(tmp_path)
        assert_published(tmp_path, step)
    assert [one.kind for one in headers(tmp_path)] == ["base", "delta"]


def own_pid(comm: Any) -> int:
    """Returns the process of the rank."""
    return os.getpid()


def test_all_rows_heal_what_lacks(gang: LocalGang, tmp_path: Path) -> None:
    """Where files were removed, all rows are written again."""
    with make_step(gang) as step:
        state = step.init(jax.random.key(0))
        for batch in BATCHES[:3]:
            state, _ = step.update(state, batch)
            step.publish(tmp_path)
        (tmp_path / "tables-00000001.delta").unlink()
        step.publish(tmp_path)
        assert_published(tmp_path, step)
        for path in tmp_path.iterdir():
            path.unlink()
        step.publish(tmp_path)
        assert names(tmp_path) == ["tables-00000000.base"]
        assert_published(tmp_path, step)


def test_files_of_others_are_left_alone(gang: LocalGang, tmp_path: Path) -> None:
    names = {"file": "notes.txt", "folder": "tables-00000000.base", "link": ".lock", "lock": ".lock"}
    with make_step(gang) as step:
        step.init(jax.random.key(0))
        for kind, name in names.items():
            folder = tmp_path / kind
            folder.mkdir()
            other = folder / name
            if kind == "folder":
                other.mkdir()
            elif kind == "link":
                other.symlink_to(tmp_path / "elsewhere")
            else:
                other.write_text("mine")
            with pytest.raises(ArgumentError, match=rf"folder=.* has {name}, which no step has published: expected"):
                step.publish(folder)
            assert [*folder.iterdir()] == [other]
    assert not (tmp_path / "elsewhere").exists()


def test_one_step_publishes_into_a_folder_and_has_its_tables(gangs: dict[int, LocalGang], tmp_path: Path) -> None:
    with make_step(gangs[3]) as step, make_step(gangs[1]) as other:
        step.init(jax.random.key(0))
        other.init(jax.random.key(0))
        step.publish(tmp_path)
        with pytest.raises(ArgumentError, match="another step publishes here: expected one at a time; close that one"):
            other.publish(tmp_path)
        step.publish(tmp_path)
    assert [one.kind for one in headers(tmp_path)] == ["base", "delta"]
    strategies = {"data": bx.Hybrid(tables="servers")}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])

    def wider(key: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf.repeat(2, -1), init(key))

    made: Any = bx.parallelize(
        loss, optax.sgd(0.1), mesh, strategies, init=wider, batch=specs(BATCHES[0]), servers=gangs[3]
    )
    with made as step:
        step.init(jax.random.key(0))
        with pytest.raises(ArgumentError, match=r"the tables table float32\[500, 4\], and this step has table .*8\]"):
            step.publish(tmp_path)
    assert len(headers(tmp_path)) == 2


def test_a_full_disk_leaves_what_was_there(gang: LocalGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with make_step(gang) as step:
        with pytest.raises(ArgumentError, match="there are no tables yet: expected a state, by init"):
            step.publish(tmp_path)
        state = step.init(jax.random.key(0))
        step.publish(tmp_path)
        state, _ = step.update(state, BATCHES[0])
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ArgumentError, match=r"folder=.*got: .*No space left on device; give another one, change"):
            step.publish(tmp_path)
        monkeypatch.undo()
        assert names(tmp_path) == ["tables-00000000.base"]
        step.publish(tmp_path)
        assert_published(tmp_path, step)
        with pytest.raises(ArgumentError, match="expected a folder that this process may make and write to, with room"):
            step.publish(tmp_path / "tables-00000000.base" / "below")
    assert [one.kind for one in headers(tmp_path)] == ["base", "delta"]


def test_a_kill_midway_leaves_what_was_whole(gang: LocalGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    folder, expected, log = tmp_path / "published", tmp_path / "expected.npy", io.StringIO()
    module = "tests.support.parallel.served.killed_midway"
    program = Program(module, (str(folder), str(expected)), "module", "nothing")
    assert launch_here(program, 1, log=log) == 128 + signal.SIGKILL, log.getvalue()
    torn = [name for name in names(folder) if name.endswith(".unfinished")]
    assert names(folder) == [*torn, "tables-00000000.base", "tables-00000001.delta"]
    assert len(torn) == 1
    np.testing.assert_array_equal(bx.read_published(folder)["table"], np.load(expected))
    with make_step(gang) as step:
        step.init(jax.random.key(5))
        step.publish(folder)
        assert_published(folder, step)
    assert names(folder) == ["tables-00000000.base", "tables-00000001.delta", "tables-00000002.base"]


def test_a_server_finds_rows_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many it looks at, and finds, at a time."""
    shard = Shard(form_of(OPTIMIZERS["sgd"]), 0, 1)
    begun = shard.begun
    shard.bear(np.asarray(jax.random.key_data(jax.random.key(4))))
    assert shard.begun == begun + 1
    for step, ids in enumerate([[1, 4, 10], [4], [0, 7]]):
        shard.push(np.array(ids), np.ones((len(ids), 3), np.float32), [], step)
    wanted = {-1: [*range(11)], 0: [0, 1, 4, 7, 10], 1: [0, 4, 7], 2: [0, 7], 3: []}
    for looked_at in (1, 2, 5, 100):
        monkeypatch.setattr(shards, "_LOOKED_AT", looked_at)
        for since, ids in wanted.items():
            for most in (1, 2, 3, 100):
                found, start = list[int](), 0
                while start < shard.num_rows:
                    some, start = shard.changed(since, start, most)
                    assert len(some) <= most
                    found += some.tolist()
                assert found == ids
    assert shard.changed(-1, 3, 0)[1] == 3
