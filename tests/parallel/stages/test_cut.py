"""A loss cut by what its segments cost."""

from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.errors import ArgumentError
from braidax.parallel.stages.balance import Priced, Pricing, Span
from braidax.parallel.stages.cut import CutLoss, _expected_slowest, cut, remembered
from braidax.parallel.stages.segments import Seconds, counted, measured, segments_of
from braidax.program import Chain, Stage, cost_behind, cost_of, trace
from tests.support.parallel.models import refused
from tests.support.program.cutting.models import draw, gpt, layers, residual

CASES = {"layers": layers(9), "gpt": gpt(8), "residual": residual()}


def refusing(stage: Stage, params: int) -> Seconds:
    raise AssertionError("nothing is timed")


def layers_of(stage: Stage) -> tuple[int, ...]:
    """The numbers of the layers that a stage of `layers` has."""
    return tuple(sorted(int(leaf.name[1:]) for leaf in stage.leaves if leaf.name.startswith("w")))


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [("layers", 4), *(pytest.param("gpt", num, marks=pytest.mark.slow) for num in (2, 4, 8)), ("residual", 4)],
)
def test_the_slowest_stage_is_that_of_the_best_cut(name: str, num_stages: int) -> None:
    program, pricing = CASES[name].traced(), Pricing(4)
    found = cut(program, num_stages, pricing=pricing, clock=counted())
    chain = Chain(program)
    borders = chain.borders()
    segments = segments_of(chain.stages(borders), counted())
    priced = Priced(segments, pricing)
    best = min(
        max(priced.cost(Span(*ends), 1).seconds for ends in pairwise((0, *cuts, len(segments))))
        for cuts in combinations(range(1, len(segments)), num_stages - 1)
    )
    assert len(found.stages) == num_stages
    own = segments_of(chain.stages(found.borders), counted())
    slowest = max(one.seconds.total for one in own)
    assert slowest == pytest.approx(found.slowest_seconds)
    assert slowest <= 1.02 * best


def test_what_the_first_stage_reads_of_a_batch_is_not_what_another_is_sent() -> None:
    """Both compute the same, and no gradient goes back to a batch."""

    def loss(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, batch, params)[0].sum(), {}

    chain = Chain(trace(loss, draw(4, 3, 3), {}, jax.random.key(0), draw(2, 3)))
    borders = [one for one in chain.borders() if one.iteration]
    first, second, third, _ = chain.stages(borders)
    assert first.told() != second.told() == third.told()
    assert [one.seconds.inputs > 0 for one in segments_of((first, second, third), counted())] == [False, True, True]


def test_segments_tell_parameters_and_bytes_and_equal_ones_are_timed_as_one_at_two_moments() -> None:
    chain, calls = Chain(gpt(8).traced()), list[str]()

    def clock(stage: Stage, params: int) -> Seconds:
        calls.append(stage.told())
        return Seconds(1.0, 3.0, 1.0) if calls.count(calls[-1]) == 1 else Seconds(2.0, 2.0, 2.0)

    borders = [one for one in chain.borders() if one.iteration] + [chain.borders()[0]]
    segments = segments_of(chain.stages(borders), clock)
    assert len(segments) == 9
    first, second = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    assert first == second
    assert len(first) == len({*first}) <= 4
    assert {one.seconds for one in segments} == {Seconds(1.0, 2.0, 1.0)}
    sizes = {"scale": 8, "qkv": 8 * 24, "out": 64, "up": 128, "down": 128}
    assert segments[3].leaves == {(f"layers/{name}", (2, 3)): 4 * size for name, size in sizes.items()}
    assert segments[3].incoming_bytes == segments[3].float_bytes == 4 * 5 * 8 * 2 + 2 * 2
    assert segments[3].kept_bytes == 4 * 5 * 8 * 2 + 8


def test_counted_seconds() -> None:
    chain = Chain(gpt(2).traced())
    first, *_, last = chain.stages(chain.borders())
    clock = counted(flops_per_second=1e12, bytes_per_second=1e3)
    jaxpr = first.program.closed.jaxpr
    costs = cost_of(jaxpr), cost_behind(jaxpr, jaxpr.invars[:2])  # what adds words and places
    whole, behind = (one.read_bytes + one.written_bytes for one in costs)
    assert 0 < behind < whole
    assert clock(first, 0).inputs == 0.0  # nothing comes in
    assert clock(last, 0).weights == 0.0  # it has no parameters
    assert clock(last, 0).inputs == clock(last, 0).forward > 0.0
    assert clock(first, 0).weights == pytest.approx((whole + behind) / 1e3)
    assert clock(first, 0).forward > 1e8 * counted(flops_per_second=1e12, bytes_per_second=1e12)(first, 0).forward


