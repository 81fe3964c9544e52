"""GPT-2's shape, scanned and rematerialised, as a loss for one device; and what its parts need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. **Fields:** `vocabulary`, `width`, `layers`, `length`: tokens of a sample; `batch`: samples."""

    vocabulary: int
    width: int
    layers: int
    length: int
    batch: int

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
        keys = iter(jax.random.split(key, 6))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) * 0.02

        return {
            "wte": normal(self.vocabulary, d),
            "wpe": normal(self.length, d),
            "layers": {
                "qkv": normal(num, d, 3 * d), "qkv_bias": jnp.zeros((num, 3 * d)),
                "out": normal(num, d, d), "out_bias": jnp.zeros((num, d)),
                "up": normal(num, d, 4 * d), "up_bias": jnp.zeros((num, 4 * d)),
                "down": normal(num, 4 * d, d), "down_bias": jnp.zeros((num, d)),
                "first": jnp.ones((num, d)), "second": jnp.ones((num, d)),
            },
            "last": jnp.ones(d),
        }  # fmt: skip

    def loss(self, params: Any, batch: Any, held: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
        """Of the next token, for one device. **Arguments:** `held`: is given what goes from layer to layer."""
        x = held(params["wte"][batch["ids"]] + params["wpe"])
        layer = jax.checkpoint(lambda x, w: (held(self.layer(x, w)[0]), None))
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return self.head(x, params["last"], params["wte"], batch["ids"])

    def head(self, x: jax.Array, scale: jax.Array, wte: jax.Array, ids: jax.Array) -> jax.Array:
        """The loss of the last layer's outputs."""
        logits = _normed(x, scale)[:, :-1] @ wte.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    def layer(self, x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        """Attention and a wider part between, each beside what it is added to."""
        num, length = x.shape[:2]
        h = _normed(x, w["first"]) @ w["qkv"] + w["qkv_bias"]
        q, k, v = jnp.split(h.reshape(num, length, 3 * self.heads, 64), 3, axis=2)
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / 8
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v).reshape(x.shape)
        x = x + mixed @ w["out"] + w["out_bias"]
        h = jax.nn.gelu(_normed(x, w["second"]) @ w["up"] + w["up_bias"])
        return x + h @ w["down"] + w["down_bias"], None

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


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return scale * (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
