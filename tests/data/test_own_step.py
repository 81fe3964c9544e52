"""A user's own `jax.jit` step on batches of a loader: what the README's line `...` stands for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from braidax.data.loader import DataLoader


class Net(nnx.Module):
    """A convolution beside an embedding: what JAX refuses on explicit axes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.embed = nnx.Embed(10, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, image: jax.Array, word: jax.Array) -> jax.Array:
        return self.out(self.conv(image).mean((1, 2)) + self.embed(word))[:, 0]


def data() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    word = rng.integers(10, size=64).astype(np.int32)
    return {"image": rng.normal(size=(64, 8, 8, 1)).astype(np.float32), "word": word, "y": word.astype(np.float32)}


def losses(mesh: Any) -> list[float]:
    optimizer = optax.adam(0.05)
    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((nnx.merge(graph, params)(batch["image"], batch["word"]) - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    found: list[float] = []
    specs = None if mesh is None else P("data")
    with DataLoader(data(), mesh, specs, batch_size=16, epochs=5) as loader:
        for batch in loader:
            params, state, loss = step(params, state, batch)
            found.append(float(loss))
    return found


@pytest.fixture(scope="module")
def on_one_device() -> list[float]:
    return losses(None)


def test_a_loader_without_a_mesh_feeds_a_step(on_one_device: list[float]) -> None:
    assert on_one_device[-1] < 0.7 * on_one_device[0]


def test_a_mesh_of_automatic_axes_feeds_the_same_step(on_one_device: list[float]) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    np.testing.assert_allclose(losses(mesh), on_one_device, rtol=2e-4)
