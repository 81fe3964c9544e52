"""Small models of the kinds that are sharded: their losses, first parameters and batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.support.parallel.drawn import drawn

BATCH, LENGTH, VOCABULARY, WIDTH = 16, 6, 50, 24


class Model(NamedTuple):
    """**Fields:** `loss(params, batch, key)`, `init(key)`, `batch(seed)`."""

    loss: Callable[..., Any]
    init: Callable[[jax.Array], Any]
    batch: Callable[[int], Any]


def _normal(key: jax.Array, *shapes: tuple[int, ...]) -> list[jax.Array]:
    return [one * 0.2 for one in drawn(key, *shapes)]


def _tokens(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"ids": random.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)}


def _images(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "image": random.normal(size=(BATCH, 8, 8, 3)).astype(np.float32),
        "label": random.integers(0, 10, BATCH).astype(np.int32),
    }


def _of_tokens(x: jax.Array, embedding: jax.Array, ids: jax.Array) -> jax.Array:
    logits = jnp.einsum("btd,vd->btv", x, embedding)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


def _gpt_init(key: jax.Array) -> Any:
    layers, d = 3, WIDTH
    embedding, positions, qkv, out, up, down = _normal(
        key, (VOCABULARY, d), (LENGTH, d), (layers, d, 3, 2, d // 2), (layers, 2, d // 2, d), (layers, d, 4 * d),
        (layers, 4 * d, d),
    )  # fmt: skip
    zeros = jnp.zeros((layers, d))
    weights = {"qkv": qkv, "out": out, "up": up, "down": down, "bias": jnp.zeros((layers, 4 * d)), "scale": zeros}
    return {"embedding": embedding, "positions": positions, "layers": weights}


def _gpt(dtype: Any = jnp.float32, *, remat: bool = True) -> Callable[..., Any]:
    """Scanned layers with attention by heads, dropout, tied embeddings."""

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        x = jnp.take(params["embedding"], batch["ids"], axis=0) + params["positions"]

        def layer(x: jax.Array, given: Any) -> Any:
            w, key = given
            w = jax.tree.map(lambda leaf: leaf.astype(dtype), w)
            h = (x * (1 + w["scale"]) / jnp.sqrt(1e-3 + (x**2).mean(-1, keepdims=True))).astype(dtype)
            q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", h, w["qkv"]), 2, 0)
            scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH))) > 0, jnp.einsum("bthk,bshk->bhts", q, k), -1e9)
            mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores.astype(jnp.float32)).astype(dtype), v)
            x = x + jnp.einsum("bthk,hkd->btd", mixed, w["out"])
            h = jax.nn.gelu(x.astype(dtype) @ w["up"] + w["bias"])
            h = h * jax.random.bernoulli(key, 0.9, h.shape)
            return (x + h @ w["down"]).astype(jnp.float32), None

        keys = jax.random.split(key, params["layers"]["up"].shape[0])
        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (params["layers"], keys))
        return _of_tokens(x, params["embedding"], batch["ids"])

    return loss


def _mlp_init(key: jax.Array) -> Any:
    shapes = ((LENGTH * WIDTH, 64), (64, 33), (33, 8), (VOCABULARY, WIDTH))  # 33: no axis divides it
    first, second, third, table = _normal(key, *shapes)
    return {"dense": [{"w": w, "b": jnp.zeros(w.shape[1])} for w in (first, second, third)], "table": table}


def _mlp(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    x = params["table"][batch["ids"]].reshape(len(batch["ids"]), -1)
    for layer in params["dense"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    decay = sum((layer["w"] ** 2).sum() for layer in params["dense"])
    return (x**2).mean() - x[:, 0].mean() + 1e-3 * decay


def _resnet_init(key: jax.Array) -> Any:
    stem, first, second, head = _normal(key, (3, 3, 3, 16), (3, 3, 16, 16), (3, 3, 16, 16), (16, 10))
    return {"stem": stem, "blocks": [first, second], "scale": jnp.ones(16), "head": head}


def _resnet(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Convolutions, and statistics of the whole batch."""

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-3) * params["scale"]

    x = convolved(batch["image"], params["stem"])
    for kernel in params["blocks"]:
        x = x + jax.nn.relu(convolved(x, kernel))
    logits = x.mean((1, 2)) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def _lstm_init(key: jax.Array) -> Any:
    embedding, both = _normal(key, (VOCABULARY, WIDTH), (2 * WIDTH, 4 * WIDTH))
    return {"embedding": embedding, "both": both, "bias": jnp.zeros(4 * WIDTH)}


