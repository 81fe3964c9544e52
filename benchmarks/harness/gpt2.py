"""GPT-2's shape, scanned and rematerialised, as a loss for one device; and what its parts need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    **Fields:** `vocabulary`, `width`, `layers`, `length`: tokens of a sample; `batch`: samples. `qkv`: how queries,
    keys and values share a weight: in one dim, or in dims of their own. `backward`: what it does with layers.
    `output`: what multiplies the last layer's outputs: the table that words are read from, or a weight of its own.
    """

    vocabulary: int
    width: int
    layers: int
    length: int
    batch: int
    qkv: Literal["side by side", "by heads"] = "side by side"
    backward: Literal["again", "kept"] = "again"
    output: Literal["tied", "apart"] = "tied"

    @property
    def heads(self) -> int:
        """Of 64 dims each."""
        return self.width // 64

    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Of a batch."""
        return {"ids": jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32)}

    def samples(self, seed: int) -> dict[str, np.ndarray]:
        """A batch."""
        random = np.random.default_rng(seed)
        return {"ids": random.integers(0, self.vocabulary, (self.batch, self.length)).astype(np.int32)}

    def init(self, key: jax.Array) -> dict[str, Any]:
        """The first parameters."""
        d, num = self.width, self.layers
        three = (3 * d,) if self.qkv == "side by side" else (3, self.heads, 64)
        keys = iter(jax.random.split(key, 7))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) * 0.02

        apart = {} if self.output == "tied" else {"head": normal(self.vocabulary, d)}
        return {
            **apart,
            "wte": normal(self.vocabulary, d),
            "wpe": normal(self.length, d),
            "layers": {
                "qkv": normal(num, d, *three), "qkv_bias": jnp.zeros((num, *three)),
                "out": normal(num, d, d) if self.qkv == "side by side" else normal(num, self.heads, 64, d),
                "out_bias": jnp.zeros((num, d)),
                "up": normal(num, d, 4 * d), "up_bias": jnp.zeros((num, 4 * d)),
                "down": normal(num, 4 * d, d), "down_bias": jnp.zeros((num, d)),
                "first": jnp.ones((num, d)), "second": jnp.ones((num, d)),
            },
            "last": jnp.ones(d),
        }  # fmt: skip

    def loss(self, params: Any, batch: Any, held: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
        """Of the next token, for one device. **Arguments:** `held`: is given what goes from layer to layer."""
        x = held(params["wte"][batch["ids"]] + params["wpe"])
        x, _ = jax.lax.scan(self.kept(lambda x, w: (held(self.layer(x, w)[0]), None)), x, params["layers"])
        return self.head(x, params["last"], params["wte" if self.output == "tied" else "head"], batch["ids"])

    def head(self, x: jax.Array, scale: jax.Array, wte: jax.Array, ids: jax.Array) -> jax.Array:
        """The loss of the last layer's outputs."""
        logits = normed(x, scale)[:, :-1] @ wte.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    def layer(self, x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        """Attention and a wider part between, each beside what it is added to."""
        x = x + self.attention(normed(x, w["first"]), w) + w["out_bias"]
        return x + self.wider(normed(x, w["second"]), w) + w["down_bias"], None

    def attention(self, h: jax.Array, w: Any) -> jax.Array:
        """By the heads that `w` holds."""
        length = h.shape[1]
        if self.qkv == "by heads":
            both = jnp.einsum("btd,dchk->cbthk", h, w["qkv"]) + w["qkv_bias"][:, None, None]
            q, k, v = both[0], both[1], both[2]
        else:
            both = h @ w["qkv"] + w["qkv_bias"]
            q, k, v = jnp.split(both.reshape(len(h), length, 3 * self.heads, 64), 3, axis=2)
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / 8
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
        if self.qkv == "by heads":
            return jnp.einsum("bthk,hkd->btd", mixed, w["out"])
        return mixed.reshape(h.shape) @ w["out"]

    def wider(self, h: jax.Array, w: Any) -> jax.Array:
        """The wider part, by the hidden dims that `w` holds."""
        return jax.nn.gelu(h @ w["up"] + w["up_bias"]) @ w["down"]

    def kept(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a layer of which the backward pass keeps its input, or everything."""
        return jax.checkpoint(layer) if self.backward == "again" else layer

    def formula_bytes(self, num_devices: int, arguments: int) -> int:
        """Returns what a device needs at least for fully sharded gradients, beside what it gives back.

        What is kept of each layer, and then the largest of three moments. At the head, the vocabulary's weights with
        the logits and their gradient, or with their own gradient and that of the logits. In a layer's backward pass its
        weights and their gradients, and what it computes again.

        **Arguments:** `arguments`: bytes that the program is given.
        """
        samples, d, t = self.batch // num_devices, self.width, self.length
        kept = self.layers * samples * t * d
        logits = samples * t * self.vocabulary
        head = self.vocabulary * d + logits + max(logits, self.vocabulary * d)
        again = samples * t * (2 * 4 * d + 6 * d) + 2 * samples * self.heads * t * t
        layer = 2 * 12 * d * d + again
        return arguments + 4 * (kept + max(head, layer))


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm without a bias."""
    mean = x.mean(-1, keepdims=True)
    return scale * (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
