from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint.format.manifest import PAGE_BYTES
from braidax.checkpoint.snapshot import staging
from braidax.checkpoint.snapshot.hold import Memory, Snapshot, hold
from braidax.checkpoint.snapshot.leaves import Leaf, describe, named_leaves
from braidax.errors import CheckpointError


def arrays(taken: Snapshot) -> dict[str, np.ndarray]:
    return {piece.name: piece.array for piece in taken.pieces}


class Position(NamedTuple):
    epoch: int
    rate: float


def test_leaves_are_named_by_their_path() -> None:
    tree = {"params": [jnp.zeros(2), None], "position": Position(3, 0.5)}
    assert list(named_leaves(tree)) == ["params/0", "position/epoch", "position/rate"]
    assert list(named_leaves(jnp.zeros(2))) == ["."]


def test_two_leaves_with_one_path_are_refused() -> None:
    with pytest.raises(CheckpointError, match="leaf 'a/b': this path is taken by another leaf"):
        named_leaves({"a": {"b": 1}, "a/b": 2})
    with pytest.raises(CheckpointError, match="leaf '__metadata__': this path is reserved by safetensors"):
        named_leaves({"__metadata__": 1})


@pytest.mark.parametrize(
    ("leaf", "expected", "text"),
    [
        (True, Leaf("x", "bool"), "a Python bool"),
        (3, Leaf("x", "int"), "a Python int"),
        (0.5, Leaf("x", "float"), "a Python float"),
        (np.float64(0.5), Leaf("x", "array", "float64"), "float64[]"),
        (np.zeros((2, 3), np.int8), Leaf("x", "array", "int8", (2, 3)), "int8[2, 3]"),
        (jax.ShapeDtypeStruct((4,), jnp.bfloat16), Leaf("x", "array", "bfloat16", (4,)), "bfloat16[4]"),
    ],
)
def test_what_a_leaf_is(leaf: Any, expected: Leaf, text: str) -> None:
    assert describe("x", leaf) == expected
    assert str(expected) == text


def test_keys_are_of_their_own_kind() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    assert describe("x", keys) == Leaf("x", "key", "key<fry>", (3,))
    assert describe("x", jax.ShapeDtypeStruct((3,), keys.dtype)) == Leaf("x", "key", "key<fry>", (3,))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("text", "leaf 'x' is of type str: expected a jax.Array, a NumPy array or a Python number"),
        (np.array(["text"]), "leaf 'x' has the dtype dtype.*expected booleans or numbers"),
        (np.zeros(2, ">f4"), "native byte order"),
        (np.zeros(2, [("a", "f4")]), "expected booleans or numbers"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "leaf 'x' is a jax.ShapeDtypeStruct, which has no content"),
    ],
)
def test_what_cannot_be_saved_is_refused(leaf: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        hold({"x": leaf})


def test_a_tracer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="leaf 'x' is a tracer"):
        jax.jit(lambda x: (hold({"x": x}), x)[1])(1.0)


def test_a_deleted_array_is_refused() -> None:
    x = jnp.zeros(2)
    x.delete()
    with pytest.raises(CheckpointError, match=r"leaf 'x' \(float32\[2\]\) is deleted"):
        hold({"x": x})


@pytest.mark.parametrize("spec", [P("a", "b"), P("b"), P(None, ("a", "b")), P(), P(("b", "a"))])
def test_shards_are_assembled(spec: P) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    want = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    taken = hold({"x": jax.device_put(want, NamedSharding(mesh, spec))}).copy()
    np.testing.assert_array_equal(arrays(taken)["x"], want)
    assert taken.num_bytes == want.nbytes


def test_replicas_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    stage = staging.stage
    monkeypatch.setattr(staging, "stage", lambda cuts: (counts.append(len(cuts)), stage(cuts))[1])
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    for spec in (P(), P("b"), P("a", "b")):
        hold(jax.device_put(np.ones((8, 8)), NamedSharding(mesh, spec)))
    assert counts == [1, 2, 8]


def test_memory_is_used_again() -> None:
    memory = Memory()
    first = hold({"x": jnp.arange(1024.0), "n": np.arange(5)}, memory).copy()
    second = hold({"x": jnp.ones(1000), "n": np.zeros(5, np.int64)}, memory).copy()
    assert np.shares_memory(first.memory, second.memory)
    np.testing.assert_array_equal(arrays(second)["x"], np.ones(1000))
    np.testing.assert_array_equal(arrays(second)["n"], np.zeros(5))
    third = hold({"x": jnp.ones(2000)}, memory).copy()
    assert not np.shares_memory(second.memory, third.memory)


def test_memory_begins_on_a_page() -> None:
    memory = Memory()
    for num_bytes in (1, 4095, 5000, 1 << 20, 9 << 20, 7):
        taken = memory.take(num_bytes)
        assert (taken.dtype, taken.shape) == (np.uint8, (num_bytes,))
        assert taken.ctypes.data % PAGE_BYTES == 0
        taken[:] = 1
    assert hold({"x": jnp.ones(1000)}).copy().memory.ctypes.data % PAGE_BYTES == 0


def test_a_snapshot_owns_its_memory() -> None:
    array, numpy = jnp.arange(1024.0), np.arange(4)
    held = hold({"array": array, "numpy": numpy})
    numpy[:] = -1
    taken = held.copy()
    assert not np.shares_memory(arrays(taken)["array"], np.asarray(array))
    np.testing.assert_array_equal(arrays(taken)["numpy"], np.arange(4))


def test_once_it_is_copied_a_tree_can_be_donated_in_place() -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jnp.zeros(1 << 16))
    address = x.unsafe_buffer_pointer()
    held = hold(x)
    held.copy()
    assert step(x).unsafe_buffer_pointer() == address


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint8", "float8_e4m3fn", "bfloat16", "float32", "complex64"])
def test_dtypes_keep_their_bits(dtype: str) -> None:
    x = jnp.arange(16).astype(dtype).reshape(4, 4)
    taken = hold([x, x[0, 1], x[:0]]).copy()
    for name, want in zip(arrays(taken), [x, x[0, 1], x[:0]], strict=True):
        assert arrays(taken)[name].dtype == np.dtype(dtype)
        assert arrays(taken)[name].shape == want.shape
        assert arrays(taken)[name].tobytes() == np.asarray(want).tobytes()
