"""A fused step that donates its state, and checkpoints of it after every update, in each way that there is."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import Checkpointer, Every, copied
from tests.support.checkpoint.saving import read_all

NUM_STEPS = 20


def save_in_every_way(folder: Path, mesh: Mesh) -> None:
    """Trains on a mesh `("a", "b")`, each state donated by the next step, and asserts the bits of every checkpoint."""
    rows, whole = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P())
    shardings = {"w": rows, "momentum": rows, "bias": whole, "key": whole, "count": whole}

    def step(state: Any) -> Any:
        key, noise = jax.random.split(state["key"])
        x = jax.random.normal(noise, (16, 64))

        def loss(w: jax.Array, bias: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w + bias) - x[:, :32]) ** 2)

        slope, of_bias = jax.grad(loss, argnums=(0, 1))(state["w"], state["bias"])
        momentum = 0.9 * state["momentum"] + slope
        return {
            "w": state["w"] - 0.1 * momentum,
            "momentum": momentum,
            "bias": state["bias"] - 0.1 * of_bias,
            "key": key,
            "count": state["count"] + 1,
        }

    fused = jax.jit(step, donate_argnums=0, out_shardings=shardings)

    def begin() -> Any:
        w = jax.random.normal(jax.random.key(0), (64, 32))
        state = {"w": w, "momentum": jnp.zeros((64, 32)), "bias": jnp.zeros(32), "key": jax.random.PRNGKey(1)}
        return jax.device_put(state | {"count": jnp.zeros((), jnp.int32)}, shardings)

    def content(state: Any) -> dict[str, bytes]:
        return {name: np.asarray(leaf).tobytes() for name, leaf in state.items()}

    expected: list[dict[str, bytes]] = []
    state = begin()
    for _ in range(NUM_STEPS):
        state = fused(state)
        expected.append(content(state))
    for way in ("wait", "at once", "copied"):
        state = begin()
        prepare = copied if way == "copied" else None
        with Checkpointer(folder / way, Every(1), keep=NUM_STEPS, prepare=prepare) as saver:
            for _ in range(NUM_STEPS):
                donated = state
                state = fused(state)
                # Where a snapshot is still being read, XLA leaves it and takes other memory.
                assert donated["w"].is_deleted() or way == "at once"
                saver.update(state)
                if way == "wait":
                    saver.wait()
        assert content(state) == expected[-1], way
        for number in range(NUM_STEPS):
            assert content(read_all(folder / way / f"step-{number + 1:08d}")) == expected[number], (way, number)
