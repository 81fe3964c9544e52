"""Copies on the devices: they are like what they were made from, share nothing with it, and save what was donated."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import Checkpointer, Every, copied
from braidax.errors import CheckpointError
from tests.support.checkpoint.donating import save_in_every_way
from tests.support.checkpoint.saving import bits
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

AUTO = jax.sharding.AxisType.Auto


def tree() -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO, AUTO))
    other = jax.sharding.Mesh(np.array(jax.devices())[::-1], ("c",))
    return {
        "split": jax.device_put(np.arange(32.0, dtype=np.float32).reshape(8, 4), NamedSharding(mesh, P("a", "b"))),
        "replicated": jax.device_put(np.arange(5, dtype=np.int32), NamedSharding(mesh, P())),
        "other mesh": jax.device_put(np.arange(16, dtype=np.uint8), NamedSharding(other, P("c"))),
        "explicit": jax.device_put(np.ones((8, 2), np.float32), NamedSharding(jax.make_mesh((8,), ("d",)), P("d"))),
        "one device": jax.device_put(jnp.ones(3, jnp.bfloat16), jax.devices()[3]),
        "uncommitted": jnp.arange(3),
        "keys": jax.random.split(jax.random.key(1), 3),
        "pinned": jax.device_put(np.arange(4.0), SingleDeviceSharding(jax.devices()[2], memory_kind="pinned_host")),
        "numpy": np.arange(4),
        "numbers": (1, 0.5, None),
    }


def memory(array: jax.Array) -> set[int]:
    data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return {shard.data.unsafe_buffer_pointer() for shard in data.addressable_shards}


@pytest.mark.parametrize("is_mesh_set", [False, True])
def test_a_copy_is_alike_and_shares_nothing(is_mesh_set: bool) -> None:
    original = tree()
    with jax.set_mesh(jax.make_mesh((2,), ("z",)) if is_mesh_set else None):
        copy = copied(original)
    assert jax.tree.structure(copy) == jax.tree.structure(original)
    for name in original:
        if isinstance(original[name], jax.Array):
            assert bits(copy[name]) == bits(original[name]), name
            assert copy[name].sharding.is_equivalent_to(original[name].sharding, original[name].ndim), name
            assert copy[name].committed == original[name].committed, name
            assert memory(copy[name]).isdisjoint(memory(original[name])), name
    original["numpy"][:] = -1
    np.testing.assert_array_equal(copy["numpy"], np.arange(4))
    assert copy["numbers"] == (1, 0.5, None)


def test_what_was_donated_before_is_named_by_who_saves_it(tmp_path: Path) -> None:
    x = jnp.zeros(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with (
        Checkpointer(tmp_path, Every(1), prepare=copied) as saver,
        pytest.raises(CheckpointError, match=r"leaf 'x' .* is deleted"),
    ):
        saver.update({"x": x})


def test_only_what_is_due_is_prepared_and_that_is_what_is_saved(tmp_path: Path) -> None:
    prepared: list[float] = []

    def prepare(tree: Any) -> Any:
        prepared.append(float(tree["x"]))
        return {"x": tree["x"] + 100}

    with Checkpointer(tmp_path, Every(3), prepare=prepare) as saver:
        for number in range(1, 8):
            saver.update({"x": jnp.float32(number)})
        saver.save({"x": jnp.float32(8)})
        assert prepared == [3, 6, 8]
        assert saver.restore({"x": jnp.float32(0)}) == {"x": 108}


def test_what_cannot_be_prepared_fails_by_itself(tmp_path: Path) -> None:
    def prepare(tree: Any) -> Any:
        raise JaxRuntimeError("INTERNAL: no such device")

    with Checkpointer(tmp_path, Every(2), prepare=prepare) as saver:
        saver.update({"x": jnp.ones(3)})
        with pytest.raises(JaxRuntimeError, match="no such device"):
            saver.update({"x": jnp.ones(3)})
        saver.update({"x": jnp.ones(3)})
    assert not list(tmp_path.glob("step-*"))


SHORT_OF_MEMORY = """
import resource
import sys

import jax
import jax.numpy as jnp

from braidax.checkpoint import Checkpointer, Every, copied, restore

x = jnp.arange(32 << 20, dtype=jnp.float32)  # 128 MiB
with Checkpointer(sys.argv[1], Every(1), prepare=copied) as saver:
    saver.update({"x": x})  # takes the memory of the snapshot
    saver.wait()
    saver.save({"x": x + 1})
    pages = int(open("/proc/self/statm").read().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20), limits[1]))
    saver.update({"x": x})
    saver.wait()
    resource.setrlimit(resource.RLIMIT_AS, limits)
found = restore(sys.argv[1], {"x": x})
print(found.step, bool((found.tree["x"] == x).all()))
"""


def test_without_memory_for_the_copy_the_checkpoint_is_of_the_state_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE, codes=(SHORT_OF_MEMORY,))
    result = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY, str(tmp_path / "run")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "2 True\n"), result.stderr
    assert "there is no memory for prepare=: RESOURCE_EXHAUSTED" in result.stderr


def test_a_fused_step_that_donates_is_saved_bit_for_bit_in_every_way(tmp_path: Path) -> None:
    save_in_every_way(tmp_path, jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO, AUTO)))
