"""Clipping by the global norm is taken out of optimizers, and what is left with the factor is the same optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.errors import ArgumentError
from braidax.parallel import rows
from braidax.parallel.rows.clipping import Clipping, split_clipping
from tests.parallel.rows.training import Case, gradients, on_mesh

SCHEDULE = optax.linear_schedule(0.3, 0.1, 8)
LIMIT = 0.05
CLIP = optax.clip_by_global_norm
BEHIND: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(SCHEDULE),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
    "adagrad": optax.adagrad(SCHEDULE),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(SCHEDULE),
    "clip": optax.chain(optax.clip(0.1), optax.rmsprop(0.1)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
}
OTHER: dict[str, optax.GradientTransformation] = {
    "no clipping": optax.adam(1e-2),
    "each array": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    "each row": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "always": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "moves": optax.chain(optax.adam(1e-2), CLIP(1.0)),
    "scaled": optax.chain(optax.scale(0.5), CLIP(1.0), optax.sgd(0.1)),
    "elements first": optax.chain(optax.clip(1e6), CLIP(1.0), optax.sgd(0.1)),
    "decay first": optax.chain(optax.add_decayed_weights(0.1), CLIP(1.0), optax.sgd(0.1)),
    "twice": optax.chain(CLIP(5.0), CLIP(1.0), optax.sgd(0.1)),
    "some arrays": optax.chain(
        optax.masked(CLIP(1.0), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)), optax.sgd(0.1)
    ),
    "a limit in the state": optax.inject_hyperparams(lambda limit: optax.chain(CLIP(limit), optax.sgd(0.1)))(limit=1.0),
    "not for one array": optax.multi_transform({"a": optax.sgd(0.1)}, {"x": "a", "y": "a"}),
}


def split(optimizer: optax.GradientTransformation) -> Clipping:
    clipping = split_clipping(optimizer)
    assert clipping is not None
    return clipping


@pytest.mark.parametrize(
    ("limit", "squared", "factor"), [(0.5, 0.0, 1), (0.5, 0.2, 1), (0.5, 4.0, 0.25), (3, 1e8, 3e-4)]
)
def test_the_factor(limit: float, squared: float, factor: float) -> None:
    clipping = split(optax.chain(CLIP(limit), optax.sgd(0.1)))
    np.testing.assert_allclose(jax.jit(clipping.factor)(jnp.float32(squared)), factor, rtol=1e-6)


@pytest.mark.parametrize("name", BEHIND)
def test_factor_and_inner_are_the_optimizer(name: str) -> None:
    """With the states of the optimizer; and the inner one is the one behind the clipping."""
    optimizer, alone = optax.chain(CLIP(0.5), BEHIND[name]), BEHIND[name]
    clipping = split(optimizer)
    params = {"table": jnp.linspace(-1, 2, 12).reshape(4, 3), "none": None, "number": jnp.asarray(0.3)}
    state, inner, unclipped = optimizer.init(params), clipping.inner.init(params), alone.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(inner)
    for number, size in enumerate((0.1, 100.0, 0.4, 0.0, 2.0)):
        gradients = jax.tree.map(lambda leaf, at=number, by=size: by * jnp.cos(at + 3 * leaf), params)
        factor = clipping.factor(jnp.square(optax.tree.norm(gradients)))
        scaled = jax.tree.map(lambda leaf, by=factor: leaf * by, gradients)
        expected, state = optimizer.update(gradients, state, params)
        moves, inner = clipping.inner.update(scaled, inner, params)
        without, unclipped = alone.update(scaled, unclipped, params)
        for got, one, other in zip(*map(jax.tree.leaves, (moves, expected, without)), strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-5, atol=1e-8)
            np.testing.assert_allclose(got, other, rtol=1e-6, atol=1e-9)
        assert jax.tree.structure(inner) == jax.tree.structure(state)


def test_what_is_left_is_recognized() -> None:
    for name in ("momentum", "adam"):
        assert rows.recognized(split(optax.chain(CLIP(0.5), BEHIND[name])).inner) is not None


def test_what_is_left_of_another_may_still_mix_rows() -> None:
    with pytest.raises(ArgumentError, match="mixes rows"):
        rows.row_optimizer(split(optax.chain(CLIP(1.0), optax.lamb(1e-3))).inner)


@pytest.mark.parametrize("name", OTHER)
def test_what_clips_otherwise_is_not_split(name: str) -> None:
    assert split_clipping(OTHER[name]) is None


def test_an_array_that_is_not_clipped_is_refused() -> None:
    def large(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim < 3, tree)

    clipping = split(optax.chain(optax.masked(CLIP(1.0), large), optax.sgd(0.1)))
    params = {"kernel": jnp.ones((2, 2, 2)), "bias": jnp.ones(2)}
    with pytest.raises(ArgumentError, match="norm of 1 of the 2 gradients beside the tables, expected that of all"):
        clipping.inner.update(params, clipping.inner.init(params), params)


@pytest.mark.parametrize(
    "case",
    [
        Case("8 explicit", num_rows=(37, 5), id_shapes=((16, 3),) * 2, slack=0.3),
        Case("4x2 auto", ("data", "model"), (37, 90), (6,), ((16, 4),) * 2, 0.2, "inner"),
    ],
    ids=["one axis", "two axes"],
)
def test_rows_count_once_over_several_rounds(case: Case) -> None:
    """Duplicates are summed before they are squared; both tables and a dense gradient count."""
    bias, names = jnp.full(3, 0.02), ("adam", "adagrad")
    found = [split(optax.chain(CLIP(LIMIT), BEHIND[name])) for name in names]
    movers = [rows.recognized(each.inner) or rows.row_optimizer(each.inner) for each in found]
    got, _, num_rounds = on_mesh(
        case, movers, num_steps=5, scale=lambda squared: found[0].factor(squared + jnp.sum(jnp.square(bias)))
    )
    assert max(num_rounds) > 1
    expected, norms = on_one_device_together(case, [BEHIND[name] for name in names], bias, num_steps=5)
    assert min(norms) > 1.1 * LIMIT
    for one, other, name in zip(got, expected, names, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=1e-5, err_msg=name)


def on_one_device_together(case: Case, optimizers: list[Any], bias: jax.Array, *, num_steps: int) -> Any:
    """Tables after plain JAX, clipped by the norm of all gradients, and these norms."""
    tables = [jnp.asarray(table) for table in case.tables()]
    states, norms = [optimizer.init(table) for optimizer, table in zip(optimizers, tables, strict=True)], list[float]()

    @jax.jit
    def dense(tables: Any, ids: Any, targets: Any) -> Any:
        def look_up(tables: Any) -> Any:
            return [jnp.where(i[..., None] >= 0, t[jnp.maximum(i, 0)], 0) for t, i in zip(tables, ids, strict=True)]

        found, back = jax.vjp(look_up, tables)
        return back(gradients(found, ids, targets))[0]

    for seed in range(num_steps):
        together = {"tables": dense(tables, *case.batch(seed)), "bias": bias}
        norms.append(float(optax.tree.norm(together)))
        together, _ = CLIP(LIMIT).update(together, optax.EmptyState())
        for at, (optimizer, gradient) in enumerate(zip(optimizers, together["tables"], strict=True)):
            moves, states[at] = optimizer.update(gradient, states[at], tables[at])
            tables[at] = tables[at] + moves
    return tables, norms
