"""After training: parameters as host arrays or as one file, from what a run has left, against the state it had."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from typer.testing import CliRunner

import braidax
import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every, HostShard, export_safetensors, load_params
from braidax.checkpoint.format import exporting, folders
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.format.reading import read_manifest
from braidax.cli import app
from braidax.errors import ArgumentError, CheckpointError
from tests.support.checkpoint.saving import Tables, bits, commit, commit_as_many, names

PARAMS: dict[str, Any] = {
    "layers": [{"w": np.arange(12, dtype=np.float32).reshape(3, 4)}, {"w": np.full((2, 2), -1, np.int8)}],
    "half": jnp.arange(5, dtype=jnp.bfloat16) / 3,
    "odd": np.array([-0.0, np.nan, np.inf]),
    "scale": 0.1,
    "empty": np.zeros((0, 4), np.float16),
}
FLAT = {"layers/0/w", "layers/1/w", "half", "odd", "scale", "empty"}


class Saved(NamedTuple):
    """A tree as the states of Flax are: parameters beside others that have their paths."""

    params: Any
    opt_state: Any


def run_of(root: Path, params: Any = PARAMS, *steps: int) -> Path:
    """Returns the folder of a run with checkpoints of these steps, whose parameters differ by `scale`."""
    root.mkdir(parents=True, exist_ok=True)
    for step in steps or (7,):
        varied = {**params, "scale": float(step)} if isinstance(params, dict) and steps else params
        commit(root, (Saved(varied, {"mu": params}), 5), step=step)
    return root


def same(found: Any, expected: Any) -> None:
    """Checks values bit for bit, and that they are NumPy's."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    arrays = [leaf if isinstance(leaf, float) else np.asarray(leaf) for leaf in jax.tree.leaves(expected)]
    assert [bits(leaf) for leaf in jax.tree.leaves(found)] == [bits(leaf) for leaf in arrays]


def damage(folder: Path) -> None:
    (where,) = (one.offset for one in read_manifest(folder).tensors if one.path == "0/params/layers/0/w")
    content = bytearray((folder / data_file(0)).read_bytes())
    content[where] ^= 1
    (folder / data_file(0)).write_bytes(content)


# As arrays


