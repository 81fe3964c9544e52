"""The halves of a stage's backward pass, as a schedule runs them."""

import weakref
from typing import Any

import jax
import pytest
from jax.extend.core import Literal
from jax.extend.core.primitives import scan_p

from braidax.parallel.stages.running import flat
from braidax.parallel.stages.running.executor import Pipelined
from braidax.parallel.stages.schedules import zero_bubble_h1
from braidax.program import bytes_of
from tests.support.parallel.stages.running.cases import check, looped, mlp, pipelined


def watch(run: Pipelined, monkeypatch: pytest.MonkeyPatch, stage: int) -> tuple[list[Any], list[Any]]:
    """Records what a stage holds from `I` to `W`, and what it lets go."""
    own, held, gone = run.stage_programs[stage], list[Any](), list[Any]()
    inputs, weights = own.inputs, own.weights

    def to_inputs(moved: Any, others: Any, params: Any, given: Any, kept: Any, gradients: Any) -> Any:
        sent, left = inputs(moved, others, params, given, kept, gradients)
        staying = {id(one) for one in jax.tree.leaves(left)}
        gone.extend(weakref.ref(one) for one in (*moved, *kept, *gradients) if id(one) not in staying)
        held.append(sum(bytes_of(jax.typeof(one)) for one in jax.tree.leaves(left)))
        return sent, left

    def to_weights(sums: Any, left: Any, params: Any, given: Any) -> Any:
        assert not any(one() is not None and not one().is_deleted() for one in gone), "it is dropped after I"
        result = weights(sums, left, params, given)
        assert all(one.is_deleted() for one in sums)
        assert not any(one.is_deleted() for one in jax.tree.leaves((left, params, given)))
        return result

    monkeypatch.setattr(own, "inputs", to_inputs)
    monkeypatch.setattr(own, "weights", to_weights)
    return held, gone


def test_what_weights_do_not_need_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    case = mlp(4)
    run = pipelined(case, zero_bubble_h1(3, 4))
    expected = case.expected(4)
    held, gone = watch(run, monkeypatch, 1)
    check(run, case, expected)
    halves = run.stage_programs[1].halves
    assert len(held) == 4
    assert len(gone) >= 4  # masks of dropout, and derivatives, in a buffer
    assert set(held) == {halves.kept_bytes}


def test_what_is_handed_on_lies_where_what_was_kept_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "SMALL_BYTES", 0)  # all are large
    case = looped(4)
    run = pipelined(case, zero_bubble_h1(3, 4))
    own, seen = run.stage_programs[1], list[Any]()
    inputs = own.inputs

    def to_inputs(moved: Any, others: Any, params: Any, given: Any, kept: Any, gradients: Any) -> Any:
        sent, left = inputs(moved, others, params, given, kept, gradients)
        seen.append(([(one.shape, one.is_deleted()) for one in kept], [one.shape for one in jax.tree.leaves(left)]))
        return sent, left

    monkeypatch.setattr(own, "inputs", to_inputs)
    check(run, case, case.expected(4))
    (kept, left), *others = seen
    layer = (1, 4, 4)
    assert kept == [(layer, True), (layer, False)]  # what a product lay in has cotangents now
    assert left == [layer, layer]  # these, and the input of the product
    assert others == [(kept, left)] * 3


@pytest.mark.parametrize("recompute", [(), pytest.param((True, True), marks=pytest.mark.slow)])
def test_on_several_devices_a_stage(recompute: tuple[bool, ...]) -> None:
    case = looped(4)
    run = pipelined(case, zero_bubble_h1(2, 4), inner=2, recompute=recompute)
    check(run, case, case.expected(4))
    halves = run.stage_programs[1].halves
    assert {one.spec for one in halves.handed_shardings} <= {jax.P("data"), jax.P(None, "data")}
    assert jax.P(None, "data") in {one.spec for one in halves.handed_shardings}  # stacked by a loop


def test_sums_of_scanned_layers_are_added_to_in_the_loop_that_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "SMALL_BYTES", 0)  # each has a buffer of its own
    case = looped(4)
    run = pipelined(case, zero_bubble_h1(2, 4))
    carried: dict[int, set[tuple[int, ...]]] = {}

    def watch_sums(owner: Any, name: str, stage: int) -> None:
        program = getattr(owner, name)

        def call(*args: Any) -> Any:
            jaxpr = program.trace(*args).jaxpr.jaxpr
            loops = [one for one in jaxpr.eqns if one.primitive is scan_p]
            read = {atom for one in loops for atom in one.invars if not isinstance(atom, Literal)}
            carried[stage] = {one.aval.shape for one in jaxpr.invars[: len(args[0])] if one in read}
            return program(*args)

        monkeypatch.setattr(owner, name, call)

    watch_sums(run.stage_programs[0], "backward", 0)
    watch_sums(run.stage_programs[1].forward_backward.halves, "_to_weights", 1)
    check(run, case, case.expected(4))
    for stage, own in enumerate(run.stage_programs):
        layers = {spec.shape for spec in own.sums.specs if len(spec.shape) == 3}
        assert layers
        assert layers <= carried[stage]
