"""A node that was saved in another form comes back by the way that it knows, in every place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.checkpoint import Checkpointer, Every, Folder, Neighbors, restore
from braidax.errors import ArgumentError, CheckpointError
from tests.support.checkpoint.neighbors import alone, saving
from tests.support.checkpoint.saving import commit


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lying:
    """A matrix that lies on its side."""

    turned: Any
    count: Any

    def saved_as(
        self, saved: Mapping[str, int | None], notes: Mapping[str, str]
    ) -> tuple[Any, Callable[[Any], Any], str] | str | None:
        if "upright" in saved:
            if notes.get("way") == "blocked":
                return "it stands, and nobody can turn it"
            like = Standing(jax.ShapeDtypeStruct(self.turned.shape[::-1], self.turned.dtype), self.count)
            return like, lambda node: Lying(node.upright.T, node.count), "it stood and lies now"
        return self, lambda node: Lying(node.turned + 100, node.count), ""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Standing:
    upright: Any
    count: Any


STANDING = {"state": (Standing(jnp.arange(6.0).reshape(2, 3), jnp.int32(5)), 1), "epoch": 7}
LYING = {"state": (Lying(jnp.zeros((3, 2)), jnp.int32(0)), 0), "epoch": 0}


def check(tree: Any) -> None:
    np.testing.assert_array_equal(tree["state"][0].turned, np.arange(6.0).reshape(2, 3).T)
    assert (int(tree["state"][0].count), tree["state"][1], tree["epoch"]) == (5, 1, 7)


def test_it_comes_back_from_a_folder_from_neighbors_and_from_both(tmp_path: Path) -> None:
    for name, make in {
        "disk": lambda path: Checkpointer(path, Every(1)),
        "memory": saving,
        "both": lambda path: Checkpointer([Neighbors(path / "1", alone()), Folder(path / "2")], Every(1)),
    }.items():
        with make(tmp_path / name) as saver:
            saver.update(STANDING)
        with make(tmp_path / name) as saver:
            check(saver.restore(LYING))
            assert saver.num_updates == 1
    check(restore(tmp_path / "disk", LYING).tree)


def test_a_part_of_it_comes_the_same_way(tmp_path: Path) -> None:
    commit(tmp_path, STANDING)
    got = restore(tmp_path, LYING, only="*/turned").tree
    np.testing.assert_array_equal(got["state"][0].turned, np.arange(6.0).reshape(2, 3).T)
    assert (int(got["state"][0].count), got["state"][1], got["epoch"]) == (0, 0, 0)
    got = restore(tmp_path, LYING, only=("state/0/count", "epoch")).tree
    assert (int(got["state"][0].count), float(got["state"][0].turned.sum()), got["epoch"]) == (5, 0, 7)
    assert restore(tmp_path, LYING, only=("epoch",)).tree["epoch"] == 7
    with pytest.raises(ArgumentError, match="'state/0/upright' matches no path in `like`"):
        restore(tmp_path, LYING, only="state/0/upright")
    with pytest.raises(CheckpointError, match="is in `like`, but not in the checkpoint"):
        restore(tmp_path, LYING | {"more": 1})


def test_a_part_of_what_was_saved_in_this_form_has_nothing_put_off(tmp_path: Path) -> None:
    commit(tmp_path, LYING | {"epoch": 7})
    assert float(restore(tmp_path, LYING).tree["state"][0].turned.sum()) == 0
    assert float(restore(tmp_path, LYING, only="*").tree["state"][0].turned.sum()) == 0
    got = restore(tmp_path, LYING, only=("*/turned", "epoch")).tree
    np.testing.assert_array_equal(got["state"][0].turned, np.full((3, 2), 100))
    assert got["epoch"] == 7


def test_one_line_says_why_there_is_no_way(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "a", Every(1)) as saver:
        saver.notes["way"] = "blocked"
        saver.save(STANDING)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path / "a", LYING)
    assert str(caught.value) == f"{tmp_path}/a/step-00000000: it stands, and nobody can turn it"
    with saving(tmp_path / "b") as saver:
        saver.notes["way"] = "blocked"
        saver.save(STANDING)
        with pytest.raises(CheckpointError, match="it stands, and nobody can turn it"):
            saver.restore(LYING)


def test_what_else_differs_is_said_with_it(tmp_path: Path) -> None:
    commit(tmp_path, STANDING | {"more": 1})
    with pytest.raises(
        CheckpointError, match=r"it stood and lies now, and more has: .*\n  leaf 'more' .* not in `like`"
    ):
        restore(tmp_path, LYING)
