"""Orbax both ways: the real one reads what we export, and we read what it has saved, bit for bit."""

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import Checkpointer, Every
from braidax.checkpoint.format.manifest import data_file
from braidax.checkpoint.format.orbax import export_orbax, restore_orbax
from braidax.errors import ArgumentError, CheckpointError, MissingExtra
from tests.support.checkpoint.saving import Longer, Tables, bits, commit
from tests.support.data.jax_gang import RUN_SECONDS, jax_gang

V, D = 13, 5
ROWS = np.arange(V * D, dtype=np.float32).reshape(V, D)


class Cursor(NamedTuple):
    seed: int
    epoch: int


def sharding(shape: tuple[int, ...], spec: P) -> NamedSharding:
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return NamedSharding(Mesh(devices, ("a", "b")[: len(shape)]), spec)


def a_state(place: NamedSharding) -> dict[str, Any]:
    """What a run may have, with all that Orbax can hold; `place`: of its matrices."""
    params = {"kernel": jax.device_put(jax.random.normal(jax.random.key(0), (8, 4)), place), "bias": jnp.ones(4)}
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "half": jax.device_put(jnp.arange(32, dtype=jnp.bfloat16).reshape(8, 4) / 3, place),
        "narrow": {
            name: np.arange(8).astype(getattr(ml_dtypes, name)) for name in ("int4", "float8_e4m3fn", "float8_e5m2")
        },
        "odd": np.array([-0.0, np.nan, np.inf, 5e-324]),
        "counts": np.array([2**63 - 1, -1]),
        "zero": np.zeros((3, 2), np.int8),
        "key": jax.random.key(7),
        "keys": jax.device_put(jax.random.split(jax.random.key(1, impl="rbg"), 8), sharding((8,), P("a"))),
        "data": jnp.array([1, 2], jnp.uint32),
        "cursor": Cursor(2**40, 3),
        "numbers": [True, -7, 0.1, float("-inf")],
        "nothing": None,
        "empty": {},
    }


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert [bits(leaf) for leaf in jax.tree.leaves(found)] == [bits(leaf) for leaf in jax.tree.leaves(expected)]


def save_with_orbax(path: Path, tree: Any, *, use_ocdbt: bool = True) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