def test_parameters_are_nested_dicts_of_arrays_or_like_a_tree(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    same(load_params(run, like=jax.eval_shape(lambda: {**PARAMS, "odd": 0.0}) | {"odd": PARAMS["odd"]}), PARAMS)
    found = load_params(run)
    first, second = PARAMS["layers"]
    same(found, {**PARAMS, "layers": {"0": first, "1": second}})
    assert found["half"].dtype == jnp.bfloat16
    same(load_params(run, at="0/opt_state/mu/half"), PARAMS["half"])
    same(load_params(str(run), at="/0/opt_state/mu/layers/"), {"0": first, "1": second})


def test_a_run_of_train_one_checkpoint_and_a_given_step_are_found(tmp_path: Path) -> None:
    inside = run_of(tmp_path / "digits" / "checkpoints", PARAMS, 1, 2, 3)
    assert load_params(tmp_path / "digits")["scale"] == 3
    assert load_params(tmp_path / "digits", step=2)["scale"] == 2
    assert load_params(inside / "step-00000001")["scale"] == 1
    moved = (inside / "step-00000001").rename(tmp_path / "mine")
    assert load_params(moved, step=1)["scale"] == 1
    with pytest.raises(CheckpointError, match=r"step=9: there is no such checkpoint: expected one of 2, 3; give one"):
        load_params(inside, step=9)


def test_a_key_is_its_data_and_a_node_may_be_one_leaf(tmp_path: Path) -> None:
    key = jax.random.key(3)
    commit(tmp_path, {"params": {"key": key, "table": Tables(np.arange(6.0).reshape(2, 3, 1), {"table": 5})}})
    found = load_params(tmp_path)
    np.testing.assert_array_equal(found["key"], jax.random.key_data(key))
    np.testing.assert_array_equal(found["table"]["table"], np.arange(5.0)[:, None])
    same(load_params(tmp_path, at="params/key"), np.asarray(jax.random.key_data(key)))
    commit(tmp_path / "alone", {"params": np.ones(2)})
    same(load_params(tmp_path / "alone"), np.ones(2))
    same(load_params(tmp_path / "alone", like=np.zeros(2)), np.ones(2))


def test_parts_of_several_processes_become_one_array(tmp_path: Path) -> None:
    want = np.arange(64, dtype=np.float32).reshape(8, 8)
    place = jax.sharding.NamedSharding(jax.make_mesh((8,), ("a",)), jax.sharding.PartitionSpec(None, "a"))
    commit_as_many(tmp_path, {"params": {"w": jax.device_put(want, place)}}, 2)
    same(load_params(tmp_path), {"w": want})
    export_safetensors(tmp_path, tmp_path / "w.safetensors")
    same(safetensors.numpy.load_file(tmp_path / "w.safetensors"), {"w": want})


# What `parallelize` trains


def looped(params: Any, batch: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, weights: (jnp.tanh(x @ weights), None), batch["x"], params["layers"])
    return (x.astype(jnp.float32) ** 2).mean()


def layers(key: jax.Array) -> Any:
    return {"layers": jax.random.normal(key, (6, 5, 5), jnp.bfloat16)}


def step_of(strategy: Any, num_devices: int) -> Any:
    mesh = jax.make_mesh((num_devices,), ("a",), devices=jax.devices()[:num_devices])
    batch = {"x": jax.ShapeDtypeStruct((8, 5), jnp.bfloat16)}
    made: Any = {"init": layers, "batch": batch, "microbatches": 2 if isinstance(strategy, bx.Pipeline) else 1}
    return bx.parallelize(looped, optax.sgd(0.1), mesh, {"a": strategy}, **made)


STEPS: dict[str, Callable[[], Any]] = {
    "one device": lambda: step_of(bx.DataParallel(), 1),
    "sharded": lambda: step_of(bx.FullySharded({"params/layers": bx.Gathered(1)}, min_bytes=0), 8),
    "staged": lambda: step_of(bx.Pipeline("1F1B", clock="counted"), 2),
}


@pytest.mark.parametrize("name", STEPS)
def test_weights_are_those_of_single_device_training_however_they_lay(tmp_path: Path, name: str) -> None:
    step = STEPS[name]()
    state = step.init(jax.random.key(0))
    if name != "staged":  # whose programs take seconds to compile, and store what `init` gives in the same form
        state, _ = step.update(state, {"x": np.ones((8, 5), jnp.bfloat16)})
    with Checkpointer(tmp_path / "run", Every(1)) as saver:
        saver.save((state, 5))
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.params)]
    assert shapes == {"one device": [(6, 5, 5)], "sharded": [(6, 8, 5)]}.get(name, shapes)
    assert (len(shapes) > 1) == (name == "staged")
    whole = np.concatenate([np.asarray(leaf)[:, :5] for leaf in jax.tree.leaves(state.params)])
    same(load_params(tmp_path / "run", like=jax.eval_shape(layers, jax.random.key(0))), {"layers": whole})
    assert export_safetensors(tmp_path / "run", tmp_path / "w.safetensors") == 0  # of the saver's updates
    found = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert (found["layers"].dtype, found["layers"].shape) == (torch.bfloat16, (6, 5, 5))
    assert found["layers"].view(torch.int16).numpy().tobytes() == whole.tobytes()


def pooled(params: Any, batch: Any) -> Any:
    return ((params["table"][batch["ids"]].mean(1) @ params["kernel"] - 1) ** 2).mean()


def tables(key: jax.Array) -> Any:
    return {"table": jax.random.normal(key, (37, 4)), "kernel": jnp.ones(4)}


