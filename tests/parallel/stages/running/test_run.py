"""In which order a batch is dispatched."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from braidax.parallel.stages.products import AS_IS, PACKED
from braidax.parallel.stages.running.dispatch_order import at_once
from braidax.parallel.stages.running.executor import Pipelined
from braidax.parallel.stages.running.home import Home
from braidax.parallel.stages.running.sending.route import Route
from braidax.parallel.stages.schedules import (
    Kind,
    Operation,
    Schedule,
    eager_one_forward_one_backward,
    gpipe,
    one_forward_one_backward,
    pipedream,
    v_min,
    with_transfers,
    zero_bubble_h1,
)
from braidax.parallel.stages.schedules.dependencies import Dependencies
from braidax.program.halving import held, turned_weights
from tests.support.parallel.stages.running.cases import Case, check, gradients_of, mlp, pipelined
from tests.support.program.cutting.models import draw


@pytest.mark.parametrize("make", [one_forward_one_backward, zero_bubble_h1])
def test_sums_begin_where_a_device_stands_still(make: Any) -> None:
    """The first one before it has a gradient; the others until something comes."""
    run, case = pipelined(mlp(2), make(2, 4)), mlp(2)
    order = _noted(run, ("zeros", "forward", "backward", "weights", "forward_backward"))
    gradients_of(run, case)
    first, second = ([name for name, stage in order if stage == at] for at in range(2))
    weights = "weights" if make is zero_bubble_h1 else "backward"
    assert first[:4] == ["forward", "forward", "zeros", weights]
    assert second[:2] == ["zeros", "forward_backward"]
    assert [own.count("zeros") for own in (first, second)] == [1, 1]


@pytest.mark.parametrize(("tied", "begins"), [(False, ["forward", "forward", "turn"]), (True, ["turn", "forward"])])
def test_weights_are_turned_once_where_a_device_stands_still(
    tied: bool, begins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one before it has a gradient, unless its forward pass takes them, too."""
    monkeypatch.setattr(turned_weights, "LARGE_BYTES", 0)
    case = dense(tied=tied)
    run = pipelined(case, one_forward_one_backward(2, 4))
    order = _noted(run, ("turn", "forward", "backward", "forward_backward"))
    check(run, case, case.expected(4))
    first, second = ([name for name, stage in order if stage == at] for at in range(2))
    assert first[: len(begins)] == begins
    assert second[:2] == ["turn", "forward_backward"]
    assert [own.count("turn") for own in (first, second)] == [1, 1]
    assert all(one.products is PACKED for one in run.stage_programs)


@pytest.mark.parametrize("make", [lambda: gpipe(2, 3), lambda: pipedream(2, 4)])
def test_few_microbatches_and_versions_of_weights_are_not_worth_turning(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turned_weights, "LARGE_BYTES", 0)
    run = pipelined(dense(samples=12), make())
    assert [(one.turns, one.products) for one in run.stage_programs] == [(False, AS_IS)] * 2


@pytest.mark.parametrize("make", [one_forward_one_backward, zero_bubble_h1])
def test_all_passes_of_a_stage_on_a_cpu_are_packed_and_compute_values_once(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turned_weights, "LARGE_BYTES", 0)
    monkeypatch.setattr(held, "_LARGE_BYTES", 0)
    compiled, seen = Home.compile, set[tuple[str, bool, bool]]()

    def compile(self: Home, fn: Any, ins: Any, outs: Any, **options: Any) -> Any:
        run = compiled(self, fn, ins, outs, **options)

        def called(*args: Any) -> Any:
            once = "bitcast_convert_type" in str(jax.make_jaxpr(fn)(*args))
            seen.add((fn.__name__, options.get("products") is PACKED, once))
            return run(*args)

        return called

    monkeypatch.setattr(Home, "compile", compile)
    run, case = pipelined(dense(), make(2, 4)), dense()
    check(run, case, case.expected(4))
    kinds = {(name, is_packed) for name, is_packed, _ in seen}
    passes = {"_forward", "run"} | ({"_inputs"} if make is zero_bubble_h1 else set())  # `run` adds to sums
    assert kinds == {(name, True) for name in passes} | {(name, False) for name, _ in kinds if name not in passes}
    assert {name for name, _, once in seen if once} == passes


@pytest.mark.parametrize("make", [one_forward_one_backward, zero_bubble_h1, gpipe])
def test_a_last_stage_goes_there_and_back_in_one_program_unless_somebody_observes(make: Any) -> None:
    run, case = pipelined(mlp(2), make(2, 4)), mlp(2)
    order = _noted(run, ("forward", "backward", "inputs", "forward_backward"))
    expected = case.expected(4)
    check(run, case, expected)
    back = "inputs" if make is zero_bubble_h1 else "backward"
    counts = {"forward": 4, back: 4} if make is gpipe else {"forward_backward": 4}
    assert Counter(name for name, stage in order if stage == 1) == counts
    order.clear()
    run.observe = lambda operation, outputs: None
    check(run, case, expected)
    assert Counter(name for name, stage in order if stage == 1) == {"forward": 4, back: 4}