def restore_with_orbax(path: Path, like: Any = None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def test_orbax_restores_what_is_exported(tmp_path: Path) -> None:
    state = a_state(sharding((4, 2), P("a", "b")))
    commit(tmp_path / "run", state, step=3)
    assert export_orbax(tmp_path / "run", tmp_path / "orbax", like=state) == 3
    same(restore_with_orbax(tmp_path / "orbax", state), state)
    like = a_state(sharding((2, 4), P("b")))
    got = restore_with_orbax(tmp_path / "orbax", like)
    same(got, state)
    assert got["params"]["kernel"].sharding.is_equivalent_to(like["params"]["kernel"].sharding, 2)


def test_without_its_tree_a_checkpoint_becomes_nested_dicts(tmp_path: Path) -> None:
    table = np.concatenate([ROWS, np.full((3, D), 9, np.float32)]).reshape(4, 4, D)
    key = jax.random.key(3)
    state = {"t": Tables(table, {"table": V}), "list": [jnp.ones(2, jnp.bfloat16), 3], "key": key}
    folder = commit(tmp_path / "run", state)
    assert export_orbax(folder, tmp_path / "orbax") == 1
    like = {"t": {"table": ROWS}, "list": {"0": np.ones(2, ml_dtypes.bfloat16), "1": 3}, "key": key}
    same(restore_with_orbax(tmp_path / "orbax", like), like)


def test_the_newest_that_verifies_is_exported_or_the_one_that_is_named(tmp_path: Path) -> None:
    folders = [commit(tmp_path / "run", {"x": np.full(3, step)}, step) for step in (1, 2, 3)]
    data = folders[2] / data_file(0)
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    assert export_orbax(tmp_path / "run", tmp_path / "a") == 2
    assert restore_with_orbax(tmp_path / "a")["x"].tolist() == [2, 2, 2]
    assert export_orbax(folders[0], tmp_path / "b", like={"x": np.zeros(3, np.int64)}) == 1
    assert restore_with_orbax(tmp_path / "b")["x"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"step-00000003.*leaf 'x' has the checksum"):
        export_orbax(folders[2], tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"nowhere: has no valid checkpoint: .*give the folder of a run"):
        export_orbax(tmp_path / "nowhere", tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_what_orbax_has_saved_is_restored(tmp_path: Path, use_ocdbt: bool) -> None:
    state = a_state(sharding((4, 2), P("a", "b")))
    path = save_with_orbax(tmp_path / "orbax", state, use_ocdbt=use_ocdbt)
    assert (path / "manifest.ocdbt").exists() == use_ocdbt
    same(restore_orbax(path, state), state)
    like = a_state(sharding((2, 4), P("b")))
    got = restore_orbax(path, like)
    same(got, state)
    assert all(leaf.flags.writeable for leaf in jax.tree.leaves(got) if isinstance(leaf, np.ndarray))
    for name in ("half", "keys"):
        assert got[name].sharding.is_equivalent_to(like[name].sharding, got[name].ndim)


def test_what_either_checkpointer_of_orbax_has_saved_is_restored(tmp_path: Path) -> None:
    state = {"w": jnp.arange(4.0), "step": 3}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", state)
    same(restore_orbax(tmp_path / "one", state), state)
    with ocp.CheckpointManager(tmp_path / "many") as many:
        many.save(7, args=ocp.args.StandardSave(state))
    same(restore_orbax(tmp_path / "many" / "7" / "default", state), state)
    hint = r"many: has no file _METADATA, .*give that of one item, such as .*/many/7/default"
    with pytest.raises(CheckpointError, match=hint):
        restore_orbax(tmp_path / "many", state)


def test_arrays_lie_as_those_of_like(tmp_path: Path) -> None:
    values = {
        "weak": jnp.asarray(2.0),
        "fixed": jnp.asarray(4.0),
        "free": jnp.ones(4),
        "spec": jnp.ones(4),
        "scalar": np.float32(3),
    }
    path = save_with_orbax(tmp_path / "orbax", values | {"key": jax.random.key(1), "keys": jax.random.key(2)})
    place = sharding((8,), P())
    like = {
        "weak": jnp.asarray(0.0),
        "fixed": jax.device_put(jnp.asarray(0.0), jax.devices()[1]),
        "free": jnp.zeros(4),
        "spec": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=place),
        "scalar": np.float32(0),
        "key": jax.random.key(0),
        "keys": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=place),
    }
    got = restore_orbax(path, like)
    assert (got["weak"].weak_type, float(got["weak"])) == (True, 2.0)
    assert (got["fixed"].weak_type, float(got["fixed"]), got["fixed"].devices()) == (True, 4.0, {jax.devices()[1]})
    assert not got["free"].committed
    assert not got["key"].committed
    assert got["spec"].sharding == place
    assert got["keys"].sharding.is_equivalent_to(place, 0)
    assert bits(got["scalar"]) == bits(np.float32(3))
    assert bits(got["key"]) == bits(jax.random.key(1))
    assert jax.random.key_data(got["keys"]).tolist() == [0, 2]


def test_a_part_is_restored(tmp_path: Path) -> None:
    saved = {"params": {"w": np.arange(3), "b": np.arange(2)}, "opt": [np.arange(4), None], "step": 3}
    path = save_with_orbax(tmp_path / "orbax", saved, use_ocdbt=False)
    (path / "opt.0" / "0").write_bytes(b"nobody reads this")
    like = {"params": {"w": np.zeros(3, np.int64), "b": np.zeros(2, np.int64)}, "mine": np.full(2, 5)}
    same(restore_orbax(path, like, only=("params/*",)), {"params": saved["params"], "mine": np.full(2, 5)})


