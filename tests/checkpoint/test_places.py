"""One state in several places: one copy for all, each place at its own pace, and the newest of all comes back."""

import itertools
import logging
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax as bx
from braidax.checkpoint import Bucket, Folder, Neighbors, Place, Saver, restore, under_way
from braidax.checkpoint.places import persist
from braidax.checkpoint.places.place import OpenPlace
from braidax.checkpoint.snapshot.hold import Held, Snapshot
from braidax.errors import ArgumentError, CheckpointError, WaitTimeout
from braidax.loop import fit
from tests.support.bucket_server import serving_bucket
from tests.support.checkpoint.neighbors import alone
from tests.support.checkpoint.saving import bits, names
from tests.support.loop import SAMPLES, make_loader, make_step


def tree(number: int) -> dict[str, Any]:
    return {"w": jnp.arange(12.0).reshape(3, 4) * number, "key": jax.random.key(number), "epoch": number}


def same(one: Any, other: Any) -> bool:
    return [bits(leaf) for leaf in jax.tree.leaves(one)] == [bits(leaf) for leaf in jax.tree.leaves(other)]


def two(folder: Path, every: int = 3, interval: int = 2) -> bx.Checkpointer:
    places = [Folder(folder / "memory", keep=1), Folder(folder / "disk", every=every)]
    return bx.Checkpointer(places, bx.Every(interval))


def three(folder: Path, keep: int = 3, interval: int = 1) -> bx.Checkpointer:
    places = [Neighbors(folder / "memory", alone()), Folder(folder / "a", keep=keep), Folder(folder / "b", keep=keep)]
    return bx.Checkpointer(places, bx.Every(interval))


def ran(folder: Path, num_updates: int) -> None:
    with two(folder) as saver:
        for number in range(1, num_updates + 1):
            saver.wait()
            saver.update(tree(number))


def flip(folder: Path) -> None:
    path = folder / "arrays-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_all_is_what_the_protocols_say(tmp_path: Path) -> None:
    with three(tmp_path) as saver:
        assert isinstance(saver, Saver)
        assert all(isinstance(place, OpenPlace) for place in saver._places.all)
    for place in (Folder(tmp_path), Neighbors(tmp_path, alone()), Bucket("s3://bucket/run")):
        assert isinstance(place, Place)


@pytest.mark.parametrize(("num_updates", "step", "where"), [(2, 2, "memory"), (6, 6, "memory"), (11, 10, "memory")])
def test_each_takes_one_in_so_many_and_the_newest_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_updates: int, step: int, where: str
) -> None:
    ran(tmp_path, num_updates)
    assert names(tmp_path / "memory") == [f"step-{step:08d}"]
    # The first one that is due is for all, and then each third: those at 6 and 12.
    assert names(tmp_path / "disk") == [f"step-{number:08d}" for number in (2, 6) if number <= num_updates]
    with two(tmp_path) as saver, caplog.at_level(logging.INFO, logger="braidax"):
        assert same(saver.restore(tree(0)), tree(step))
        assert saver.num_updates == step
        for number in range(step + 1, 13):
            saver.update(tree(number))
    assert caplog.messages == [f"restored the checkpoint of update {step} in {tmp_path / where}"]
    assert names(tmp_path / "memory") == ["step-00000012"]
    # An interruption moves none of them; it only adds the first one of the run that goes on.
    due = sorted({*range(2, step + 1, 2)} & {2, 6} | {step + 2, *({6, 12} - {*range(step + 1)})})
    assert names(tmp_path / "disk") == [f"step-{number:08d}" for number in due[-3:]]


def test_who_decides_by_measuring_decides_for_all(tmp_path: Path) -> None:
    places = [Folder(tmp_path / "a", keep=99), Folder(tmp_path / "b", every=2, keep=99)]
    with bx.Checkpointer(places, bx.Adaptive(max_lost_seconds=1e-9)) as saver:
        for number in range(1, 60):
            saver.update(tree(number))
            saver.newest()
    first, second = names(tmp_path / "a"), names(tmp_path / "b")
    assert len(first) > 9
    assert second == [first[0], *first[1::2]]


def test_a_save_is_for_all_and_for_the_first(tmp_path: Path) -> None:
    with two(tmp_path) as saver:
        assert saver.save(tree(1)) == tmp_path / "disk" / "step-00000000"
        for number in range(1, 5):
            saver.update(tree(number))
    assert (names(tmp_path / "memory"), names(tmp_path / "disk")) == (["step-00000004"], ["step-00000000"])


