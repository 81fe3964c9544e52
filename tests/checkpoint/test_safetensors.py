"""Plain safetensors: others read our files, and we restore from theirs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint.format.manifest import data_file
from braidax.checkpoint.format.safetensors import restore_safetensors
from braidax.errors import ArgumentError, CheckpointError
from tests.support.checkpoint.saving import Longer, Tables, bits, commit, commit_as_many


def sharding(shape: tuple[int, ...], spec: P) -> NamedSharding:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return NamedSharding(Mesh(devices, ("a", "b")[: len(shape)]), spec)


def dotted(path: str) -> str:
    return path.replace("/", ".")


def test_torch_reads_names_and_values(tmp_path: Path) -> None:
    half = jax.random.normal(jax.random.key(0), (3, 5)).astype(jnp.bfloat16)
    narrow = np.arange(8).astype(ml_dtypes.float8_e4m3fn)
    tree = {"layers": [{"w": half}, {"w": narrow}], "n": 3, "odd": np.array([-0.0, np.nan], np.float32)}
    found = safetensors.torch.load_file(commit(tmp_path, tree) / data_file(0))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        "layers/0/w": (torch.bfloat16, (3, 5)),
        "layers/1/w": (torch.float8_e4m3fn, (8,)),
        "odd": (torch.float32, (2,)),
    }
    assert found["layers/0/w"].view(torch.int16).numpy().tobytes() == np.asarray(half).tobytes()
    assert found["layers/1/w"].view(torch.uint8).numpy().tobytes() == narrow.tobytes()
    assert found["odd"].numpy().tobytes() == tree["odd"].tobytes()


def test_the_files_of_several_processes_have_all_values_once(tmp_path: Path) -> None:
    want = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {"split": jax.device_put(want, sharding((8,), P(None, "a"))), "whole": jnp.ones(3, jnp.bfloat16)}
    folder = commit_as_many(tmp_path, tree, 2)
    found = np.full((8, 8), np.nan, np.float32)
    others: dict[str, torch.Tensor] = {}
    for process in range(2):
        for name, tensor in safetensors.torch.load_file(folder / data_file(process)).items():
            if not name.endswith("]"):
                others[name] = tensor
                continue
            leaf, _, place = name.removesuffix("]").partition("[")
            assert leaf == "split"
            index = tuple(slice(*map(int, bounds.split(":"))) for bounds in place.split(","))
            assert np.isnan(found[index]).all()
            found[index] = tensor.numpy()
    np.testing.assert_array_equal(found, want)
    assert {name: tensor.tolist() for name, tensor in others.items()} == {"whole": [1, 1, 1]}


def test_a_file_of_torch_is_restored_by_its_names(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(8, 4, generator=generator).bfloat16()
    tensors = {"model.layers.0.w": w, "model.norm": torch.tensor([1.5, -0.0]), "model.step": torch.tensor(7)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    place = sharding((4, 2), P("a", "b"))
    like = {
        "model": {
            "layers": [{"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=place)}],
            "norm": jnp.zeros(2),
            "step": np.int64(0),
        }
    }
    got = restore_safetensors(tmp_path / "model.safetensors", like, name=dotted)
    assert jax.tree.structure(got) == jax.tree.structure(like)
    (layer,) = got["model"]["layers"]
    assert layer["w"].sharding == place
    assert np.asarray(layer["w"]).tobytes() == w.view(torch.int16).numpy().tobytes()
    assert bits(got["model"]["norm"]) == bits(jnp.array([1.5, -0.0]))
    assert not got["model"]["norm"].committed
    assert bits(got["model"]["step"]) == bits(np.int64(7))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64", "bfloat16", "complex64"])
def test_all_dtypes_come_back_from_any_place_in_a_file(tmp_path: Path, dtype: str) -> None:
    want = np.asarray(jnp.arange(12).reshape(3, 4)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    commit(tmp_path, {"x": want, "empty": want[:0], "b": np.ones(3, np.int8)})
    file = tmp_path / "step-00000001" / data_file(0)
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + header_bytes])
    text = json.dumps(header).encode()  # without padding: nothing is aligned any more
    text += b" " * (len(text) % 2 == 0)
    file.write_bytes(len(text).to_bytes(8, "little") + text + file.read_bytes()[8 + header_bytes :])
    like = {"x": np.zeros_like(want), "empty": want[:0], "b": np.zeros(3, np.int8)}
    got = restore_safetensors(file, like)
    assert [bits(leaf) for leaf in jax.tree.leaves(got)] == [bits(np.ones(3, np.int8)), bits(want[:0]), bits(want)]
    assert got["x"].flags.owndata


def test_all_files_of_a_folder_are_read_once(tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / f"model-{number + 1:05d}-of-00002.safetensors"
        safetensors.numpy.save_file({f"w{number}": np.full(2, number)}, path)
    got = restore_safetensors(tmp_path, {"w0": np.zeros(2, np.int64), "w1": np.zeros(2, np.int64)})
    assert (got["w0"].tolist(), got["w1"].tolist()) == ([0, 0], [1, 1])
    safetensors.numpy.save_file({"w0": np.ones(2)}, tmp_path / "z.safetensors")
    with pytest.raises(CheckpointError, match=r"z.safetensors: has a tensor 'w0', and so has model-00001-of-00002"):
        restore_safetensors(tmp_path, {"w0": np.zeros(2)})


def test_layers_are_stacked_and_seen_otherwise(tmp_path: Path) -> None:
    """As hubs have them: a tensor a layer, outputs first, heads side by side, half as wide; and words are padded."""
    random = np.random.default_rng(0)
    query, words = random.normal(size=(3, 8, 6)).astype(ml_dtypes.bfloat16), random.normal(size=(13, 6))
    tensors = {f"model.{at}.q_proj.weight": torch.from_numpy(query[at].view(np.int16).copy()) for at in range(3)}
    tensors = {name: tensor.view(torch.bfloat16) for name, tensor in tensors.items()}
    safetensors.torch.save_file({**tensors, "lm_head": torch.zeros(2)}, tmp_path / "a.safetensors")
    safetensors.numpy.save_file({"embed": words}, tmp_path / "b.safetensors")
    place = sharding((4,), P(None, None, "a"))
    like = Longer(
        {
            "layers": {"q": jax.ShapeDtypeStruct((3, 6, 4, 2), jnp.float32, sharding=place)},
            "words": np.zeros((16, 6)),
            "step": np.int64(5),
        },
        {"arrays/words": (13, 6)},
    )

    def name(path: str) -> str | list[str]:
        return {"arrays/layers/q": [f"model.{at}.q_proj.weight" for at in range(3)], "arrays/words": "embed"}[path]

    seen: list[tuple[str, tuple[int, ...]]] = []

    def view(path: str, tensor: np.ndarray) -> np.ndarray:
        seen.append((path, tensor.shape))
        return tensor.T.reshape(6, 4, 2).astype(np.float32) if path.endswith("q") else tensor

    got = restore_safetensors(tmp_path, like, name=name, view=view, only=["*/layers/*", "*/words"]).arrays
    assert got["layers"]["q"].sharding == place
    want = np.moveaxis(query, 1, 2).reshape(3, 6, 4, 2).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(got["layers"]["q"]), want)
    np.testing.assert_array_equal(got["words"], np.pad(words, ((0, 3), (0, 0))))
    assert got["step"] == 5
    # Each once to know its shape, and once to read it.
    assert sorted(seen) == [("arrays/layers/q", (8, 6))] * 6 + [("arrays/words", (13, 6))] * 2


def test_a_stack_that_cannot_be(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros((2, 3)), "b": np.zeros((3, 2))}, tmp_path / "x.safetensors")
    like = {"w": np.zeros((2, 2, 3))}

    def restored(names: str | list[str], view: Any = None) -> Any:
        return restore_safetensors(tmp_path / "x.safetensors", like, name=lambda path: names, view=view)

    with pytest.raises(
        CheckpointError, match=r"'b' gives float64\[3, 2\], and 'a' float64\[2, 3\]: expected .* 'w'; corr"
    ):
        restored(["a", "b"])
    with pytest.raises(CheckpointError, match=r"has no tensor 'c', but others of the 2 that `name` gives for leaf 'w'"):
        restored(["a", "c"])
    with pytest.raises(
        CheckpointError, match=r"leaf 'w' \(float64\[2, 2, 3\]\) is in `like`, but not in the checkpoint"
    ):
        restored(["c", "d"])
    words = (
        r"view fails for leaf 'w' and tensor 'a', float64\[2, 3\]: ValueError: cannot reshape .*; expected a function"
    )
    with pytest.raises(CheckpointError, match=words):
        restored(["a", "b"], lambda path, tensor: tensor.reshape(4))
    assert restored(["a", "b"], lambda path, tensor: tensor.reshape(2, 3))["w"].shape == (2, 2, 3)


def test_tables_by_rows_come_from_whole_ones(tmp_path: Path) -> None:
    rows = np.arange(26, dtype=np.float32).reshape(13, 2)
    safetensors.numpy.save_file({"table": rows}, tmp_path / "a.safetensors")
    place = sharding((4,), P(None, "a"))
    like = Tables(jax.ShapeDtypeStruct((4, 4, 2), jnp.float32, sharding=place), {"table": 13})
    got = restore_safetensors(tmp_path, like)
    assert got.table.sharding == place
    np.testing.assert_array_equal(np.asarray(got.table).reshape(16, 2), np.concatenate([rows, np.zeros((3, 2))]))


def test_what_does_not_match_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(3), "b.w": np.zeros(2, np.float32), "c": np.zeros(1)}, file)
    like = {"a": np.zeros(4), "b": {"w": np.zeros(2)}, "d": np.zeros(1), "n": 1, "c": {"x": np.zeros(1)}}
    with pytest.raises(CheckpointError) as caught:
        restore_safetensors(file, like, name=dotted)
    assert str(caught.value).startswith(f"{file}: does not match `like` in 6 of 6 leaves")
    for line in (
        "leaf 'a' is float64[3] in the checkpoint, but float64[4] in `like`",
        "leaf 'b/w' is float32[2] in the checkpoint, but float64[2] in `like`",
        "leaf 'd' (float64[1]) is in `like`, but not in the checkpoint",
        "leaf 'n' (a Python int) is in `like`, but not in the checkpoint",
        "leaf 'c' (float64[1]) is in the checkpoint, but not in `like`",
        "leaf 'c/x' (float64[1]) is in `like`, but not in the checkpoint",
    ):
        assert line in str(caught.value)
    got = restore_safetensors(file, {"b": {"w": np.ones(2, np.float32)}, "n": 1}, name=dotted, only=("b/*",))
    assert (got["b"]["w"].tolist(), got["n"]) == ([0, 0], 1)
    with pytest.raises(ArgumentError, match="'z' matches no path in `like`"):
        restore_safetensors(file, like, only=("z",))


def test_a_name_is_not_taken_for_the_path_of_another_leaf(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(3)}, file)
    with pytest.raises(CheckpointError) as caught:
        restore_safetensors(file, {"x": np.zeros(3)}, name=lambda path: f"model.{path}")
    assert "leaf 'x' (float64[3]) is in `like`, but not in the checkpoint" in str(caught.value)
    assert "leaf 'tensor x' (float64[3]) is in the checkpoint, but not in `like`" in str(caught.value)


def headed(header: Any, num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def a_tensor(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} | changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: b"", "cannot be read: "),
        (lambda: b"\x10", "does not begin with the header of a safetensors file"),
        (lambda: b"PK" + bytes(100), "does not begin with the header of a safetensors file"),
        (lambda: headed([1], 0), "does not begin with the header of a safetensors file"),
        (lambda: headed(a_tensor(), 11), r"ends within tensor 'x', which is at \[0, 12\) of 11 bytes"),
        (lambda: headed(a_tensor(shape=[4]), 12), r"tensor 'x' is F32\[4\] in 12 bytes, expected 16"),
        (lambda: headed(a_tensor(shape=3), 12), "tensor 'x' is described as .*expected dtype, shape and data_offsets"),
        (lambda: headed(a_tensor(dtype="F4"), 12), r"leaf 'x' is F4\[3\] in the checkpoint, but float32\[3\]"),
    ],
)
def test_a_file_that_is_not_valid(tmp_path: Path, content: Callable[[], bytes], message: str) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(content())
    with pytest.raises(CheckpointError, match=rf"(?s)a\.safetensors: .*{message}"):
        restore_safetensors(file, {"x": np.zeros(3, np.float32)})


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read: .*No such file"):
        restore_safetensors(tmp_path / "a.safetensors", {})
    with pytest.raises(CheckpointError, match=r"has no file \*\.safetensors; give a folder that has, or a file"):
        restore_safetensors(tmp_path, {})