def test_tables_by_rows_come_from_whole_ones(tmp_path: Path) -> None:
    path = save_with_orbax(tmp_path / "orbax", {"table": ROWS})
    place = sharding((4,), P(None, "a"))
    like = Tables(jax.ShapeDtypeStruct((4, 4, D), jnp.float32, sharding=place), {"table": V})
    got = restore_orbax(path, like)
    assert got.table.sharding == place
    np.testing.assert_array_equal(np.asarray(got.table).reshape(16, D)[:V], ROWS)
    assert not np.asarray(got.table).reshape(16, D)[V:].any()


def test_padded_dims_come_padded_or_not_and_are_exported_as_like_has_them(tmp_path: Path) -> None:
    def longer(num_rows: int) -> Any:
        array = jax.device_put(np.zeros((num_rows, D), np.float32), sharding((num_rows // 2,), P("a")))
        return {"state": Longer({"w": array.at[:V].set(ROWS)}, {"arrays/w": (V, D)})}

    folder = commit(tmp_path / "ours", longer(14))
    export_orbax(folder, tmp_path / "exported", like=longer(16))
    save_with_orbax(tmp_path / "true", {"state": {"arrays": {"w": ROWS}}})
    for path, like in (("exported", longer(16)), ("true", longer(14))):
        same(restore_orbax(tmp_path / path, like), like)
    save_with_orbax(tmp_path / "wrong", jax.tree.map(lambda leaf: leaf + 1, longer(16)))
    with pytest.raises(CheckpointError, match=r"'state/arrays/w' is \[16, 5\], and \[13, 5\] without .* not all"):
        restore_orbax(tmp_path / "wrong", longer(16))


def test_what_is_padded_alike_is_read_where_it_is_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = NamedSharding(jax.make_mesh((8,), ("a",)), P("a"))  # whose axis is explicit
    array = np.pad(ROWS, ((0, 16 - V), (0, 0)))
    path = save_with_orbax(tmp_path / "padded", {"arrays": {"w": jax.device_put(array, place)}})
    asked: list[Any] = []

    def spied(item: Any, restore_args: Any, real: Any = ocp.args.PyTreeRestore) -> Any:
        asked.append(restore_args["arrays"]["w"])
        return real(item, restore_args)

    monkeypatch.setattr(ocp.args, "PyTreeRestore", spied)
    like = Longer({"w": jax.ShapeDtypeStruct((16, D), jnp.float32, sharding=place)}, {"arrays/w": (V, D)})
    found = restore_orbax(path, like).arrays["w"]
    assert (asked[0].sharding, asked[0].global_shape) == (place, None)  # each device its shard, and nothing is cut
    assert found.sharding == place
    np.testing.assert_array_equal(np.asarray(found)[:V], ROWS)
    array[V, 0] = np.nan
    wrong = save_with_orbax(tmp_path / "wrong", {"arrays": {"w": jax.device_put(array, place)}})
    with pytest.raises(CheckpointError, match=r"'arrays/w' is \[16, 5\], and \[13, 5\] without .* not all"):
        restore_orbax(wrong, like)


def together(comm: Any, folder: Path) -> str:
    """Saves, exports and restores on all processes; returns what is wrong."""
    devices = np.array(jax.devices())
    mesh, wide = Mesh(devices.reshape(4, 2), ("a", "b")), Mesh(devices[::-1].reshape(2, 4), ("a", "b"))
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 8)))
    table = np.concatenate([ROWS, np.zeros((3, D), np.float32)]).reshape(4, 4, D)
    whole = {"half": np.arange(64.0).reshape(8, 8).astype(ml_dtypes.bfloat16), "table": ROWS, "keys": keys}

    def place(value: np.ndarray, mesh: Mesh, spec: P) -> Any:
        place = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, place, lambda index: value[index], dtype=value.dtype)

    longer = np.pad(ROWS, ((0, 3), (0, 0)))
    state = {
        "half": place(whole["half"], mesh, P("a", "b")),
        "long": Longer({"w": place(longer, mesh, P(("a", "b")))}, {"arrays/w": (V, D)}),
        "table": place(ROWS, mesh, P()),
        "keys": jax.random.wrap_key_data(place(keys, mesh, P("a"))),
        "numpy": np.full(3, 5),
        "n": 4,
    }
    with Checkpointer(folder / "run", Every(1), timeout_seconds=20) as saver:
        saver.save(state)
    export_orbax(folder / "run", folder / "orbax", like=state)
    like = {
        "half": place(np.zeros_like(whole["half"]), wide, P(("b", "a"))),
        "keys": jax.random.wrap_key_data(place(np.zeros_like(keys), wide, P())),
        "long": Longer({"w": place(np.zeros_like(longer), wide, P("a"))}, {"arrays/w": (V, D)}),
        "numpy": np.zeros(3, np.int64),
        "n": 0,
    }
    found = restore_orbax(folder / "orbax", like, only=("half", "keys", "long/*", "n*"))
    padded = Tables(place(np.zeros_like(table), wide, P(None, "b")), {"table": V})
    found["table"] = restore_orbax(folder / "orbax", padded, only=("table",)).table
    found |= {"keys": jax.random.key_data(found["keys"]), "long": found["long"].arrays["w"]}
    wrong = [name for name, want in (("numpy", [5, 5, 5]), ("n", 4)) if np.asarray(found[name]).tolist() != want]
    for name, want in (("half", whole["half"]), ("keys", keys), ("table", table), ("long", longer)):
        for shard in found[name].addressable_shards:
            if np.asarray(shard.data).tobytes() != want[shard.index].tobytes():
                wrong.append(f"{name} on {shard.device}")
    return f"{comm.rank}: {wrong}"