@pytest.mark.parametrize("program", [layers(4, 64), gpt(4)], ids=["layers", "gpt"])
def test_counted_seconds_of_the_first_stage_are_about_those_of_its_segments(program: Any) -> None:
    """Gradients go back through all of it, but for what reads its first parameters."""
    chain = Chain(program.traced())
    borders = chain.borders()
    clock = counted(flops_per_second=1e9, bytes_per_second=1e30)
    segments = [clock(stage, 0).total for stage in chain.stages(borders)]
    for count in (2, 3):
        whole = clock(chain.stages(borders[count - 1 : count])[0], 0)
        assert whole.inputs == 0.0
        assert whole.total == pytest.approx(sum(segments[:count]), rel=0.15)


def test_stages_that_take_longer_than_their_segments_are_corrected() -> None:
    """Two layers in one stage are said to take three times as long as alone, but for the last ones."""

    def clock(stage: Stage, params: int) -> Seconds:
        names = {leaf.name for leaf in stage.leaves if leaf.name.startswith("w")}
        slow = 3.0 if len(names) > 1 and "w0" in names else 1.0
        return Seconds(len(names) * slow, 0.0, 0.0)

    found = cut(layers(4).traced(), 2, pricing=Pricing(2), clock=clock)
    assert [len(stage.leaves) for stage in found.stages] == [3, 7]  # one layer and x, three layers and y
    assert [one.forward for one in found.seconds] == [1.0, 3.0]
    assert found.slowest_seconds == 3.0


def test_a_stage_is_looked_at_twice_and_the_shorter_time_is_remembered() -> None:
    (stage,) = Chain(layers(1).traced()).stages(())
    times = iter([Seconds(1.0, 3.0, 1.0), Seconds(2.0, 2.0, 2.0)])
    clock = remembered(lambda stage, params: next(times))
    assert [clock(stage, 0) for _ in range(3)] == [Seconds(1.0, 3.0, 1.0), *[Seconds(1.0, 2.0, 1.0)] * 2]


def test_cuts_that_are_about_as_good_are_timed_in_turns() -> None:
    """Two and two layers are cut best, which the first two looks at the first two, at a slow moment, do not show."""
    order = list[tuple[int, ...]]()
    seconds = {(0,): 2.0, (1,): 0.1, (2,): 0.1, (3,): 1.9, (0, 1): 2.0, (2, 3): 2.0, (1, 2, 3): 2.2}

    def clock(stage: Stage, params: int) -> Seconds:
        own = layers_of(stage)
        order.append(own)
        return Seconds(2.25 if own == (0, 1) and order.count(own) <= 2 else seconds[own], 0.0, 0.0)

    found = cut(layers(4).traced(), 2, pricing=Pricing(2), clock=clock)
    assert found.slowest_seconds == 2.0
    assert [len(stage.leaves) for stage in found.stages] == [5, 5]
    turns = [one for one in order if len(one) > 1][-6:]
    assert turns[:3] == turns[3:]
    assert {(0, 1), (1, 2, 3)} <= {*turns}


def test_a_stage_that_takes_much_longer_than_its_segments_is_timed_again() -> None:
    """Two and two layers are cut best, and were timed while the machine was slow."""
    order = list[tuple[int, ...]]()

    def clock(stage: Stage, params: int) -> Seconds:
        own = layers_of(stage)
        order.append(own)
        is_slow = len(own) == 2 and order.count(own) <= 2
        return Seconds(1.6 * len(own) if is_slow else float(len(own)), 0.0, 0.0)

    found = cut(layers(4).traced(), 2, pricing=Pricing(2), clock=clock)
    assert [one.total for one in found.seconds] == [2.0, 2.0]
    assert {own: order.count(own) for own in order} == {(0,): 2, (2,): 2, (3,): 2, (0, 1): 4, (2, 3): 4}


def test_a_stage_that_does_take_longer_than_its_segments_is_timed_again_once() -> None:
    """The first two of five layers are a stage of two cuts that are tried, which are timed in turns at the end."""
    order = list[tuple[int, ...]]()

    def clock(stage: Stage, params: int) -> Seconds:
        order.append(layers_of(stage))
        return Seconds(1.5 * len(order[-1]) if len(order[-1]) > 1 else 1.0, 0.0, 0.0)

    cut(layers(5).traced(), 3, pricing=Pricing(2), clock=clock)
    assert order.count((0, 1)) == 2 + 2 + 3


