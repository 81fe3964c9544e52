"""Batches under `jax.set_mesh`: sequences of tokens, split along both axes, so that each device gets a part of each.

JAX_NUM_CPU_DEVICES=4 python examples/load_set_mesh.py
braidax launch --processes 2 --devices-per-process 2 examples/load_set_mesh.py
"""

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import braidax as bx

VOCABULARY, LENGTH = 32, 64


def sentences(num):
    """Makes sequences in which either of two tokens follows each token: no loss is better than log(2)."""
    rng = np.random.default_rng(0)
    followers = rng.integers(VOCABULARY, size=(VOCABULARY, 2))
    tokens = rng.integers(VOCABULARY, size=(num, LENGTH + 1), dtype=np.int32)
    for place in range(LENGTH):
        tokens[:, place + 1] = followers[tokens[:, place], rng.integers(2, size=num)]
    return {"token": tokens[:, :-1], "next": tokens[:, 1:]}


def init_fn(key):
    keys = jax.random.split(key)
    return {"table": jax.random.normal(keys[0], (VOCABULARY, 64)), "out": jax.random.normal(keys[1], (64, VOCABULARY))}


def loss_fn(params, batch):
    hidden = jax.lax.with_sharding_constraint(params["table"][batch["token"]], P("data", "sequence"))
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"] / 8, batch["next"]).mean()


optimizer = optax.adam(3e-2)


@jax.jit
def train_step(params, state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


shape = (jax.device_count() // 2, 2) if jax.device_count() % 2 == 0 else (jax.device_count(), 1)
mesh = jax.make_mesh(shape, ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
jax.set_mesh(mesh)  # from here on a PartitionSpec is enough
params = jax.jit(init_fn, out_shardings=P())(jax.random.key(0))
state = jax.jit(optimizer.init, out_shardings=P())(params)
losses = []
with bx.DataLoader(sentences(1024), mesh, P("data", "sequence"), batch_size=32, epochs=2) as loader:
    for batch in loader:
        params, state, loss = train_step(params, state, batch)
        losses.append(float(loss))
if jax.process_index() == 0:
    print(f"{len(losses)} steps on {jax.device_count()} devices: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
