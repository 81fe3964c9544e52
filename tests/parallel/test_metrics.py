"""Arrays in aux that go along the samples stay divided as the batch is, in the order of the samples."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import braidax.parallel as bx
from tests.support.parallel.models import make_mesh, specs

ROWS, WIDTH, LENGTH, CLASSES, BATCH = 999, 8, 4, 512, 16
RANDOM = np.random.default_rng(0)
BATCH_OF_IDS = {
    "ids": RANDOM.integers(0, ROWS, (BATCH, LENGTH)).astype(np.int32),
    "weight": RANDOM.normal(size=BATCH).astype(np.float32),
}
ALONG = {"logits": 0, "flat": 0, "turned": 1, "nested/weight": 0}
DATA, BOTH = {"data": bx.Hybrid()}, {"data": bx.DataParallel(), "model": bx.FullySharded(min_bytes=0)}


def init(key: jax.Array) -> Any:
    return {"head": jax.random.normal(key, (WIDTH, CLASSES)), "table": jax.random.normal(key, (ROWS, WIDTH))}


def loss(params: Any, batch: Any, train: bool) -> Any:
    logits = jnp.tanh(params["table"][batch["ids"]]) @ params["head"]
    aux = {
        "logits": logits,
        "flat": logits.reshape(-1, CLASSES),
        "turned": jnp.swapaxes(logits.mean(-1), 0, 1),
        "nested": {"weight": batch["weight"] * 2, "sum": batch["weight"].sum(), "of classes": logits.mean((0, 1))},
    }
    return (logits.mean((1, 2)) * batch["weight"]).mean(), aux


@pytest.mark.parametrize(
    ("mesh", "strategies", "microbatches"),
    [
        pytest.param("8 explicit", DATA, 1, marks=pytest.mark.slow),
        pytest.param("8 auto", DATA, 2, marks=pytest.mark.slow),  # below another tree has microbatches
        ("4x2 explicit", BOTH, 1),
        pytest.param("4x2 auto", BOTH, 2, marks=pytest.mark.slow),
    ],
)
def test_they_lie_as_the_batch_does(mesh: str, strategies: Any, microbatches: int) -> None:
    step = bx.parallelize(
        loss, optax.sgd(0.1), make_mesh(mesh), strategies,
        init=init, batch=specs(BATCH_OF_IDS), microbatches=microbatches,
    )  # fmt: skip
    state = step.init(jax.random.key(0))
    params = jax.tree.map(np.array, step.to_dense(state).params)
    value, expected = jax.jit(loss, static_argnums=2)(params, BATCH_OF_IDS, True)
    evaluated = step.evaluate(state, BATCH_OF_IDS)
    updated = step.update(state, BATCH_OF_IDS)[1]
    axes = step.plan.batch_axes
    for got in (evaluated, updated):
        np.testing.assert_allclose(got["loss"], value, rtol=1e-5)
        for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
            name = "/".join(key.key for key in path)
            found = got["nested"][path[1].key] if path[0].key == "nested" else got[name]
            if name == "nested/sum" and got is updated:
                leaf = leaf / microbatches  # averaged
            np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-5, err_msg=name)
            spec = PartitionSpec(*[None] * ALONG[name], axes) if name in ALONG else PartitionSpec()
            assert found.sharding.is_equivalent_to(jax.NamedSharding(step.mesh, spec), found.ndim), name


def test_no_device_makes_all_logits() -> None:
    step = bx.parallelize(loss, optax.sgd(0.1), make_mesh("8 auto"), DATA, init=init, batch=specs(BATCH_OF_IDS))
    text = step.lower().gradients.compile().as_text() or ""
    assert f"f32[{BATCH // 8},{LENGTH},{CLASSES}]" in text
    assert f"f32[{BATCH},{LENGTH},{CLASSES}]" not in text
    assert f"f32[{BATCH * LENGTH},{CLASSES}]" not in text


def test_aux_may_be_any_tree() -> None:
    def told(params: Any, batch: Any) -> Any:
        logits = jnp.tanh(params["table"][batch["ids"]]) @ params["head"]
        return logits.mean(), (logits.mean(-1), [batch["weight"].sum()])

    step = bx.parallelize(
        told, optax.sgd(0.1), make_mesh("8 auto"), DATA, init=init, batch=specs(BATCH_OF_IDS), microbatches=2
    )
    state = step.init(jax.random.key(0))
    _, (logits, [total]) = jax.jit(told)(jax.tree.map(np.array, step.to_dense(state).params), BATCH_OF_IDS)
    metrics = step.update(state, BATCH_OF_IDS)[1]
    np.testing.assert_allclose(metrics["aux"][0], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["aux"][1][0], total / 2, rtol=1e-5)  # the mean over microbatches of their sums
    assert metrics["aux"][0].sharding.spec == PartitionSpec("data")
