"""From raw tables to training: join, dedupe, filter, tokenize and shuffle on several ranks, then a small model.

python examples/prepare_text.py                      # on generated tables
python examples/prepare_text.py --documents "crawl/*.jsonl" --sites sites.parquet --ranks 8 --epochs 1

Documents have the fields `site` and `text`, sites the columns `site` and `quality`, from 0 to 1.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import polars as pl
from jax.sharding import PartitionSpec as P

import braidax as bx
import braidax.frame as bf
from braidax.gang import LocalGang

LENGTH, END = 48, 0
WORDS = "the a small large old cat dog bird ship sees finds leaves under beside".split()
parser = argparse.ArgumentParser()
parser.add_argument("--documents", help="JSON Lines: a file or a pattern")
parser.add_argument("--sites", help="Parquet: a file or a pattern")
for name, number in {"ranks": 2, "epochs": 4, "batch": 64}.items():
    parser.add_argument(f"--{name}", default=number, type=int)
args = parser.parse_args()
if (args.documents is None) != (args.sites is None):
    parser.error("expected both of --documents and --sites, or none of them")


def write(folder):
    """Writes what crawlers bring: documents, many of them twice, and what is known of the sites that they are from."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(2, 14))) for _ in range(6000)]
    for part in range(3):  # of a crawl, each with much that the others have
        rows = rng.integers(0, len(texts), 4000)
        documents = {"site": rows % 40, "text": [f"  {texts[row]}\n" for row in rows]}
        pl.DataFrame(documents).write_ndjson(folder / f"documents-{part}.jsonl")
    pl.DataFrame({"site": np.arange(40), "quality": rng.random(40)}).write_parquet(folder / "sites.parquet")


def tokenize(texts):  # runs on the ranks, on some thousand texts at a time
    encoded = [text.encode()[: LENGTH - 1] for text in texts]
    tokens = np.full((len(encoded), LENGTH), END, np.int32)
    for row, data in zip(tokens, encoded, strict=True):
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return pl.Series(tokens, dtype=pl.Array(pl.Int32, LENGTH))


def prepare(documents, sites):
    """Returns the plan, as for one process."""
    documents = pl.scan_ndjson(documents).with_columns(pl.col("text").str.strip_chars())
    texts = documents.unique("text", keep="first", maintain_order=True)
    good = texts.join(pl.scan_parquet(sites), on="site", maintain_order="left").filter(pl.col("quality") > 0.5)
    long = good.filter(pl.col("text").str.len_bytes() >= 20)
    tokens = pl.col("text").map_batches(tokenize, return_dtype=pl.Array(pl.Int32, LENGTH), is_elementwise=True)
    return long.select(tokens.alias("tokens"))


def init_fn(key):
    keys = jax.random.split(key)
    return {"table": jax.random.normal(keys[0], (256, 32)), "logits": jax.random.normal(keys[1], (64, 256)) / 8}


def loss_fn(params, batch):  # the next byte, by the two before it
    seen = params["table"][batch["tokens"]]
    logits = jnp.concatenate([seen[:, :-2], seen[:, 1:-1]], -1) @ params["logits"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 2:])
    mask = batch["tokens"][:, 1:-1] != END
    return (losses * mask).sum() / mask.sum()


mesh = jax.make_mesh((jax.device_count(),), ("data",))
with tempfile.TemporaryDirectory() as folder:
    if args.documents is None:
        write(Path(folder))
        args.documents, args.sites = Path(folder) / "documents-*.jsonl", Path(folder) / "sites.parquet"
        print("no --documents: generated 12,000 in a temporary folder")
    with LocalGang(args.ranks) as gang:
        frame = bf.from_polars(prepare(args.documents, args.sites), gang).shuffle(seed=0)
        loader = bx.DataLoader(frame, mesh, P("data"), batch_size=args.batch, seed=1, epochs=args.epochs)  # computes it
print(f"{loader.num_samples:,} documents are left")

batch = loader.source.batch_spec(args.batch)
step = bx.parallelize(loss_fn, optax.adam(1e-2), mesh, {"data": bx.DataParallel()}, init=init_fn, batch=batch)
state, losses = step.init(jax.random.key(0)), []
with loader:
    for batch in loader:
        state, metrics = step.update(state, batch)
        losses.append(float(metrics["loss"]))
print(f"{len(losses)} steps on {jax.device_count()} devices: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
