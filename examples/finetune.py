"""Fine-tuning from a safetensors file: an Equinox model whose trunk stays frozen gets a new head. It goes on, too.

python examples/finetune.py                          # pretrains a model on generated samples first
python examples/finetune.py --weights pretrained.safetensors --data train.npz --run runs/mine
"""

import argparse
from itertools import pairwise
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

import braidax as bx
from braidax.checkpoint import export_safetensors, restore_safetensors

parser = argparse.ArgumentParser()
parser.add_argument("--weights", type=Path, help="safetensors: trunk.0.weight, trunk.0.bias and so on, as of PyTorch")
parser.add_argument("--data", type=Path, help=".npz of samples x, float32 [n, features], and their classes y, [n]")
parser.add_argument("--run", default="runs/finetune", type=Path, help="the folder of the checkpoints")
parser.add_argument("--epochs", default=20, type=int)
parser.add_argument("--batch", default=16, type=int)
args = parser.parse_args()
if (args.weights is None) != (args.data is None):
    parser.error("expected both of --weights and --data, or none of them")


class Net(eqx.Module):
    trunk: list
    head: eqx.nn.Linear

    def __init__(self, sizes, num_classes, key):
        *keys, last = jax.random.split(key, len(sizes))
        self.trunk = [eqx.nn.Linear(*pair, key=key) for pair, key in zip(pairwise(sizes), keys, strict=True)]
        self.head = eqx.nn.Linear(sizes[-1], num_classes, key=last)

    def __call__(self, x):
        for layer in self.trunk:
            x = jax.nn.relu(layer(x))
        return self.head(x)


def name(path):  # of the tensor for a leaf
    return path.removeprefix("params/").replace("/", ".")


def train(data, sizes, run, *, epochs, trainable=None, weights=None):
    def init_fn(key):
        return eqx.filter(Net(sizes, num_classes, key), eqx.is_inexact_array)

    def loss_fn(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        mask = batch.get("mask")  # of a last batch that is not full
        right = jnp.average(logits.argmax(-1) == batch["y"], weights=mask)
        return jnp.average(losses, weights=mask), {"accuracy": right}

    num_classes = 1 + int(data["y"].max())
    static = eqx.filter(Net(sizes, num_classes, jax.random.key(0)), eqx.is_inexact_array, inverse=True)
    known, new = bx.data.split(bx.open(dict(data)), 0.8, seed=0)
    mesh, batch = jax.make_mesh((jax.device_count(),), ("data",)), known.batch_spec(args.batch)
    options = {"strategies": {"data": bx.DataParallel()}, "trainable": trainable}
    step = bx.parallelize(loss_fn, optax.adam(3e-3), mesh, init=init_fn, batch=batch, **options)
    state = step.init(jax.random.key(0))
    if weights:  # the head stays as it begins
        state = restore_safetensors(weights, state, only="params/trunk/*", name=name)
    shared = {"mesh": mesh, "specs": step.batch_shardings, "batch_size": args.batch}
    with (
        bx.DataLoader(known, **shared, epochs=epochs) as loader,
        bx.DataLoader(new, **shared, seed=None, remainder="pad") as held_out,
        bx.Checkpointer(run, bx.Adaptive()) as saver,
    ):
        state = bx.fit(step, state, loader, saver=saver, report=bx.Report(every_seconds=60))
        return state, bx.evaluate(step, state, held_out)["accuracy"]


if args.weights is None:
    args.weights, args.data = args.run / "pretrained.safetensors", args.run / "train.npz"
    if not args.weights.exists():  # many samples tell 12 kinds from one another; the three new classes have few
        rng = np.random.default_rng(0)
        kind, centers = rng.integers(12, size=4240), rng.normal(size=(12, 24))
        x = np.tanh(centers[kind] + 1.2 * rng.normal(size=(4240, 24))).astype(np.float32)
        _, accuracy = train({"x": x[240:], "y": kind[240:]}, (24, 64, 32), args.run / "pretrained", epochs=3)
        export_safetensors(args.run / "pretrained", args.weights, name=name)
        np.savez(args.data, x=x[:240], y=kind[:240] % 3)
    print(f"no --weights: {args.weights} was trained on generated samples, and {args.data} has some more")
tensors = load_file(args.weights)
trunk = [tensors[f"trunk.{layer}.weight"].shape for layer in range(sum("trunk" in name for name in tensors) // 2)]
sizes = (trunk[0][1], *(outputs for outputs, _ in trunk))
tuned = {"epochs": args.epochs, "trainable": "params/head/*", "weights": args.weights}
state, accuracy = train(np.load(args.data), sizes, args.run / "tuned", **tuned)
print(
    f"step {int(state.step)}: {100 * accuracy:.0f} % of the test samples are right; a trunk of sizes {sizes} as it was"
)