def test_memory_that_is_gone_costs_only_what_it_had(tmp_path: Path) -> None:
    ran(tmp_path, 8)
    shutil.rmtree(tmp_path / "memory")
    with two(tmp_path) as saver:
        assert same(saver.restore(tree(0)), tree(6))
        saver.update(tree(7))
        saver.update(tree(8))
    assert names(tmp_path / "memory") == ["step-00000008"]


def test_without_a_checkpoint_the_tree_is_that_of_the_caller(tmp_path: Path) -> None:
    like = tree(3)
    with three(tmp_path) as saver:
        assert saver.restore(like) is like
        assert (saver.num_updates, saver.newest(), saver.skipped) == (0, None, [])


# One snapshot.


def measured(save: Callable[[], object]) -> int:
    """Returns the most bytes that Python and NumPy had at once meanwhile."""
    tracemalloc.start()
    try:
        save()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_three_places_have_one_copy_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": jnp.arange(4_000_000.0), "n": np.arange(250_000.0)}
    num_bytes = 16_000_000 + 2_000_000
    copies, sums = list[int](), list[int]()
    copy, checksums_of = Held.copy, under_way.checksums_of

    def copied(held: Held) -> Snapshot:
        copies.append(held.num_bytes)
        return copy(held)

    monkeypatch.setattr(Held, "copy", copied)
    monkeypatch.setattr(under_way, "checksums_of", lambda snapshot: (sums.append(1), checksums_of(snapshot))[1])
    with three(tmp_path / "new") as saver:
        peak = measured(lambda: saver.save(state))
    assert (copies, sums) == ([num_bytes], [1])
    assert num_bytes < peak < 1.2 * num_bytes
    # Three savers, as there were before, show that this measure sees copies.
    savers = [bx.Checkpointer(tmp_path / name, bx.Every(1)) for name in ("1", "2", "3")]
    assert measured(lambda: [saver.save(state) for saver in savers]) > 2.8 * num_bytes
    assert copies[1:] == [num_bytes] * 3
    for saver in savers:
        saver.close()
    for folder in (tmp_path / "new" / "a", tmp_path / "new" / "b", tmp_path / "new" / "memory" / "slot-0"):
        assert same(restore(folder, jax.tree.map(lambda leaf: leaf * 0, state)).tree, state)


def test_the_loop_waits_for_one_copy_and_not_for_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []

    def prepare(state: Any) -> Any:
        prepared.append(state["epoch"])
        return state

    places = [Folder(tmp_path / "a"), Folder(tmp_path / "b")]
    with bx.Checkpointer(places, bx.Every(1), prepare=prepare) as saver:
        saver.update(tree(1))
        saver.update(tree(2))
    assert prepared == [1, 2]
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["step-00000001", "step-00000002"]


def test_state_outside_is_asked_once_and_gets_back_what_is_restored(tmp_path: Path) -> None:
    class Outside:
        version = num_asked = 0

        def __init__(self) -> None:
            self.given: list[int] = []

        def checkpoint_state(self) -> Any:
            self.num_asked += 1
            return {"version": self.version}

        def restored(self, state: Any) -> "Outside":
            self.version = state["version"]
            self.given.append(self.version)
            return self

    server = Outside()
    with three(tmp_path) as saver:
        for number in range(1, 10):
            server.version = number
            saver.update({"server": server, "w": jnp.full(3, number)})
    assert server.num_asked == 9
    flip(tmp_path / "memory" / "slot-0" / "step-00000009")
    for name, steps in {"a": (9,), "b": (9, 8)}.items():  # of which one goes back to 8, and the other to 7
        for step in steps:
            flip(tmp_path / name / f"step-{step:08d}")
    with three(tmp_path) as saver:
        found = saver.restore({"server": server, "w": jnp.zeros(3, int)})
    assert found["server"] is server
    assert (server.given, found["w"].tolist()) == ([8], [8, 8, 8])


def test_notes_and_the_metric_are_in_all(tmp_path: Path) -> None:
    with two(tmp_path) as saver:
        saver.notes["plan"] = "a"
        saver.save({"w": jnp.zeros(2)}, metric=0.5)
    for name in ("memory", "disk"):
        assert dict(restore(tmp_path / name, {"w": jnp.ones(2)}).notes) == {"plan": "a"}


# What fails, and what is damaged.


