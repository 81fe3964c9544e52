"""Placements by what they cost: the formulas as numbers, and what is chosen by them."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.plan.costs.choosing import Offer, cheapest
from braidax.parallel.plan.costs.prices import Price
from braidax.parallel.plan.costs.ring import RingWork, planned_ring
from braidax.program import collectives_of
from tests.support.parallel.dense.models import BATCH, LENGTH, MODELS
from tests.support.parallel.dense.models import WIDTH as MODEL_WIDTH
from tests.support.parallel.dense.steps import assert_as_on_one_device, make_step
from tests.support.parallel.models import make_mesh, recorded_events

LAYERS, WIDTH, HIDDEN, SAMPLES = 8, 64, 256, 1024
ELEMENTS = WIDTH * HIDDEN  # of a layer's weight
BYTES = 4 * LAYERS * ELEMENTS  # of both weights each
OTHERS = 7 / 8
RATE, LATENCY = 1e6, 1e-3
LINK = bx.Link(RATE, LATENCY)
NOTHING_HIDDEN, ALL_HIDDEN = 1e18, 1e3  # flops a second


def init(key: jax.Array) -> Any:
    return {"up": jnp.ones((LAYERS, WIDTH, HIDDEN)), "down": jnp.ones((LAYERS, HIDDEN, WIDTH))}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> Any:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()


def plan(
    flops_per_second: float = NOTHING_HIDDEN,
    link: bx.Link = LINK,
    strategy: Callable[..., Any] = bx.RotatedTensorParallel,
    **options: Any,
) -> bx.Plan:
    machine = bx.Machine(flops_per_second, {"data": link}, options.pop("collectives", {}), name="by hand")
    given = {name: options.pop(name) for name in ("microbatches", "trainable") if name in options}
    loss = options.pop("loss", loss_fn)
    strategies = {"data": strategy(machine=machine, **options)}
    batch, mesh = jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32), make_mesh("8 auto")
    return bx.parallelize(loss, optax.sgd(0.1), mesh, strategies, init=init, batch=batch, **given).plan


def kinds(plan: bx.Plan) -> set[str]:
    return {str(placement).partition(",")[0] for one in plan.variables for placement in one.placements}


def waits(plan: bx.Plan) -> float:
    return sum(one.costs.exposed_seconds or 0.0 for one in plan.variables)


BETWEEN = 4 * SAMPLES // 8 * HIDDEN  # what a layer makes of a device's samples between its weights
ALL_BETWEEN = (LAYERS + 1) * BETWEEN  # of all layers, and a gradient
WEIGHTS = 2 * 2 * BYTES  # both, and their gradients
REPLICATED_BYTES = WEIGHTS + ALL_BETWEEN
GATHERED_BYTES = WEIGHTS // 8 + 2 * 2 * BYTES // LAYERS + ALL_BETWEEN  # a layer and its gradient, for a moment
KEPT_BYTES = WEIGHTS // 8 + 2 * BYTES + 2 * BYTES // LAYERS + ALL_BETWEEN  # all layers until the backward pass
SHARDED_BYTES = WEIGHTS // 8 + 2 * BYTES // LAYERS  # one weight is gathered behind the other
ROTATED_BYTES = WEIGHTS // 8 + 2 * 2 * 2 * BYTES // LAYERS // 8 + 2 * BETWEEN // 8  # two parts of either


@pytest.mark.parametrize(
    ("memory_bytes", "kind", "seconds"),
    [
        (None, "replicated", 2 * (2 * BYTES * OTHERS / RATE + 2 * LATENCY)),
        (REPLICATED_BYTES, "replicated", 2 * (2 * BYTES * OTHERS / RATE + 2 * LATENCY)),
        (REPLICATED_BYTES - 1, "gathered", 2 * 2 * (BYTES * OTHERS / RATE + LAYERS * LATENCY)),
        (KEPT_BYTES, "gathered", 2 * 2 * (BYTES * OTHERS / RATE + LAYERS * LATENCY)),
        (KEPT_BYTES - 1, "gathered", 2 * 3 * (BYTES * OTHERS / RATE + LAYERS * LATENCY)),
        (GATHERED_BYTES, "gathered", 2 * 3 * (BYTES * OTHERS / RATE + LAYERS * LATENCY)),
        (GATHERED_BYTES - 1, "rotated", 2 * 3 * 7 * (BYTES / 8 / RATE + LAYERS * LATENCY)),
        (ROTATED_BYTES, "rotated", 2 * 3 * 7 * (BYTES / 8 / RATE + LAYERS * LATENCY)),
    ],
)
def test_the_fastest_that_there_is_room_for(memory_bytes: int | None, kind: str, seconds: float) -> None:
    """All-reduce: 2 B (N - 1) / N in two messages; gathers 3 B (N - 1) / N in 3 a layer, or 2 of each where they are
    kept; a ring in 3 (N - 1)."""
    made = plan(memory_bytes=memory_bytes)
    assert kinds(made) == {kind}
    assert waits(made) == pytest.approx(seconds)


ALL_KEPT_BYTES = KEPT_BYTES - BYTES // LAYERS - ALL_BETWEEN
AGAIN, KEPT, WHOLE = "gathered, dim 1", "gathered, dim 1, kept", "replicated"


@pytest.mark.parametrize(
    ("memory_bytes", "placements", "sent"),
    [
        (None, {WHOLE}, 4),
        (WEIGHTS - 1, {WHOLE, KEPT}, 4),
        (ALL_KEPT_BYTES, {KEPT}, 4),
        (ALL_KEPT_BYTES - 1, {AGAIN, WHOLE}, 5),  # in two messages
        (SHARDED_BYTES + BYTES, {AGAIN, KEPT}, 5),
        (SHARDED_BYTES + BYTES - 1, {AGAIN}, 6),
        (SHARDED_BYTES, {AGAIN}, 6),
    ],
)
def test_memory_decides_what_fully_sharded_training_keeps(
    memory_bytes: int | None, placements: set[str], sent: int
) -> None:
    """Two weights: one is gathered and scattered in three messages of its bytes, or in two."""
    made = plan(strategy=bx.FullySharded, memory_bytes=memory_bytes)
    assert {str(one.placements[0]) for one in made.variables} == placements
    assert sum(one.costs.sent_bytes or 0 for one in made.variables) == sent * BYTES * OTHERS
    held = [getattr(one.costs, f"{name}_bytes") for one in made.variables for name in ("held", "gradient", "kept")]
    assert sum(held) <= (memory_bytes or sum(held))


def test_less_than_fully_sharded_training_needs_is_refused() -> None:
    least = SHARDED_BYTES
    with pytest.raises(ArgumentError, match=f"memory_bytes={least - 1:,}: expected at least {least:,}, which"):
        plan(strategy=bx.FullySharded, memory_bytes=least - 1)
    with pytest.raises(ArgumentError, match=r"^memory_bytes=7 is room for a choice by cost, and machine is None: give"):
        bx.FullySharded(memory_bytes=7)


def test_short_messages_make_a_variable_whole_and_long_ones_keep_it_apart() -> None:
    """How short is no fixed size: what a message costs at all, and what products hide of its bytes."""
    free = bx.Link(RATE, 0.0)
    assert kinds(plan(ALL_HIDDEN, free, bx.FullySharded)) == {"gathered"}
    assert kinds(plan(ALL_HIDDEN, bx.Link(RATE, 1e6), bx.FullySharded)) == {"replicated"}
    made = plan(strategy=bx.FullySharded, memory_bytes=GATHERED_BYTES - ALL_BETWEEN)
    assert {one.why for one in made.variables} == {
        "data: fully sharded: gathered where it is used, gradient scattered; gathered 1.4 s a step, 262 KB; kept "
        "934 ms a step, 721 KB; replicated 920 ms a step, 1.05 MB"
    }
    assert bx.Plan.from_json(made.to_json()) == made


def test_less_than_the_fewest_bytes_is_refused_before_anything_is_compiled() -> None:
    with recorded_events() as events, pytest.raises(ArgumentError) as caught:
        plan(memory_bytes=ROTATED_BYTES - 1)
    assert str(caught.value) == (
        f"memory_bytes={ROTATED_BYTES - 1:,}: expected at least {ROTATED_BYTES:,}, which the variables of a device "
        "take with gradients and optimizer's state where each lies in the fewest bytes; give more, or more devices "
        "along the axis"
    )
    assert [event for event in events if "backend_compile" in event] == []


def test_where_products_hide_all_that_is_sent_the_fewest_bytes_are_chosen() -> None:
    made = plan(ALL_HIDDEN)
    assert kinds(made) == {"rotated"}
    assert waits(made) == 0
    half = plan(ALL_HIDDEN, bx.Link(RATE, LATENCY, hidden=0.5))
    assert kinds(half) == {"replicated"}
    assert waits(half) == pytest.approx(BYTES * 2 * OTHERS / RATE + 2 * LATENCY)


def test_each_hop_is_hidden_as_long_as_the_products_of_a_part() -> None:
    tokens = SAMPLES // 8
    flops = 2 * tokens * LAYERS * ELEMENTS / 8  # by a part of either weight, in all layers
    hop = BYTES / 8 / RATE + LAYERS * LATENCY
    made = plan(flops / (hop / 3), memory_bytes=ROTATED_BYTES)
    assert waits(made) == pytest.approx(2 * 7 * ((hop - hop / 3) + (2 * hop - 2 * hop / 3)))
    assert made.ring is not None
    assert (made.ring.axis, made.ring.tokens, made.ring.flops_per_byte) == ("data", tokens, tokens / 2)
    assert made.ring.break_even_tokens == pytest.approx(3 * tokens, abs=1)
    told = (
        f"a part's hop is hidden from {made.ring.break_even_tokens} tokens a device on, and it has 128 in a run of the"
    )
    assert told in " ".join(str(made).split())


def test_in_place_there_is_one_part_at_a_time_and_no_hop_is_hidden() -> None:
    room = ROTATED_BYTES - 2 * 2 * BYTES // LAYERS // 8
    made = plan(ALL_HIDDEN, memory_bytes=room, hops="in place")
    assert kinds(made) == {"rotated"}
    assert waits(made) == pytest.approx(2 * 3 * 7 * (BYTES / 8 / RATE + LAYERS * LATENCY))
    (why,) = {one.why for one in made.variables}
    assert "rotated 3.09 s a step, 328 KB (ahead 0 µs a step, 360 KB); split" in why
    with pytest.raises(ArgumentError, match=f"expected at least {room:,},"):
        plan(ALL_HIDDEN, memory_bytes=room - 1, hops="in place")


def test_break_even_is_bytes_times_flops_by_twice_the_rate() -> None:
    """c F / (2 W): bfloat16, 600 TFLOP/s, 200 GB/s."""
    elements, tokens, rate = 1 << 20, 1000, 200e9
    work = RingWork(2 * tokens * elements, elements, 2 * elements, 2 * elements / rate, 600e12, 1.0)
    ring = planned_ring("data", [work, None])
    assert ring == bx.PlannedRing("data", 1000, 1000.0, 3000, 1.0)
    late = planned_ring("data", [work._replace(hop_seconds=4 * elements / rate), work])
    assert late is not None
    assert late.break_even_tokens == 4500
    assert planned_ring("data", [None]) is None
    assert planned_ring("data", [RingWork(0.0, 0.0, 8.0)]) is None


def test_microbatches_send_weights_again_and_whole_gradients_once() -> None:
    once, twice = plan(microbatches=2), plan(microbatches=2, memory_bytes=ROTATED_BYTES)
    assert waits(once) == pytest.approx(2 * (2 * BYTES * OTHERS / RATE + 2 * LATENCY))
    assert waits(twice) == pytest.approx(2 * 2 * 3 * 7 * (BYTES / 8 / RATE + LAYERS * LATENCY))
    assert twice.ring is not None
    assert twice.ring.tokens == SAMPLES // 8 // 2


def test_what_is_frozen_has_no_gradient_to_send_or_hold() -> None:
    free = plan(trainable="params/up")
    costs = {one.path: one.costs.exposed_seconds for one in free.variables}
    assert costs == {"params/down": 0.0, "params/up": pytest.approx(2 * BYTES * OTHERS / RATE + 2 * LATENCY)}
    room = 3 * BYTES // 8 + 2 * 3 * BYTES // LAYERS // 8 + 2 * BETWEEN // 8
    made = plan(trainable="params/up", memory_bytes=room)
    assert kinds(made) == {"rotated"}
    assert waits(made) == pytest.approx((3 + 2) * 7 * (BYTES / 8 / RATE + LAYERS * LATENCY))
    with pytest.raises(ArgumentError, match=f"expected at least {room:,},"):
        plan(trainable="params/up", memory_bytes=room - 1)


def test_a_penalty_on_weights_sends_nothing() -> None:
    def penalized(params: Any, batch: Any) -> jax.Array:
        return loss_fn(params, batch) + 1e-3 * sum((leaf**2).sum() for leaf in params.values())

    assert waits(plan(loss=penalized, memory_bytes=ROTATED_BYTES)) == waits(plan(memory_bytes=ROTATED_BYTES))


def test_collectives_may_have_a_rate_of_their_own() -> None:
    """A ring whose messages are quick beside gathers and sums that are not."""
    made = plan(link=bx.Link(1e9, 0.0), collectives={"data": bx.Link(RATE, LATENCY)})
    assert kinds(made) == {"rotated"}
    assert waits(made) == pytest.approx(2 * 3 * BYTES * OTHERS / 1e9)


def test_the_plan_tells_the_figures_of_every_way() -> None:
    made = plan(memory_bytes=GATHERED_BYTES)
    (why,) = {one.why for one in made.variables}
    assert why == (
        "data: rotated tensor parallel: gathered where it is used, gradient scattered; 2 variables: rotated 3.09 s a "
        "step, 360 KB (in place 3.09 s a step, 328 KB); split 7.37 s a step, 4.06 MB; gathered 2.8 s a step, 1.7 MB; "
        "kept 1.87 s a step, 2.62 MB; replicated 1.84 s a step, 3.28 MB; its hops are hidden from "
        f"{made.ring.break_even_tokens:,} tokens a device on"  # pyright: ignore[reportOptionalMemberAccess]
    )
    lines = str(made).splitlines()
    assert max(map(len, lines)) <= 120
    assert "RotatedTensorParallel(machine=Machine(by hand: 1e+06 TFLOP/s; data 1 MB/s)," in lines[0]
    assert "a device sends 2.75 MB a step for them, and waits for 2.8 s of that by the machine's figures" in lines
    assert bx.Plan.from_json(made.to_json()) == made
    assert hash(made) == hash(bx.Plan.from_json(made.to_json()))
    text = made.to_json().replace(', "exposed_seconds": null', "")
    older = bx.Plan.from_json(text[: text.index(', "ring":')] + "}")
    assert older == bx.anywhere(replace(made, ring=None))  # which has no knobs, and no machine


def test_plans_are_compared_by_their_rings() -> None:
    made = plan(memory_bytes=ROTATED_BYTES)
    other = replace(made, ring=None)
    assert made.ring is not None
    even = f"{made.ring.break_even_tokens:,}"
    assert other.compare(made).splitlines()[0] == f"ring: none → 128 tokens a device, hidden from {even} on"
    assert made.compare(made) == "the plans are alike"
    totals = {line.rpartition("  ")[0].strip(): line for line in made.compare(other).splitlines()}
    assert any("and waits for it" in line for line in totals)


def test_without_figures_all_that_can_goes_around_and_the_plan_tells_what_hides_it() -> None:
    batch = jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32)
    strategy = {"data": bx.RotatedTensorParallel()}
    made = bx.parallelize(loss_fn, optax.sgd(0.1), make_mesh("8 auto"), strategy, init=init, batch=batch).plan
    assert kinds(made) == {"rotated"}
    assert made.ring == bx.PlannedRing("data", 128, 64.0)
    assert "a device has 128 tokens in a run of the loss, and computes with them 64 flops for each byte of a hop" in (
        " ".join(str(made).split())
    )
    assert "hidden from" not in str(made)


def test_overrides_stay_and_take_their_room() -> None:
    pinned = {"params/up": bx.Replicated()}
    made = plan(overrides=pinned, memory_bytes=WEIGHTS // 2 + GATHERED_BYTES)
    assert [str(one.placements[0]) for one in made.variables if one.path == "params/up"] == ["replicated"]
    assert kinds(made) == {"replicated", "gathered"}
    with pytest.raises(ArgumentError, match="expected at least"):
        plan(overrides=pinned, memory_bytes=WEIGHTS // 2)
    with pytest.raises(ArgumentError, match=r"up cannot be placed by Gathered\(dim=7\)"):
        plan(overrides={"params/up": bx.Gathered(7)})


def test_bad_input() -> None:
    machine = bx.Machine(1e12, {"model": bx.Link(1e9)})
    with pytest.raises(ArgumentError, match=r"^memory_bytes=0: expected a size in bytes, such as 16 << 30$"):
        bx.RotatedTensorParallel(machine=machine, memory_bytes=0)
    with pytest.raises(ArgumentError, match=r"^memory_bytes=7 is room for a choice by cost, and machine is None: give"):
        bx.RotatedTensorParallel(memory_bytes=7)
    with pytest.raises(ArgumentError, match=r"permutes along \['model'\], and none along the axis 'data': measure it"):
        make_step(MODELS["mlp"], {"data": bx.RotatedTensorParallel(machine=machine)})


def test_one_device_needs_no_link_but_room() -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    batch = jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32)

    def planned(memory_bytes: int) -> bx.Plan:
        strategy = bx.RotatedTensorParallel(machine=bx.Machine(1e12, {}), memory_bytes=memory_bytes)
        return bx.parallelize(loss_fn, optax.adam(0.1), mesh, {"data": strategy}, init=init, batch=batch).plan

    state = 2 * 2 * BYTES + 4  # two moments of either weight, and a count
    made = planned(WEIGHTS + state)
    assert (kinds(made), made.ring) == ({"replicated"}, None)
    with pytest.raises(ArgumentError, match=rf"expected at least {WEIGHTS + state:,},"):
        planned(WEIGHTS + state - 1)


GPT = bx.RotatedTensorParallel(min_bytes=0, machine=bx.Machine(1e9, {"data": bx.Link(1e7, 1e-6)}), memory_bytes=60_000)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def test_a_mixture_trains_as_on_one_device() -> None:
    step = make_step(MODELS["gpt"], {"data": GPT}, "8 auto", optimizer=OPTIMIZER)
    assert kinds(step.plan) == {"rotated", "gathered", "replicated"}
    held = [(one.costs.held_bytes, one.costs.gradient_bytes, one.costs.state_bytes) for one in step.plan.variables]
    assert sum(sum(one) for one in held) <= 60_000  # pyright: ignore[reportArgumentType, reportCallIssue]
    alike = {
        str(one.placements[0])[:7] for one in step.plan.variables if one.path.split("/")[-1] in ("up", "down", "bias")
    }
    assert len(alike) == 1
    assert_as_on_one_device(step, MODELS["gpt"], optimizer=OPTIMIZER, num_updates=2)


@functools.cache
def of_few_samples() -> bx.Step:
    """A step that two tests read and train by: it keeps no state."""
    machine = bx.Machine(NOTHING_HIDDEN, {"data": bx.Link(RATE)})
    strategy = bx.RotatedTensorParallel(min_bytes=0, machine=machine, memory_bytes=100_000)
    return make_step(MODELS["gpt"], {"data": strategy}, "8 auto", optimizer=OPTIMIZER)


@pytest.mark.slow  # dense/test_rotated.py has weights that stay
def test_with_few_samples_it_trains_as_on_one_device() -> None:
    assert_as_on_one_device(of_few_samples(), MODELS["gpt"], optimizer=OPTIMIZER, num_updates=2)


def test_few_samples_are_brought_to_weights_that_stay_split() -> None:
    """Samples cross five times under a remat, weights three times: fewer bytes below 24/5 of the width in all."""
    step = of_few_samples()
    found = {one.path.removeprefix("params/layers/"): one for one in step.plan.variables}
    assert [str(found[name].placements[0]) for name in ("up", "down", "bias")] == [
        "split, dim 2", "split, dim 1", "split, dim 1"
    ]  # fmt: skip
    activations = 4 * BATCH * LENGTH * MODEL_WIDTH
    of_wider = 5 * 3 * activations * OTHERS
    assert sum(found[name].costs.exposed_seconds or 0 for name in ("up", "down", "bias")) == pytest.approx(
        of_wider / RATE
    )
    assert "rotated tensor parallel: stays split, and samples of all devices" in found["up"].why
    sent = collectives_of(step.lower().gradients.compile().as_text() or "")
    brought = [one for one in sent if one.times == 3 and one.sent_bytes == activations * OTHERS]
    assert sorted(one.kind for one in brought) == ["all-gather"] * 3 + ["reduce-scatter"] * 2


def test_a_decorated_step_counts_what_its_state_keeps() -> None:
    def planned(memory_bytes: int) -> bx.Plan:
        machine = bx.Machine(NOTHING_HIDDEN, {"data": LINK})
        strategy = bx.RotatedTensorParallel(machine=machine, memory_bytes=memory_bytes)

        @bx.parallelize(make_mesh("8 auto"), {"data": strategy})
        def train_step(state: Any, batch: Any) -> Any:
            loss, gradients = bx.value_and_grad(loss_fn)(state["params"], batch)
            momentum = jax.tree.map(lambda one, more: 0.9 * one + more, state["momentum"], gradients)
            params = jax.tree.map(lambda one, more: one - 0.1 * more, state["params"], momentum)
            return {"params": params, "momentum": momentum, "count": state["count"] + 1}, loss

        params = init(jax.random.key(0))
        state = {"params": params, "momentum": params, "count": jnp.zeros(())}
        return train_step.prepare(state, jnp.ones((SAMPLES, WIDTH)))

    least = ROTATED_BYTES + 2 * BYTES // 8 + 4
    assert kinds(planned(least)) == {"rotated", "replicated"}  # the count
    with pytest.raises(ArgumentError, match=f"expected at least {least:,},"):
        planned(least - 1)


# The choice itself

NUMBERS = st.integers(0, 12).map(float)
OFFERS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=3), min_size=1, max_size=4)


def made(offers: Sequence[Sequence[tuple[float, float, float]]]) -> list[Offer]:
    kinds = ("rotated", "gathered", "replicated")
    return [Offer((), {kind: Price(*one) for kind, one in zip(kinds, prices, strict=False)}) for prices in offers]


def total(prices: Sequence[Price]) -> tuple[float, float]:
    """Seconds and bytes."""
    held, moment = sum(one.held_bytes for one in prices), max(one.moment_bytes for one in prices)
    return sum(one.seconds for one in prices), held + moment


@given(OFFERS, st.integers(1, 50), st.integers(0, 5))
def test_what_is_chosen_fits_where_anything_does(given: Any, room: int, fixed: int) -> None:
    offers = made(given)
    every = [total(prices) for prices in itertools.product(*(one.prices.values() for one in offers))]
    fewest = fixed + min(num_bytes for _, num_bytes in every)
    if fewest > room:
        with pytest.raises(ArgumentError, match=f"expected at least {math.ceil(fewest):,}, which"):
            cheapest(offers, room, fixed)
        return
    kinds = cheapest(offers, room, fixed)
    seconds, num_bytes = total([one.prices[kind] for one, kind in zip(offers, kinds, strict=True)])
    assert fixed + num_bytes <= room
    fitting = [seconds for seconds, num_bytes in every if fixed + num_bytes <= room]
    assert min(fitting) <= seconds
    assert seconds <= min(one for one, num_bytes in every if fixed + num_bytes == fewest)


def test_room_goes_to_what_saves_the_most_seconds_a_byte() -> None:
    small, large = [(10.0, 1.0, 0.0), (4.0, 4.0, 0.0)], [(10.0, 1.0, 0.0), (1.0, 9.0, 0.0)]  # 2 s a byte, and 1.125
    assert cheapest(made([large, small]), 12) == ["rotated", "gathered"]
    assert cheapest(made([large, small]), 13) == ["gathered", "gathered"]
    passing = [(10.0, 1.0, 0.0), (9.0, 1.0, 8.0), (0.0, 6.0, 0.0)]  # its room is taken for a moment only, once
    assert cheapest(made([passing, passing]), 9) == ["replicated", "rotated"]
    both = [[(10.0, 1.0, 8.0), (1.0, 6.0, 8.0)]]
    assert [cheapest(made(both), room) for room in (13, 14)] == [["rotated"], ["gathered"]]


@given(OFFERS)
def test_with_room_for_all_each_is_the_fastest(given: Any) -> None:
    offers = made(given)
    fastest = sum(min(price.seconds for price in one.prices.values()) for one in offers)
    for room in (None, 10**6):
        kinds = cheapest(offers, room)
        assert sum(one.prices[kind].seconds for one, kind in zip(offers, kinds, strict=True)) == fastest
