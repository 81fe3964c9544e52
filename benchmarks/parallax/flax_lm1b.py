"""A model of the form and the sizes of Flax' example `lm1b`, whose step is planned and not run."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness.models import Model

_VOCABULARY, _WIDTH, _HIDDEN, _NUM_LAYERS, _NUM_HEADS = 30_000, 512, 2048, 6, 8
_NUM_WORDS, _WARMUP, _RATE, _DROPOUT = 128, 1000, 0.05, 0.1
_POSITIONS = 2048


class _Layer(nn.Module):
    """Attention, then a hidden layer, each behind a norm and around a sum."""

    @nn.compact
    def __call__(self, words: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        normed = nn.LayerNorm(dtype=jnp.bfloat16)(words)
        attended = nn.MultiHeadDotProductAttention(
            _NUM_HEADS, dtype=jnp.bfloat16, use_bias=False, dropout_rate=_DROPOUT, deterministic=not train
        )(normed, mask=mask)
        words += nn.Dropout(_DROPOUT, deterministic=not train)(attended)
        hidden = nn.relu(nn.Dense(_HIDDEN, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(words)))
        hidden = nn.Dense(_WIDTH, dtype=jnp.bfloat16)(nn.Dropout(_DROPOUT, deterministic=not train)(hidden))
        return words + nn.Dropout(_DROPOUT, deterministic=not train)(hidden)


class _Decoder(nn.Module):
    """Predicts each word from those before it in its own text; a sample holds several."""

    @nn.compact
    def __call__(self, batch: Any, train: bool) -> jax.Array:
        words, texts = batch["inputs"], batch["inputs_segmentation"]
        before = jnp.pad(words, ((0, 0), (1, 0)))[:, :-1] * (texts == jnp.pad(texts, ((0, 0), (1, 0)))[:, :-1])
        state = nn.Embed(_VOCABULARY, _WIDTH, embedding_init=nn.initializers.normal(1.0))(before)
        state += jnp.take(_waves(), batch["inputs_position"], axis=0)
        state = nn.Dropout(_DROPOUT, deterministic=not train)(state).astype(jnp.bfloat16)
        seen = nn.make_attention_mask(words > 0, words > 0), nn.make_attention_mask(texts, texts, jnp.equal)
        mask = nn.combine_masks(nn.make_causal_mask(words), *seen)
        assert mask is not None, "masks have been given"
        for _ in range(_NUM_LAYERS):
            state = _Layer()(state, mask, train)
        return nn.Dense(_VOCABULARY, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(state))


def flax_lm1b(batch_size: int) -> Model:
    """Returns the model with its AdamW, whose rate rises and falls with the inverse root of the step."""
    decoder = _Decoder()

    def init(key: jax.Array) -> tuple[Any, Any]:
        return decoder.init(key, batch(0, 1), train=False)["params"], {}

    def loss(params: Any, batch: Any, key: jax.Array, variables: Any) -> Any:
        logits: Any = decoder.apply({"params": params}, batch, train=True, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"])
        kept = batch["targets"] > 0
        return jnp.where(kept, losses, 0).sum() / kept.sum(), {"variables": variables}

    def batch(number: int, size: int = batch_size) -> Any:
        words = np.random.default_rng(number).integers(1, _VOCABULARY, (size, _NUM_WORDS), np.int32)
        place, one_text = np.tile(np.arange(_NUM_WORDS, dtype=np.int32), (size, 1)), np.ones_like(words)
        return {"inputs": words, "inputs_position": place, "inputs_segmentation": one_text, "targets": words}

    def rate(step: Any) -> Any:
        return _RATE * jnp.minimum(1.0, step / _WARMUP) * jax.lax.rsqrt(jnp.maximum(step, _WARMUP * 1.0))

    return Model(
        f"Flax' lm1b, {_NUM_LAYERS} layers, D={_WIDTH}, V={_VOCABULARY:,}, {batch_size} x {_NUM_WORDS} words",
        init,
        loss,
        optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1),
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch(0)),
        batch,
    )


def _waves() -> jax.Array:
    """Returns sines and cosines of positions, float32 `[_POSITIONS, _WIDTH]`."""
    scales = np.exp(-np.log(1e4) * np.arange(_WIDTH // 2) / (_WIDTH // 2 - 1))
    angles = np.arange(_POSITIONS)[:, None] * scales
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), jnp.float32)
