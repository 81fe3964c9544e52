from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import restore
from braidax.errors import ArgumentError, CheckpointError
from tests.support.checkpoint.saving import bits, commit, load


class Cursor(NamedTuple):
    seed: int | None
    epoch: int
    position: int


def round_trip(root: Path, tree: Any, like: Any) -> Any:
    return load(commit(root, tree), like)


def test_structure_and_types_come_back(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "cursor": Cursor(None, 3, 512),
        "flags": [True, 2, 0.5],
        "none": None,
        "numpy": (np.arange(3), np.float32(2)),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "scalar": jnp.int32(4),
    }
    got = round_trip(tmp_path, tree, tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert [bits(leaf) for leaf in jax.tree.leaves(got)] == [bits(leaf) for leaf in jax.tree.leaves(tree)]
    assert got["cursor"] == Cursor(None, 3, 512)
    assert jax.random.bits(got["key"]) == jax.random.bits(tree["key"])


def test_a_tree_that_is_one_leaf(tmp_path: Path) -> None:
    np.testing.assert_array_equal(round_trip(tmp_path, jnp.arange(3), jnp.zeros(3, jnp.int32)), [0, 1, 2])


MESHES: list[tuple[tuple[int, ...], P]] = [((8,), P("a")), ((4, 2), P("b", "a")), ((4, 2), P(("a", "b"))), ((1,), P())]


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("origin", MESHES)
def test_onto_another_mesh(
    tmp_path: Path, origin: tuple[tuple[int, ...], P], target: tuple[tuple[int, ...], P]
) -> None:
    def sharding(shape: tuple[int, ...], spec: P) -> NamedSharding:
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        return NamedSharding(jax.sharding.Mesh(devices, ("a", "b")[: len(shape)]), spec)

    want = np.asarray(jax.random.normal(jax.random.key(0), (16, 8)))
    keys = jax.random.split(jax.random.key(1), (16, 8))
    tree = {"x": jax.device_put(want, sharding(*origin)), "keys": jax.device_put(keys, sharding(*origin))}
    like = {
        "x": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding(*target)),
        "keys": jax.device_put(keys, sharding(*target)),
    }
    got = round_trip(tmp_path, tree, like)
    np.testing.assert_array_equal(np.asarray(got["x"]), want)
    np.testing.assert_array_equal(jax.random.key_data(got["keys"]), jax.random.key_data(keys))
    assert got["x"].sharding.is_equivalent_to(sharding(*target), 2)
    assert got["keys"].sharding.is_equivalent_to(sharding(*target), 2)


def test_committed_stays_committed_and_free_stays_free(tmp_path: Path) -> None:
    tree = {"free": jnp.zeros(2), "bound": jax.device_put(jnp.ones(2), jax.devices()[3])}
    got = round_trip(tmp_path, tree, tree)
    assert (got["free"].committed, got["bound"].committed) == (False, True)
    assert got["bound"].sharding == SingleDeviceSharding(jax.devices()[3])


def test_weak_types_stay_weak(tmp_path: Path) -> None:
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), P("a"))
    tree = [
        jnp.full(3, 0.1),
        jnp.asarray(2),
        jax.device_put(jnp.full(8, -0.0), sharding),
        jnp.ones(3),
        jnp.asarray(True),
    ]
    got = round_trip(tmp_path, tree, tree)
    assert [leaf.weak_type for leaf in got] == [leaf.weak_type for leaf in tree] == [True, True, True, False, False]
    assert [bits(leaf) for leaf in got] == [bits(leaf) for leaf in tree]
    assert [leaf.committed for leaf in got] == [leaf.committed for leaf in tree]
    assert got[2].sharding == sharding


def test_restored_arrays_can_be_donated_though_replicas_share_host_memory(tmp_path: Path) -> None:
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), P())
    want = np.arange(1 << 14, dtype=np.float32)
    got = round_trip(tmp_path, [jax.device_put(want, sharding)], [jax.device_put(want, sharding)])
    step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=sharding)
    x = step(step(got[0]))
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data, want + 2)


def test_restored_arrays_do_not_depend_on_the_file(tmp_path: Path) -> None:
    want = np.arange(1 << 12, dtype=np.float32)
    got = round_trip(tmp_path, [jnp.asarray(want), want], [jnp.asarray(want), want])
    data = tmp_path / "step-00000001" / "arrays-00000.safetensors"
    with data.open("r+b") as file:
        file.write(bytes(data.stat().st_size))
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], want)
    assert got[1].flags.writeable


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (
            {"a": {"w": jnp.zeros((2, 4))}},
            r"leaf 'a/w' is float32\[2, 3\] in the checkpoint, but float32\[2, 4\] in `like`",
        ),
        ({"a": {"w": jnp.zeros((2, 3), jnp.bfloat16)}}, r"leaf 'a/w' .*but bfloat16\[2, 3\]"),
        ({"a": {"w": 3.0}}, r"leaf 'a/w' is float32\[2, 3\] in the checkpoint, but a Python float in `like`"),
        (
            {"a": {"w": jnp.zeros((2, 3)), "v": 1}},
            r"leaf 'a/v' \(a Python int\) is in `like`, but not in the checkpoint",
        ),
        ({"a": {}}, r"leaf 'a/w' \(float32\[2, 3\]\) is in the checkpoint, but not in `like`"),
        ({"a": {"w": None}}, r"leaf 'a/w' .* is in the checkpoint, but not in `like`"),
        ({str(n): 0 for n in range(200)}, r"leaf '188' .*\n  and 101 more\nrestore with"),
    ],
)
def test_what_does_not_match_is_an_error(tmp_path: Path, like: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000001: does not match `like` in (.*\n)*.*" + message):
        round_trip(tmp_path, {"a": {"w": jnp.zeros((2, 3))}}, like)


def test_all_that_does_not_match_is_in_one_error(tmp_path: Path) -> None:
    tree = {"same": 1, "gone": np.zeros(3, np.int8), "wider": jnp.zeros((2, 3)), "kind": 2}
    like = {"same": 1, "new": np.zeros(3, np.int8), "wider": jnp.zeros((2, 4)), "kind": 2.0}
    with pytest.raises(CheckpointError) as caught:
        round_trip(tmp_path, tree, like)
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'step-00000001'}: does not match `like` in 4 of 5 leaves, and nothing is cast, left out or made "
        "up:",
        "  leaf 'new' (int8[3]) is in `like`, but not in the checkpoint",
        "  leaf 'gone' (int8[3]) is in the checkpoint, but not in `like`",
        "  leaf 'kind' is a Python int in the checkpoint, but a Python float in `like`",
        "  leaf 'wider' is float32[2, 3] in the checkpoint, but float32[2, 4] in `like`",
        "restore with the tree of the run that saved it and convert afterwards, or a part of it with only=(pattern, "
        "...); or give a new run another folder",
    ]


