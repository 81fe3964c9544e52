"""BERT's encoder as a classifier of texts, in Flax Linen; its layers are one that is scanned.

Sources: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"
(arXiv:1810.04805); Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from braidax.errors import import_extra

if TYPE_CHECKING:
    from flax import linen as nn
else:
    nn = import_extra("flax.linen", "tasks", purpose="a model of braidax's tasks")

_INIT = nn.initializers.truncated_normal(0.02)
_NUM_SEGMENTS = 2  # of a pair of texts; here there is only the first
_EPSILON = 1e-12


@dataclass(frozen=True)
class Sizes:
    """How large the encoder is.

    **Fields:** `vocabulary`: ids of words. `positions`: words of the longest text. `width`: of a word's vector.
    `num_layers`: of attention and a network of width 4 · `width`. `num_heads`: of attention. `dropout`: the share that
    is left out while training, of the sums in and before the layers and of the attention.
    """

    vocabulary: int = 30_522
    positions: int = 512
    width: int = 768
    num_layers: int = 12
    num_heads: int = 12
    dropout: float = 0.1


class Bert(nn.Module):
    """BERT's encoder, its pooler, and a layer that classifies.

    **Arguments:** `num_classes`: size of the output. `sizes`: of the encoder. `remat`: what is computed again for the
    gradients, to save memory: the inside of the `"layers"`, or `"nothing"`.
    """

    num_classes: int
    sizes: Sizes = Sizes()
    remat: Literal["layers", "nothing"] = "nothing"

    @nn.compact
    def __call__(
        self, words: Int[Array, "n length"], num_words: Int[Array, "n"], *, train: bool
    ) -> Float[Array, "n classes"]:
        """Returns a logit per class; with `train`, an rng `"dropout"` is needed.

        **Arguments:** `num_words`: how many of each text are none of the filling, which nothing attends to.
        """
        sizes, length = self.sizes, words.shape[1]
        x = nn.Embed(sizes.vocabulary, sizes.width, embedding_init=_INIT, name="word_embedding")(words)
        x += self.param("position_embedding", _INIT, (sizes.positions, sizes.width))[:length]
        x += self.param("segment_embedding", _INIT, (_NUM_SEGMENTS, sizes.width))[0]
        x = nn.LayerNorm(_EPSILON, name="embedding_norm")(x)
        x = nn.Dropout(sizes.dropout, deterministic=not train)(x)
        seen = jnp.arange(length) < num_words[:, None]
        layer = nn.remat(_Layer, prevent_cse=False) if self.remat == "layers" else _Layer
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType] (flax documents it, and annotates int)
            length=sizes.num_layers,
        )
        x, _ = layers(sizes, train, name="layers")(x, seen[:, None, None, :])
        x = jnp.tanh(nn.Dense(sizes.width, kernel_init=_INIT, name="pooler")(x[:, 0]))
        x = nn.Dropout(sizes.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes, kernel_init=_INIT, name="classifier")(x)


class _Layer(nn.Module):
    """Attention and a network of two layers, each added to its input and then normalized."""

    sizes: Sizes
    train: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "n length width"], seen: Bool[Array, "n 1 1 length"]
    ) -> tuple[Float[Array, "n length width"], None]:
        sizes, still = self.sizes, not self.train
        attend = nn.MultiHeadDotProductAttention(
            sizes.num_heads,
            dropout_rate=sizes.dropout,
            broadcast_dropout=False,
            deterministic=still,
            kernel_init=_INIT,
            name="attention",
        )
        y = nn.Dropout(sizes.dropout, deterministic=still)(attend(x, mask=seen))
        x = nn.LayerNorm(_EPSILON, name="attention_norm")(x + y)
        y = nn.gelu(nn.Dense(4 * sizes.width, kernel_init=_INIT, name="inner")(x), approximate=False)
        y = nn.Dense(sizes.width, kernel_init=_INIT, name="outer")(y)
        y = nn.Dropout(sizes.dropout, deterministic=still)(y)
        return nn.LayerNorm(_EPSILON, name="network_norm")(x + y), None
