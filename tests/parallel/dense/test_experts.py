"""Mixtures of experts: these go around while tokens stay, or stay and are sent tokens, whichever sends less."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.parallel.plan import compiling
from braidax.program import collectives_of, total_sent
from tests.support.parallel.dense.models import BATCH, WIDTH
from tests.support.parallel.dense.moe import CAPACITY, HIDDEN, MOES, switch
from tests.support.parallel.dense.rotated import OPTIMIZER
from tests.support.parallel.dense.steps import assert_as_on_one_device, make_step

ALL = bx.RotatedTensorParallel(min_bytes=0)
SLOW = pytest.mark.slow
AROUND = bx.RotatedTensorParallel({f"*/{name}": bx.Rotated(1) for name in ("up", "down", "*_bias")}, min_bytes=0)
STRATEGIES: dict[str, Any] = {
    "one axis": {"data": ALL},
    "around": {"data": AROUND},
    "replicas": {"data": ALL, "model": bx.DataParallel()},
    "replicas before": {"data": bx.DataParallel(), "model": ALL},
    "sharded on": {"data": ALL, "model": bx.FullySharded(min_bytes=0)},
    "beside tensor": {"data": ALL, "model": bx.TensorParallel(min_bytes=0)},
}


@pytest.mark.parametrize(
    ("model", "mesh", "strategies"),
    [  # below experts are trained that are stacked, and stay
        *(
            pytest.param(model, mesh, strategies, marks=SLOW)
            for model, mesh, strategies in [
                *((model, "8 auto", "one axis") for model in MOES),
                ("stacked", "4x2 auto", "replicas"),
                ("stacked", "8 explicit", "around"),
                ("stacked", "4x2 explicit", "replicas before"),
                ("stacked", "4x2 auto", "sharded on"),
                ("stacked", "4x2 auto", "beside tensor"),
                ("crowded, stacked", "4x2 explicit", "sharded on"),
                ("best two", "4x2 auto", "replicas"),
            ]
        ),
    ],
)
def test_it_trains_as_on_one_device(model: str, mesh: str, strategies: str) -> None:
    step = make_step(MOES[model], STRATEGIES[strategies], mesh, optimizer=OPTIMIZER)
    assert_as_on_one_device(step, MOES[model], optimizer=OPTIMIZER, num_updates=3)


@functools.cache
def _around(model: str) -> bx.Step:
    """A step that several tests read: it keeps no state."""
    return make_step(MOES[model], {"data": ALL}, "8 auto", optimizer=OPTIMIZER)


def _placed(model: str, *names: str) -> list[str]:
    step = _around(model)
    found = {one.path.removeprefix("params/"): str(one.placements[0]) for one in step.plan.variables}
    return [found[name] for name in names]


@pytest.mark.parametrize(
    ("model", "up", "down"),
    [
        pytest.param("switch", "split, dim 0", "split, dim 0", marks=SLOW),
        pytest.param("two, gated", "split, dim 0", "split, dim 0", marks=SLOW),
        ("stacked", "split, dim 1", "split, dim 1"),
        ("by index", "split, dim 0", "split, dim 0"),
        pytest.param("crowded", "rotated, dim 0", "rotated, dim 0", marks=SLOW),
        ("seven experts", "rotated, dim 2", "rotated, dim 1"),  # rather than with one that is none
        ("dense", "rotated, dim 0", "rotated, dim 0"),
        ("best two", "rotated, dim 0", "rotated, dim 0"),  # though nothing divides what picks them
        pytest.param("mapped", "rotated, dim 0", "rotated, dim 0", marks=SLOW),
        ("looped", "rotated, dim 2", "rotated, dim 1"),  # the hidden dim instead
        ("four experts", "rotated, dim 2", "rotated, dim 1"),
        pytest.param("ten experts", "rotated, dim 2", "rotated, dim 1", marks=SLOW),
        pytest.param("written out", "gathered, dim 0", "gathered, dim 0", marks=SLOW),
    ],
)
def test_experts_go_around_or_stay(model: str, up: str, down: str) -> None:
    assert _placed(model, "up", "down") == [up, down]


def test_the_plan_says_what_either_way_sends_or_why_it_is_none() -> None:
    def why(model: str, name: str = "up") -> str:
        step = _around(model)
        return next(one.why for one in step.plan.variables if one.path == f"params/{name}")

    assert why("stacked", "down_bias").endswith(
        "experts stay: a device sends 48.4 KB of what is for them, there and back, a step; weights around a ring would "
        "be 399 KB"
    )
    assert why("crowded").endswith(
        "goes around a ring, with its gradient, two parts of 9.5 KB at a time and hops under products; experts go "
        "around: a device sends 200 KB a step; if they stayed, 344 KB of what is for them, there and back"
    )
    assert re.search(r"no product uses it at moe\.py:\d+, but slice: gathered where", why("written out"))
    assert re.search(r"no product uses it at moe\.py:\d+, but ragged_dot_general: gathered", why("ragged"))
    assert "it multiplies what all samples have made, which no device has a part of" in why("all tokens")


def test_experts_that_stay_are_sent_what_is_for_them() -> None:
    step = _around("stacked")
    text = step.lower().gradients.compile().as_text() or ""
    sent = dict(total_sent(collectives_of(text)))
    routed = 4 * BATCH // 8 * 8 * CAPACITY * WIDTH
    # Two layers; there and back; forward, again under the remat, and backward.
    assert sent["all-to-all"] == pytest.approx(2 * 2 * 3 * routed * 7 / 8)
    assert sent["collective-permute"] == pytest.approx(2 * 3 * 7 / 8 * 4 * WIDTH * 8)  # routers
    assert sent["all-reduce"] < 1024
    assert {*sent} == {"all-to-all", "collective-permute", "all-reduce"}
    assert sum(one.costs.sent_bytes or 0 for one in step.plan.variables if one.placements == (bx.Split(1),)) == 0


def test_where_messages_are_hidden_each_device_sends_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(compiling._RING_FORMS, "cpu")  # pyright: ignore[reportPrivateUsage]
    step = make_step(MOES["stacked"], {"data": ALL}, "8 auto", optimizer=OPTIMIZER)
    sent = dict(total_sent(collectives_of(step.lower().gradients.compile().as_text() or "")))
    routed = 4 * BATCH // 8 * 8 * CAPACITY * WIDTH
    routers = 2 * 3 * 7 / 8 * 4 * WIDTH * 8
    assert sent["collective-permute"] == pytest.approx(2 * 2 * 3 * routed * 7 / 8 + routers)
    assert {*sent} == {"collective-permute", "all-reduce"}
    assert_as_on_one_device(step, MOES["stacked"], optimizer=OPTIMIZER, num_updates=2)


@pytest.mark.slow  # test_where_messages_are_hidden_each_device_sends_for_itself has the messages
@pytest.mark.usefixtures("aot")
def test_on_gpus_experts_compute_while_the_next_message_comes() -> None:
    layers, width, length, capacity, experts = 3, 512, 512, 128, 8
    shapes = {"router": (width, experts), "up": (experts, width, 4 * width), "down": (experts, 4 * width, width)}

    def init(key: jax.Array) -> Any:
        return {name: jax.random.normal(key, (layers, *shape)) for name, shape in shapes.items()}

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            return x + switch(w, jnp.tanh(x), capacity=capacity)[0], None

        return (jax.lax.scan(jax.checkpoint(layer), batch, params)[0] ** 2).mean()

    batch, mesh = (
        jax.ShapeDtypeStruct((4, length, width), jnp.float32),
        jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]),
    )
    step = bx.parallelize(loss, optax.sgd(0.1), mesh, {"data": ALL}, init=init, batch=batch)
    found = step.compile_for("h100:4").collectives
    message, turns = 4 * 2 * capacity * width, 3 * layers  # for two experts; forward, again, and backward
    assert sum(total_sent(found).values()) == pytest.approx(2 * turns * 3 * message, rel=0.01)
    waiting = sum(one.times * one.sent_bytes for one in found if not one.is_covered)
    assert waiting <= 1.01 * layers * message  # the last back, forward; an `all_to_all` each way would be all forward


def test_of_experts_that_go_around_no_part_of_what_is_for_them_is_whole() -> None:
    step = _around("crowded, stacked")
    text = step.lower().gradients.compile().as_text() or ""
    sent = dict(total_sent(collectives_of(text)))
    weights = 4 * 2 * (3 * 8 * WIDTH * HIDDEN + 8 * WIDTH)
    assert sent["collective-permute"] == pytest.approx(3 * 7 / 8 * weights)
    assert {*sent} == {"collective-permute", "all-reduce"}
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}
    samples = BATCH // 8
    assert any({samples, 64, WIDTH} <= {*shape} for shape in shapes)  # what is for one expert
    assert [shape for shape in shapes if {samples, 8, 64} <= {*shape}] == []  # for all of them, and their masks


def test_split_by_hand_over_an_axis_of_samples() -> None:
    by_hand = {"data": bx.DataParallel({f"*/{name}": bx.Split(0) for name in ("up", "down", "up_bias", "down_bias")})}
    step = make_step(MOES["two, biases"], by_hand, "8 auto", optimizer=OPTIMIZER)
    sent = dict(total_sent(collectives_of(step.lower().gradients.compile().as_text() or "")))
    routed = 4 * BATCH // 8 * 8 * CAPACITY * WIDTH
    assert sent["all-to-all"] == pytest.approx(3 * routed * 7 / 8)  # nobody asks for the batch's gradient
    assert "all-gather" not in sent
    assert bx.Plan.from_json(step.plan.to_json()) == step.plan
    odd = make_step(MOES["four experts"], by_hand, "8 auto", optimizer=OPTIMIZER)  # what 8 devices do not divide
    assert odd.init(jax.random.key(0)).params["up"].shape == (8, WIDTH, HIDDEN)
    assert odd.update(odd.init(jax.random.key(0)), MOES["four experts"].batch(0))[1]["loss"] > 0


def test_experts_stay_by_bytes_also_where_the_rest_is_chosen_by_cost() -> None:
    machine = bx.Machine(1e12, {"data": bx.Link(1e9)}, {}, name="by hand")
    step = make_step(MOES["stacked"], {"data": bx.RotatedTensorParallel(min_bytes=0, machine=machine)}, "8 auto")
    placed = {one.path: str(one.placements[0]) for one in step.plan.variables}
    assert (placed["params/up"], placed["params/down"]) == ("split, dim 1", "split, dim 1")
