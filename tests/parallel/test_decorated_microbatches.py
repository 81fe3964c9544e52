"""Microbatches of a decorated step: means over them, sums over devices once, and what cannot be divided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, SpecError
from braidax.program import collectives_of, total_sent
from tests.support.parallel.models import assert_close, copied, make_mesh

BATCH, PIECES, ROWS = 32, 2, 64
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)
ALL = bx.FullySharded(min_bytes=0)


def init() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"table": (ROWS, 8), "first": (8, 32), "second": (32, 8)}
    return {name: jax.random.normal(key, shape) * 0.3 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss(params: Any, x: Any, ids: Any, key: Any, shift: Any) -> Any:
    """A mean, statistics, dropout, a count that moves, what there is for each sample, and for each of its tokens."""
    h = jnp.tanh((x + params["table"][ids].mean(1)) @ params["first"])
    h = h * jax.random.bernoulli(key, 0.7, h.shape)
    y = h @ params["second"] + shift["mean"]
    aux = {"y": y.T, "flat": params["table"][ids].sum(-1).reshape(-1), "mean": y.mean(0), "count": shift["count"] + 1}
    return (y**2).mean(), aux


def update(state: Any, batch: Any, found: Any) -> Any:
    (value, aux), gradients = found
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    shift = {"mean": 0.9 * state["shift"]["mean"] + 0.1 * aux["mean"], "count": aux["count"]}
    metrics = {"loss": value, "y": aux["y"], "flat": aux["flat"], "last": batch["x"].sum()}
    return {
        **state,
        "params": optax.apply_updates(state["params"], updates),
        "opt_state": opt_state,
        "shift": shift,
    }, metrics


def train_step(state: Any, batch: Any) -> Any:
    wanted = jax.value_and_grad(loss, has_aux=True)
    scaled = 2 * batch["x"]  # computed outside of the loss, along the samples
    return update(state, batch, wanted(state["params"], scaled, batch["ids"], state["key"], state["shift"]))


def by_hand(state: Any, batch: Any) -> Any:
    """What the step means: sample `i` is in microbatch `i % PIECES`, whose key is folded with its number."""
    found: list[Any] = []
    typed = jnp.issubdtype(state["key"].dtype, jax.dtypes.prng_key)
    for at in range(PIECES):
        key = jax.random.fold_in(state["key"], at)
        assert typed or key.dtype == jnp.uint32
        wanted = jax.value_and_grad(loss, has_aux=True)
        x, ids = 2 * batch["x"][at::PIECES], batch["ids"][at::PIECES]
        found.append(wanted(state["params"], x, ids, key, state["shift"]))
    ((value, aux), gradients) = jax.tree.map(lambda *leaves: sum(leaves) / PIECES, *found)
    parts = [one[0][1] for one in found]
    aux["y"] = jnp.stack([part["y"] for part in parts], -1).reshape(8, BATCH)
    aux["flat"] = jnp.stack([part["flat"].reshape(-1, 3) for part in parts], 1).reshape(-1)
    aux["count"] = parts[0]["count"]
    return update(state, batch, ((value, aux), gradients))


def begin(key: Any = None) -> Any:
    return _begun(jax.random.key(1) if key is None else key)


@jax.jit
def _begun(key: Any) -> Any:
    params = init()
    shift = {"mean": jnp.zeros(8), "count": jnp.zeros((), jnp.int32)}
    return {"params": params, "opt_state": OPTIMIZER.init(params), "shift": shift, "key": key}


def samples(seed: int) -> Any:
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (BATCH, 3)).astype(np.int32)
    return {"x": random.normal(size=(BATCH, 8)).astype(np.float32), "ids": ids}


@pytest.mark.parametrize(
    ("mesh", "strategies", "key"),
    [
        ("8 auto", {"data": ALL}, "numbers"),  # typed ones are those of test_step.py
        pytest.param("8 auto", {"data": ALL}, "typed", marks=pytest.mark.slow),
        pytest.param("8 explicit", {"data": bx.DataParallel()}, "numbers", marks=pytest.mark.slow),
        pytest.param(
            "4x2 auto",
            {
                "data": bx.Hybrid(overrides={"state/params/table": bx.Rows()}),
                "model": bx.TensorParallel(min_bytes=0),
            },
            "numbers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_is_the_mean_over_microbatches(mesh: str, strategies: Any, key: str) -> None:
    step = bx.parallelize(make_mesh(mesh), strategies, microbatches=PIECES)(train_step)
    made = jax.random.key(1) if key == "typed" else jax.random.PRNGKey(1)
    state, alone, run = begin(made), begin(made), jax.jit(by_hand)
    for seed in range(3):
        state, found = step(state, samples(seed))
        alone, expected = run(alone, jax.tree.map(jnp.asarray, samples(seed)))
        assert_close(copied(found), copied(expected), atol=1e-5)
    assert_close(copied(state), copied(alone), atol=1e-5)
    assert step.plan.microbatches == PIECES
    assert found["y"].sharding.spec != jax.P()


def test_gradients_of_whole_weights_are_summed_over_devices_once() -> None:
    sent: list[float] = []
    for pieces in (1, 4):
        step = bx.parallelize(make_mesh("8 auto"), {"data": bx.DataParallel()}, microbatches=pieces)(train_step)
        step.prepare(jax.eval_shape(begin), samples(0))
        text = step.lower().gradients.compile().as_text() or ""
        sent.append(sum(total_sent(one for one in collectives_of(text) if one.kind == "all-reduce").values()))
    assert sent[0] > 4000
    assert sent[1] < 1.1 * sent[0]


def counting(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        y = batch["x"] @ params["first"]
        return (y**2).mean(), {"right": (y.sum(-1) > 0).sum()}

    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state)
    return jax.tree.map(lambda leaf, gradient: leaf - gradient, state, gradients), {"loss": value, **aux}


def positions(state: Any, batch: Any) -> Any:
    weights = jnp.arange(len(batch["x"])) / len(batch["x"])
    value, gradients = jax.value_and_grad(lambda params: ((batch["x"] @ params["first"]).sum(1) * weights).mean())(
        state
    )
    return jax.tree.map(lambda leaf, gradient: leaf - gradient, state, gradients), value


def fixed(state: Any, batch: Any) -> Any:
    value, gradients = jax.value_and_grad(lambda params: (batch["x"].reshape(32, 8) @ params["first"]).mean())(state)
    return jax.tree.map(lambda leaf, gradient: leaf - gradient, state, gradients), value


def sometimes(state: Any, batch: Any) -> Any:
    if len(batch["x"]) < BATCH:
        state = jax.tree.map(lambda leaf, more: leaf + more, state, jax.grad(lambda p: p["first"].sum())(state))
    value, gradients = jax.value_and_grad(lambda params: (batch["x"] @ params["first"]).mean())(state)
    return jax.tree.map(lambda leaf, gradient: leaf - gradient, state, gradients), value


def each_sample(state: Any, batch: Any) -> Any:
    one = jax.vmap(jax.grad(lambda params, x: (x @ params["first"]).mean()), (None, 0))
    return jax.tree.map(lambda leaf, gradient: leaf - gradient.mean(0), state, one(state, batch["x"])), {}


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (each_sample, "the step takes no gradient that can be divided, such as one of each sample in a vmap"),
        (counting, r"the loss at .*:\d+ computes int32\[\] of the samples, which is not averaged"),
        (positions, r"float32\[32\], which the loss at .* reads or gives, is \[16\] for a microbatch and does not go"),
        (fixed, r"fixed cannot be traced for one of them \(TypeError: .*must not depend on the number of samples"),
        (sometimes, "takes other gradients of a microbatch than of the batch"),
    ],
)
def test_what_cannot_be_divided_is_said(fn: Any, told: str) -> None:
    step = bx.parallelize(make_mesh("8 auto"), {"data": bx.DataParallel()}, microbatches=2)(fn)
    with pytest.raises(ArgumentError, match=told):
        step.prepare({"first": jnp.ones((8, 4))}, {"x": np.ones((BATCH, 8), np.float32)})


def test_microbatches_that_are_none_are_refused() -> None:
    with pytest.raises(ArgumentError, match="microbatches is 0, expected a whole number of at least 1"):
        bx.parallelize(make_mesh("8 auto"), {"data": bx.DataParallel()}, microbatches=0)
    step = bx.parallelize(make_mesh("8 auto"), {"data": bx.DataParallel()}, microbatches=3)(train_step)
    with pytest.raises(SpecError, match="batch/ids has 32 samples, which do not divide into microbatches=3"):
        step.prepare(jax.eval_shape(begin), samples(0))
