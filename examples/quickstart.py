"""The whole loop on real handwritten digits: python examples/quickstart.py. Stop it, run it again: it goes on."""

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


digits = load_digits()
order = np.random.default_rng(0).permutation(1797)
samples = {"image": digits.images[order].astype(np.uint8), "label": digits.target[order].astype(np.int32)}
train, test = ({name: array[rows] for name, array in samples.items()} for rows in (slice(1477), slice(1477, None)))

mesh = jax.make_mesh((jax.device_count(),), ("data",))
source = bx.open(train)  # a dict of arrays here; a path to files all the same
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

with bx.DataLoader(test, mesh, step.batch_shardings, batch_size=64, seed=None) as batches:
    metrics = bx.evaluate(step, state, batches)
print(f"test accuracy {100 * metrics['accuracy']:.1f} %")