def test_of_cuts_that_are_about_as_good_one_with_fewer_slow_stages_is_taken() -> None:
    """One layer and three take 2.36 and 2.38 s, three and one 2.40 and 1.2: the former are rarely both that fast."""
    seconds = {(0,): 2.36, (1,): 1e-3, (2,): 1e-3, (3,): 1.2, (1, 2, 3): 2.38, (0, 1, 2): 2.4}

    def clock(stage: Stage, params: int) -> Seconds:
        return Seconds(seconds[layers_of(stage)], 0.0, 0.0)

    found = cut(layers(4).traced(), 2, pricing=Pricing(2), clock=clock)
    assert found.slowest_seconds == pytest.approx(2.4)
    assert found.seconds[1].total == pytest.approx(1.2)


def test_stages_that_compute_the_same_count_as_one_slow_stage() -> None:
    """Of six layers that take as long the four in the middle do."""
    found = cut(layers(6).traced(), 6, pricing=Pricing(2), clock=lambda stage, params: Seconds(1.0, 0.0, 0.0))
    assert found.slowest_seconds == 1.0
    assert _expected_slowest(found) == pytest.approx(3 ** (1 / 32))


def test_measured_seconds_of_the_passes() -> None:
    chain = Chain(layers(3, 8).traced())
    first, second, _ = chain.stages(chain.borders())
    clock = measured(num_runs=2)
    assert clock(first, 0).inputs == 0.0
    assert clock(first, 0).weights > 0.0
    seconds = clock(second, 0)
    assert seconds.forward > 0.0
    assert seconds.inputs > 0.0
    assert 1e-6 < seconds.total < 5.0


def test_cuts_by_name_and_what_is_printed() -> None:
    found = cut(layers().traced(), cuts=("layer_4", "layer_1"), pricing=Pricing(4), num_devices=4, clock=counted())
    assert [sorted(leaf.name for leaf in stage.leaves if leaf.name[0] in "bw") for stage in found.stages] == [
        ["b0", "w0"], ["b1", "b2", "b3", "w1", "w2", "w3"], ["b4", "b5", "w4", "w5"]
    ]  # fmt: skip
    assert found.replicas == (1, 2, 1)
    lines = str(found).splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("0      1        ")
    assert lines[2].startswith("1      2        ")
    assert "before" in lines[2]
    assert "models.py:" in lines[2]
    again = cut(layers().traced(), 2, pricing=Pricing(4, recompute=True), clock=counted())
    assert again.recompute == (True, True)
    assert "again in the backward pass" in str(again).splitlines()[1]


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too many": (layers(), {"num_stages": 7}, "num_stages=7: the loss has 5 places to cut at"),
    "devices": (layers(), {"num_stages": 3, "num_devices": 2}, "num_devices=2: expected at least one"),
    "scope": (layers(), {"cuts": ("head",)}, "cuts has 'head', which is no jax.named_scope"),
    "twice": (layers(), {"cuts": ("layer_2", "layer_2")}, "cuts has 'layer_2' and 'layer_2', which begin at one place"),
    "both": (layers(), {"cuts": ("layer_2",), "num_stages": 2}, r"num_stages=2, cuts=\['layer_2'\]: expected one of"),
    "neither": (layers(), {}, r"num_stages=None, cuts=\[\]: expected one of them"),
    "memory": (layers(), {"num_stages": 2, "pricing": Pricing(2, memory_bytes=1)}, "memory_bytes=1: no cut into 2"),
    "mixing": (
        residual(norm=True), {"num_stages": 2},
        r"the loss mixes samples: what .*models.py:\d+ computes of one .* num_microbatches=4 .* mixes_samples=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_cut_is_refused_before_anything_is_compiled(name: str) -> None:
    case, given, words = BAD[name]
    options: dict[str, Any] = {"pricing": Pricing(4), "clock": refusing, **given}
    program = case.traced()
    with refused(ArgumentError, words):
        cut(program, **options)


def test_mixed_samples_may_be_accepted() -> None:
    program = residual(norm=True).traced()
    one: CutLoss = cut(program, 2, pricing=Pricing(1), clock=counted())
    other = cut(program, 2, pricing=Pricing(4), clock=counted(), mixes_samples=True)
    assert one.borders == other.borders
    assert jnp.isfinite(one.slowest_seconds)
