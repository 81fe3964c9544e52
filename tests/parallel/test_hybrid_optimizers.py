"""Tables by rows, under every kind of optimizer: the numbers of single-device training, or a plan that says why not."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from tests.support.parallel.models import copied, recorded_events, specs
from tests.support.parallel.rarely_touched import BY_HAND, init, loss, make_batch

Optimizer = optax.GradientTransformation | optax.GradientTransformationExtraArgs


def by_ndim(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def by_path(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "words", tree)


def labels(tree: Any) -> Any:
    return {name: "frozen" if name == "words" else "trained" for name in tree}


def decays(rate: Any) -> Optimizer:
    return optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(rate))


FROZEN = {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}
TREE = {"bias": False, "kernel": True, "words": True}
MASKED = {"bias": True, "kernel": True, "words": False}
LABELS = {"bias": "trained", "kernel": "trained", "words": "frozen"}
WARMUP = optax.linear_schedule(0.0, 0.05, 5)
LATE = optax.piecewise_constant_schedule(0.1, {3: 0.0, 9: 0.5})
CLIP = optax.clip_by_global_norm(0.5)

BY_ROWS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, 0.9),
    "nesterov": lambda: optax.sgd(WARMUP, 0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "adamw, mask by ndim": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=by_ndim),
    "momentum, decay by ndim": lambda: optax.chain(optax.add_decayed_weights(0.1, by_ndim), optax.sgd(0.1, 0.9)),
    "adamw, mask by path": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=by_path),
    "adamw, mask tree": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=TREE),
    "adamw, table masked by a tree": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=MASKED),
    "adamw, warmup from zero": lambda: optax.adamw(WARMUP, weight_decay=0.1),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), by_path), optax.scale(-0.1)),
    "adagrad": lambda: optax.adagrad(0.1),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "rmsprop, centered, momentum": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "lion": lambda: optax.lion(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "frozen by a function": lambda: optax.multi_transform(FROZEN, labels),
    "frozen by a tree": lambda: optax.multi_transform(FROZEN, LABELS),
    "clipped adam": lambda: optax.chain(CLIP, optax.adam(1e-2)),
    "clipped twice": lambda: optax.chain(CLIP, optax.scale(3.0), optax.clip_by_global_norm(0.3), optax.sgd(0.5)),
    "clipped, mask tree": lambda: optax.chain(CLIP, optax.adamw(1e-2, weight_decay=0.1, mask=TREE)),
    "each array clipped": lambda: optax.chain(optax.clip_by_block_rms(0.02), optax.sgd(0.1)),
    "some clipped": lambda: optax.chain(optax.masked(CLIP, by_path), optax.sgd(0.1)),
    "cosine": lambda: optax.adam(optax.cosine_decay_schedule(0.05, 10)),
    "staircase": lambda: optax.sgd(optax.exponential_decay(0.1, 4, 0.5, staircase=True), 0.9),
    "rate zero for a while, decay": lambda: decays(LATE),
    "rate zero at first, decay": lambda: decays(optax.piecewise_constant_schedule(0.0, {4: 1.0})),
    "restarts": lambda: optax.sgd(optax.sgdr_schedule([{"init_value": 0.0, "peak_value": 0.1, "decay_steps": 5,
                                                       "warmup_steps": 2, "end_value": 0.0}] * 4), 0.9),
    "growing rate": lambda: optax.sgd(optax.exponential_decay(1e-4, 1, 1.3), 0.9),
    "every third": lambda: optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation(),
    "every third, sgd": lambda: optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation(),
    "finite sgd": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=WARMUP, weight_decay=0.1),
    "injected sgd": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "yogi": lambda: optax.yogi(1e-2),
    "adadelta": lambda: optax.adadelta(1.0),
}  # fmt: skip

QUICK = (
    "momentum, decay by ndim",
)  # the others are compiled and run nightly: below one is frozen, one warms up, and test_asked.py has norms over rows

DENSE: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "lamb": (lambda: optax.lamb(1e-2), "reduce_sum over all rows, of more than their gradients"),
    "lars": (lambda: optax.lars(1e-2), "over all rows"),
    "adafactor": (lambda: optax.adafactor(1e-2), "over all rows"),
    "adafactor, factored": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2), "reduce_sum over all rows"),
    "finite adam": (
        lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
        "moves rows that have no gradient, by .*depends on the gradient of params",
    ),
    "noise": (
        lambda: optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, jax.random.key(0))),
        "add with an array whose rows differ",
    ),
    "clipped moves": (lambda: optax.chain(optax.adam(1e-2), CLIP), "reduce_sum over all rows"),
    "centralized over rows": (
        lambda: optax.stateless(lambda g, p: jax.tree.map(lambda leaf: -0.1 * (leaf - leaf.mean(0)), g)),
        "moves rows that have no gradient, by something that depends on the gradient of params/words",
    ),
}


def make_step(optimizer: Optimizer, dtype: Any = jnp.float32, strategy: Any = BY_HAND) -> bx.Step:
    def made(key: jax.Array) -> Any:
        params = init(key)
        return {**params, "words": params["words"].astype(dtype)}

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    return bx.parallelize(loss, optimizer, mesh, {"data": strategy}, init=made, batch=specs(make_batch(0)))


def placement(step: bx.Step) -> tuple[str, str]:
    (variable,) = [one for one in step.plan.variables if one.path == "params/words"]
    return str(variable.placements[0]), variable.why


def trained(
    step: bx.Step, optimizer: Optimizer, num_updates: int, begun: Any = None, batch: Any = make_batch
) -> tuple[Any, Any]:
    """Parameters after updates by a step, and by plain JAX on one device."""
    state = step.init(jax.random.key(0))
    dense = copied(step.to_dense(state).params)
    params = jax.tree.map(jnp.asarray, dense)
    opt_state = optimizer.init(params)
    if begun is not None:
        opt_state = begun(opt_state)
        whole = step.to_dense(state)
        state = step.from_dense(bx.State(whole.step, whole.params, opt_state, whole.variables, whole.key))

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        moves, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, moves), opt_state, value

    for seed in range(num_updates):
        params, opt_state, value = update(params, opt_state, batch(seed))
        state, metrics = step.update(state, batch(seed))
        np.testing.assert_allclose(metrics["loss"], value, rtol=2e-5 if params["words"].dtype == jnp.float32 else 2e-2)
    whole = step.to_dense(state)
    assert jax.tree.structure(whole.opt_state) == jax.tree.structure(opt_state)
    return (copied(whole.params), copied(whole.opt_state)), (copied(params), copied(opt_state))


def assert_alike(got: Any, expected: Any, *, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert one.dtype == other.dtype, name
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=rtol, atol=atol, err_msg=name)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in BY_ROWS])
def test_rows_move_as_on_one_device(name: str) -> None:
    step = make_step(BY_ROWS[name]())
    assert placement(step)[0] == "rows", placement(step)
    assert_alike(*trained(step, BY_ROWS[name](), 13))


@pytest.mark.parametrize("name", BY_ROWS)
def test_what_is_proven_is_by_rows(name: str) -> None:
    with recorded_events() as events:
        assert placement(make_step(BY_ROWS[name]()))[0] == "rows"
    assert [event for event in events if "backend_compile" in event] == []


@pytest.mark.parametrize("name", DENSE)
def test_what_is_not_proven_is_dense(name: str) -> None:
    make, why = DENSE[name]
    placed, told = placement(make_step(make(), strategy=bx.Hybrid()))
    assert placed == "replicated"
    assert re.search(why, told), told


def test_a_frozen_table_stays() -> None:
    optimizer = BY_ROWS["frozen by a tree"]()
    step = make_step(optimizer)
    assert placement(step)[0] == "rows"
    state = step.init(jax.random.key(0))
    begun = copied(step.to_dense(state).params)
    state, _ = step.update(state, make_batch(0))
    after = copied(step.to_dense(state).params)
    np.testing.assert_array_equal(after["words"], begun["words"])
    assert np.abs(after["kernel"] - begun["kernel"]).max() > 1e-3


def counted(count: int) -> Callable[[Any], Any]:
    """Sets all counts of an optimizer's state."""

    def begin(state: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.full_like(leaf, count) if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf, state
        )

    return begin


