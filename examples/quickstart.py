"""The whole loop on real handwritten digits: python examples/quickstart.py. Stop it, run it again: it goes on."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import braidax as bx

jax.config.update("jax_num_cpu_devices", 8)  # 8 virtual devices where there is no accelerator


def init_fn(key):
    keys = jax.random.split(key)
    return {
        "hidden": jax.random.normal(keys[0], (64, 128)) / 8,
        "classes": jax.random.normal(keys[1], (128, 10)) / 11,
        "bias": jnp.zeros(10),
    }


def loss_fn(params, batch):  # written for one device
    pixels = batch["image"].reshape(-1, 64).astype(jnp.float32) / 16
    logits = jax.nn.relu(pixels @ params["hidden"]) @ params["classes"] + params["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


Path("runs").mkdir(exist_ok=True)
digits = load_digits()
order = np.random.default_rng(0).permutation(1797)
for name, rows in {"train": order[:1477], "test": order[1477:]}.items():
    np.savez(f"runs/{name}.npz", image=digits.images[rows].astype(np.uint8), label=digits.target[rows].astype(np.int32))

mesh = jax.make_mesh((len(jax.devices()),), ("data",))
source = bx.open("runs/train.npz")
step = bx.parallelize(
    loss_fn, optax.adam(3e-3), mesh, {"data": bx.DataParallel()}, init=init_fn, batch=source.batch_spec(64)
)
print(step.plan)

state = step.init(jax.random.key(0))  # born sharded
with (
    bx.DataLoader(source, mesh, step.batch_shardings, batch_size=64, epochs=10) as loader,
    bx.Checkpointer("runs/quickstart", bx.Every(50)) as saver,
):
    state, loader.cursor = saver.restore((state, loader.cursor))
    if loader.cursor.epoch < loader.epochs:  # else an earlier run has finished
        for batch in loader:
            state, metrics = step.update(state, batch, before_apply=saver.wait)
            saver.update((state, loader.cursor))  # copied under the next gradients, written behind the next steps
        saver.save((state, loader.cursor))

test = bx.DataLoader("runs/test.npz", mesh, step.batch_shardings, batch_size=64, seed=None)
accuracies = [float(step.evaluate(state, batch)["accuracy"]) for batch in test]
print(f"test accuracy {100 * np.mean(accuracies):.1f} %")
