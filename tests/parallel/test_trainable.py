"""Frozen variables: no gradient, no state of the optimizer, nothing sent; what is trained is as on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.program import collectives_of, named_leaves, total_sent
from tests.support.parallel.models import assert_close, copied, make_mesh

ROWS = 401
BATCH = {"ids": jax.ShapeDtypeStruct((16, 3), jnp.int32), "target": jax.ShapeDtypeStruct((16,), jnp.float32)}
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
MOMENTUM = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    base = {"table": jax.random.normal(keys[0], (ROWS, 16)), "kernel": jax.random.normal(keys[1], (16, 32))}
    return {"base": base, "lora": {"down": jax.random.normal(keys[2], (16, 4)), "up": jnp.zeros((4, 32))}}


def loss(params: Any, batch: Any) -> jax.Array:
    x = params["base"]["table"][batch["ids"]].mean(1)
    y = x @ params["base"]["kernel"] + x @ params["lora"]["down"] @ params["lora"]["up"]
    return ((jnp.tanh(y).sum(-1) - batch["target"]) ** 2).mean()


def samples(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (16, 3)).astype(np.int32)
    return {"ids": ids, "target": random.normal(size=16).astype(np.float32)}


def make(strategy: Any = None, trainable: Any = "params/lora/*", **options: Any) -> bx.Step:
    strategies = None if strategy is None else {"data": strategy}
    options = {"init": init, "batch": BATCH, **options}
    return bx.parallelize(loss, options.pop("optimizer", ADAM), make_mesh(), strategies, trainable=trainable, **options)


def parted(params: Any, frozen: set[str]) -> Any:
    leaves = [None if path in frozen else leaf for path, leaf in named_leaves(params, "params")]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def on_one_device(optimizer: Any, params: Any, frozen: set[str], num_updates: int) -> Any:
    leaves, structure = jax.tree.flatten(params)
    still = [path in frozen for path, _ in named_leaves(params, "params")]
    moved = [leaf for leaf, fixed in zip(leaves, still, strict=True) if not fixed]
    opt_state = optimizer.init(moved)

    def of(moved: Any, batch: Any) -> jax.Array:
        rest = iter(moved)
        given = [leaf if fixed else next(rest) for leaf, fixed in zip(leaves, still, strict=True)]
        return loss(structure.unflatten(given), batch)

    @jax.jit
    def update(moved: Any, opt_state: Any, batch: Any) -> Any:
        updates, opt_state = optimizer.update(jax.grad(of)(moved, batch), opt_state, moved)
        return optax.apply_updates(moved, updates), opt_state

    for seed in range(num_updates):
        moved, opt_state = update(moved, opt_state, samples(seed))
    rest = iter(moved)
    return structure.unflatten([leaf if fixed else next(rest) for leaf, fixed in zip(leaves, still, strict=True)])


@pytest.mark.parametrize(
    ("strategy", "trainable", "microbatches", "optimizer"),
    [
        (bx.DataParallel(), "params/lora/*", 2, ADAM),
        pytest.param(bx.FullySharded(min_bytes=0), "params/lora/*", 1, ADAM, marks=pytest.mark.slow),
        (bx.Hybrid(dense=bx.FullySharded(min_bytes=0)), ["params/lora/*", "params/base/table"], 2, MOMENTUM),
    ],
    ids=["whole, microbatches", "gathered", "rows, gathered, microbatches"],
)
def test_what_is_trained_is_as_on_one_device(strategy: Any, trainable: Any, microbatches: int, optimizer: Any) -> None:
    step = make(strategy, trainable, microbatches=microbatches, optimizer=optimizer)
    frozen = {one.path for one in step.plan.variables if one.frozen}
    assert frozen == {"params/base/kernel"} | ({"params/base/table"} if isinstance(trainable, str) else set())
    state = step.init(jax.random.key(0))
    params = jax.tree.map(jnp.asarray, copied(step.to_dense(state).params))
    for seed in range(3):
        state, _ = step.update(state, samples(seed))
    found = copied(step.to_dense(state).params)
    assert_close(found, copied(on_one_device(optimizer, params, frozen, 3)), atol=1e-5)
    np.testing.assert_array_equal(found["base"]["kernel"], params["base"]["kernel"])
    assert copied(step.from_dense(step.to_dense(state)).params).keys() == found.keys()


def test_the_optimizer_is_not_shown_them_and_nothing_is_sent() -> None:
    step, whole = make(bx.DataParallel()), make(bx.DataParallel(), None)
    told = [path for path, _ in named_leaves(step.state_specs.opt_state)]
    assert told == ["1/0/count", *(f"1/0/{kind}/lora/{one}" for kind in ("mu", "nu") for one in ("down", "up"))]
    texts = [one.lower().gradients.compile().as_text() for one in (step, whole)]
    sent, all_sent = (sum(total_sent(collectives_of(text)).values()) for text in texts)
    assert sent < all_sent / 20
    assert "frozen" in str(step.plan)


def test_a_mask_and_weights_that_are_no_floats() -> None:
    def quantized(key: jax.Array) -> Any:
        made = init(key)
        made["base"]["kernel"] = jnp.round(made["base"]["kernel"] * 30).astype(jnp.int8)
        return made

    mask = {"base": {"table": False, "kernel": False}, "lora": {"down": True, "up": True}}
    step = make(bx.FullySharded(min_bytes=0), mask, init=quantized)
    state = step.init(jax.random.key(0))
    kernel = np.array(state.params["base"]["kernel"])
    assert kernel.dtype == np.int8
    state, metrics = step.update(state, samples(0))
    np.testing.assert_array_equal(state.params["base"]["kernel"], kernel)
    assert np.isfinite(metrics["loss"])
    with pytest.raises(ArgumentError, match=r"params/base/kernel is int8, expected floating .*out of trainable="):
        make(bx.DataParallel(), None, init=quantized)


def test_a_plan_keeps_them() -> None:
    plan = bx.Plan.from_json(make(bx.FullySharded(min_bytes=0)).plan.to_json())
    assert make(trainable=None, plan=plan).plan == plan
    assert make(plan=plan).plan == plan
    with pytest.raises(ArgumentError, match="leaves params/base/kernel trained, and it is frozen in the plan"):
        make(trainable="params/*", plan=plan)


@pytest.mark.parametrize(
    ("trainable", "words"),
    [
        ("params/laro/*", r"trainable='params/laro/\*' names no variable: expected a pattern of paths params/b"),
        (["params/lora/*", "x"], "trainable='x' names no variable"),
        ([], "trainable=\\[\\] names no variable"),
        ({"lora": True}, "trainable is {'lora': True}, expected a pattern such as 'params/lora"),
        (
            {"base": {"table": 0, "kernel": 0}, "lora": {"down": True, "up": 1}},
            "trainable/base/kernel is 0, expe",
        ),
        (jax.tree.map(lambda _: False, jax.eval_shape(init, jax.random.key(0))), "trainable names no variable: expect"),
    ],
)
def test_what_names_nothing_is_said(trainable: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make(bx.DataParallel(), trainable)


def test_rows_of_a_frozen_table_are_not_exchanged() -> None:
    assert make(bx.Hybrid()).plan.variables[1].placements[0] == bx.Replicated()
    words = (
        r"rows of params/base/table, and these cannot be exchanged: it is frozen: .* \(Gathered\(dim\) splits it all"
    )
    with pytest.raises(ArgumentError, match=words):
        make(bx.Hybrid({"params/base/table": bx.Rows()}))


def test_rows_of_a_frozen_table_come_in_parts_and_nothing_goes_back() -> None:
    def sent(strategy: Any) -> list[tuple[str, int, bool]]:
        found = collectives_of(make(strategy).lower().gradients.compile().as_text())
        return [(one.kind, one.result_bytes, "transpose" in one.op_name) for one in found]

    ids, rows, lora = 16 * 3 * 4, 16 * 3 // 4 * 16 * 4, (16 * 4 * 4, 4 * 32 * 4)
    assert [(kind, size) for kind, size, _ in sent(bx.Hybrid())] == [("all-reduce", 4 + sum(lora))]
    found = sent(bx.Hybrid(dense=bx.FullySharded(min_bytes=0)))
    assert {("all-gather", ids, False), ("all-to-all", rows, False)} <= {*found}
    assert sorted(one for one in found if one[2]) == [("reduce-scatter", size // 4, True) for size in lora]
    assert max(size for _, size, _ in found) < ROWS * 16 * 4 / 4
