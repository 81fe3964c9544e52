"""Batches from a file into a plain `jax.jit` step: the compiler splits the work as the batch is split.

JAX_NUM_CPU_DEVICES=4 python examples/load_jit.py
braidax launch --processes 2 --devices-per-process 2 examples/load_jit.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import braidax as bx


def write(path):
    """Writes points in 8 dims, and whether each is in the ball that holds about half of them."""
    points = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    np.savez(path, point=points, label=((points**2).sum(1) < 7.34).astype(np.int32))


def init_fn(key):
    keys = jax.random.split(key)
    hidden, classes = jax.random.normal(keys[0], (8, 64)) / 3, jax.random.normal(keys[1], (64, 2)) / 8
    return {"hidden": hidden, "bias": jnp.zeros(64), "classes": classes}


def loss_fn(params, batch):
    logits = jax.nn.relu(batch["point"] @ params["hidden"] + params["bias"]) @ params["classes"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


optimizer = optax.adam(1e-2)


@jax.jit
def train_step(params, state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
params = jax.jit(init_fn, out_shardings=NamedSharding(mesh, P()))(jax.random.key(0))
state = jax.jit(optimizer.init, out_shardings=NamedSharding(mesh, P()))(params)
losses = []
with tempfile.TemporaryDirectory() as folder:  # each process writes its own copy
    write(Path(folder) / "points.npz")
    with bx.DataLoader(Path(folder) / "points.npz", mesh, P("data"), batch_size=128, epochs=3) as loader:
        for batch in loader:
            params, state, loss = train_step(params, state, batch)
            losses.append(float(loss))
if jax.process_index() == 0:
    print(f"{len(losses)} steps on {jax.device_count()} devices: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
