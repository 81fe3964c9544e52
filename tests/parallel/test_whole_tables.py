"""An evaluation that uses a table otherwise than by rows computes on its parts: no device has all of it."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from tests.support.parallel.models import copied, make_mesh, specs

ROWS, WIDTH, BATCH, LENGTH = 8003, 32, 16, 5
RANDOM = np.random.default_rng(0)
IDS = {name: RANDOM.integers(0, ROWS, (BATCH, LENGTH)).astype(np.int32) for name in ("ids", "target")}
SLOW = pytest.mark.slow


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key)
    table = jax.random.normal(keys[0], (ROWS, WIDTH))
    return {"table": table, "kernel": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 8, "bias": jnp.ones(ROWS)}


def softmax(params: Any, batch: Any, hidden: jax.Array) -> Any:
    logits = hidden.astype(jnp.bfloat16) @ params["table"].T.astype(jnp.bfloat16) + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["target"]).mean(), {}


def nearest(params: Any, batch: Any, hidden: jax.Array) -> Any:
    """By the cosine, and rows of what was made of the table."""
    table = params["table"] / jnp.linalg.norm(params["table"], axis=1, keepdims=True)
    scores, found = jax.lax.top_k(hidden[:, 0] @ table.T, 3)
    return (scores[:, :1] * table[batch["target"][:, 0]]).sum(), {"found": found}


def averaged(params: Any, batch: Any, hidden: jax.Array) -> Any:
    """Weights of all rows, and their mean."""
    weights = jax.nn.softmax(jnp.einsum("nld,vd->nlv", hidden, params["table"]))
    return ((weights @ params["table"]) ** 2).mean() + (params["table"] ** 2).mean(), {}


def scanned(params: Any, batch: Any, hidden: jax.Array) -> Any:
    def step(total: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
        return total + jax.nn.logsumexp(one @ params["table"].T, -1).mean(), None

    return jax.lax.scan(step, jnp.zeros(()), jnp.swapaxes(hidden, 0, 1))[0], {}


BOTH = {"data": bx.Hybrid(), "model": bx.Hybrid()}


@pytest.mark.parametrize(
    ("head", "mesh", "strategies"),
    [
        (softmax, "8 auto", {"data": bx.Hybrid()}),
        pytest.param(nearest, "4x2 explicit", BOTH, marks=SLOW),
        pytest.param(averaged, "8 auto", {"data": bx.Hybrid()}, marks=SLOW),
        pytest.param(scanned, "8 explicit", {"data": bx.Hybrid()}, marks=SLOW),
        pytest.param(softmax, "4x2 auto", {"data": bx.Hybrid(), "model": bx.DataParallel()}, marks=SLOW),
    ],
)
def test_no_device_has_a_whole_table(head: Callable[..., Any], mesh: str, strategies: Any) -> None:
    def loss(params: Any, batch: Any, key: jax.Array, train: bool) -> Any:
        hidden = jnp.tanh(params["table"][batch["ids"]] @ params["kernel"])
        return head(params, batch, hidden) if not train else ((hidden**2).mean(), {})

    step = bx.parallelize(loss, optax.sgd(0.1, momentum=0.9), make_mesh(mesh), strategies, init=init, batch=specs(IDS))
    state = step.init(jax.random.key(0))
    for _ in range(2):
        state, _ = step.update(state, {name: ids // 2 for name, ids in IDS.items()})  # others lag behind
    got = step.evaluate(state, IDS)
    params = jax.tree.map(jnp.asarray, copied(step.to_dense(state).params))
    expected, aux = jax.jit(loss, static_argnums=3)(params, IDS, jax.random.key(0), False)
    np.testing.assert_allclose(got["loss"], expected, rtol=2e-3 if head is softmax else 2e-5)
    for name, value in aux.items():
        np.testing.assert_array_equal(got[name], value)
    (made,) = step._readings._made.values()  # pyright: ignore[reportPrivateUsage]
    batch = jax.device_put(IDS, made.batch_shardings)
    compiled = made.compiled.lower(*step._readable(state), batch).compile()  # pyright: ignore[reportPrivateUsage]
    whole = r"\[(80\d\d,32|32,80\d\d|80\d\d,1,32|100[12],8,32|8,100[18],32)\]"
    assert re.findall(rf"\w+{whole}", compiled.as_text()) == []
