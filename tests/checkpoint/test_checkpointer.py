import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import Checkpointer, Every, Skipped, restore, under_way
from braidax.checkpoint.format import reading
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.places import persist
from braidax.checkpoint.snapshot.hold import Held, Snapshot
from braidax.errors import ArgumentError, CallFailed, CheckpointError, PeerLost, WaitTimeout
from braidax.spans import Trace
from tests.support.checkpoint.saving import commit, names, read_all

LIMIT = 30.0
DATA_FILE, MANIFEST_FILE = data_file(0), manifest_file(0)


class Cursor(NamedTuple):
    seed: int
    epoch: int
    position: int


class Gate:
    """Holds the background thread at the start of a function until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._opened.wait(LIMIT)


@pytest.fixture
def persist_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, commit = Gate(), persist.commit

    def held_back(*arguments: Any) -> Path:
        gate.pass_through()
        return commit(*arguments)

    monkeypatch.setattr(persist, "commit", held_back)
    yield gate
    gate.open()


@pytest.fixture
def snapshot_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, copy = Gate(), Held.copy

    def held_back(self: Held) -> Snapshot:
        gate.pass_through()
        return copy(self)

    monkeypatch.setattr(Held, "copy", held_back)
    yield gate
    gate.open()


def fail_commit(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def failing(*arguments: Any) -> Path:
        raise error

    monkeypatch.setattr(persist, "commit", failing)


def test_a_checkpoint_at_every_multiple_and_the_newest_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "runs" / "a", Every(2), keep=2) as saver:
        for step in range(1, 8):
            saver.update({"step": step})
        assert saver.num_updates == 7
    assert names(tmp_path / "runs" / "a") == ["step-00000004", "step-00000006"]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(4.0), "cursor": Cursor(0, 2, 128)}
    with Checkpointer(tmp_path, Every(2)) as saver:
        assert saver.restore(tree) is tree
        for _ in range(3):
            saver.update(tree)
    like = {"w": jnp.zeros(4), "cursor": Cursor(0, 0, 0)}
    with Checkpointer(tmp_path, Every(2)) as saver:
        got = saver.restore(like)
        assert saver.num_updates == 2
        assert got["cursor"] == Cursor(0, 2, 128)
        assert type(got["cursor"]) is Cursor
        np.testing.assert_array_equal(got["w"], np.arange(4.0))
        saver.update(got)
        saver.update(got)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_save_is_durable_when_it_returns(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(100)) as saver:
        saver.update({"x": 1})
        folder = saver.save({"x": 2})
        assert folder == tmp_path / "step-00000001"
        assert restore(tmp_path, {"x": 0}).tree == {"x": 2}
        assert saver.save({"x": 3}) == tmp_path / "step-00000001-1"
        assert saver.restore({"x": 0}) == {"x": 3}
    assert names(tmp_path) == ["step-00000001-1"]


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_donated_at_once_is_saved_bit_for_bit(tmp_path: Path, waits: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shardings = {
        "split": NamedSharding(mesh, P("a", "b")),
        "whole": NamedSharding(mesh, P()),
        "one": NamedSharding(mesh, P()),
    }
    step = jax.jit(
        lambda state: jax.tree.map(lambda x: x * 1.0001 + 1, state), donate_argnums=0, out_shardings=shardings
    )
    state = {"split": jnp.ones((512, 256)), "whole": jnp.ones(4096), "one": jnp.zeros(())}
    state = jax.device_put(state, shardings)
    with Checkpointer(tmp_path, Every(1), keep=100) as saver:
        wanted: list[dict[str, Any]] = []
        for _ in range(40):
            state = step(state)
            wanted.append(jax.tree.map(lambda x: np.array(x), state))
            saver.update(state)
            if waits:
                saver.wait()
            for _ in range(3):
                state = step(state)
    for number, want in enumerate(wanted, start=1):
        for path, got in read_all(tmp_path / f"step-{number:08d}").items():
            assert got.tobytes() == want[path].tobytes(), (number, path)


def test_update_returns_while_the_snapshot_is_copied_and_wait_does_not(tmp_path: Path, snapshot_gate: Gate) -> None:
    with Checkpointer(tmp_path, Every(1), timeout_seconds=0.05) as saver:
        saver.update({"x": jnp.ones(3)})
        assert snapshot_gate.reached.wait(LIMIT)
        with pytest.raises(WaitTimeout, match=r"step-00000001: copying this checkpoint took longer than .*=0\.05"):
            saver.wait()
        snapshot_gate.open()
        saver.timeout_seconds = LIMIT
        saver.wait()
    assert names(tmp_path) == ["step-00000001"]


def test_wait_returns_while_the_checkpoint_is_written(tmp_path: Path, persist_gate: Gate) -> None:
    with Checkpointer(tmp_path, Every(1), timeout_seconds=LIMIT) as saver:
        saver.wait()
        saver.update({"x": jnp.ones(3)})
        saver.wait()
        assert persist_gate.reached.wait(LIMIT)
        assert names(tmp_path) == []
        persist_gate.open()
    assert names(tmp_path) == ["step-00000001"]


def test_one_checkpoint_is_under_way_at_a_time(tmp_path: Path, persist_gate: Gate) -> None:
    with Checkpointer(tmp_path, Every(2), timeout_seconds=0.05) as saver:
        for _ in range(3):
            saver.update({"x": 1})
        with pytest.raises(WaitTimeout, match=r"step-00000002: writing this checkpoint took longer than .*the disk"):
            saver.update({"x": 2})
        persist_gate.open()
        saver.timeout_seconds = LIMIT
        for x in (3, 4):
            saver.update({"x": x})
    assert names(tmp_path) == ["step-00000002", "step-00000006"]
    assert restore(tmp_path, {"x": 0}).tree == {"x": 4}


def test_a_wait_is_over_when_a_process_has_ended(
    tmp_path: Path, persist_gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braidax.checkpoint.background_job._LOOK_SECONDS", 0.01)
    asked = list[int]()

    def ask() -> None:
        asked.append(len(asked))
        if len(asked) == 3:
            threading.Timer(0.05, persist_gate.open).start()
            raise PeerLost("process 1 has ended", 1)

    with pytest.raises(PeerLost, match="process 1 has ended"), Checkpointer(tmp_path, Every(1)) as saver:
        saver.while_waiting = ask
        saver.update({"x": 1})
        saver.update({"x": 2})
    assert asked == [0, 1, 2]
    with pytest.raises(CheckpointError, match="is closed"):
        saver.wait()


def test_a_call_that_failed_elsewhere_leaves_no_process_behind(tmp_path: Path) -> None:
    """Its process is well, and finishes the checkpoint that is under way with all others."""
    with pytest.raises(CallFailed, match="process 1 failed"), Checkpointer(tmp_path, Every(1)) as saver:
        saver.update({"x": 1})
        raise CallFailed("process 1 failed: OSError: record 21 is gone", 1)
    assert names(tmp_path) == ["step-00000001"]


def test_who_has_ended_is_said_in_place_of_what_a_checkpoint_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    def ask() -> None:
        raise PeerLost("process 1 has ended", 1)

    monkeypatch.setattr("braidax.checkpoint.places.persist.write", fail)
    with pytest.raises(PeerLost), Checkpointer(tmp_path, Every(1)) as saver:
        saver.while_waiting = ask
        saver.save({"x": 1})


@pytest.mark.parametrize("call", ["update", "wait", "save", "restore", "close"])
def test_an_error_behind_the_step_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    saver = Checkpointer(tmp_path, Every(1), timeout_seconds=LIMIT)
    with monkeypatch.context() as patch:
        fail_commit(patch, CheckpointError("the disk is full"))
        saver.update({"x": 1})
        assert saver._pending is not None
        saver._pending.committed.exception(LIMIT)
    with pytest.raises(CheckpointError, match="the disk is full"):
        getattr(saver, call)(*([{"x": 2}] if call in ("update", "save", "restore") else []))
    if call != "close":
        saver.save({"x": 3})
        assert saver.restore({"x": 0}) == {"x": 3}
    saver.close()


def test_an_error_nobody_foresaw_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_commit(monkeypatch, MemoryError("no memory"))
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.update({"x": 1})
        with pytest.raises(CheckpointError, match="step-00000001: the checkpoint failed: MemoryError") as caught:
            saver.save({"x": 1})
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_copy_that_fails_is_raised_by_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Held) -> Snapshot:
        raise MemoryError("no memory")

    monkeypatch.setattr(Held, "copy", failing)
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.update({"x": 1})
        with pytest.raises(CheckpointError, match="the checkpoint failed: MemoryError"):
            saver.wait()
    assert names(tmp_path) == []


@pytest.mark.parametrize("mode", ["under step", "at once"])
def test_a_snapshot_is_copied_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot_gate: Gate, mode: Literal["under step", "at once"]
) -> None:
    wait = under_way.UnderWay.copied

    def opening(self: under_way.UnderWay, *arguments: Any) -> Any:
        snapshot_gate.open()  # somebody waits for the copy
        return wait(self, *arguments)

    monkeypatch.setattr(under_way.UnderWay, "copied", opening)
    with Checkpointer(tmp_path, Every(1)) as saver:
        assert saver.snapshot == "under step"
        saver.snapshot = mode
        saver.update({"x": jnp.ones(3)})
        assert saver._pending is not None  # pyright: ignore[reportPrivateUsage]
        assert saver._pending.owned.done() == (mode == "at once")  # pyright: ignore[reportPrivateUsage]
        saver.wait()
        saver.update({"x": jnp.ones(3)})
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.usefixtures("unchecked")
def test_another_word_for_when_it_is_copied_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        with pytest.raises(ArgumentError, match='snapshot=\'later\': expected "under step" or "at once"'):
            saver.snapshot = "later"  # pyright: ignore[reportAttributeAccessIssue]
        assert saver.snapshot == "under step"


def test_a_copy_at_once_that_fails_is_raised_by_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Held) -> Snapshot:
        raise MemoryError("no memory")

    monkeypatch.setattr(Held, "copy", failing)
    with Checkpointer(tmp_path, Every(2)) as saver:
        saver.snapshot = "at once"
        saver.update({"x": 1})
        with pytest.raises(CheckpointError, match="the checkpoint failed: MemoryError"):
            saver.update({"x": 1})
        saver.update({"x": 1})
    assert names(tmp_path) == []


def test_a_leaf_that_cannot_be_saved_is_named_at_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver, pytest.raises(CheckpointError, match="leaf 'x' is of type str"):
        saver.update({"x": "text"})


def damaged(root: Path) -> None:
    with Checkpointer(root, Every(1), keep=5) as saver:
        for step in range(1, 6):
            saver.update({"step": step, "x": jnp.full(4, step, jnp.float32)})
    data = root / "step-00000005" / DATA_FILE
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    (root / "step-00000004" / MANIFEST_FILE).unlink()
    (root / "step-00000003" / DATA_FILE).unlink()


def test_invalid_checkpoints_are_skipped_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged(tmp_path)
    like = {"step": 0, "x": jnp.zeros(4)}
    with Checkpointer(tmp_path, Every(1), keep=2) as saver:
        with caplog.at_level(logging.WARNING, logger="braidax"):
            got = saver.restore(like)
        assert got["step"] == saver.num_updates == 2
        np.testing.assert_array_equal(got["x"], np.full(4, 2))
        assert [skipped.path.name for skipped in saver.skipped] == ["step-00000005", "step-00000004", "step-00000003"]
        for skipped, reason in zip(
            saver.skipped, ["leaf 'x' has the checksum", "no finished", "No such file"], strict=True
        ):
            assert reason in skipped.reason
            assert skipped.reason in caplog.text
        # What is invalid goes once something newer than what was restored is durable, and not before.
        assert len(names(tmp_path)) == 5
        saver.update({"step": 3, "x": jnp.zeros(4)})
    assert names(tmp_path) == ["step-00000002", "step-00000003-1"]
    assert restore(tmp_path, like).tree["step"] == 3


def test_nothing_but_invalid_checkpoints_is_an_error(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        (saver.save({"x": 1}) / MANIFEST_FILE).unlink()
        words = (
            "none of its 1 checkpoints is valid: .*; nothing of them is removed. To go on, .*; to start anew, move them"
        )
        for read in (saver.restore, lambda like: restore(tmp_path, like)):
            with pytest.raises(CheckpointError, match=words):
                read({"x": 0})


def test_of_a_damaged_checkpoint_the_error_says_how_to_go_on_and_that_works(tmp_path: Path) -> None:
    tree = {"broken": jnp.ones(4), "whole": jnp.arange(4.0)}
    with Checkpointer(tmp_path, Every(1)) as saver:
        data = saver.save(tree) / DATA_FILE
    content = data.read_bytes()
    at = content.index(np.ones(4, np.float32).tobytes())
    data.write_bytes(content[:at] + b"?" + content[at + 1 :])
    like = jax.tree.map(jnp.zeros_like, tree)
    with Checkpointer(tmp_path, Every(1)) as saver:
        with pytest.raises(CheckpointError, match=r"leaf 'broken' has the checksum .* restore with only=") as caught:
            saver.restore(like)
        assert f"the leaves that `braidax inspect {tmp_path}` shows to be whole" in str(caught.value)
        got = saver.restore(like, only=("whole",))
    np.testing.assert_array_equal(got["whole"], np.arange(4))
    np.testing.assert_array_equal(got["broken"], np.zeros(4))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE])
def test_what_cannot_be_read_now_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        for step in (1, 2):
            saver.update({"x": step})

    def refuse(path: Path) -> bytes:
        raise OSError(code, os.strerror(code), str(path))

    with Checkpointer(tmp_path, Every(1), keep=1) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", refuse)
            with pytest.raises(CheckpointError, match="does not show that it is damaged: mend it, and start again, or"):
                saver.restore({"x": 0})
        assert saver.restore({"x": 0}) == {"x": 2}


def test_what_does_not_match_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save({"x": jnp.zeros(3)})
        with pytest.raises(CheckpointError, match=r"leaf 'x' is float32\[3\] in the checkpoint, but float32\[4\]"):
            saver.restore({"x": jnp.zeros(4)})
        assert saver.skipped == []


@pytest.mark.parametrize("call", ["update", "save"])
def test_a_run_does_not_mix_with_one_it_did_not_restore(tmp_path: Path, call: str) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save({"x": 1})
    with Checkpointer(tmp_path, Every(1)) as saver:
        with pytest.raises(CheckpointError, match=r"of an earlier run, the newest step-00000000, .*call restore"):
            getattr(saver, call)({"x": 2})
        assert saver.restore({"x": 0}) == {"x": 1}
        getattr(saver, call)({"x": 2})


def test_restore_finishes_what_is_under_way_first(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.update({"x": 1})
        assert saver.restore({"x": 0}) == {"x": 1}


def test_a_folder_is_one_runs_until_it_is_closed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save({"x": 1})
        with pytest.raises(CheckpointError, match="saves its checkpoints here: expected one open Checkpointer"):
            Checkpointer(tmp_path, Every(1))
    with Checkpointer(tmp_path, Every(1)) as saver:
        assert saver.restore({"x": 0}) == {"x": 1}
    Checkpointer(tmp_path, Every(1))  # nobody has it, so nobody keeps the folder
    Checkpointer(tmp_path, Every(1)).close()


def test_a_part_is_restored_and_the_count_goes_on(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(3)) as saver:
        for step in range(3):
            saver.update({"params": {"w": jnp.full(2, step)}, "n": step})
        assert saver.restore({"params": {"w": jnp.zeros(2)}, "n": 7}, only=("n",))["n"] == 2
        got = saver.restore({"params": {"w": jnp.zeros(2, jnp.int32)}, "n": 7}, only=("params/*",))
        assert got["n"] == 7
        np.testing.assert_array_equal(got["params"]["w"], [2, 2])
        assert saver.num_updates == 3


def test_steps_and_the_best_stay_besides_the_newest(tmp_path: Path) -> None:
    metrics = [5.0, 1.0, float("nan"), 2.0, jnp.float32(1.5), np.float64(3.0), None, 9, 8]
    with Checkpointer(tmp_path, Every(1), keep=1, keep_every=4, keep_best=2) as saver:
        for step, metric in enumerate(metrics, start=1):
            saver.update({"step": step}, metric=metric)
    assert [int(name[5:]) for name in names(tmp_path)] == [2, 4, 5, 8, 9]
    with Checkpointer(tmp_path, Every(1), keep=1, keep_best=2) as saver:
        saver.restore({"step": 0})
        saver.save({"step": 0}, metric=0.5)  # instead of the one of this step
    assert names(tmp_path) == ["step-00000002", "step-00000009-1"]


@pytest.mark.parametrize("metric", [np.zeros(3), "0.5", jnp.zeros((1, 2))])
def test_a_metric_is_a_number(tmp_path: Path, metric: Any) -> None:
    with (
        Checkpointer(tmp_path, Every(1)) as saver,
        pytest.raises(ArgumentError, match=r"metric=.*expected a number or"),
    ):
        saver.update({"x": 1}, metric=metric)


def test_nobody_waits_for_a_metric(tmp_path: Path, snapshot_gate: Gate) -> None:
    class Late(np.ndarray):
        waited = threading.Event()

        def __float__(self) -> float:
            self.waited.set()
            return 2.0

    metric = np.zeros(()).view(Late)
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.update({"x": 1}, metric=metric)
        assert not Late.waited.is_set()
        snapshot_gate.open()
    assert reading.read_manifest(tmp_path / "step-00000001").about.metric == 2.0


def test_host_memory_is_used_again(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save({"x": jnp.ones(1 << 16)})
        before = saver._memory._kept
        saver.save({"x": jnp.zeros(1 << 16)})
        assert saver._memory._kept is before
    np.testing.assert_array_equal(restore(tmp_path, {"x": jnp.ones(1 << 16)}).tree["x"], np.zeros(1 << 16))


def test_what_is_removed_while_it_is_read_gives_way_to_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, {"x": 1}, 1)
    read_content, reads = reading.read_content, list[str]()

    def replaced(folder: Path) -> Any:
        reads.append(folder.name)
        if len(reads) == 1:
            commit(tmp_path, {"x": 2}, 2)
            shutil.rmtree(folder)
        return read_content(folder)

    monkeypatch.setattr("braidax.checkpoint.places.restoring.read_content", replaced)
    got = restore(tmp_path, {"x": 0})
    assert (got.tree, got.skipped, reads) == ({"x": 2}, (), ["step-00000001", "step-00000002"])


def test_another_format_is_an_error_and_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.update({"x": 1})
        with monkeypatch.context() as later:
            saver.wait()
            later.setattr("braidax.checkpoint.format.manifest._FORMAT", 3)
            saver.save({"x": 2})
    with Checkpointer(tmp_path, Every(1)) as saver:
        with pytest.raises(
            CheckpointError, match=r"is of format 3, written by braidax .*expected format 2: read it with"
        ):
            saver.restore({"x": 0})
        assert saver.skipped == []


def test_a_reader_sees_what_was_skipped(tmp_path: Path) -> None:
    damaged(tmp_path)
    got = restore(tmp_path, {"step": 0, "x": jnp.zeros(4)})
    assert (got.step, got.path) == (2, tmp_path / "step-00000002")
    assert all(isinstance(skipped, Skipped) for skipped in got.skipped)
    assert [skipped.path.name for skipped in got.skipped] == ["step-00000005", "step-00000004", "step-00000003"]


def test_spans_say_where_the_time_went(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.trace = Trace(max_spans=10)
        saver.save({"x": jnp.zeros(256), "n": 1})
        assert [(span.lane, span.name, span.num_bytes) for span in saver.trace.spans] == [
            ("checkpoint", "snapshot", 1024),
            ("checkpoint", "persist", 1024),
        ]
        assert all(span.thread.startswith("braidax-checkpoint") for span in saver.trace.spans)


def test_an_exception_in_the_loop_still_finishes_the_checkpoint(tmp_path: Path, persist_gate: Gate) -> None:
    def loop() -> None:
        with Checkpointer(tmp_path, Every(1)) as saver:
            saver.update({"x": 1})
            persist_gate.open()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert names(tmp_path) == ["step-00000001"]


def test_a_closed_checkpointer_refuses(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, Every(1))
    saver.close()
    saver.close()
    for call in (saver.update, saver.save, saver.restore):
        with pytest.raises(CheckpointError, match="this Checkpointer is closed; make a new one"):
            call({"x": 1})


def test_there_is_a_thread_only_while_a_checkpoint_is_under_way(tmp_path: Path) -> None:
    def threads() -> int:
        return sum(thread.name.startswith(under_way.THREAD_NAME) for thread in threading.enumerate())

    saver = Checkpointer(tmp_path, Every(1))
    assert threads() == 0
    saver.save({"x": 1})
    assert threads() == 0
    saver.update({"x": 1})
    saver.close()
    assert threads() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep=0: expected a whole number >= 1"),
        ({"keep_every": 0}, "keep_every=0: expected a whole number >= 1, or None"),
        ({"keep_best": -1}, "keep_best=-1: expected a whole number >= 0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0: expected"),
    ],
)
def test_arguments_that_cannot_work(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Checkpointer(tmp_path, Every(1), **arguments)


def test_a_limit_is_a_number_of_bytes(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        with pytest.raises(ArgumentError, match=r"limit_bytes_per_second=0.0: expected bytes > 0, or None"):
            saver.limit_bytes_per_second = 0.0
        assert saver.limit_bytes_per_second is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("interval", [100, 0, None, Every])
def test_an_interval_that_is_none_is_refused_at_once(tmp_path: Path, interval: Any) -> None:
    words = "Every(100) or Adaptive()"
    with pytest.raises(
        ArgumentError, match=re.escape("expected what says when one is due, such as " + words)
    ) as caught:
        Checkpointer(tmp_path / "new", interval)
    assert str(caught.value).startswith(f"interval={interval!r}: ")
    assert not (tmp_path / "new").exists()
    with pytest.raises(
        ArgumentError, match=re.escape("interval=7: expected what says when one is due, such as Every(7)")
    ):
        Checkpointer(tmp_path / "new", 7)  # pyright: ignore[reportArgumentType]


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"path='{tmp_path / 'file'}': expected a folder"):
        Checkpointer(tmp_path / "file", Every(1))