def test_of_one_stage_alone_the_second_half_has_the_whole_way_back() -> None:
    run, case = pipelined(mlp(2), zero_bubble_h1(1, 4)), mlp(2)
    order = _noted(run, ("forward", "backward", "forward_backward"))
    check(run, case, case.expected(4))
    assert Counter(name for name, _ in order) == {"forward_backward": 4}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (zero_bubble_h1(1, 2), {"0F0": "0I0", "0F1": "0I1"}),
        (one_forward_one_backward(2, 3), {"1F0": "1B0", "1F1": "1B1", "1F2": "1B2"}),  # receives are in between
        (zero_bubble_h1(3, 2), {"2F0": "2I0", "2F1": "2I1"}),
        (gpipe(2, 3), {}),
        (gpipe(2, 1), {"1F0": "1B0"}),
        (eager_one_forward_one_backward(2, 3), {"1F0": "1B0", "1F1": "1B1", "1F2": "1I2"}),
        (v_min(2, 2), {"3F0": "3I0", "3F1": "3I1"}),  # and no other stage of the same device
    ],
    ids=lambda one: one.name if isinstance(one, Schedule) else "",
)
def test_which_operations_are_one_program(schedule: Schedule, expected: dict[str, str]) -> None:
    found = at_once(with_transfers(schedule))
    assert {str(one): str(back) for one, back in found.items()} == expected


@pytest.mark.parametrize("is_apart", [True, False])
def test_what_all_others_wait_for_is_computed_before_more_is_dispatched(
    is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it goes to another process: on a CPU dispatching takes its time from the same cores."""
    run, case = pipelined(mlp(2), one_forward_one_backward(2, 4)), mlp(2)
    order = _noted(run, ("forward",))
    waits, wait = list[tuple[int, Any]](), jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda one: (waits.append((len(order), one)), wait(one))[1])
    monkeypatch.setattr(Route, "sends", property(lambda _: is_apart))
    gradients_of(run, case)
    assert [count for count, _ in waits] == [1] * is_apart
    for _, arrays in waits:
        assert [one.shape for one in arrays] == [one.shape for one in run.stage_programs[0].stage.outgoing]


def test_options_of_the_user_prevail_over_those_of_products() -> None:
    mesh, (name,) = Mesh(np.array(jax.devices()[:1]), "stage"), PACKED
    x = jnp.ones((16, 16))
    for given, is_told in ((None, False), ({name: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}, True)):
        home = Home(mesh, compiler_options=given)
        run = home.compile(lambda x: x @ x, (home.whole,), home.whole, products=PACKED)
        assert ("__ynn_fusion" in run.lower(x).compile().as_text()) is is_told


def test_what_is_sent_is_on_its_way_before_somebody_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody looks at it behind the next computation, which may take over its memory."""
    run, case, events = pipelined(mlp(2), one_forward_one_backward(2, 4)), mlp(2), list[tuple[str, Any]]()
    ways, send = [way for pair in run._ways for way in (pair.forward, pair.backward)], Route.send

    def sent(route: Route, arrays: Any) -> Any:
        if route in ways:
            events.append(("sent", None))
        return send(route, arrays)

    def observed(operation: Operation, outputs: Any) -> Callable[[], None]:
        events.append(("dispatched", operation))
        return partial(look, operation, outputs)

    def look(operation: Operation, outputs: Any) -> None:
        assert not any(one.is_deleted() for one in jax.tree.leaves(outputs))
        events.append(("observed", operation))

    monkeypatch.setattr(Route, "send", sent)
    run.observe = observed
    gradients_of(run, case)
    sends = [one for one in run._order if one.kind in (Kind.SEND_F, Kind.SEND_B)]
    computed = [one for one in run._order if one not in sends and one.kind is not Kind.UPDATE]
    assert [what for name, what in events if name == "dispatched"] == computed
    assert sorted(what for name, what in events if name == "observed") == sorted(computed)
    places = [at for at, (name, _) in enumerate(events) if name == "sent"]
    assert len(places) == 8
    for place, (need,) in zip(places, map(Dependencies(run.schedule).of, sends), strict=True):
        assert place < events.index(("observed", need)), str(need)


def dense(*, tied: bool = False, samples: int = 16) -> Case:
    """Layers; what the first one multiplies by is turned, too, if that is asked for."""

    def loss(params: Any, batch: Any, key: Any, variables: Any) -> Any:
        x = batch["x"] @ (params["w0"].T if tied else params["w0"])
        for at in range(1, 4):
            x = x - x.mean(-1, keepdims=True) + 1.0
            x = (x * jnp.tanh(x)) @ params[f"w{at}"]
        return ((x.sum(-1) - batch["y"]) ** 2).mean(), {"variables": variables}

    params = {f"w{at}": draw(4, 4, seed=at) for at in range(4)}
    return Case(loss, params, {}, {"x": draw(samples, 4, seed=50), "y": draw(samples, seed=51)})


def _noted(run: Pipelined, names: Sequence[str]) -> list[tuple[str, int]]:
    """Returns what is told of programs by these names, with the stage, when they are called."""
    order: list[tuple[str, int]] = []

    def noting(name: str, stage: int, made: Any) -> Any:
        def called(*args: Any) -> Any:
            order.append((name, stage))
            return made(*args)

        return called

    for stage, one in enumerate(run.stage_programs):
        for name in names:
            if name != "forward_backward":
                setattr(one, name, noting(name, stage, getattr(one, name)))
            elif not one.stage.outgoing:
                whole = one.forward_backward
                for owner, part in ((whole, "whole"), (whole.halves, "inputs")):
                    setattr(owner, part, noting(name, stage, getattr(owner, part)))
    return order
