"""A small GPT from your own text: tokenize, split, pack, train, checkpoint. Stop it, run it again: it goes on.

python examples/gpt_from_text.py                     # on generated text
python examples/gpt_from_text.py --data "books/*.jsonl" --column text --run runs/books --epochs 20
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import braidax as bx

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="JSON Lines, or .txt with a document a line: a file, a folder or a pattern")
parser.add_argument("--column", default="text", help="the field of JSON Lines that holds the text")
parser.add_argument("--run", default="runs/gpt", type=Path, help="the folder of the tokenizer and the checkpoints")
for name, number in {"epochs": 4, "batch": 16, "length": 64, "width": 64, "layers": 2, "vocabulary": 512}.items():
    parser.add_argument(f"--{name}", default=number, type=int)
args = parser.parse_args()
args.run.mkdir(parents=True, exist_ok=True)
if args.data is None:
    args.data = args.run / "text.jsonl"
    if not args.data.exists():  # texts in which one of two words follows each word
        rng = np.random.default_rng(0)
        texts = [np.cumsum([rng.integers(100), *rng.choice([1, 7], rng.integers(8, 40))]) % 100 for _ in range(400)]
        args.data.write_text("\n".join(json.dumps({"text": " ".join(f"w{word}" for word in text)}) for text in texts))
    print(f"no --data: {args.data} has generated text")
source = bx.open(args.data, columns=None if str(args.data).endswith(".txt") else [args.column])
if not (args.run / "tokenizer.json").exists():  # a run keeps the tokenizer that it began with
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=args.vocabulary, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator((sample[args.column] for sample in source[:10_000]), trainer)
    tokenizer.save(str(args.run / "tokenizer.json"))
tokenizer = Tokenizer.from_file(str(args.run / "tokenizer.json"))
tokens = bx.data.tokenized(source, tokenizer, leaf=args.column, end=tokenizer.token_to_id("<end>"))
train, test = (bx.data.packed(part, args.length) for part in bx.data.split(tokens, 0.95, seed=0))
print(f"{len(source):,} documents: {len(train):,} rows of {args.length} tokens to train on, {len(test):,} to test on")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(args.width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(args.width // 32, args.width, decode=False, rngs=rngs)
        self.up = nnx.Linear(args.width, 4 * args.width, rngs=rngs)
        self.down = nnx.Linear(4 * args.width, args.width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.token = nnx.Embed(tokenizer.get_vocab_size(), args.width, rngs=rngs)
        self.place = nnx.Embed(args.length, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(args.layers)])
        self.out = nnx.Linear(args.width, tokenizer.get_vocab_size(), rngs=rngs)

    def __call__(self, tokens, segments, positions):
        same = segments[:, None, :, None] == segments[:, None, None, :]  # attention stays inside a document
        x = self.token(tokens) + self.place(positions)
        for block in self.blocks:
            x = block(x, same & np.tri(args.length, dtype=bool))
        return self.out(x)


def loss_fn(params, batch):
    tokens, segments = batch["tokens"], batch["segment_ids"]
    logits = nnx.merge(graph, params)(tokens, segments, batch["positions"])[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)  # the next token is of the same document
    counts &= batch.get("mask", np.ones(len(tokens), bool))[:, None]  # of a last batch that is not full
    return (losses * counts).sum() / counts.sum(), {"num_tokens": counts.sum()}


def init_fn(key):
    return nnx.split(GPT(nnx.Rngs(key)))[1]


graph = nnx.split(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))))[0]
mesh, batch = jax.make_mesh((jax.device_count(),), ("data",)), train.batch_spec(args.batch)
step = bx.parallelize(loss_fn, optax.adamw(3e-3), mesh, {"data": bx.DataParallel()}, init=init_fn, batch=batch)
shared = {"mesh": mesh, "specs": step.batch_shardings, "batch_size": args.batch}
with (
    bx.DataLoader(train, **shared, epochs=args.epochs) as loader,
    bx.DataLoader(test, **shared, seed=None, remainder="pad") as held_out,
    bx.Checkpointer(args.run, bx.Adaptive()) as saver,
):
    report = bx.Report(metrics=args.run / "metrics.jsonl")
    state = bx.fit(step, step.init(jax.random.key(0)), loader, saver=saver, report=report, test=held_out)
    perplexity = bx.evaluate(step, state, held_out)["perplexity"]
print(f"step {int(state.step)}: test perplexity {perplexity:.2f}; by guessing {tokenizer.get_vocab_size()}")