def test_the_newest_that_verifies_is_found_wherever_it_is(tmp_path: Path) -> None:
    with three(tmp_path / "whole", keep=4) as saver:
        for number in range(1, 5):
            saver.update(tree(number))
    slot = Path("memory") / "slot-0"
    all_of_them = [*itertools.product([Path("a"), Path("b")], range(1, 5)), (slot, 4)]
    seen: set[int] = set()
    for seed in range(7):
        folder, damage = tmp_path / str(seed), random.Random(seed)
        shutil.copytree(tmp_path / "whole", folder)
        valid = set(all_of_them)
        for place, step in all_of_them:
            if damage.random() < 0.7:
                valid.discard((place, step))
                path = folder / place / f"step-{step:08d}"
                flip(path) if damage.random() < 0.7 else shutil.rmtree(path)
        best = max((step for _, step in valid), default=0)
        seen.add(best)
        with three(folder, keep=4) as saver:
            if not valid:
                with pytest.raises(CheckpointError, match="valid"):
                    saver.restore(tree(0))
                continue
            assert same(saver.restore(tree(0)), tree(best))
            assert saver.num_updates == best
            saver.update(tree(best + 1))  # what says to be newer goes
        for place in ("a", "b", slot):
            assert names(folder / place)[-1].startswith(f"step-{best + 1:08d}")
    assert len(seen) > 2


def test_what_is_damaged_gives_way_to_an_older_one_elsewhere_and_is_replaced(tmp_path: Path) -> None:
    ran(tmp_path, 8)
    flip(tmp_path / "memory" / "step-00000008")
    with two(tmp_path) as saver:
        assert same(saver.restore(tree(0)), tree(6))
        assert [skipped.path for skipped in saver.skipped] == [tmp_path / "memory" / "step-00000008"]
        assert names(tmp_path / "memory") == ["step-00000008"]
        saver.save(tree(6))
    assert names(tmp_path / "memory") == ["step-00000006"]


def test_what_is_older_than_what_was_found_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(tmp_path, 8)
    flip(tmp_path / "disk" / "step-00000006")
    with two(tmp_path) as saver:
        assert same(saver.restore(tree(0)), tree(8))
        assert saver.skipped == []


def test_nothing_valid_anywhere_is_an_error(tmp_path: Path) -> None:
    ran(tmp_path, 4)
    flip(tmp_path / "memory" / "step-00000004")
    flip(tmp_path / "disk" / "step-00000002")
    with two(tmp_path) as saver, pytest.raises(CheckpointError, match=r"memory: none of its 1 checkpoints is valid"):
        saver.restore(tree(0))


def test_another_tree_is_an_error_and_no_reason_to_look_elsewhere(tmp_path: Path) -> None:
    ran(tmp_path, 6)
    with two(tmp_path) as saver, pytest.raises(CheckpointError, match=r"leaf 'more' .* is in `like`, but not in"):
        saver.restore({**tree(0), "more": 1})


def test_a_run_that_did_not_restore_mixes_nothing(tmp_path: Path) -> None:
    ran(tmp_path, 4)
    shutil.rmtree(tmp_path / "memory")
    with two(tmp_path) as saver, pytest.raises(CheckpointError, match="disk: has checkpoints of an earlier run, the"):
        saver.save(tree(1))
    assert (names(tmp_path / "memory"), names(tmp_path / "disk")) == ([], ["step-00000002"])


def test_a_part_of_the_tree_is_restored(tmp_path: Path) -> None:
    ran(tmp_path, 6)
    with two(tmp_path) as saver:
        found = saver.restore(tree(1), only=("w",))
    assert same(found, {**tree(1), "w": tree(6)["w"]})


def test_one_that_fails_does_not_keep_the_others_from_theirs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = two(tmp_path, every=1, interval=1)
    shutil.rmtree(tmp_path / "memory")
    with pytest.raises(CheckpointError, match="memory/step-00000000: the checkpoint could not be written"):
        saver.save(tree(0))
    assert names(tmp_path / "disk") == ["step-00000000"]
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(CheckpointError, match="memory/step-00000001: the checkpoint could not be written"):
        for number in (1, 2):
            saver.update(tree(number))
    with pytest.raises(CheckpointError, match="memory/step-00000002"):
        saver.close()
    assert [words for words in caplog.messages if "disk/step-00000002: the checkpoint could not be written" in words]
    assert saver.num_updates == 2
    with pytest.raises(CheckpointError, match="memory: this Checkpointer is closed"):
        saver.wait()


def test_what_fails_in_a_way_that_nobody_foresaw_is_said_of_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = persist.commit

    def failing(root: Path, *arguments: Any) -> Path:
        if root.name == "memory":
            raise ZeroDivisionError("nobody foresaw it")
        return commit(root, *arguments)

    with two(tmp_path) as saver:
        monkeypatch.setattr(persist, "commit", failing)
        with pytest.raises(CheckpointError, match="memory/step-00000000: the checkpoint failed: ZeroDivisionError"):
            saver.save(tree(1))
    assert (names(tmp_path / "memory"), names(tmp_path / "disk")) == ([], ["step-00000000"])