def test_a_part_of_a_tree_is_restored(tmp_path: Path) -> None:
    commit(tmp_path, {"params": {"w": jnp.arange(3.0), "b": jnp.ones(2)}, "opt": {"mu": jnp.ones(3)}, "n": 4})
    like = {"params": {"w": jnp.zeros(3), "b": jnp.zeros(2)}, "head": jnp.full(5, 7.0), "n": 0}
    got = restore(tmp_path, like, only=("params/*",))
    assert (got.step, got.path, got.skipped) == (1, tmp_path / "step-00000001", ())
    np.testing.assert_array_equal(got.tree["params"]["w"], np.arange(3.0))
    np.testing.assert_array_equal(got.tree["params"]["b"], np.ones(2))
    assert got.tree["head"] is like["head"]
    assert got.tree["n"] == 0
    for only in ("params/*", ("params/*",), ["params/*"]):  # one pattern may come alone
        got = restore(tmp_path, like, only=only)
        assert (got.tree["params"]["w"].tolist(), got.tree["n"]) == ([0, 1, 2], 0)
    assert restore(tmp_path, {"n": 0, "params": {"w": np.zeros(3, np.float32)}}, only=["n", "*/w"]).tree["n"] == 4


def test_a_part_has_to_match_as_well(tmp_path: Path) -> None:
    commit(tmp_path, {"params": {"w": jnp.arange(3.0), "b": jnp.ones(2)}, "n": 4})
    with pytest.raises(
        CheckpointError, match=r"in 1 of 2 leaves.*\n  leaf 'params/b' .* is in the checkpoint, but not"
    ):
        restore(tmp_path, {"params": {"w": jnp.zeros(3)}}, only=("params/*",))
    with pytest.raises(
        ArgumentError, match=r"only=\('parms/\*',\): 'parms/\*' matches no path in `like`, which has 'n'"
    ):
        restore(tmp_path, {"n": 0}, only=("parms/*",))
    with pytest.raises(ArgumentError, match=r"only=\('parms/\*',\): 'parms/\*' matches no path in `like`"):
        restore(tmp_path, {"n": 0}, only="parms/*")
    with pytest.raises(ArgumentError, match=r"'m' matches no path in the checkpoint, which has 'n', 'params/b'"):
        restore(tmp_path, {"m": 0}, only=("m",))


def test_a_folder_without_checkpoints_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}: has no checkpoint; give the folder of a run"):
        restore(tmp_path, {"n": 0})
    with pytest.raises(CheckpointError, match=r"none: cannot be read: .*No such file"):
        restore(tmp_path / "none", {"n": 0})
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="leaf 'n' is a Python int in the checkpoint, but a Python float in"):
        round_trip(tmp_path, {"n": 1}, {"n": 1.0})


def test_another_kind_of_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"leaf 'k' is key<fry>\[\] in the checkpoint, but key<rbg>\[\]"):
        round_trip(tmp_path, {"k": jax.random.key(0)}, {"k": jax.random.key(0, impl="rbg")})


def test_64_bits_are_not_cut_to_32(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"leaf 'x' is float64.*which JAX would make float32.*jax_enable_x64"):
        round_trip(tmp_path, {"x": np.zeros(2)}, {"x": jax.ShapeDtypeStruct((2,), np.float64)})


DTYPES = [
    "bool",
    "int4",
    "int8",
    "uint16",
    "int32",
    "float8_e4m3fn",
    "float8_e5m2",
    "bfloat16",
    "float16",
    "float32",
    "complex64",
]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def array_of(dtype: str, shape: tuple[int, ...], seed: int, jax_array: bool) -> Any:
    values = jnp.asarray(np.random.default_rng(seed).integers(-8, 8, shape)).astype(dtype)
    return values if jax_array else np.array(values)


LEAVES = (
    st.builds(array_of, st.sampled_from(DTYPES), SHAPES, st.integers(0, 99), st.booleans())
    | st.builds(jax.random.key, st.integers(0, 99))
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.booleans()
    | st.none()
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abü ", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@hypothesis.given(tree=TREES)
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    got = round_trip(tmp_path_factory.mktemp("any"), tree, tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert [bits(leaf) for leaf in jax.tree.leaves(got)] == [bits(leaf) for leaf in jax.tree.leaves(tree)]
