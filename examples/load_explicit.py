"""Batches on a mesh of explicit axes: how a batch is split is part of its type, and of all that is made of it.

JAX_NUM_CPU_DEVICES=4 python examples/load_explicit.py
braidax launch --processes 2 --devices-per-process 2 examples/load_explicit.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import braidax as bx


def sums(num):
    """Makes pairs of numbers below 16 and their sum modulo 16."""
    pairs = np.random.default_rng(0).integers(16, size=(num, 2), dtype=np.int32)
    return {"pair": pairs, "sum": pairs.sum(1, dtype=np.int32) % 16}


def init_fn(key):
    keys = jax.random.split(key)
    table, out = jax.random.normal(keys[0], (2, 16, 128)) / 2, jax.random.normal(keys[1], (128, 16)) / 11
    return {"table": jax.reshard(table, P(None, None, "model")), "out": jax.reshard(out, P("model", None))}


def loss_fn(params, batch):
    first, second = (
        params["table"][number].at[batch["pair"][:, number]].get(out_sharding=P("data", "model")) for number in range(2)
    )
    hidden = jax.nn.relu(first + second)
    assert jax.typeof(hidden).sharding.spec == P("data", "model")
    logits = jnp.einsum("bm,mc->bc", hidden, params["out"], out_sharding=P("data", None))
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["sum"], 16)).mean()


optimizer = optax.adam(1e-2)


@jax.jit
def train_step(params, state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


shape = (jax.device_count() // 2, 2) if jax.device_count() % 2 == 0 else (jax.device_count(), 1)
mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
losses = []
with jax.set_mesh(mesh), bx.DataLoader(sums(2048), mesh, P("data"), batch_size=64, epochs=6) as loader:
    params = jax.jit(init_fn)(jax.random.key(0))
    state = jax.jit(optimizer.init)(params)
    for batch in loader:
        params, state, loss = train_step(params, state, batch)
        losses.append(float(loss))
if jax.process_index() == 0:
    print(f"{len(losses)} steps on {jax.device_count()} devices: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