@SLOW  # below hundreds of steps by a schedule are missed
@pytest.mark.parametrize("name", ["momentum", "sgd", "adam"])
def test_a_rate_that_drops_late(name: str) -> None:
    """The first boundary is at 12,000 steps, and some rows are away while it passes."""
    rate = optax.piecewise_constant_schedule(0.1, {12_000: 0.1})
    optimizer = {"sgd": optax.sgd(rate), "momentum": optax.sgd(rate, 0.9), "adam": optax.adam(rate)}[name]
    step = make_step(optimizer)
    assert placement(step)[0] == "rows"
    assert_alike(*trained(step, optimizer, 9, begun=counted(11_996)))


def test_hundreds_of_missed_steps_by_a_schedule() -> None:
    """Warm-up, cosine and decay: rows that are first read late, or come back, are where one device has them."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, 40, 400, 1e-3)
    optimizer = optax.adamw(rate, weight_decay=0.1)
    step, late = make_step(optimizer), {150: 9, 290: 18, 291: 9, 330: 27}  # all other batches have rows 0 to 6, and 60

    def batch(number: int) -> Any:
        made = make_batch(6 * number)
        return {**made, "ids": np.where(made["ids"] < 9, made["ids"] + late.get(number, 0), made["ids"])}

    assert_alike(*trained(step, optimizer, 340, batch=batch), rtol=1e-4, atol=1e-5)
    (words,) = step._work._feed._update._split.tables.values()  # pyright: ignore
    assert words.growth is not None


@SLOW  # test_catch_up.py has narrow rows
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["adam", "momentum", "sgd"])
def test_narrow_tables(name: str, dtype: Any) -> None:
    step, eps = make_step(BY_ROWS[name](), dtype), float(jnp.finfo(dtype).eps)
    assert placement(step)[0] == "rows"
    assert_alike(*trained(step, BY_ROWS[name](), 9), rtol=8 * eps, atol=8 * eps)


def test_another_rate_counts_from_where_it_was_set() -> None:
    """Rows that lag behind have missed steps by the old rate, whoever sets a new one."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    step, batches = make_step(optimizer), [make_batch(seed) for seed in range(8)]
    state = step.init(jax.random.key(0))
    params = jax.tree.map(jnp.asarray, copied(step.to_dense(state).params))
    opt_state = optimizer.init(params)

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        moves, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, moves), opt_state

    for number, batch in enumerate(batches):
        if number == 3:
            opt_state.hyperparams["learning_rate"] = jnp.asarray(0.01)
            state.opt_state["dense"].hyperparams["learning_rate"] = jnp.asarray(0.01)
        params, opt_state = update(params, opt_state, batch)
        state, _ = step.update(state, batch)
    assert placement(step)[0] == "rows"
    assert_alike(copied(step.to_dense(state).params), copied(params))


def test_a_mask_tree_without_any_table() -> None:
    optimizer = optax.adamw(1e-2, mask={"bias": False, "kernel": True})

    def no_table(params: Any, batch: Any) -> jax.Array:
        hidden = batch["target"][:, None] * params["bias"] @ params["kernel"]
        return (hidden**2).mean()

    def made(key: jax.Array) -> Any:
        params = init(key)
        return {name: params[name] for name in ("bias", "kernel")}

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step = bx.parallelize(no_table, optimizer, mesh, {"data": bx.Hybrid()}, init=made, batch=specs(make_batch(0)))
    _, metrics = step.update(step.init(jax.random.key(0)), make_batch(0))
    assert np.isfinite(metrics["loss"])