def test_processes_export_and_restore_together(tmp_path: Path) -> None:
    with jax_gang(2, 4) as gang:
        assert gang.run(together, tmp_path, timeout_seconds=RUN_SECONDS) == ["0: []", "1: []"]


def test_a_tree_that_does_not_match_is_refused(tmp_path: Path) -> None:
    saved = {"a": np.zeros(3), "b": np.zeros(2, np.float32), "n": 3, "f": 1.0, "s": np.float64(2), "t": "text"}
    path = save_with_orbax(tmp_path / "orbax", saved)
    like = {"a": np.zeros(4), "b": np.zeros(2, np.int32), "n": 3.0, "f": np.float32(1), "s": np.float64(0), "c": 1}
    with pytest.raises(CheckpointError) as caught:
        restore_orbax(path, like)
    message = str(caught.value)
    assert message.startswith(f"{path}: does not match `like` in 6 of 7 leaves")
    for line in (
        "leaf 'c' (a Python int) is in `like`, but not in the checkpoint",
        "leaf 't' (str[]) is in the checkpoint, but not in `like`",
        "leaf 'a' is float64[3] in the checkpoint, but float64[4] in `like`",
        "leaf 'b' is float32[2] in the checkpoint, but int32[2] in `like`",
        "leaf 'n' is a Python int in the checkpoint, but a Python float in `like`",
        "leaf 'f' is float64[] in the checkpoint, but float32[] in `like`",
    ):
        assert line in message
    assert "leaf 's'" not in message


