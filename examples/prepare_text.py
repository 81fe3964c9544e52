"""From raw text to training in one script: join, dedupe, filter, tokenize and shuffle on two ranks, then a small model.

JAX_NUM_CPU_DEVICES=4 python examples/prepare_text.py
"""

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
WORDS = [
    "the",
    "a",
    "small",
    "large",
    "old",
    "cat",
    "dog",
    "bird",
    "ship",
    "sees",
    "finds",
    "leaves",
    "under",
    "beside",
]


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


def prepare(folder):
    """Returns the plan, as for one process."""
    documents = pl.scan_ndjson(folder / "documents-*.jsonl").with_columns(pl.col("text").str.strip_chars())
    texts = documents.unique("text", keep="first", maintain_order=True)
    good = texts.join(pl.scan_parquet(folder / "sites.parquet"), on="site", maintain_order="left").filter(
        pl.col("quality") > 0.5
    )
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
    write(Path(folder))
    with LocalGang(2) as gang:
        frame = bf.from_polars(prepare(Path(folder)), gang).shuffle(seed=0)
        loader = bx.DataLoader(frame, mesh, P("data"), batch_size=64, seed=1, epochs=4)  # computes it

source = loader.source
step = bx.parallelize(
    loss_fn, optax.adam(1e-2), mesh, {"data": bx.DataParallel()}, init=init_fn, batch=source.batch_spec(64)
)
state, losses = step.init(jax.random.key(0)), []
with loader:
    for batch in loader:
        state, metrics = step.update(state, batch)
        losses.append(float(metrics["loss"]))
print(f"{len(source)} of 12000 documents")
print(f"{len(losses)} steps on {jax.device_count()} devices: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
