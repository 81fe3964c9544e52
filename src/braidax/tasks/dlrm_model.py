"""DLRM, a model of clicks: tables for what is categorical, a network for what is a number, and their dot products.

In plain JAX. Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems" (arXiv:1906.00091). Tables are read by rows only.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key


@dataclass(frozen=True)
class Sizes:
    """How large the model is.

    **Fields:** `cardinalities`: rows of each table. `num_dense`: numbers of a sample. `bottom`: layers for them; the
    last is as wide as a row of a table. `top`: layers behind the dot products, before the one logit.
    """

    cardinalities: tuple[int, ...]
    num_dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @property
    def width(self) -> int:
        """Numbers in a row of a table."""
        return self.bottom[-1]


def init_dlrm(key: Key[Array, ""], sizes: Sizes) -> dict[str, Any]:
    """Returns first parameters: tables uniform within 1 / √rows, matrices normal by Glorot, biases 0."""
    num_vectors = len(sizes.cardinalities) + 1
    num_products = num_vectors * (num_vectors - 1) // 2
    bottom_key, top_key, *table_keys = jax.random.split(key, 2 + len(sizes.cardinalities))
    tables = {
        f"table_{number:02}": jax.random.uniform(
            table_key, (rows, sizes.width), jnp.float32, -1 / math.sqrt(rows), 1 / math.sqrt(rows)
        )
        for number, (table_key, rows) in enumerate(zip(table_keys, sizes.cardinalities, strict=True))
    }
    bottom = _init_layers(bottom_key, (sizes.num_dense, *sizes.bottom))
    return {
        "tables": tables,
        "bottom": bottom,
        "top": _init_layers(top_key, (sizes.width + num_products, *sizes.top, 1)),
    }


def predict_clicks(params: Any, dense: Float[Array, "n numbers"], ids: Int[Array, "n tables"]) -> Float[Array, "n"]:
    """Returns the logit of a click for each sample.

    **Arguments:** `ids`: a row of each table.
    """
    x = dense
    for layer in params["bottom"].values():
        x = jax.nn.relu(_apply(layer, x))
    rows = [table[ids[:, number]] for number, table in enumerate(params["tables"].values())]
    vectors = jnp.stack([x, *rows], axis=1)
    products = jnp.einsum("niw,njw->nij", vectors, vectors)
    first, second = np.tril_indices(vectors.shape[1], -1)
    x = jnp.concatenate([x, products[:, first, second]], axis=1)
    *hidden, output = params["top"].values()
    for layer in hidden:
        x = jax.nn.relu(_apply(layer, x))
    return _apply(output, x)[:, 0]


def _init_layers(key: jax.Array, widths: tuple[int, ...]) -> dict[str, Any]:
    matrix = jax.nn.initializers.glorot_normal()
    keys = jax.random.split(key, len(widths) - 1)
    return {
        f"layer_{number}": {"kernel": matrix(key, (inside, outside)), "bias": jnp.zeros(outside)}
        for number, (key, (inside, outside)) in enumerate(zip(keys, itertools.pairwise(widths), strict=True))
    }


def _apply(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]
