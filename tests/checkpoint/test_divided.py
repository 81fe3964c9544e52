"""Rows of one array that are several leaves: one tensor in a checkpoint, from and into any division, and none."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from braidax.checkpoint import TrueShapes, export_orbax, restore, restore_orbax, restore_safetensors
from braidax.checkpoint.format.reading import Reader
from braidax.errors import CheckpointError
from tests.support.checkpoint.neighbors import saving
from tests.support.checkpoint.saving import Longer, Tables, commit, commit_as_many, load, read_all

ROWS = np.arange(1, 14 * 5 + 1, dtype=np.float32).reshape(14, 5)


def on(value: np.ndarray, first: int, count: int, *, dim: int = 0, lengths: tuple[int, int] | None = None) -> jax.Array:
    """An array on some devices, split along a dim, with zeros behind its ends."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[first : first + count]), ("a",)), P(*[None] * dim, "a"))
    padded = np.zeros(value.shape if lengths is None else lengths, value.dtype)
    padded[: len(value), : value.shape[1]] = value
    return jax.device_put(padded, sharding)


def divided(kind: str, rows: np.ndarray = ROWS) -> Any:
    """The rows in some form, below a node that says what it is."""
    if kind == "whole":
        return {"state": Longer({"w": jnp.array(rows), "b": 1})}
    if kind == "sharded":
        return {"state": Longer({"w": on(rows, 0, 7), "b": 1})}
    if kind == "four":
        parts = (on(rows[:4], 0, 1), rows[4:5].copy(), on(rows[5:9], 4, 4), on(rows[9:], 2, 5, dim=1))
        return {"state": Longer({"w": parts, "b": 1}, {"arrays/w": (len(rows), 5)})}
    if kind == "mixed":  # what is copied at once stays, whatever is behind the end of the other
        parts = [on(rows[:6], 0, 4, lengths=(8, 5)), rows[6:].copy()]
        return {"state": Longer({"w": parts, "b": 1}, {"arrays/w": (14, 5), "arrays/w/0": (6, 5)})}
    parts = (on(rows[:6], 0, 4, lengths=(8, 5)), on(rows[6:], 3, 3, dim=1, lengths=(8, 6)))
    return {"state": Longer({"w": [*parts], "b": 1}, {"arrays/w": (14, 5), "arrays/w/0": (6, 5), "arrays/w/1": (8, 5)})}


KINDS = ("whole", "sharded", "four", "padded", "mixed")


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
        assert getattr(one, "sharding", None) == getattr(other, "sharding", None)


@pytest.mark.parametrize("wanted", KINDS)
@pytest.mark.parametrize("saved", KINDS)
def test_any_division_comes_back_as_any_other(tmp_path: Path, saved: str, wanted: str) -> None:
    folder = commit(tmp_path, divided(saved))
    file = load_file(folder / "arrays-00000.safetensors")
    np.testing.assert_array_equal(file.pop("state/arrays/w"), ROWS, strict=True)
    assert file == {}
    same(load(folder, divided(wanted, 0 * ROWS)), divided(wanted))


@pytest.mark.parametrize("saved", KINDS)
def test_each_process_writes_the_rows_that_it_has(tmp_path: Path, saved: str) -> None:
    folder = commit_as_many(tmp_path, divided(saved), 4)
    np.testing.assert_array_equal(read_all(folder)["state/arrays/w"], ROWS, strict=True)
    parts = [load_file(folder / f"arrays-0000{process}.safetensors") for process in range(4)]
    if saved == "four":
        assert [sorted(part) for part in parts] == [
            ["state/arrays/w[0:5,0:5]"],
            ["state/arrays/w[9:14,0:2]"],
            ["state/arrays/w[5:7,0:5]", "state/arrays/w[9:14,2:4]"],
            ["state/arrays/w[7:9,0:5]", "state/arrays/w[9:14,4:5]"],
        ]
    if saved == "padded":  # of what two processes have, there is one
        assert sum(array.size for part in parts for array in part.values()) == ROWS.size


def test_of_each_leaf_its_rows_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = commit(tmp_path, divided("whole"))
    boxes: list[Any] = []
    read = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, entry, box: boxes.append(box) or read(self, entry, box))
    load(folder, divided("four"))
    assert boxes == [
        ((0, 4), (0, 5)),
        ((4, 5), (0, 5)),
        *(((at, at + 1), (0, 5)) for at in range(5, 9)),
        ((9, 14), (0, 5)),
    ]


def test_neighbors_have_the_array_as_well(tmp_path: Path) -> None:
    with saving(tmp_path) as saver:
        saver.save(divided("four"))
    with saving(tmp_path) as saver:
        same(saver.restore(divided("padded", 0 * ROWS)), divided("padded"))


def test_rows_are_divided_at_any_depth_and_beside_others(tmp_path: Path) -> None:
    assert isinstance(Longer({}), TrueShapes)
    inner = {"one": Longer({"x": (ROWS[:1], ROWS[1:]), "y": (ROWS, ROWS)}, {"arrays/x": (14, 5)})}
    outer = (Longer({"z": [ROWS[:9], ROWS[9:]], "inner": inner}, {"arrays/z": (14, 5)}), 3)
    folder = commit(tmp_path, outer)
    assert sorted(read_all(folder)) == [
        "0/arrays/inner/one/arrays/x", "0/arrays/inner/one/arrays/y/0", "0/arrays/inner/one/arrays/y/1", "0/arrays/z",
        "1",
    ]  # fmt: skip
    same(load(folder, jax.tree.map(lambda leaf: leaf * 0, outer)), outer)


