"""Snapshots of what lies on a GPU: they own their bytes before the state is donated, and are restored onto it."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import braidax as bx
from braidax.checkpoint import Checkpointer, Every, copied, restore
from tests.support.checkpoint.donating import NUM_STEPS, save_in_every_way
from tests.support.checkpoint.saving import bits

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("gpu")[:1]).reshape(1, 1), ("a", "b"))


def test_a_fused_step_that_donates_is_saved_bit_for_bit_in_every_way(tmp_path: Path, mesh: Mesh) -> None:
    save_in_every_way(tmp_path, mesh)


@pytest.mark.parametrize("way", ["at once", "copied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "uint8", "bool"])
def test_large_arrays_of_all_dtypes_are_donated_at_once(tmp_path: Path, mesh: Mesh, dtype: str, way: str) -> None:
    """The copy to the host is under way while the next step writes to the same memory."""
    device = mesh.devices.flat[0]
    state = jax.device_put({"x": jax.random.randint(jax.random.key(0), (4096, 4096), 0, 2).astype(dtype)}, device)
    expected = bits(jax.device_get(state["x"]))[1:]
    spoil = jax.jit(lambda state: jax.tree.map(lambda x: (x == 0).astype(x.dtype), state), donate_argnums=0)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpointer(tmp_path, Every(1), prepare=copied if way == "copied" else None) as saver:
        saver.update(state)
        for _ in range(10):
            state = spoil(state)
    got = restore(tmp_path, like).tree["x"]
    assert got.devices() == {device}
    assert bits(jax.device_get(got))[1:] == expected


def test_a_step_that_waits_before_it_applies_resumes_bit_for_bit(tmp_path: Path, mesh: Mesh) -> None:
    batch = {"x": np.linspace(-1, 1, 8 * 256, dtype=np.float32).reshape(8, 256)}

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["x"]) ** 2)

    step = bx.parallelize(
        loss,
        optax.adam(1e-2),
        mesh,
        {"a": bx.DataParallel(), "b": bx.DataParallel()},
        init=lambda key: {"w": jax.random.normal(key, (256, 256)) / 16},
        batch=batch,
    )

    def trained(state: Any, saver: Checkpointer, until: int) -> Any:
        for _ in range(saver.num_updates, until):
            state, _ = step.update(state, batch, before_apply=saver.wait)
            saver.update(state)
        return state

    def content(state: Any) -> list[Any]:
        return [bits(leaf) for leaf in jax.tree.leaves(jax.device_get(state))]

    with Checkpointer(tmp_path / "whole", Every(1)) as saver:
        wanted = content(trained(step.init(jax.random.key(0)), saver, NUM_STEPS))
    with Checkpointer(tmp_path / "parts", Every(1)) as saver:
        trained(step.init(jax.random.key(0)), saver, NUM_STEPS // 2)
    with Checkpointer(tmp_path / "parts", Every(1)) as saver:
        resumed = saver.restore(step.init(jax.random.key(1)))
        assert saver.num_updates == NUM_STEPS // 2
        assert content(trained(resumed, saver, NUM_STEPS)) == wanted
