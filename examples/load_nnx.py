"""Batches into a Flax NNX step.

JAX_NUM_CPU_DEVICES=4 python examples/load_nnx.py
braidax launch --processes 2 --devices-per-process 2 examples/load_nnx.py
"""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import braidax as bx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)  # over the whole batch, on all devices
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))[:, 0]


def curve(num):
    """Makes points in 16 dims and a smooth function of them."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(num, 16)).astype(np.float32)
    return {"x": points, "y": np.sin(points @ rng.normal(size=16).astype(np.float32) / 4)}


mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


@nnx.jit
def init():
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    for part in net, optimizer:  # every device has all of them
        nnx.update(part, jax.lax.with_sharding_constraint(nnx.state(part), NamedSharding(mesh, P())))
    return net, optimizer


@nnx.jit
def train_step(net, optimizer, batch):
    loss, gradients = nnx.value_and_grad(lambda net: ((net(batch["x"]) - batch["y"]) ** 2).mean())(net)
    optimizer.update(net, gradients)
    return loss


net, optimizer = init()
losses = []
with bx.DataLoader(curve(4096), mesh, P("data"), batch_size=128, epochs=3) as loader:
    for batch in loader:
        losses.append(float(train_step(net, optimizer, batch)))
if jax.process_index() == 0:
    print(f"{len(losses)} steps on {jax.device_count()} devices: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
