"""The dynamic program against all divisions there are."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from braidax.errors import ArgumentError
from braidax.parallel.plan.costs.machine import Link
from braidax.parallel.stages.balance import Priced, Pricing, Shares, Span, balance
from braidax.parallel.stages.segments import Seconds, Segment


def drawn(count: int, seed: int) -> tuple[Segment, ...]:
    random = np.random.default_rng(seed)
    found: list[Segment] = []
    for at in range(count):
        seconds = Seconds(*(float(one) for one in random.uniform(0.1, 1, 3)))
        sent = int(random.integers(10, 100)) if at else 0
        leaves = {f"w{at}": int(random.integers(10, 1000))} | ({"tied": 700} if at in (0, count - 1) else {})
        found.append(Segment(seconds, int(random.integers(10, 500)), sent, sent // 2, leaves))
    return tuple(found)


def divisions(count: int, num_stages: int, num_devices: int) -> Iterator[tuple[Span, ...]]:
    for total in range(num_stages, num_devices + 1):
        shares = [(0, *ends, total) for ends in combinations(range(1, total), num_stages - 1)]
        for cuts in combinations(range(1, count), num_stages - 1):
            for share in shares:
                pairs = zip(pairwise((0, *cuts, count)), pairwise(share), strict=True)
                yield tuple(Span(*ends, most - least) for ends, (least, most) in pairs)


def price_of(priced: Priced, spans: tuple[Span, ...]) -> float:
    """The slowest stage, written down again; infinite where one does not fit."""
    pricing, slowest = priced.pricing, 0.0
    for at, span in enumerate(spans):
        own = priced.segments[span.begin : span.end]
        weights = sum({name: size for one in own for name, size in one.leaves.items()}.values())
        in_flight = min(pricing.num_microbatches, len(spans) - at)
        held = weights * pricing.bytes_per_parameter + sum(one.kept_bytes for one in own) * in_flight / span.replicas
        if held > pricing.memory_bytes:
            return math.inf
        computing = sum(sum(one.seconds) for one in own) / span.replicas
        behind = priced.segments[span.end].incoming_bytes if span.end < len(priced.segments) else 0
        sending = (behind + own[0].float_bytes) / span.replicas / pricing.between.bytes_per_second
        summed = 2 * weights * (span.replicas - 1) / span.replicas / pricing.within.bytes_per_second
        total = sending + summed / pricing.num_microbatches
        slowest = max(slowest, max(computing, total) if pricing.between.hidden else computing + total)
    return slowest


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hidden", [0.0, 1.0])
@pytest.mark.parametrize(
    ("num_stages", "num_devices", "count"), [(2, 2, 9), (4, 4, 9), (8, 8, 10), (2, 5, 6), (4, 6, 6), (1, 4, 4)]
)
def test_the_slowest_stage_is_as_fast_as_can_be(
    num_stages: int, num_devices: int, count: int, hidden: float, seed: int
) -> None:
    between, within = Link(60.0, hidden=hidden), Link(900.0, hidden=hidden)
    for memory in (math.inf, 5500.0):
        pricing = Pricing(4, between, within, memory, bytes_per_parameter=2.0, recompute=False)
        priced = Priced(drawn(count, seed), pricing)
        best = min(price_of(priced, spans) for spans in divisions(count, num_stages, num_devices))
        if best == math.inf:
            with pytest.raises(ArgumentError, match="memory_bytes=5500: no cut"):
                balance(priced, num_stages, num_devices)
            continue
        spans = balance(priced, num_stages, num_devices)
        assert [span.end for span in spans[:-1]] == [span.begin for span in spans[1:]]
        assert price_of(priced, spans) == pytest.approx(best, rel=1e-12)
        assert max(one.seconds for one in priced.costs(spans)) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_stages_beside_the_slowest_one_are_as_alike_as_can_be(seed: int) -> None:
    """The last segment is the slowest stage of any division; the others are then divided by the squares of theirs."""
    *others, last = drawn(9, seed)
    priced = Priced((*others, replace(last, seconds=Seconds(20.0, 0.0, 0.0))), Pricing(4, recompute=False))

    def squares(spans: tuple[Span, ...]) -> float:
        return sum(one.seconds**2 for one in priced.costs(spans))

    alone = [spans for spans in divisions(9, 4, 4) if spans[-1].begin == 8]
    assert squares(balance(priced, 4)) == pytest.approx(min(map(squares, alone)), rel=1e-12)


@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_what_stages_cost(hidden: float) -> None:
    pricing = Pricing(2, Link(200.0, hidden=hidden), Link(900.0, hidden=hidden), bytes_per_parameter=2.0)
    priced = Priced(drawn(6, 7), pricing)
    for spans in divisions(6, 3, 6):
        assert max(one.seconds for one in priced.costs(spans)) == pytest.approx(price_of(priced, spans), rel=1e-12)


def even(count: int, *, kept: int = 100, weights: int = 10) -> tuple[Segment, ...]:
    seconds = Seconds(1.0, 1.0, 1.0)
    return tuple(Segment(seconds, kept, 10 * bool(at), 10 * bool(at), {f"w{at}": weights}) for at in range(count))


def test_a_heavy_stage_gets_more_devices() -> None:
    heavy, light = (
        Segment(Seconds(9.0, 0.0, 0.0), 1, 0, 0, {"a": 1}),
        Segment(Seconds(3.0, 0.0, 0.0), 1, 1, 1, {"b": 1}),
    )
    assert balance(Priced((heavy, light), Pricing(8)), 2, 4) == (Span(0, 1, 3), Span(1, 2, 1))
    assert balance(Priced((heavy, light), Pricing(8, samples=4)), 2, 4) == (Span(0, 1, 2), Span(1, 2, 1))


def test_replicas_do_not_pay_where_gradients_take_longer_than_they_save() -> None:
    pricing = Pricing(1, within=Link(1.0, hidden=1.0))
    assert balance(Priced(even(2, weights=10), pricing), 1, 2) == (Span(0, 2, 1),)
    assert balance(Priced(even(2, weights=1), pricing), 1, 2) == (Span(0, 2, 2),)


def test_all_devices_are_divided_or_as_it_is_told() -> None:
    pricing = Pricing(1, within=Link(1.0, hidden=1.0))
    assert balance(Priced(even(2, weights=10), pricing), 1, Shares(2)) == (Span(0, 2, 2),)
    heavy, light = (Segment(Seconds(one, 0.0, 0.0), 1, 0, 0, {}) for one in (9.0, 3.0))
    priced = Priced((heavy, light), Pricing(8, samples=4))
    assert balance(Priced((heavy, light), Pricing(8)), 2, Shares(4, (1, 3))) == (Span(0, 1, 1), Span(1, 2, 3))
    assert balance(priced, 2, Shares(5)) == (Span(0, 1, 4), Span(1, 2, 1))
    with pytest.raises(ArgumentError, match=r"num_devices=7: they cannot be divided among 2 stages .* the 4 samples"):
        balance(priced, 2, Shares(7))


def test_early_stages_hold_more_microbatches() -> None:
    assert [span.end for span in balance(Priced(even(5), Pricing(8)), 2)] == [2, 5]
    priced = Priced(even(6), Pricing(8, bytes_per_parameter=1.0, memory_bytes=430.0, recompute=False))
    spans = balance(Priced(even(6), Pricing(8, bytes_per_parameter=1.0)), 3)
    assert [span.end for span in spans] == [2, 4, 6]
    assert [one.bytes for one in priced.costs(spans)] == [620, 420, 220]
    assert [span.end for span in balance(priced, 3)] == [1, 3, 6]


def test_stages_that_do_not_fit_run_again_in_the_backward_pass() -> None:
    tight = Pricing(8, bytes_per_parameter=1.0, memory_bytes=430.0)
    priced = Priced(even(6), tight)
    spans = balance(priced, 3)
    assert [span.recompute for span in spans] == [span == spans[0] for span in spans]
    assert priced.cost(Span(0, 1, 1, True), 3).seconds == 4
    assert priced.cost(Span(1, 3, 1, True), 2).bytes == 20 + 200 + 2 * 10
    always = balance(Priced(even(6), Pricing(8, recompute=True)), 3)
    assert all(span.recompute for span in always)


def test_what_cannot_be_is_refused() -> None:
    priced = Priced(even(3), Pricing(4, bytes_per_parameter=1.0, memory_bytes=200.0))
    with pytest.raises(
        ArgumentError, match=r"num_stages=4: the loss has 2 places to cut at, which makes 3 stages at most"
    ):
        balance(priced, 4)
    with pytest.raises(ArgumentError, match=r"num_stages=0: expected 1 or more"):
        balance(priced, 0)
    with pytest.raises(ArgumentError, match=r"num_devices=1: expected at least one for each of num_stages=2"):
        balance(priced, 2, 1)
    with pytest.raises(ArgumentError, match=r"memory_bytes=100: no cut .* one needs is 330 bytes a device"):
        balance(Priced(even(3), Pricing(4, bytes_per_parameter=1.0, memory_bytes=100.0)), 1)
    for name in ("num_microbatches", "memory_bytes", "bytes_per_parameter"):
        with pytest.raises(ArgumentError, match=f"{name}=0: expected a positive number"):
            replace(Pricing(1), **{name: 0})