def test_a_part_is_restored_by_the_path_of_the_array(tmp_path: Path) -> None:
    commit(tmp_path, divided("four"))
    like = divided("padded", 0 * ROWS)
    like["state"].arrays["b"] = 7
    found = restore(tmp_path, like, only="state/arrays/w").tree
    assert found["state"].arrays.pop("b") == 7
    want = divided("padded")
    want["state"].arrays.pop("b")
    same(found, want)
    other = restore(tmp_path, like, only=("state/arrays/b",)).tree
    assert other["state"].arrays["w"][0] is like["state"].arrays["w"][0]


def test_a_table_by_rows_comes_in_parts(tmp_path: Path) -> None:
    stored = np.concatenate([ROWS, 0 * ROWS[:1]]).reshape(5, 3, 5)
    folder = commit(tmp_path, {"state": Tables({"arrays": {"w": stored, "b": 1}}, {"table/arrays/w": 14})})
    for kind in ("four", "padded"):
        got = load(folder, {"state": {"table": divided(kind, 0 * ROWS)["state"]}})
        same(got["state"]["table"], divided(kind)["state"])


def test_others_files_come_in_parts(tmp_path: Path) -> None:
    save_file({"state/arrays/w": ROWS}, tmp_path / "hub.safetensors")
    save_file({f"{at}": row for at, row in enumerate(ROWS)}, tmp_path / "rows.safetensors")
    like = divided("padded", 0 * ROWS)
    found = restore_safetensors(tmp_path / "hub.safetensors", like, only="*/w")
    same(found, divided("padded"))
    names = [str(at) for at in range(14)]
    found = restore_safetensors(tmp_path / "rows.safetensors", like, only="*/w", name=lambda _: names)
    same(found, divided("padded"))


def test_orbax_has_the_array_or_the_leaves_and_gives_both(tmp_path: Path) -> None:
    commit(tmp_path / "run", divided("four"))
    export_orbax(tmp_path / "run", tmp_path / "whole")
    same(restore_orbax(tmp_path / "whole", divided("padded", 0 * ROWS)), divided("padded"))
    like = divided("four", 0 * ROWS)
    export_orbax(tmp_path / "run", tmp_path / "apart", like=like)
    same(restore_orbax(tmp_path / "apart", like), divided("four"))


def test_rows_of_another_array_do_not_match(tmp_path: Path) -> None:
    folder = commit(tmp_path, divided("four"))
    with pytest.raises(CheckpointError, match=r"'state/arrays/w' is float32\[14, 5\] in .*, but float32\[13, 5\] in"):
        load(folder, divided("four", ROWS[:13]))
    with pytest.raises(CheckpointError, match=r"'state/arrays/w' \(float32\[14, 5\]\) is in .*, but not in `like`"):
        load(folder, {"state": Longer({"b": 1})})
    with pytest.raises(CheckpointError, match=r"leaf 'state/arrays/v' \(float32\[14, 5\]\) is in `like`, but not in"):
        load(folder, {"state": Longer({"v": (ROWS[:3], ROWS[3:]), "b": 1}, {"arrays/v": (14, 5)})})


SPEC = jax.ShapeDtypeStruct((2, 5), np.float32)


@pytest.mark.parametrize(
    ("arrays", "shape", "message"),
    [
        ((), (14, 5), r"is \[14, 5\], but it is no leaf of this tree: expected a leaf, or a tuple or list of arrays"),
        ({"x": ROWS}, (14, 5), r"is \[14, 5\], but it is no leaf of this tree: expected"),
        ((ROWS, ROWS), (14, 5), r"is \[14, 5\], but its rows are float32\[14, 5\], float32\[14, 5\]: expected"),
        ((ROWS, ROWS[:, 1:]), (28, 5), r"but its rows are float32\[14, 5\], float32\[14, 4\]: expected"),
        ((ROWS, ROWS.astype(np.float16)), (28, 5), r"but its rows are float32\[14, 5\], float16\[14, 5\]: expected"),
        ((ROWS[0, 0], ROWS[0, 1]), (2,), r"but its rows are float32\[\], float32\[\]: expected"),
        ((ROWS[0, 0], ROWS[0, 1]), (0,), r"but its rows are float32\[\], float32\[\]: expected"),
        ((1, 2), (2,), r"but its rows are a Python int, a Python int: expected"),
    ],
)
def test_what_is_said_of_rows_has_to_be_true(tmp_path: Path, arrays: Any, shape: Any, message: str) -> None:
    tree = {"state": Longer({"w": arrays}, {"arrays/w": shape})}
    with pytest.raises(CheckpointError, match=message):
        commit(tmp_path / "new", tree)
    commit(tmp_path, divided("whole"))
    with pytest.raises(CheckpointError, match=r"^true_shapes says that leaf 'state/arrays/w' is"):
        restore(tmp_path, tree)


def test_what_has_no_content_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"leaf 'arrays/w' is a jax.ShapeDtypeStruct, which has no content"):
        commit(tmp_path, Longer({"w": (ROWS[:2], SPEC)}, {"arrays/w": (4, 5)}))
    gone = jnp.zeros((2, 5))
    gone.delete()
    with pytest.raises(CheckpointError, match=r"leaf 'arrays/w' \(float32\[4, 5\]\) is deleted"):
        commit(tmp_path, Longer({"w": (jnp.zeros((2, 5)), gone)}, {"arrays/w": (4, 5)}))
