"""Rows and their gradients cross while products are made that do not wait for them, by the compiler for H100s."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx

SAMPLES, NUMBERS, WIDTH, HIDDEN, DEVICES = 2048, 64, 16, 512, 8
ROWS = (5000, 3000)
WEIGHT = 4 * HIDDEN * HIDDEN


def init(key: jax.Array) -> Any:
    shapes = {
        "below": ((NUMBERS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, WIDTH)),
        "above": ((WIDTH + 3, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)),
        "tables": tuple((rows, WIDTH) for rows in ROWS),
    }
    return {
        name: [jax.random.normal(jax.random.fold_in(key, at), shape) * 0.1 for at, shape in enumerate(some)]
        for name, some in shapes.items()
    }


def clicks(params: Any, batch: Any) -> jax.Array:
    """Numbers go through layers before they meet rows, as in DLRM, and all go through layers then."""
    x = batch["numbers"]
    for weight in params["below"]:
        x = jnp.tanh(x @ weight)
    rows = [table[batch["ids"][:, at]] for at, table in enumerate(params["tables"])]
    vectors = jnp.stack([x, *rows], axis=1)
    products = jnp.einsum("niw,njw->nij", vectors, vectors)
    x = jnp.concatenate([x, products[:, 0, 1:], products[:, 1, 2:]], axis=1)
    for weight in params["above"]:
        x = jnp.tanh(x @ weight)
    return jnp.mean(jnp.square(x[:, 0] - batch["label"]))


def batch() -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "numbers": jax.ShapeDtypeStruct((SAMPLES, NUMBERS), jnp.float32),
        "ids": jax.ShapeDtypeStruct((SAMPLES, len(ROWS)), jnp.int32),
        "label": jax.ShapeDtypeStruct((SAMPLES,), jnp.float32),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("aot")
def test_rows_cross_under_the_layers_that_need_none() -> None:
    mesh, strategies = jax.make_mesh((DEVICES,), ("data",)), {"data": bx.Hybrid()}
    found = bx.parallelize(clicks, optax.adam(1e-3), mesh, strategies, init=init, batch=batch()).compile_for("h100:8")
    (option,) = (one for one in found.compiler_options if one.name == "xla_gpu_all_reduce_combine_threshold_bytes")
    assert option.value == WEIGHT
    exchanged = [one for one in found.collectives if one.kind == "all-to-all" and not one.in_unknown_loop]
    ids, rows, gradients = sorted(exchanged, key=lambda one: one.sent_bytes)
    assert ids.sent_bytes < rows.sent_bytes == gradients.sent_bytes
    assert rows.is_covered
    assert gradients.is_covered
