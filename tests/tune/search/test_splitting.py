"""What tensor parallelism splits is what its plan would split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.parallel.given.initial import trace_init, traced_loss
from braidax.parallel.given.loss import Loss
from braidax.parallel.plan.model import Model
from braidax.parallel.rows.read_rows import ReadRows
from braidax.program import cost_of
from braidax.tune.search.splitting import Splits, along, splits_of

WIDTH, HIDDEN, BATCH = 96, 256, 8


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    """Two products with a hidden dim, and one whose dims are used elsewhere."""
    hidden = jnp.tanh(batch @ params["to"])
    return jnp.mean((batch @ params["odd"] + hidden @ params["back"]) ** 2)


def traced() -> tuple[Model, float]:
    shapes = {"to": (WIDTH, HIDDEN), "back": (HIDDEN, WIDTH), "odd": (WIDTH, WIDTH)}

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), np.float32)
    program = traced_loss(Loss(loss), trace_init(init, Loss(loss)).out_specs, batch, 1, mesh)
    model = ReadRows(program, optax.sgd(0.1), {}, 1, frozenset()).model(1, ())
    return model, cost_of(program.closed.jaxpr).flops


def test_a_hidden_dim_is_split_and_what_has_none_stays() -> None:
    model, flops = traced()
    held = 4.0 * BATCH * HIDDEN  # of the hidden values
    even, odd = splits_of(model, flops=flops, activation_bytes=2 * held, sizes=(4, 5))
    assert even.variables == pytest.approx(2 * HIDDEN / (2 * HIDDEN + WIDTH))
    assert even.activations == pytest.approx(0.5)
    assert even.flops == pytest.approx(2 * HIDDEN / (2 * HIDDEN + WIDTH), rel=0.1)  # tanh and the mean besides
    assert even.summed_bytes == 2 * 2 * 4 * BATCH * WIDTH
    assert odd == Splits(5, 0.0, 0.0, 0.0, 0.0)  # does not divide 256


def test_each_size_has_its_own_and_what_is_not_known_is_split() -> None:
    found = along((Splits(4, 0.5, 0.25, 0.75, 8.0),), np.array([4.0, 2.0, 4.0]))
    assert found.variables.tolist() == [0.5, 1.0, 0.5]
    assert found.activations.tolist() == [0.25, 1.0, 0.25]
    assert found.flops.tolist() == [0.75, 1.0, 0.75]
    np.testing.assert_array_equal(found.summed_bytes, [8.0, np.nan, 8.0])
