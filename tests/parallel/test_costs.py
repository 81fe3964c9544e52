"""What a plan says that tables cost is what a compiled step sends, and decides alike however it was counted."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.program import collectives_of, total_sent
from tests.support.parallel.models import make_mesh, specs

ROWS, WIDTH, BATCH, CANDIDATES = 40_960, 64, 256, 64
RANDOM = np.random.default_rng(0)
BATCHES = [{name: RANDOM.integers(0, ROWS, BATCH).astype(np.int32) for name in ("ids", "target")} for _ in range(2)]


def init(key: jax.Array) -> Any:
    return {"table": jax.random.normal(key, (ROWS, WIDTH))}


def own(params: Any, batch: Any) -> jax.Array:
    return (jnp.tanh(params["table"][batch["ids"]]) * params["table"][batch["target"]]).mean()


def candidates(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Sampled classes, the same for all samples, beside ids of each sample."""
    classes = jax.random.randint(key, (CANDIDATES,), 0, ROWS)
    hidden = jnp.tanh(params["table"][batch["ids"]])
    logits = hidden @ params["table"][classes].T
    return (jax.nn.logsumexp(logits, -1) - (hidden * params["table"][batch["target"]]).sum(-1)).mean()


def make_step(loss: Callable[..., Any], optimizer: Any, num_devices: int = 8, **options: Any) -> bx.Step:
    mesh = make_mesh("8 auto") if num_devices == 8 else jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return bx.parallelize(loss, optimizer, mesh, {"data": bx.Hybrid(**options)}, init=init, batch=specs(BATCHES[0]))


def decided(step: bx.Step) -> tuple[str, str]:
    (variable,) = step.plan.variables
    return str(variable.placements[0]), variable.why


def measured(loss: Callable[..., Any], num_parts: int) -> Any:
    return bx.measure_touched(loss, init=init, batches=BATCHES, num_parts=num_parts).tables


def said(why: str) -> float:
    """Bytes by rows."""
    found = re.search(r"sends ([\d.]+) (KB|MB) a step by rows", why)
    assert found is not None, why
    return float(found[1]) * {"KB": 1e3, "MB": 1e6}[found[2]]


@pytest.mark.parametrize("loss", [pytest.param(own, marks=pytest.mark.slow), candidates])
def test_what_is_said_is_sent(loss: Callable[..., Any]) -> None:
    step = make_step(loss, optax.sgd(0.1), touched=measured(loss, 8))
    placed, why = decided(step)
    assert placed == "rows"
    assert ("64 ids are shared by all devices" in why) == (loss is candidates)
    sent = sum(total_sent(collectives_of(step.lower().gradients.compile().as_text())).values())
    np.testing.assert_allclose(said(why), sent, rtol=0.01)


def test_an_upper_bound_counts_shared_ids_too() -> None:
    own_ids, all_ids = (said(decided(make_step(loss, optax.sgd(0.1)))[1]) for loss in (own, candidates))
    row = 4 * WIDTH
    np.testing.assert_allclose(
        all_ids - own_ids, CANDIDATES / 8 * (4 + 2 * row) + 3 * 7 / 8 * CANDIDATES * row, rtol=0.01
    )


def test_positions_are_shared() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return (params["table"][batch["ids"]] + params["table"][jnp.arange(BATCH)]).mean()

    assert "256 ids are shared by all devices" in decided(make_step(loss, optax.sgd(0.1)))[1]
    assert measured(loss, 8)["params/table"].num_shared == BATCH


def test_one_device_decides_alike() -> None:
    """It sends nothing either way; what it moves decides, counted or not."""
    for touched in ({}, measured(own, 1)):
        placed, why = decided(make_step(own, optax.sgd(0.1), 1, touched=touched))
        assert placed == "rows"
        assert re.search(r"a device moves 2[56][0-9] KB a step by rows, 21 MB whole", why), why


def test_missed_steps_that_are_taken_one_by_one_count() -> None:
    """A thousand for 512 rows, by one device, are dearer than a step of all rows; for 64 by each of 8 they are not."""
    placed, why = decided(make_step(own, optax.amsgrad(1e-2)))
    assert placed == "rows"
    assert "its optimizer takes missed steps one by one: 1,000 of them cost as much as 8.19 MB more" in why
    assert "those of all rows 5.24 MB" in why
    assert decided(make_step(own, optax.adamw(1e-2)))[1].count("one by one") == 0
    assert decided(make_step(own, optax.amsgrad(1e-2), 1))[0] == "replicated"
    assert decided(make_step(own, optax.adamw(1e-2), 1))[0] == "rows"


def test_axes_of_the_batch_alone_repeat_no_exchange() -> None:
    """Where devices hold the same rows, each pulls its own ids' rows; gradients meet where the rows are."""
    sent: list[float] = []
    for strategies in ({"data": bx.Hybrid()}, {"data": bx.Hybrid(), "model": bx.DataParallel()}):
        step = bx.parallelize(
            own, optax.sgd(0.1), make_mesh("4x2 auto"), strategies, init=init, batch=specs(BATCHES[0])
        )
        assert "rows" in {str(one) for one in step.plan.variables[0].placements}
        gradients, apply = (collectives_of(one.compile().as_text() or "") for one in step.lower())
        found = total_sent(gradients)
        assert found.get("all-gather", 0) == 0
        sent.append(found["all-to-all"])
    assert sent[1] < 0.6 * sent[0]
    # They meet in the loop over rounds, which mostly turns once.
    step_gathers = sum(one.sent_bytes for one in apply if one.kind == "all-gather")
    np.testing.assert_allclose(step_gathers, sent[1] / (3 / 4) / (4 + 2 * 4 * WIDTH) * (4 + 4 * WIDTH), rtol=0.01)
