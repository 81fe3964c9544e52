"""Several microbatches: each gradient crosses the devices once an update, and is what one device computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.program import collectives_of, total_sent
from tests.support.parallel.dense.models import MODELS, Model
from tests.support.parallel.models import assert_close, copied, make_mesh, on_one_device, specs

OPTIMIZER = optax.adam(1e-2)
SLOW = pytest.mark.slow


def make_step(model: Model, strategies: Any, mesh: str, microbatches: int) -> bx.Step:
    return bx.parallelize(
        model.loss, OPTIMIZER, make_mesh(mesh), strategies, init=model.init, batch=specs(model.batch(0)),
        microbatches=microbatches,
    )  # fmt: skip


def sent(step: bx.Step) -> dict[str, float]:
    return dict(total_sent(collectives_of(step.lower().gradients.compile().as_text() or "")))


def accumulated(model: Model, state: bx.State, batches: list[Any], microbatches: int) -> Any:
    """Parameters after plain JAX on one device, gradients averaged over slices of the batch."""

    @jax.jit
    def step(params: Any, opt_state: Any, key: Any, batch: Any) -> Any:
        pieces = [jax.tree.map(lambda leaf, at=at: leaf[at::microbatches], batch) for at in range(microbatches)]
        found = [jax.grad(model.loss)(params, piece, jax.random.fold_in(key, at)) for at, piece in enumerate(pieces)]
        gradients = jax.tree.map(lambda *each: sum(each) / microbatches, *found)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    key, params = on_one_device((state.key, state.params))
    opt_state = OPTIMIZER.init(params)
    for number, batch in enumerate(batches):
        params, opt_state = step(params, opt_state, jax.random.fold_in(key, number), jax.tree.map(jnp.asarray, batch))
    return copied(params)


@pytest.mark.parametrize(
    ("model", "mesh", "strategies"),
    [
        pytest.param("gpt", "8 explicit", {"data": bx.DataParallel()}, marks=SLOW),
        pytest.param("lstm", "4x2 auto", {"data": bx.DataParallel(), "model": bx.DataParallel()}, marks=SLOW),
        pytest.param("resnet", "8 auto", {"data": bx.DataParallel()}, marks=SLOW),
        pytest.param("mlp", "8 auto", {"data": bx.Hybrid({"params/table": bx.Rows()})}, marks=SLOW),
        pytest.param(
            "gpt", "4x2 explicit", {"data": bx.DataParallel(), "model": bx.FullySharded(min_bytes=0)}, marks=SLOW
        ),
        ("lstm", "4x2 explicit", {"data": bx.DataParallel(), "model": bx.FullySharded(min_bytes=0)}),
        pytest.param("gpt, kept", "4x2 auto", {"data": bx.DataParallel()}, marks=SLOW),
    ],
)
def test_microbatches_are_those_of_one_device(model: str, mesh: str, strategies: Any) -> None:
    of, pieces = MODELS[model], 2
    if model == "mlp":  # it is written for one size of the batch
        of = of._replace(
            loss=lambda params, batch, key: (params["table"][batch["ids"]] ** 2).mean() * len(batch["ids"])
        )
    step = make_step(of, strategies, mesh, pieces)
    state, batches = step.init(jax.random.key(5)), [of.batch(seed) for seed in range(3)]
    expected = accumulated(of, step.to_dense(state), batches, pieces)
    for batch in batches:
        state, _ = step.update(state, batch)
    assert_close(copied(step.to_dense(state).params), expected, atol=2e-5)


@pytest.mark.parametrize("model", [pytest.param("gpt", marks=SLOW), "lstm"])
def test_more_microbatches_send_no_more(model: str) -> None:
    one, two = (sent(make_step(MODELS[model], {"data": bx.DataParallel()}, "8 auto", number)) for number in (1, 2))
    assert set(one) == set(two) == {"all-reduce"}
    # Less, even: of tied embeddings both uses add to the same parts.
    assert two["all-reduce"] <= one["all-reduce"] * 1.001


def test_a_gradient_that_is_not_covered_is_summed_beside() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return ((batch @ params["w"]) ** 2).mean() + 0.1 * jnp.abs(params["w"]).sum() + (params["b"] ** 2).sum()

    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (4, 3)), "b": jnp.ones(3)}

    model = Model(loss, init, lambda seed: np.random.default_rng(seed).normal(size=(16, 4)).astype(np.float32))
    steps = [make_step(model, {"data": bx.DataParallel()}, "8 auto", number) for number in (1, 2)]
    states = [step.update(step.init(jax.random.key(0)), model.batch(0))[0] for step in steps]
    assert_close(copied(states[1].params), copied(states[0].params), atol=1e-6)


def _layers(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def _chosen_by_a_branch(params: Any, x: Any) -> jax.Array:
    """Both branches give another leaf as their first result."""
    w = jax.lax.cond(x[0, 0] > 100, lambda a, b: a, lambda a, b: b, params["a"], params["b"])
    return ((jnp.tanh(x @ params["b"]) @ params["a"] @ w) ** 2).mean()


def _layers_in_steps(params: Any, x: Any) -> jax.Array:
    y = jax.lax.scan(lambda x, shift: (_layers(params["w"], x + shift), None), x, jnp.arange(4.0) / 8)[0]
    return ((y @ params["b"]) ** 2).mean()


def _layers_in_a_while(params: Any, x: Any) -> jax.Array:
    def again(at: Any) -> Any:
        return _layers(params["w"], at[0]), at[1] + 1

    far, _ = jax.lax.stop_gradient(jax.lax.while_loop(lambda at: at[1] < 2, again, (x, 0)))
    return ((_layers(params["w"], x) @ params["b"] - far) ** 2).mean()


@pytest.mark.parametrize("loss", [_chosen_by_a_branch, _layers_in_steps, _layers_in_a_while])
def test_where_weights_are_used_otherwise(loss: Any) -> None:
    def init(key: jax.Array) -> Any:
        a, b, w = jax.random.split(key, 3)
        shapes = {"a": (a, (5, 5)), "b": (b, (5, 5)), "w": (w, (2, 5, 5))}
        return {name: jax.random.normal(key, shape) / 3 for name, (key, shape) in shapes.items()}

    batch = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
    strategies = {"data": bx.DataParallel()}
    step = bx.parallelize(
        loss, optax.sgd(1.0), make_mesh("8 auto"), strategies, init=init, batch=specs(batch), microbatches=2
    )
    state = step.init(jax.random.key(0))
    before = copied(state.params)
    gradients = [jax.jit(jax.grad(loss))(before, batch[at::2]) for at in range(2)]
    expected = jax.tree.map(lambda value, *each: value - sum(each) / 2, before, *gradients)
    assert_close(copied(step.update(state, batch)[0].params), copied(expected), atol=1e-6)