def _lstm(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A weight that all steps of a loop share."""
    start = jnp.zeros((len(batch["ids"]), WIDTH))

    def step(carry: Any, x: jax.Array) -> Any:
        h, c = carry
        i, f, o, g = jnp.split(jnp.concatenate([x, h], -1) @ params["both"] + params["bias"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    x = params["embedding"][batch["ids"].T]
    _, outputs = jax.lax.scan(step, (start, start), x)
    return _of_tokens(jnp.moveaxis(outputs, 0, 1), params["embedding"], batch["ids"])


def _fused_init(key: jax.Array) -> Any:
    layers, d = 2, WIDTH
    shapes = {"qkv": (layers, d, 48), "out": (layers, d, d), "up": (layers, d, 6 * d), "down": (layers, 3 * d, d)}
    embedding, *others = _normal(key, (VOCABULARY, d), *shapes.values())
    return {
        "embedding": embedding,
        "layers": {**dict(zip(shapes, others, strict=True)), "bias": jnp.ones((layers, 48))},
    }


def _fused(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """One weight makes four queries, two keys and two values a head; another one what is gated, and the gates."""
    x = params["embedding"][batch["ids"]]

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> Any:
        query, at, value = jnp.split(x @ w["qkv"] + w["bias"], [24, 36], axis=-1)
        query, at, value = (one.reshape(*one.shape[:2], 2, -1, 6) for one in (query, at, value))
        scores = jax.nn.softmax(jnp.einsum("bthgk,bshjk->bhgts", query, at) / 6**0.5)
        mixed = jnp.einsum("bhgts,bshjk->bthgk", scores, value).reshape(x.shape)
        x = x + mixed @ w["out"]
        hidden, gates = jnp.split(x @ w["up"], 2, axis=-1)
        return x + (jax.nn.silu(gates) * hidden) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    decay = sum((leaf**2).mean() for leaf in jax.tree.leaves(params["layers"]))
    return _of_tokens(x, params["embedding"], batch["ids"]) + 1e-2 * decay


def _bert_init(key: jax.Array) -> Any:
    d = WIDTH
    shapes = {
        "query": (d, 4, 6), "key": (d, 4, 6), "value": (d, 4, 6), "out": (4, 6, d),
        "up": (d, 2 * d), "down": (2 * d, d),
    }  # fmt: skip
    first, second, *others = jax.random.split(key, 4)
    embedding, positions, transform = _normal(first, (VOCABULARY, d), (LENGTH, d), (d, d))
    layers = [dict(zip(shapes, _normal(one, *shapes.values()), strict=True)) for one in (second, *others)]
    for layer in layers:
        layer.update(bias=jnp.zeros(2 * d), scale=jnp.ones((2, d)), shift=jnp.zeros((2, d)))
    return {
        "embedding": embedding, "positions": positions, "layers": layers, "transform": transform,
        "out_bias": jnp.zeros(VOCABULARY),
    }  # fmt: skip


def _bert(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Attention to both sides, normalized behind the residuals; words that are guessed from the others."""
    hidden = (batch["ids"] + jnp.arange(LENGTH)) % 3 == 0
    x = params["embedding"][jnp.where(hidden, 0, batch["ids"])] + params["positions"]

    def normalized(x: jax.Array, w: Any, at: int) -> jax.Array:
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
        return x * w["scale"][at] + w["shift"][at]

    for number, w in enumerate(params["layers"]):
        query, at, value = (jnp.einsum("btd,dhk->bhtk", x, w[name]) for name in ("query", "key", "value"))
        scores = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", query, at) / 6**0.5)
        mixed = jnp.einsum("bhtk,hkd->btd", scores @ value, w["out"])
        mixed = mixed * jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, mixed.shape)
        x = normalized(x + mixed, w, 0)
        x = normalized(x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"], w, 1)
    logits = jax.nn.gelu(x @ params["transform"]) @ params["embedding"].T + params["out_bias"]
    log_probs = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(log_probs, batch["ids"][..., None], axis=-1)[..., 0]
    return (losses * hidden).sum() / hidden.sum()


def _clicks(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "dense": random.normal(size=(BATCH, 5)).astype(np.float32),
        "ids": random.integers(0, VOCABULARY, (BATCH, 3)).astype(np.int32),
        "label": random.integers(0, 2, BATCH).astype(np.int32),
    }


def _dlrm_init(key: jax.Array) -> Any:
    first, second, *tables = _normal(key, (5, 16), (16, 8), *[(VOCABULARY, 8)] * 3)
    third, fourth = _normal(jax.random.fold_in(key, 1), (8 + 6, 32), (32, 1))
    return {"tables": tables, "bottom": [first, second], "top": [third, fourth], "bias": jnp.zeros(32)}


def _dlrm(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Tables that are read by rows, and products of all pairs of what was read."""
    x = jax.nn.relu(jax.nn.relu(batch["dense"] @ params["bottom"][0]) @ params["bottom"][1])
    read = [table[batch["ids"][:, at]] for at, table in enumerate(params["tables"])]
    both = jnp.stack([x, *read], axis=1)
    one, other = np.triu_indices(4, 1)
    pairs = jnp.einsum("bid,bjd->bij", both, both)[:, one, other]
    hidden = jax.nn.relu(jnp.concatenate([x, pairs], axis=1) @ params["top"][0] + params["bias"])
    return optax.sigmoid_binary_cross_entropy((hidden @ params["top"][1])[:, 0], batch["label"]).mean()


MODELS: dict[str, Model] = {
    "gpt": Model(_gpt(), _gpt_init, _tokens),
    "gpt, kept": Model(_gpt(remat=False), _gpt_init, _tokens),
    "gpt, bfloat16": Model(_gpt(jnp.bfloat16), _gpt_init, _tokens),
    "mlp": Model(_mlp, _mlp_init, _tokens),
    "resnet": Model(_resnet, _resnet_init, _images),
    "lstm": Model(_lstm, _lstm_init, _tokens),
    "gpt, fused": Model(_fused, _fused_init, _tokens),
    "bert": Model(_bert, _bert_init, _tokens),
    "dlrm": Model(_dlrm, _dlrm_init, _clicks),
}
