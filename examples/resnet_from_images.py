"""A small ResNet from a folder of images, `folder/class/*.jpg`: decode, crop, mirror, train, evaluate. It goes on, too.

python examples/resnet_from_images.py                # on generated images
python examples/resnet_from_images.py --data photos --size 128 --width 64 --run runs/photos --epochs 30
"""

import argparse
from pathlib import Path

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import braidax as bx

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, help="a folder with a folder of images for each class: JPEG, PNG, WebP, BMP")
parser.add_argument("--run", default="runs/resnet", type=Path, help="the folder of the checkpoints")
for name, number in {"epochs": 4, "batch": 32, "size": 32, "width": 8}.items():
    parser.add_argument(f"--{name}", default=number, type=int)
args = parser.parse_args()

if args.data is None:
    args.data, rng, (x, y) = args.run / "images", np.random.default_rng(0), np.mgrid[-24:24, -24:24]
    places = {"diamonds": np.abs(x) + np.abs(y), "rings": np.hypot(x, y), "standing": y, "lying": x}
    for number in range(0 if args.data.exists() else 400):  # waves of four kinds, in any colors
        kind = list(places)[number % 4]
        (args.data / kind).mkdir(parents=True, exist_ok=True)
        waves = np.sin(rng.uniform(0.4, 0.8) * places[kind] + rng.uniform(0, 6))[:, :, None]
        pixels = np.where(waves > 0, *rng.uniform(0, 255, (2, 3))) + rng.normal(0, 20, (48, 48, 3))
        cv2.imwrite(str(args.data / kind / f"{number}.jpg"), np.clip(pixels, 0, 255).astype(np.uint8))
    print(f"no --data: {args.data} has generated images")
source = bx.open(args.data)
classes = bx.data.class_names(source)  # by their labels
train, test = bx.data.split(source, 0.9, seed=0)
train = bx.data.flipped(bx.data.random_resized_crop(train, (args.size, args.size), scale=(0.5, 1.0)))
test = bx.data.center_crop(test, (args.size, args.size), fraction=0.875)
print(f"{len(train):,} images to train on, {len(test):,} to test on, of {len(classes)} classes: {', '.join(classes)}")


class Block(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        def normed(x):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)  # over the whole batch, on all devices

        y = nn.relu(normed(nn.Conv(self.width, (3, 3), self.stride, use_bias=False)(x)))
        y = normed(nn.Conv(self.width, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = normed(nn.Conv(self.width, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(args.width, (3, 3))(images.astype(jnp.float32) / 128 - 1)
        for stage in range(3):
            x = Block(args.width << stage, stride=1 if stage == 0 else 2)(x, train)
        return nn.Dense(len(classes))(x.mean((1, 2)))


model = ResNet()


def init_fn(key):
    made = model.init(key, jnp.zeros((1, args.size, args.size, 3)), train=False)
    return made["params"], {"batch_stats": made["batch_stats"]}


def loss_fn(params, batch, variables, train):
    logits, changed = model.apply({"params": params, **variables}, batch["image"], train, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    mask = batch.get("mask")  # of a last batch that is not full
    right = jnp.average(logits.argmax(-1) == batch["label"], weights=mask)
    return jnp.average(losses, weights=mask), {"accuracy": right, "variables": changed}


mesh, batch = jax.make_mesh((jax.device_count(),), ("data",)), train.batch_spec(args.batch)
num_steps = args.epochs * (len(train) // args.batch)
optimizer = optax.adamw(optax.cosine_onecycle_schedule(num_steps, 2e-2))
step = bx.parallelize(loss_fn, optimizer, mesh, {"data": bx.DataParallel()}, init=init_fn, batch=batch)
shared = {"mesh": mesh, "specs": step.batch_shardings, "batch_size": args.batch}
with (
    bx.DataLoader(train, **shared, epochs=args.epochs) as loader,
    bx.DataLoader(test, **shared, seed=None, remainder="pad") as held_out,
    bx.Checkpointer(args.run, bx.Adaptive()) as saver,
):
    report = bx.Report(metrics=args.run / "metrics.jsonl")
    state = bx.fit(step, step.init(jax.random.key(0)), loader, saver=saver, report=report, test=held_out)
    accuracy = bx.evaluate(step, state, held_out)["accuracy"]
print(f"step {int(state.step)}: {100 * accuracy:.0f} % of the test images are right")
