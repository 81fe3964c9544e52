"""Tables that are stored by rows, into another number of shards, and from and into `[V, ...]`; dims that are padded."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import PaddedRows, TrueShapes, restore_safetensors
from braidax.checkpoint.format import reading
from braidax.checkpoint.format.reading import read_manifest
from braidax.checkpoint.snapshot.leaves import padded_rows
from braidax.errors import CheckpointError
from tests.support.checkpoint.saving import Longer, Tables, commit, commit_as_many, load, read_all

V, D = 13, 5
WANT = np.arange(V * D, dtype=np.float32).reshape(V, D)


def stored(num_shards: int, fill: float = 0.0) -> np.ndarray:
    """The rows, and then padding."""
    num_rows = -(-V // num_shards)
    padding = np.full((num_rows * num_shards - V, D), fill, np.float32)
    return np.concatenate([WANT, padding]).reshape(num_rows, num_shards, D)


def sharding(num_shards: int, spec: P) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:num_shards]), ("a",)), spec)


def tables(leaf: Any, num_rows: int | None = V) -> Any:
    return {"state": Tables({"w": leaf, "b": 1}, {} if num_rows is None else {"table/w": num_rows})}


def test_what_has_padded_rows_is_found_at_any_depth() -> None:
    assert isinstance(Tables({}), PaddedRows)
    assert padded_rows(tables(np.zeros(3))) == {"state/table/w": V}
    inner = Tables({"x": 1, "inner": [Tables(2, {"table": 3})]}, {"table/x": 7})
    assert padded_rows((0, inner)) == {"1/table/x": 7, "1/table/inner/0/table": 3}
    assert padded_rows(inner) == {"table/x": 7, "table/inner/0/table": 3}
    assert padded_rows([jnp.zeros(2), None, 3]) == {}


@pytest.mark.parametrize("block_bytes", [32, 1 << 20])
@pytest.mark.parametrize("wanted", [1, 3, 4, 8, None])
@pytest.mark.parametrize("saved", [1, 4, 8, None])
def test_rows_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int | None, wanted: int | None, block_bytes: int
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", block_bytes)

    def placed(num_shards: int | None, fill: float) -> jax.Array:
        if num_shards is None:
            return jnp.asarray(WANT)
        return jax.device_put(stored(num_shards, fill), sharding(num_shards, P(None, "a")))

    folder = commit(tmp_path, tables(placed(saved, 9.0), V if saved else None))
    got = load(folder, tables(placed(wanted, 1.0), V if wanted else None))["state"].table["w"]
    if wanted is None:
        np.testing.assert_array_equal(got, WANT)
    else:
        # The same N is the same bits; otherwise padding is zero.
        np.testing.assert_array_equal(got, stored(wanted, 9.0 if wanted == saved else 0.0))
        assert got.sharding == sharding(wanted, P(None, "a"))


def test_rows_move_without_being_told_twice(tmp_path: Path) -> None:
    folder = commit(tmp_path, tables(stored(4)))
    assert read_manifest(folder).entries[1].padded_rows == V
    for like in (stored(2), np.zeros((V, D), np.float32)):
        got = load(folder, tables(like, None))["state"].table["w"]
        np.testing.assert_array_equal(got.reshape(-1, D)[:V], WANT)
    np.testing.assert_array_equal(load(folder, {"state": Tables({"w": stored(4), "b": 1})})["state"].table["b"], 1)


def test_a_part_of_the_rows_is_read(tmp_path: Path) -> None:
    folder = commit(tmp_path, tables(stored(4)))
    like = jax.ShapeDtypeStruct((V, D), np.float32, sharding=sharding(5, P(None, "a")))
    got = load(folder, tables(like, None))["state"].table["w"]
    np.testing.assert_array_equal(got, WANT)
    assert [shard.data.shape for shard in got.addressable_shards] == [(V, 1)] * 5


@pytest.mark.parametrize(
    ("like", "num_rows"),
    [
        (np.zeros((7, 2, D), np.float32), V + 1),
        (np.zeros((V + 1, D), np.float32), None),
        (np.zeros((6, 2, D), np.float32), None),
        (np.zeros((7, 2, D + 1), np.float32), None),
        (np.zeros((V, D), np.int32), None),
    ],
)
def test_other_rows_do_not_match(tmp_path: Path, like: np.ndarray, num_rows: int | None) -> None:
    folder = commit(tmp_path, tables(stored(2)))
    said = "" if num_rows is None else f" of {num_rows} rows"
    shape = str(list(like.shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(
        CheckpointError,
        match=rf"leaf 'state/table/w' is float32\[7, 2, 5\] of 13 rows in .*but {like.dtype}{shape}{said} in `li",
    ):
        load(folder, tables(like, num_rows))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (tables(np.zeros((4, 4, D))), None),
        (tables(np.zeros((3, 4, D))), r"leaf 'state/table/w' has 13 rows, but it is float64\[3, 4, 5\]: expected"),
        (tables(np.zeros(V)), r"but it is float64\[13\]: expected an array \[ceil\(13 / N\), N"),
        ({"s": Tables({"x": 1}, {"table/y": 2})}, r"leaf 's/table/y' has 2 rows, but it is no leaf of this tree"),
    ],
)
def test_what_is_said_of_rows_has_to_be_true(tmp_path: Path, tree: Any, message: str | None) -> None:
    if message is None:
        commit(tmp_path, tree)
        return
    with pytest.raises(CheckpointError, match=r"padded_rows says that leaf|" + message) as caught:
        commit(tmp_path, tree)
    caught.match(message)


TRUE = np.arange(1, 66, dtype=np.float32).reshape(V, D)


def longer(shape: tuple[int, int], num_shards: int, true_shape: tuple[int, ...] | None = (V, D)) -> Any:
    """An array of some shape with `TRUE` before zeros, split along both dims, if there are devices."""
    array = np.zeros(shape, np.float32)
    array[:V, :D] = TRUE
    on = jax.device_put(array, sharding(num_shards, P("a"))) if num_shards else array
    return {"state": Longer({"w": on, "n": 3}, {} if true_shape is None else {"arrays/w": true_shape})}


@pytest.mark.parametrize("num_processes", [1, 4])
def test_a_checkpoint_holds_dims_without_padding(tmp_path: Path, num_processes: int) -> None:
    folder = commit_as_many(tmp_path, longer((24, 6), 8), num_processes)
    assert isinstance(longer((24, 6), 8)["state"], TrueShapes)
    np.testing.assert_array_equal(read_all(folder)["state/arrays/w"], TRUE)
    for shape, num_shards in (((16, 5), 8), ((V, 7), 1), ((15, D), 3), ((14, 9), 0)):
        got, want = load(folder, longer(shape, num_shards)), longer(shape, num_shards)
        np.testing.assert_array_equal(got["state"].arrays["w"], want["state"].arrays["w"])
        assert got["state"].arrays["n"] == 3
    np.testing.assert_array_equal(load(folder, longer((V, D), 1, None))["state"].arrays["w"], TRUE)
    if num_processes == 1:
        got = restore_safetensors(folder, longer((16, 6), 8), only="*w")
        np.testing.assert_array_equal(got["state"].arrays["w"], longer((16, 6), 8)["state"].arrays["w"])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (longer((16, 6), 0, (V,)), r"'state/arrays/w' is \[13\] without padding, but it is float32\[16, 6\]: expected"),
        (longer((16, 6), 0, (17, D)), r"'state/arrays/w' is \[17, 5\] without padding, but it is float32\[16, 6\]"),
        ({"s": Longer(1, {"arrays": ()})}, r"'s/arrays' is \[\] without padding, but it is a Python int: expected"),
        ({"s": Longer(1, {"x": (2,)})}, r"'s/x' is \[2\], but it is no leaf of this tree: expected a leaf, or a tu"),
    ],
)
def test_what_is_said_of_dims_has_to_be_true(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"true_shapes says that leaf {message}"):
        commit(tmp_path, tree)


def test_other_dims_do_not_match(tmp_path: Path) -> None:
    folder = commit(tmp_path, longer((24, 6), 8))
    for like in (longer((24, 6), 8, None), longer((24, 6), 8, (V, 6))):
        with pytest.raises(CheckpointError, match=r"is float32\[13, 5\] in .*, but float32\[(24|13), 6\] in"):
            load(folder, like)
