"""Updates that are told the coming batch: its rows are fetched early, every number is that of one device."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, DataError
from braidax.parallel.rows import row_optimizer
from braidax.parallel.rows.touched import Touched
from tests.support.parallel.hybrid import HYBRID, LOSSES, OPTIMIZERS, as_dense, as_plain, make_batch, make_step
from tests.support.parallel.models import assert_close, copied, recorded_events, single_device, specs
from tests.support.parallel.rarely_touched import BY_HAND
from tests.support.parallel.rarely_touched import ROWS as SMALL_ROWS
from tests.support.parallel.rarely_touched import init as small_init
from tests.support.parallel.rarely_touched import loss as small_loss
from tests.support.parallel.rarely_touched import make_batch as make

SLOW = pytest.mark.slow
NUM_UPDATES = 6
BOTH = {"data": bx.Hybrid(), "model": bx.Hybrid()}
COPIED = {"data": bx.DataParallel(), "model": bx.Hybrid()}
SCHEDULED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.02, 8)))


def placed_batch(step: bx.Step, make: Any, seed: int) -> Any:
    return jax.device_put(make(seed), step.batch_shardings)


def trained(step: bx.Step, make: Any = make_batch) -> tuple[Any, list[Any]]:
    """Trains with each update told what comes, but for the last. **Returns:** the settled state, and all metrics."""
    state, batches, told = step.init(jax.random.key(3)), [placed_batch(step, make, at) for at in range(NUM_UPDATES)], []
    for batch, coming in zip(batches, [*batches[1:], None], strict=True):
        state, metrics = step.update(state, batch, coming=coming)
        told.append(metrics)
    step.finish()
    return step.settled(state), told


def assert_as_on_one_device(step: bx.Step, loss: Any, optimizer: Any) -> None:
    begun = step.init(jax.random.key(3))
    params = copied(bx.State(begun.step, as_dense(step, begun.params), (), {}, begun.key)).params
    first = bx.State(0, params, optimizer.init(jax.tree.map(jnp.asarray, params)), {}, begun.key)
    batches = [make_batch(seed) for seed in range(NUM_UPDATES)]
    expected, _, expected_metrics = single_device(as_plain(loss), optimizer, first, batches)
    state, told = trained(step)
    for metrics, expects in zip(told, expected_metrics, strict=True):
        assert_close({name: metrics[name] for name in expects}, expects)
        assert set(metrics) == {*expects, "row_rounds"}
    assert_close(as_dense(step, state.params), expected)


SHARDED = {"data": bx.Hybrid(dense=bx.FullySharded(min_bytes=0))}


@pytest.mark.parametrize(
    ("loss", "optimizer", "mesh", "strategies"),
    [
        pytest.param("pooled", OPTIMIZERS["adamw"], "8 explicit", HYBRID, marks=SLOW),
        pytest.param("scanned", SCHEDULED, "8 auto", HYBRID, marks=SLOW),
        pytest.param("scanned", SCHEDULED, "4x2 explicit", COPIED, marks=SLOW),
        pytest.param("scanned", OPTIMIZERS["momentum"], "4x2 explicit", COPIED, marks=SLOW),  # below it is as without
        pytest.param("sampled", OPTIMIZERS["momentum"], "4x2 explicit", COPIED, marks=SLOW),
        pytest.param("sampled", OPTIMIZERS["adagrad"], "4x2 auto", BOTH, marks=SLOW),
        pytest.param("pooled", SCHEDULED, "8 explicit", HYBRID, marks=SLOW),
        pytest.param("pooled", OPTIMIZERS["adam"], "8 explicit", SHARDED, marks=SLOW),
    ],
)
def test_it_trains_as_on_one_device(loss: str, optimizer: Any, mesh: str, strategies: Any) -> None:
    step = make_step(LOSSES[loss], optimizer, mesh, strategies=strategies)
    assert_as_on_one_device(step, LOSSES[loss], optimizer)


FEW = Touched(SMALL_ROWS, 2, 4, num_unique=1.0, max_unique=1, max_sent=1, num_touched=1.0)
"""What makes room for one row at a time, for each pair of devices."""


def _small(optimizer: Any, strategy: Any, **options: Any) -> bx.Step:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    batch = specs(make(0))
    return bx.parallelize(small_loss, optimizer, mesh, {"data": strategy}, init=small_init, batch=batch, **options)


@pytest.mark.parametrize(
    ("hybrid", "options", "most_rounds"),
    [
        pytest.param(BY_HAND, {"microbatches": 2}, 1, marks=SLOW),  # by night; test_trainable.py has some by day
        pytest.param(replace(BY_HAND, row_optimizers={"*": row_optimizer(optax.adam(3e-2))}), {}, 1, marks=SLOW),
        (replace(BY_HAND, touched={"params/words": FEW}), {"metrics": ["grad_norm"]}, 2),
    ],
    ids=["microbatches", "row optimizers", "several rounds"],
)
def test_it_trains_as_without(hybrid: bx.Hybrid, options: Any, most_rounds: int) -> None:
    step = _small(optax.sgd(3e-2, momentum=0.9), hybrid, **options)  # it lags behind by less of a program than Adam
    state, told = trained(step, make)
    other = step.init(jax.random.key(3))
    for seed, metrics in enumerate(told):
        other, expected = step.update(other, make(seed))
        assert_close(metrics, expected)
    assert_close(copied(state).params, copied(step.settled(other)).params)
    assert max(int(metrics["row_rounds"]) for metrics in told) == most_rounds


@pytest.fixture(scope="module")
def step() -> bx.Step:
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=3e-2, momentum=0.9)
    return _small(optimizer, replace(BY_HAND, out_of_range="raise"))


def test_what_was_fetched_serves_that_batch_and_that_state_only(step: bx.Step) -> None:
    state, other = step.init(jax.random.key(3)), step.init(jax.random.key(3))
    batches = [placed_batch(step, make, at) for at in range(5)]
    for at, batch in enumerate(batches):
        told = batches[0] if at == 1 else batches[min(at + 1, 4)]  # behind the second one comes another than was told
        state, _ = step.update(state, batch, coming=told)
        if at == 2:  # what rows of the next batch move by is changed
            state = _slower(state)
        if at == 3:  # equal, and not the arrays that were read
            state = jax.tree.map(jnp.copy, state)
    for at, batch in enumerate(batches):
        other, _ = step.update(other, batch)
        other = _slower(other) if at == 2 else other
    assert_close(copied(step.settled(state)).params, copied(step.settled(other)).params)


def _slower(state: bx.State) -> bx.State:
    dense = state.opt_state["dense"]
    rate = jax.device_put(dense.hyperparams["learning_rate"] / 3, dense.hyperparams["learning_rate"].sharding)
    dense = dense._replace(hyperparams={**dense.hyperparams, "learning_rate": rate})
    return replace(state, opt_state={**state.opt_state, "dense": dense})


def test_each_program_is_compiled_once(step: bx.Step) -> None:
    state, batches = step.init(jax.random.key(3)), [placed_batch(step, make, at) for at in range(7)]
    for at in range(3):
        state, _ = step.update(state, batches[at], coming=batches[at + 1])
    with recorded_events() as events:
        for at in range(3, 6):
            state, _ = step.update(state, batches[at], coming=batches[at + 1])
    assert events == []


def test_no_state_is_kept_alive(step: bx.Step) -> None:
    batches = [placed_batch(step, make, at) for at in range(2)]
    state, _ = step.update(step.init(jax.random.key(3)), batches[0], coming=batches[1])
    leaf = weakref.ref(state.params["kernel"])
    del state
    gc.collect()
    assert leaf() is None


def test_ids_out_of_range_are_told_of_their_own_batch(step: bx.Step) -> None:
    step.finish()
    state, batches = step.init(jax.random.key(3)), [placed_batch(step, make, at) for at in range(3)]
    batches[2] = {**batches[2], "ids": jnp.full_like(batches[2]["ids"], 5000)}
    state, _ = step.update(state, batches[0], coming=batches[1])
    state, _ = step.update(state, batches[1], coming=batches[2])
    step.finish()
    state, _ = step.update(state, batches[2], coming=batches[1])
    with pytest.raises(DataError, match=r"^the batch of update \d+ of this step has ids out of range: 8 "):
        step.finish()


def test_bad_input(step: bx.Step) -> None:
    state, batch = step.init(jax.random.key(3)), placed_batch(step, make, 0)
    with pytest.raises(ArgumentError, match=r"^coming has a leaf of type ndarray, which could be changed before it is"):
        step.update(state, batch, coming=make(1))
    with pytest.raises(ArgumentError, match=r"^coming.*target.*give parallelize the batch"):
        step.update(state, batch, coming={name: leaf for name, leaf in batch.items() if name != "target"})
    step.update(state, batch)  # nothing was given up
    whole = _small(optax.sgd(0.1), bx.DataParallel())
    assert (step.fetches_ahead, whole.fetches_ahead) == (True, False)
    with pytest.raises(ArgumentError, match=r'^coming is "known", and the step fetches nothing ahead'):
        whole.lower(coming="known")
    batches = [placed_batch(whole, make, at) for at in range(2)]
    whole.update(whole.init(jax.random.key(3)), batches[0], coming=batches[1])  # there is nothing to fetch


SAMPLES, WORDS, WIDTH, HIDDEN = 256, 4096, 256, 1024


def _words(params: Any, batch: Any) -> jax.Array:
    """Words by rows come before everything else: nothing hides what is fetched of them but another batch."""
    x = params["words"][batch["ids"]]
    for weight in params["layers"]:
        x = x + jnp.tanh(x @ weight) @ weight.T
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["ids"]).mean()


@SLOW  # test_under_products.py has the rows of a batch itself
@pytest.mark.usefixtures("aot")
def test_rows_of_the_coming_batch_cross_under_products() -> None:
    def made(key: jax.Array) -> Any:
        layers = [jnp.ones((WIDTH, HIDDEN))] * 3
        return {"words": jnp.ones((WORDS, WIDTH)), "head": jnp.ones((WIDTH, WORDS)), "layers": layers}

    batch = {"ids": jax.ShapeDtypeStruct((SAMPLES, 64), jnp.int32)}
    step = bx.parallelize(_words, optax.adam(1e-3), jax.make_mesh((8,), ("data",)), HYBRID, init=made, batch=batch)
    found = step.compile_for("h100:8", coming="known")
    crossing = [one for one in found.collectives if one.kind == "all-to-all" and not one.in_unknown_loop]
    _, rows, gradients = sorted(crossing, key=lambda one: one.sent_bytes)
    assert rows.sent_bytes == gradients.sent_bytes
    assert rows.is_covered
    assert gradients.is_covered
    assert found.held["fetched"] > found.held["coming"] == found.held["batch"] == SAMPLES // 8 * 64 * 4
