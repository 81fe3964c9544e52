"""DLRM from Parquet: clicks by numbers and categories, with tables that are split by rows. It goes on, too.

python examples/dlrm_from_parquet.py                 # on generated clicks
python examples/dlrm_from_parquet.py --data "clicks/*.parquet" --label clicked --rows 1000000 --run runs/clicks
"""

import argparse
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

import braidax as bx

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="Parquet, a file, a folder or a pattern: floats are numbers, others categories")
parser.add_argument("--label", default="label", help="the column that is predicted, 0 or 1")
parser.add_argument("--run", default="runs/dlrm", type=Path, help="the folder of the checkpoints")
for name, number in {"rows": 10_000, "epochs": 2, "batch": 256, "width": 16}.items():
    parser.add_argument(f"--{name}", default=number, type=int)
args = parser.parse_args()

if args.data is None:
    args.data, rng = args.run / "clicks.parquet", np.random.default_rng(0)
    if not args.data.exists():
        args.run.mkdir(parents=True, exist_ok=True)
        ids = {name: rng.zipf(1.6, 20_000) % 2**31 for name in ("user", "advertiser", "site")}
        price, age = rng.lognormal(size=(2, 20_000))
        likes = sum(np.sin(place + ids[name]) for place, name in enumerate(ids)) - 0.5 * np.log(price)
        label = rng.random(20_000) < 1 / (1 + np.exp(-2 * likes))
        pq.write_table(pa.table({"label": label.astype(np.int8), "price": price, "age": age, **ids}), args.data)
    print(f"no --data: {args.data} has generated clicks")


def arranged(window):  # a function of whole windows: columns [n] become arrays [n, columns]
    columns = [window[name] for name in sorted(window) if name != args.label]
    numbers = [np.log1p(np.maximum(np.nan_to_num(column), 0)) for column in columns if column.dtype.kind == "f"]
    others = [column for column in columns if column.dtype.kind != "f"]
    codes = [[crc32(text.encode()) for text in one] if one.dtype.kind == "O" else one for one in others]
    ids = np.stack(codes, 1) % args.rows  # rows of the tables
    return {"numbers": np.stack(numbers, 1), "ids": ids, "label": window[args.label]}


train, test = bx.data.split(bx.open(args.data, transform=arranged), 0.9, seed=0)
num_numbers, num_tables = train.sample_spec["numbers"].shape[0], train.sample_spec["ids"].shape[0]
print(f"{len(train):,} clicks to train on, {len(test):,} to test on: {num_numbers} numbers and {num_tables} ids each")


def layers(key, *sizes):
    return [
        {"kernel": jax.random.normal(key, (size, following)) / np.sqrt(size), "bias": jnp.zeros(following)}
        for key, (size, following) in zip(jax.random.split(key, len(sizes)), pairwise(sizes), strict=False)
    ]


def init_fn(key):
    keys, num_products = jax.random.split(key, 3), num_tables * (num_tables + 1) // 2
    return {
        "tables": list(jax.random.normal(keys[0], (num_tables, args.rows, args.width)) / 8),
        "bottom": layers(keys[1], num_numbers, 64, args.width),
        "top": layers(keys[2], args.width + num_products, 64, 1),
    }


def loss_fn(params, batch):
    def apply(layers, x):
        for layer in layers[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return x @ layers[-1]["kernel"] + layers[-1]["bias"]

    x = apply(params["bottom"], batch["numbers"])
    vectors = jnp.stack([x, *(table[ids] for table, ids in zip(params["tables"], batch["ids"].T, strict=True))], 1)
    products = jnp.einsum("niw,njw->nij", vectors, vectors)[:, *np.tril_indices(vectors.shape[1], -1)]
    logits = apply(params["top"], jnp.concatenate([x, products], 1))[:, 0]
    mask = batch.get("mask")  # of a last batch that is not full
    right = jnp.average((logits > 0) == (batch["label"] > 0), weights=mask)
    return jnp.average(optax.sigmoid_binary_cross_entropy(logits, batch["label"]), weights=mask), {"accuracy": right}


mesh, batch = jax.make_mesh((jax.device_count(),), ("data",)), train.batch_spec(args.batch)
step = bx.parallelize(loss_fn, optax.adagrad(0.1), mesh, {"data": bx.Hybrid()}, init=init_fn, batch=batch)
by_rows = sum(variable.placements == (bx.parallel.Rows(),) for variable in step.plan.variables)
print(f"{by_rows} of {len(step.plan.variables)} variables are tables by rows; print(step.plan) says why")
shared = {"mesh": mesh, "specs": step.batch_shardings, "batch_size": args.batch}
with (
    bx.DataLoader(train, **shared, epochs=args.epochs) as loader,
    bx.DataLoader(test, **shared, seed=None, remainder="pad") as held_out,
    bx.Checkpointer(args.run, bx.Adaptive()) as saver,
):
    report = bx.Report(metrics=args.run / "metrics.jsonl")
    state = bx.fit(step, step.init(jax.random.key(0)), loader, saver=saver, report=report, test=held_out)
    found = bx.evaluate(step, state, held_out)
print(f"step {int(state.step)}: test loss {found['loss']:.3f}, {100 * found['accuracy']:.1f} % are told right")
