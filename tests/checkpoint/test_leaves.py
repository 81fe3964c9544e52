"""State that lives outside of the tree is saved and restored with it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import braidax as bx
from braidax.cli import app
from braidax.errors import CheckpointError


@dataclass
class Server:
    """Rows in somebody else's memory, and how often they were asked for."""

    rows: np.ndarray
    version: int = 0
    asked: list[str] = field(default_factory=list[str])

    def checkpoint_state(self) -> Any:
        self.asked.append("state")
        return {"rows": self.rows, "version": self.version}

    def restored(self, state: Any) -> "Server":
        self.asked.append("restored")
        self.rows, self.version = state["rows"], state["version"]
        return self


def make(value: float) -> dict[str, Any]:
    return {"w": jnp.full(4, value), "servers": (Server(np.full((3, 2), value), int(value)), Server(np.ones(2)))}


def test_it_is_in_the_same_commit(tmp_path: Path) -> None:
    tree = make(5.0)
    first = tree["servers"][0]
    with bx.Checkpointer(tmp_path, bx.Every(2)) as saver:
        saver.update(tree)
        assert first.asked == []  # nothing was due
        saver.update(tree)
        assert first.asked == ["state"]
        first.rows[:] = -1  # what was saved is a copy
        first.version = 9
    other = make(0.0)
    with bx.Checkpointer(tmp_path, bx.Every(2)) as saver:
        found = saver.restore(other)
        assert saver.num_updates == 2
    server = found["servers"][0]
    assert server is other["servers"][0]
    assert server.asked == ["state", "restored"]
    np.testing.assert_array_equal(server.rows, np.full((3, 2), 5.0))
    assert server.version == 5
    np.testing.assert_array_equal(found["w"], np.full(4, 5.0))
    read = bx.checkpoint.restore(tmp_path, {"servers": ({"rows": np.zeros((3, 2))},)}, only=("servers/0/rows",))
    np.testing.assert_array_equal(read.tree["servers"][0]["rows"], np.full((3, 2), 5.0))


def test_it_is_left_alone_when_nothing_can_be_restored(tmp_path: Path) -> None:
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        saver.save(make(5.0))
    other = {"w": jnp.zeros(5), "servers": make(0.0)["servers"]}
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver, pytest.raises(CheckpointError, match="leaf 'w' is float32"):
        saver.restore(other)
    assert other["servers"][0].asked == ["state"]
    assert other["servers"][0].version == 0


def test_what_it_gives_is_checked_like_the_tree(tmp_path: Path) -> None:
    class Wrong(Server):
        def checkpoint_state(self) -> Any:
            return {"rows": "text"}

    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver, pytest.raises(CheckpointError, match=r"leaf 'a/rows' is of"):
        saver.update({"a": Wrong(np.zeros(1))})


def test_notes_are_kept_with_a_checkpoint(tmp_path: Path) -> None:
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        saver.update({"w": jnp.zeros(2)})
        saver.notes["plan"] = '{"mesh": "8 × 1"}'
        saver.update({"w": jnp.ones(2)})
        saver.notes["plan"] = "later"  # no longer of the one under way
    assert dict(bx.checkpoint.restore(tmp_path, {"w": jnp.zeros(2)}).notes) == {"plan": '{"mesh": "8 × 1"}'}
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "200"})
    assert 'plan: {"mesh": "8 × 1"}\n' in shown.output