def by_rows() -> tuple[Any, Any]:
    """Returns a step whose table is stored by rows, and its state: two updates have touched 12 rows each."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    made: Any = {"init": tables, "batch": {"ids": jax.ShapeDtypeStruct((4, 3), jnp.int32)}}
    step = bx.parallelize(pooled, optax.adam(1e-2), mesh, {"data": bx.Hybrid({"params/table": bx.Rows()})}, **made)
    state = step.init(jax.random.key(0))
    for first in (0, 12):
        state, _ = step.update(state, {"ids": np.arange(first, first + 12, dtype=np.int32).reshape(4, 3)})
    return step, state


def test_tables_by_rows_are_dense_and_late_rows_are_refused(tmp_path: Path) -> None:
    step, state = by_rows()
    assert state.params["table"].shape == (19, 2, 4)
    settled = step.settled(state)
    expected = {
        "kernel": np.asarray(state.params["kernel"]),
        "table": np.asarray(settled.params["table"]).reshape(-1, 4)[:37],
    }
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save((state, 5))
        with pytest.raises(CheckpointError) as caught:
            load_params(tmp_path)
        assert str(caught.value) == (
            f"{tmp_path}/step-00000000: 25 of 37 rows of 'table' lag behind: the optimizer moves all rows at each "
            "step, and a row that no batch touches is brought up when it is next read, by the step alone. Save a "
            "settled state, saver.save((step.settled(state), loader.cursor)), or take step.to_dense(state).params; or "
            'have such rows as they were when last touched: late_rows="as saved", or --late-rows'
        )
        found = load_params(tmp_path, late_rows="as saved")
        stored = np.asarray(state.params["table"]).reshape(-1, 4)[:37]
        same(found, {"kernel": expected["kernel"], "table": stored})
        assert not np.array_equal(stored, expected["table"])
        saver.save((settled, 5))
    same(load_params(tmp_path, like=jax.eval_shape(tables, jax.random.key(0))), expected)
    assert export_safetensors(tmp_path, tmp_path / "w.safetensors") == 0  # of the saver's updates
    same(safetensors.numpy.load_file(tmp_path / "w.safetensors"), expected)


def test_tables_of_servers_are_among_the_parameters(tmp_path: Path) -> None:
    """As `ServedTables` and `ServedVariables` save them; `tests/parallel/served` holds that they do."""
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)

    def served(last: int, **more: Any) -> Any:
        values = HostShard(rows, rows.shape, (0, 0))
        kept = HostShard(np.full(5, last), (5,), (0,))
        return {"step": 3, "tables": {"m/table": {"rows": {"values": values, "kept/last": kept, **more}}}}

    kernel = np.ones(2)
    expected = {"kernel": kernel, "m": {"table": rows}}
    commit(tmp_path / "tables", ({"params": {"kernel": kernel}, "opt_state": {"kernel": kernel}}, served(3), 5))
    same(load_params(tmp_path / "tables"), expected)
    everything = {"step": 3, "tables": served(3), "whole": {"params": {"kernel": kernel}}}
    commit(tmp_path / "all", ({"step": np.int32(3)}, everything, 5))
    same(load_params(tmp_path / "all"), expected)
    commit(tmp_path / "late", ({"params": {"kernel": kernel}}, served(2), 5))
    with pytest.raises(CheckpointError, match="5 of 5 rows of 'm/table' lag behind"):
        load_params(tmp_path / "late")
    commit(tmp_path / "grown", ({"params": {"kernel": kernel}}, served(3, ids=np.arange(5)), 5))
    words = r"'m/table' grows: .*; at='0/params' gives the other parameters, and at='1/tables/m/table/rows' the ids and"
    with pytest.raises(CheckpointError, match=words):
        load_params(tmp_path / "grown")
    same(load_params(tmp_path / "grown", at="0/params"), {"kernel": kernel})
    np.testing.assert_array_equal(load_params(tmp_path / "grown", at="1/tables/m/table/rows")["values"], rows)


# As a file


def test_a_file_has_names_values_dtypes_and_where_they_are_from(tmp_path: Path, monkeypatch: Any) -> None:
    run = run_of(tmp_path / "run")
    file = tmp_path / "made" / "model.safetensors"
    monkeypatch.setattr(exporting, "_BLOCK_BYTES", 16)
    assert export_safetensors(run, file) == 7
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata() == {"step": "7", "braidax": read_manifest(run / "step-00000007").about.version}
        assert set(opened.keys()) == FLAT
        same(opened.get_tensor("layers/0/w"), PARAMS["layers"][0]["w"])
        same(opened.get_tensor("odd"), PARAMS["odd"])
        assert opened.get_tensor("empty").shape == (0, 4)
        assert (opened.get_tensor("scale").dtype, float(opened.get_tensor("scale"))) == (np.float64, 0.1)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    for name, told in json.loads(content[8 : 8 + size]).items():
        alignment = {"I8": 1, "BF16": 2, "F64": 8}.get(told.get("dtype"), 4)
        assert name == "__metadata__" or (8 + size + told["data_offsets"][0]) % alignment == 0
    half = safetensors.torch.load_file(file)["half"]
    assert half.dtype == torch.bfloat16
    assert half.view(torch.int16).numpy().tobytes() == np.asarray(PARAMS["half"]).tobytes()
    assert names(file.parent) == ["model.safetensors"]
    read = braidax.checkpoint.restore_safetensors(file, {**PARAMS, "scale": np.zeros(())})
    same(read["layers"], PARAMS["layers"])


def test_a_file_that_is_there_stays_unless_it_is_to_be_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    run, file = run_of(tmp_path / "run"), tmp_path / "model.safetensors"
    file.write_text("mine")
    with pytest.raises(ArgumentError, match=r"is there: expected a file .* existing=\"replace\", which is --repl"):
        export_safetensors(run, file)
    assert file.read_text() == "mine"
    export_safetensors(run, file, existing="replace")
    assert set(safetensors.numpy.load_file(file)) == FLAT
    with pytest.raises(ArgumentError, match="is a folder: expected a file to write; give a name in it"):
        export_safetensors(run, run, existing="replace")
    # One that comes while it is written stays, with and without links.
    late = tmp_path / "late"
    write = exporting._write

    def slow(target: Path, *rest: Any) -> None:
        write(target.with_name("other"), *rest)
        target.write_text("mine")
        write(target, *rest)

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(exporting, "_write", slow)
    for link in (os.link, no_links):
        monkeypatch.setattr(exporting.os, "link", link)
        with pytest.raises(ArgumentError, match=r"late.: is there"):
            export_safetensors(run, late)
        assert late.read_text() == "mine"
        assert set(safetensors.numpy.load_file(tmp_path / "other")) == FLAT
        assert names(tmp_path) == ["late", "model.safetensors", "other", "run"]
        late.unlink()
        (tmp_path / "other").unlink()


def test_nothing_is_left_where_a_file_cannot_be_written(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"cannot be written: .*; give another path, make room, or change"):
        export_safetensors(run, tmp_path / "file" / "model.safetensors")
    damage(run / "step-00000007")
    with pytest.raises(CheckpointError, match="none of its checkpoints is valid"):
        export_safetensors(run, tmp_path / "model.safetensors")
    assert names(tmp_path) == ["file", "run"]


def test_two_parameters_of_one_name_and_numbers_that_do_not_fit_are_told(tmp_path: Path) -> None:
    commit(tmp_path / "run", {"params": {"a.b": np.ones(1), "a": {"b": np.zeros(1)}, "big": 2**70}})
    with pytest.raises(ArgumentError, match=r"name gives 'a.b' for parameter 'a.b', .* parameter 'a/b': expected one"):
        export_safetensors(tmp_path / "run", tmp_path / "file", name=lambda path: path.replace("/", "."))
    with pytest.raises(CheckpointError, match=r"'big' is 1180591620717411303424, which has more than 64 bits"):
        export_safetensors(tmp_path / "run", tmp_path / "file")
    with pytest.raises(ArgumentError, match="'__metadata__' for parameter 'a/b', and that is the name of the format"):
        export_safetensors(tmp_path / "run", tmp_path / "file", name=lambda path: "__metadata__")
    assert load_params(tmp_path / "run")["big"] == 2**70


# What is not there, or broken


def test_folders_without_checkpoints_are_told_from_runs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: is not there: expected the folder of a run; correct the path"):
        load_params(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: is no folder: expected the folder of a run"):
        load_params(tmp_path / "file")
    with pytest.raises(CheckpointError, match="has no checkpoint; give the folder of a run that has saved one"):
        load_params(tmp_path)
    run_of(tmp_path / "runs" / "a" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"has no checkpoint; give one of the runs in it, such as .*/runs/a$"):
        load_params(tmp_path / "runs")
    with pytest.raises(ArgumentError, match=r"run='s3://bucket/run': expected a folder on a disk; copy a checkpoint"):
        load_params("s3://bucket/run")


def test_a_damaged_checkpoint_gives_way_to_one_before_unless_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, PARAMS, 1, 2, 3)
    damage(run / "step-00000003")
    assert load_params(run)["scale"] == 2
    assert "skipped the checkpoint" in caplog.text
    assert "the file was changed" in caplog.text
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 is valid: .*the file was changed; put a whole"):
        load_params(run, step=3)
    with pytest.raises(CheckpointError, match=r"arrays-00000.safetensors: .*the file was changed$"):
        load_params(run / "step-00000003")
    (run / "step-00000002" / manifest_file(0)).unlink()
    shutil.copytree(run / "step-00000001", run / "step-00000009")
    assert load_params(run)["scale"] == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 is valid: .* holds the checkpoint of step 1"):
        load_params(run, step=9)


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(tmp_path: Path, monkeypatch: Any) -> None:
    run = run_of(tmp_path, PARAMS, 1, 2)
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.parent.name == "step-00000002":
            raise PermissionError(errno.EACCES, "no right", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(CheckpointError, match=r"manifest.json: cannot be read, .*no right"):
        load_params(run)


def test_one_that_is_removed_while_it_is_read_gives_way_to_a_newer_one(tmp_path: Path, monkeypatch: Any) -> None:
    run, read = run_of(tmp_path, PARAMS, 1), exporting.read_content

    def replaced(folder: Path) -> Any:
        if folder.name == "step-00000001":
            run_of(run, PARAMS, 2)
            folders.remove(folders.Found(1, 0, folder))
        return read(folder)

    monkeypatch.setattr(exporting, "read_content", replaced)
    assert load_params(run)["scale"] == 2


def test_what_are_the_parameters_has_to_be_clear(tmp_path: Path) -> None:
    commit(tmp_path / "none", ({"w": np.ones(1)}, 5))
    with pytest.raises(CheckpointError) as caught:
        load_params(tmp_path / "none")
    assert str(caught.value) == (
        f"{tmp_path}/none/step-00000001: at=None: expected the path of a node that has the parameters, by default one "
        "that is called params, but there is none among '0/w', '1'; give its path, such as at='0/model'"
    )
    same(load_params(tmp_path / "none", at="0"), {"w": np.ones(1)})
    with pytest.raises(CheckpointError, match="at='0/params': expected the path of a node"):
        load_params(tmp_path / "none", at="0/params")
    commit(tmp_path / "two", {"ema": {"params": np.ones(1)}, "now": {"params": np.zeros(1)}})
    with pytest.raises(
        CheckpointError, match=r"there are parameters at 'ema/params', 'now/params': .* at='ema/params'"
    ):
        load_params(tmp_path / "two")
    same(load_params(tmp_path / "two", at="now/params"), np.zeros(1))


def test_a_tree_that_is_not_that_of_the_run_is_told_leaf_by_leaf(tmp_path: Path) -> None:
    commit(tmp_path, {"params": {"a": np.ones((2, 3), np.float32), "b": np.ones(2), "c": np.ones(1)}})
    like = {"a": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32), "d": np.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        load_params(tmp_path, like=like)
    assert str(caught.value) == (
        f"{tmp_path}/step-00000001: has other parameters than `like`:\n"
        "  'd' is in `like`, but not in the checkpoint\n"
        "  'a' is float32[2, 3] in the checkpoint, but float32[3, 2] in `like`\n"
        "  'b' is float64[2] in the checkpoint, but float32[2] in `like`\n"
        "  'c' is float64[1] in the checkpoint, but not in `like`\n"
        "give a tree like that of the run, or none and convert afterwards"
    )


def test_paths_that_nested_dicts_cannot_hold_need_a_tree(tmp_path: Path) -> None:
    params = {"a": np.ones(1), "a/b": np.zeros(1)}
    commit(tmp_path, {"params": params})
    with pytest.raises(CheckpointError, match="parameter 'a/b': another one has the path of a node above it"):
        load_params(tmp_path)
    same(load_params(tmp_path, like=params), params)


# The command


def test_the_command_writes_a_file_and_says_what_is_in_it(tmp_path: Path) -> None:
    run, file = run_of(tmp_path / "run", PARAMS, 1, 1200), tmp_path / "model.safetensors"

    def export(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["export", str(run), str(file), *options])
        return result.exit_code, result.output

    assert export("--names", "dotted") == (
        0,
        f"{file}: the parameters of step 1,200, {file.stat().st_size:,} bytes\n",
    )
    assert set(safetensors.numpy.load_file(file)) == {name.replace("/", ".") for name in FLAT}
    code, said = export()
    assert (code, said.splitlines()[0][:6]) == (1, "error:")
    assert export("--replace", "--step", "1", "--at", "0/params/layers")[1].startswith(
        f"{file}: the parameters of step 1,"
    )
    assert set(safetensors.numpy.load_file(file)) == {"0/w", "1/w"}