def test_a_copy_that_fails_fails_everywhere_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(held: Held) -> Snapshot:
        raise MemoryError("no memory")

    with three(tmp_path) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(Held, "copy", failing)
            with pytest.raises(CheckpointError, match="process 0 could not copy its part: MemoryError"):
                saver.save(tree(1))
        saver.save(tree(2))
    assert names(tmp_path / "a") == names(tmp_path / "memory" / "slot-0") == ["step-00000000"]


def test_a_place_that_hangs_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, tell = os.pipe()
    commit = persist.commit
    monkeypatch.setattr(persist, "commit", lambda root, *rest: (os.read(told, 1), commit(root, *rest))[1])
    saver = two(tmp_path)
    saver.timeout_seconds = 0.2
    words = f"{tmp_path}/memory, {tmp_path}/disk/step-00000000: writing this checkpoint took longer than .*=0.2"
    with pytest.raises(WaitTimeout, match=words):
        saver.save(tree(1))
    os.write(tell, b"go")
    saver.timeout_seconds = 30.0
    saver.close()
    os.close(told)
    os.close(tell)
    assert names(tmp_path / "disk") == ["step-00000000"]


# What is given.


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="places= are none: expected a path, or Folder, Bucket and Neighbors"):
        bx.Checkpointer([], bx.Every(1))
    with pytest.raises(ArgumentError, match=r"places= have every=\[2, 3\]: expected one that takes all checkpoints"):
        bx.Checkpointer([Folder(tmp_path, every=2), Folder(tmp_path / "b", every=3)], bx.Every(1))
    options: list[dict[str, Any]] = [{"keep": 3}, {"keep_every": 5}, {"keep_best": 1}]
    for given in options:
        with pytest.raises(ArgumentError, match=r"keep=.*, keep_every=.*, keep_best=.*: expected them of a path alone"):
            bx.Checkpointer([Folder(tmp_path)], bx.Every(1), **given)
    assert list(tmp_path.iterdir()) == []
    places = [Folder(tmp_path / "a"), Folder(tmp_path / "a")]
    with pytest.raises(CheckpointError, match="saves its checkpoints here: expected one open Checkpointer"):
        bx.Checkpointer(places, bx.Every(1))
    bx.Checkpointer(places[0], bx.Every(1)).close()  # the first is free


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("places", [7, [7], [Folder], ["runs/a"]])
def test_what_is_no_place_is_refused(places: Any) -> None:
    with pytest.raises(ArgumentError, match=r"places= have .*: expected a path, or Folder, Bucket and Neighbors of"):
        bx.Checkpointer(places, bx.Every(1))


def test_one_limit_for_all(tmp_path: Path) -> None:
    messages = alone()
    places = [Neighbors(tmp_path / "a", messages), Folder(tmp_path / "b")]
    with bx.Checkpointer(places, bx.Every(1)) as saver:
        assert (saver.timeout_seconds, messages.timeout_seconds) == (600.0, 30.0)
        saver.timeout_seconds = 7.0
        assert (saver.timeout_seconds, messages.timeout_seconds) == (7.0, 7.0)


def test_memory_disk_and_store(tmp_path: Path) -> None:
    with serving_bucket() as server:

        def places(folder: Path) -> bx.Checkpointer:
            return bx.Checkpointer(
                [
                    Folder(folder / "memory", keep=1),
                    Folder(folder / "disk", every=2),
                    Bucket("s3://bucket/run", every=4, client=server.client),
                ],
                bx.Every(2),
            )

        with places(tmp_path) as saver:
            for number in range(1, 15):
                saver.update(tree(number))
        for lost, step in (("", 14), ("memory", 12), ("disk", 8)):
            shutil.rmtree(tmp_path / (lost or "no"), ignore_errors=True)
            with places(tmp_path) as saver:
                assert same(saver.restore(tree(0)), tree(step))
                assert saver.num_updates == step


def test_fit_goes_on_from_the_newest(tmp_path: Path) -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    with make_loader(step, epochs=3) as loader:
        straight = fit(step, step.init(jax.random.key(0)), loader)
    for epochs, num_updates in ((1, 5), (3, 15)):
        with make_loader(step, epochs=epochs) as loader, two(tmp_path, every=100) as saver:
            state = fit(step, step.init(jax.random.key(0)), loader, saver=saver)
            assert saver.num_updates == num_updates
    assert same(state, straight)
    assert names(tmp_path / "disk") == ["step-00000005", "step-00000006", "step-00000015"]
