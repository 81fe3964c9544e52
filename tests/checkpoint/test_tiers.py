"""Several savers of one run: each at its own pace, and the newest of all comes back."""

import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax as bx
from braidax.checkpoint import Archive, Saver, Tier, Tiers
from braidax.errors import ArgumentError, CheckpointError
from braidax.loop import fit
from tests.bucket_server import serving_bucket
from tests.checkpoint.saving import bits, names
from tests.test_loop import SAMPLES, make_loader, make_step


def tree(number: int) -> dict[str, Any]:
    return {"w": jnp.arange(12.0).reshape(3, 4) * number, "key": jax.random.key(number), "epoch": number}


def same(one: Any, other: Any) -> bool:
    return [bits(leaf) for leaf in jax.tree.leaves(one)] == [bits(leaf) for leaf in jax.tree.leaves(other)]


def two(folder: Path, quick: int = 2, lasting: int = 5) -> Tiers:
    return Tiers(
        bx.Checkpointer(folder / "memory", bx.Every(quick), keep=1), bx.Checkpointer(folder / "disk", bx.Every(lasting))
    )


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


def test_tiers_are_what_the_protocols_say(tmp_path: Path) -> None:
    with two(tmp_path) as saver:
        assert isinstance(saver, Saver)
        assert all(isinstance(tier, Tier) for tier in saver.tiers)


@pytest.mark.parametrize(("num_updates", "step", "where"), [(5, 5, "disk"), (6, 6, "memory"), (10, 10, "memory")])
def test_each_keeps_its_interval_and_the_newest_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_updates: int, step: int, where: str
) -> None:
    ran(tmp_path, num_updates)
    assert names(tmp_path / "memory") == [f"step-{num_updates // 2 * 2:08d}"]
    assert names(tmp_path / "disk") == [f"step-{number:08d}" for number in range(5, num_updates + 1, 5)]
    with two(tmp_path) as saver, caplog.at_level(logging.INFO, logger="braidax"):
        assert same(saver.restore(tree(0)), tree(step))
        assert [saver.num_updates, *(tier.num_updates for tier in saver.tiers)] == [step] * 3
        for number in range(step + 1, 11):
            saver.update(tree(number))
    assert caplog.messages == [f"restored the checkpoint of update {step} in {tmp_path / where}"]
    assert names(tmp_path / "memory") == ["step-00000010"]
    assert names(tmp_path / "disk") == ["step-00000005", "step-00000010"]


def test_memory_that_is_gone_costs_only_what_it_had(tmp_path: Path) -> None:
    ran(tmp_path, 6)
    shutil.rmtree(tmp_path / "memory")
    with two(tmp_path) as saver:
        assert same(saver.restore(tree(0)), tree(5))
        saver.update(tree(6))
    assert names(tmp_path / "memory") == ["step-00000006"]


def test_without_a_checkpoint_the_tree_is_that_of_the_caller(tmp_path: Path) -> None:
    like = tree(3)
    with two(tmp_path) as saver:
        assert saver.restore(like) is like
        assert saver.num_updates == 0


def test_what_is_damaged_gives_way_to_an_older_one_elsewhere_and_is_replaced(tmp_path: Path) -> None:
    ran(tmp_path, 8)
    flip(tmp_path / "memory" / "step-00000008")
    with two(tmp_path) as saver:
        assert same(saver.restore(tree(0)), tree(5))
        assert names(tmp_path / "memory") == ["step-00000008"]
        saver.update(tree(6))
    assert names(tmp_path / "memory") == ["step-00000006"]
    with two(tmp_path) as saver:
        assert same(saver.restore(tree(0)), tree(6))


def test_an_older_valid_one_of_the_quick_tier_does_not_hide_a_newer_one(tmp_path: Path) -> None:
    def tiers() -> Tiers:
        return Tiers(bx.Checkpointer(tmp_path / "a", bx.Every(2)), bx.Checkpointer(tmp_path / "b", bx.Every(5)))

    with tiers() as saver:
        for number in range(1, 7):
            saver.update(tree(number))
    flip(tmp_path / "a" / "step-00000006")
    with tiers() as saver:
        assert same(saver.restore(tree(0)), tree(5))
        assert {tier.num_updates for tier in saver.tiers} == {5}
        saver.update(tree(6))
    assert names(tmp_path / "a") == ["step-00000002", "step-00000004", "step-00000006-1"]


def test_state_outside_is_that_of_the_tree_that_is_restored(tmp_path: Path) -> None:
    class Outside:
        version = 0

        def checkpoint_state(self) -> Any:
            return {"version": self.version}

        def restored(self, state: Any) -> "Outside":
            self.version = state["version"]
            return self

    def tiers() -> Tiers:
        return Tiers(bx.Checkpointer(tmp_path / "a", bx.Every(1)), bx.Checkpointer(tmp_path / "b", bx.Every(3)))

    server = Outside()
    with tiers() as saver:
        for number in range(1, 10):
            server.version = number
            saver.update({"server": server, "w": jnp.full(3, number)})
    for name in ("a", "b"):  # of which one goes back to 8, and the other to 6
        flip(tmp_path / name / "step-00000009")
    with tiers() as saver:
        found = saver.restore({"server": server, "w": jnp.zeros(3, int)})
    assert found["server"] is server
    assert (server.version, found["w"].tolist()) == (8, [8, 8, 8])


