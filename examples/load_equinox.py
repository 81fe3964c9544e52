"""Batches into an Equinox step.

JAX_NUM_CPU_DEVICES=4 python examples/load_equinox.py
braidax launch --processes 2 --devices-per-process 2 examples/load_equinox.py
"""

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import braidax as bx


def curve(num):
    """Makes points in 16 dims and a smooth function of them."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(num, 16)).astype(np.float32)
    return {"x": points, "y": np.sin(points @ rng.normal(size=16).astype(np.float32) / 4)}


mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
optimizer = optax.adam(1e-2)


@eqx.filter_jit
def init(key):
    net = eqx.nn.MLP(16, "scalar", 64, depth=2, key=key)
    state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    return eqx.filter_shard((net, state), NamedSharding(mesh, P()))  # every device has all of it


def loss_fn(net, batch):
    return ((jax.vmap(net)(batch["x"]) - batch["y"]) ** 2).mean()


@eqx.filter_jit
def train_step(net, state, batch):
    loss, gradients = eqx.filter_value_and_grad(loss_fn)(net, batch)
    updates, state = optimizer.update(gradients, state)
    return eqx.apply_updates(net, updates), state, loss


net, state = init(jax.random.key(0))
losses = []
with bx.DataLoader(curve(4096), mesh, P("data"), batch_size=128, epochs=3) as loader:
    for batch in loader:
        net, state, loss = train_step(net, state, batch)
        losses.append(float(loss))
if jax.process_index() == 0:
    print(f"{len(losses)} steps on {jax.device_count()} devices: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