def test_keys_are_keys_of_their_kind(tmp_path: Path) -> None:
    key = jax.random.key(3)
    path = save_with_orbax(tmp_path / "orbax", {"key": key, "data": jax.random.key_data(key)})
    as_data = jnp.zeros(2, jnp.uint32)
    got = restore_orbax(path, {"key": jax.device_put(as_data, jax.devices()[1]), "data": as_data})
    assert got["key"].devices() == {jax.devices()[1]}
    assert got["key"].tolist() == got["data"].tolist() == [0, 3]
    expected = r"leaf 'data' is uint32\[2\], but key<fry>\[\] in `like`\n.*wrap_key_data"
    with pytest.raises(CheckpointError, match=expected):
        restore_orbax(path, {"key": key, "data": key})
    other = save_with_orbax(tmp_path / "other", {"key": jax.random.split(jax.random.key(0, impl="rbg"), 2)})
    with pytest.raises(CheckpointError, match=r"leaf 'key' is key<rbg>\[2\], but key<urbg>\[2\]"):
        restore_orbax(other, {"key": jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 2)})


def test_what_orbax_cannot_hold_is_named_before_anything_is_written(tmp_path: Path) -> None:
    state = {
        "none": np.zeros((0, 3)),
        "odd": np.zeros(2, ml_dtypes.uint4),
        "huge": 2**63,
        "fine": -(2**63),
        "a": {"b": 1},
        "a.b": 2,
    }
    commit(tmp_path / "run", state)
    with pytest.raises(CheckpointError) as caught:
        export_orbax(tmp_path / "run", tmp_path / "orbax", like=state)
    message = str(caught.value)
    assert f"{tmp_path / 'run'}: Orbax cannot hold 4 of 6 leaves:" in message
    for line in (
        "leaf 'none' (float64[0, 3]) has no elements",
        "leaf 'odd' (uint4[2]) is of a dtype that TensorStore does not know",
        "leaf 'huge' is 9223372036854775808, which has more than 64 bits",
        "leaf 'a.b' would overwrite leaf 'a/b', as both become 'a.b'",
    ):
        assert line in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    commit(tmp_path / "leaf", np.zeros(2))
    with pytest.raises(CheckpointError, match="the tree has no leaves, or is one leaf: put it into a dict"):
        export_orbax(tmp_path / "leaf", tmp_path / "orbax", like=np.zeros(2))


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("a", "a/b/c")])
def test_paths_that_nested_dicts_cannot_hold_need_the_tree(tmp_path: Path, names: tuple[str, str]) -> None:
    state = [(name, number) for number, name in enumerate(names)]
    commit(tmp_path / "run", dict(state))
    with pytest.raises(
        CheckpointError, match=r"another leaf has the path of one of its parents.*give the tree in like="
    ):
        export_orbax(tmp_path / "run", tmp_path / "orbax")
    export_orbax(tmp_path / "run", tmp_path / "orbax", like=dict(state))
    assert restore_with_orbax(tmp_path / "orbax") == dict(state)


def test_wrong_paths(tmp_path: Path) -> None:
    commit(tmp_path / "run", {"x": 1})
    with pytest.raises(ArgumentError, match=r"target='.*/run': exists: expected a folder that is to be made"):
        export_orbax(tmp_path / "run", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run: has no file _METADATA, so it is no checkpoint of Orbax"):
        restore_orbax(tmp_path / "run", {"x": 1})
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"target='.*/file/orbax': expected a folder that this process may make"):
        export_orbax(tmp_path / "run", tmp_path / "file" / "orbax")


def test_what_orbax_cannot_read_is_said(tmp_path: Path) -> None:
    path = save_with_orbax(tmp_path / "orbax", {"x": np.arange(3)}, use_ocdbt=False)
    shutil.rmtree(path / "x")
    with pytest.raises(CheckpointError, match=r"orbax: Orbax cannot read it: .*x/\.zarray"):
        restore_orbax(path, {"x": np.zeros(3, np.int64)})
    (path / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=r"orbax: Orbax cannot read it: "):
        restore_orbax(path, {"x": np.zeros(3, np.int64)})


def test_without_orbax_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (
        lambda: export_orbax(tmp_path / "run", tmp_path / "orbax"),
        lambda: restore_orbax(tmp_path / "orbax", {}),
    ):
        with pytest.raises(MissingExtra, match=r'_orbax needs the module .*pip install "braidax\[orbax\]"'):
            call()