def test_nothing_valid_anywhere_is_an_error(tmp_path: Path) -> None:
    ran(tmp_path, 5)
    flip(tmp_path / "memory" / "step-00000004")
    flip(tmp_path / "disk" / "step-00000005")
    with two(tmp_path) as saver, pytest.raises(CheckpointError, match=r"none of its 1 checkpoints is valid"):
        saver.restore(tree(0))


def test_another_tree_is_an_error_and_no_reason_to_look_elsewhere(tmp_path: Path) -> None:
    ran(tmp_path, 6)
    with two(tmp_path) as saver, pytest.raises(CheckpointError, match=r"leaf 'more' .* is in `like`, but not in"):
        saver.restore({**tree(0), "more": 1})


def test_a_run_that_did_not_restore_mixes_nothing(tmp_path: Path) -> None:
    ran(tmp_path, 4)
    with two(tmp_path) as saver, pytest.raises(CheckpointError, match="memory: has checkpoints of an earlier run"):
        saver.save(tree(1))


def test_a_part_of_the_tree_is_restored(tmp_path: Path) -> None:
    ran(tmp_path, 6)
    with two(tmp_path) as saver:
        found = saver.restore(tree(1), only=("w",))
    assert same(found, {**tree(1), "w": tree(6)["w"]})


def test_one_that_fails_does_not_keep_the_others_from_theirs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = two(tmp_path, quick=1, lasting=1)
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
    assert [tier.num_updates for tier in saver.tiers] == [2, 2]
    with pytest.raises(CheckpointError, match="memory: this Checkpointer is closed"):
        saver.wait()


def test_who_goes_on_from_elsewhere_replaces_what_says_to_be_newer(tmp_path: Path) -> None:
    with bx.Checkpointer(tmp_path, bx.Every(2)) as saver:
        for number in range(1, 5):
            saver.update(tree(number))
    with bx.Checkpointer(tmp_path, bx.Every(1), keep=2) as saver:
        saver.go_on(1)
        assert (saver.num_updates, saver.newest()) == (1, 4)
        saver.update(tree(5))
    assert names(tmp_path) == ["step-00000002-1"]


def test_one_limit_for_all(tmp_path: Path) -> None:
    with two(tmp_path) as saver:
        assert saver.timeout_seconds == 600.0
        saver.timeout_seconds = 7.0
        assert [tier.timeout_seconds for tier in saver.tiers] == [7.0, 7.0]


def test_tiers_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"tiers=\(\): expected at least one"):
        Tiers()
    with bx.Checkpointer(tmp_path / "a", bx.Every(9)) as one, bx.Checkpointer(tmp_path / "b", bx.Every(9)) as other:
        one.update(tree(1))
        with pytest.raises(ArgumentError, match=r"tiers= have seen \[1, 0\] updates: expected as many by all"):
            Tiers(one, other)


def test_memory_disk_and_store_together(tmp_path: Path) -> None:
    with serving_bucket() as server:

        def tiers(folder: Path) -> Tiers:
            disk = bx.Checkpointer(folder / "disk", bx.Every(4))
            store = Archive(disk, "s3://bucket/run", bx.Every(8), client=server.client)
            return Tiers(bx.Checkpointer(folder / "memory", bx.Every(2), keep=1), store)

        with tiers(tmp_path) as saver:
            for number in range(1, 15):
                saver.update(tree(number))
        for lost, step in (("", 14), ("memory", 12), ("disk", 8)):
            shutil.rmtree(tmp_path / (lost or "no"), ignore_errors=True)
            with tiers(tmp_path) as saver:
                assert same(saver.restore(tree(0)), tree(step))
                assert saver.num_updates == step
                assert saver.tiers[1].num_updates == step


def test_fit_goes_on_from_the_newest(tmp_path: Path) -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    with make_loader(step, epochs=3) as loader:
        straight = fit(step, step.init(jax.random.key(0)), loader)
    for epochs, num_updates in ((1, 5), (3, 15)):
        with make_loader(step, epochs=epochs) as loader, two(tmp_path, 2, 100) as saver:
            state = fit(step, step.init(jax.random.key(0)), loader, saver=saver)
            assert saver.num_updates == num_updates
    assert same(state, straight)
    assert names(tmp_path / "disk") == ["step-00000005", "step-00000015"]


def test_notes_are_the_same_of_all(tmp_path: Path) -> None:
    quick = bx.Checkpointer(tmp_path / "quick", bx.Every(1))
    quick.notes["plan"] = "a"
    lasting = bx.Checkpointer(tmp_path / "lasting", bx.Every(2))
    with Tiers(quick, lasting) as saver:
        saver.notes["more"] = "b"
        saver.save({"w": jnp.zeros(2)})
    for name in ("quick", "lasting"):
        found = bx.checkpoint.restore(tmp_path / name, {"w": jnp.ones(2)})
        assert dict(found.notes) == {"plan": "a", "more": "b"}
