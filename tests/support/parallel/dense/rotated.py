"""Models and strategies whose parts of weights go round."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import braidax.parallel as bx
from tests.support.parallel.dense.models import MODELS, VOCABULARY, Model

ALL = bx.RotatedTensorParallel(min_bytes=0)
STRATEGIES: dict[str, Any] = {
    "one axis": {"data": ALL},
    "replicas": {"data": bx.DataParallel(), "model": ALL},
    "sharded on": {"data": bx.FullySharded(min_bytes=0), "model": ALL},
    "beside rows": {"data": bx.Hybrid(dense=ALL), "model": bx.DataParallel()},
    "beside tensor": {"data": ALL, "model": bx.TensorParallel({"params/layers/[qo]*": bx.Replicated()}, min_bytes=0)},
    "gathered on": {"data": ALL, "model": bx.TensorParallel({"*/0/w": bx.Gathered(0)}, min_bytes=1 << 40)},
}
# Momentum: Adam would make of a rounding a whole step, and parts are added up in another order.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def by_heads(heads: int, layers: int = 2) -> Model:
    """Layers of attention and a wider part, computed again, with words that one table reads and guesses."""

    def init(key: jax.Array) -> Any:
        shapes = {"qkv": (16, 3, heads, 4), "out": (heads, 4, 16), "up": (16, 128), "down": (128, 16)}
        keys = jax.random.split(key, 5)
        layer = {
            name: 0.2 * jax.random.normal(one, (layers, *shape))
            for one, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        return {"layers": layer, "table": 0.2 * jax.random.normal(keys[4], (VOCABULARY, 16))}

    def loss(params: Any, batch: Any) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: Any) -> Any:
            q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", jnp.tanh(x), w["qkv"]), 2, 0)
            mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k)), v)
            x = x + jnp.einsum("bthk,hkd->btd", mixed, w["out"])
            return x + jax.nn.gelu(jnp.tanh(x) @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, params["table"][batch["ids"]], params["layers"])
        logits = x @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).mean()

    return Model(loss, init, MODELS["gpt"].batch)
