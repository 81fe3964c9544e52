"""Schedules, run: gradients, metrics and variables are those of one device with the same microbatches."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.errors import ArgumentError
from braidax.parallel.stages.running import flat
from braidax.parallel.stages.running.executor import Pipelined
from braidax.parallel.stages.schedules import (
    Schedule,
    format_csv,
    gpipe,
    interleaved,
    one_forward_one_backward,
    parse_csv,
    pipedream,
    zero_bubble_h1,
    zero_bubble_v,
)
from tests.support.parallel.models import recorded_events, refused
from tests.support.parallel.stages.pipelines import FLUSHED
from tests.support.parallel.stages.running.cases import (
    Case,
    check,
    gradients_of,
    key_and_batch,
    meshes_of,
    mlp,
    pipelined,
    placed,
    small_gpt,
    stages_of,
)
from tests.support.program.cutting.models import draw, residual


@functools.cache
def of_two_stages() -> Pipelined:
    """What several tests run: it keeps nothing."""
    return pipelined(mlp(2), one_forward_one_backward(2, 4))


def of_layout(name: str, devices: int, count: int) -> list[Schedule]:
    """All named schedules that have stages on the devices where one has them."""
    first = FLUSHED[name](devices, count)
    others = [make(devices, count) for make in FLUSHED.values()]
    return [one for one in others if one.device_of_stage == first.device_of_stage]


@pytest.mark.parametrize(
    ("layout", "devices", "count"),
    [
        ("1F1B", 2, 4),
        pytest.param("Interleaved1F1B", 2, 4, marks=pytest.mark.slow),  # a V has two stages a device, too
        ("ZB-V", 2, 4),
        pytest.param("1F1B", 4, 8, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", 4, 8, marks=pytest.mark.slow),
        pytest.param("ZB-V", 4, 8, marks=pytest.mark.slow),
    ],
)
def test_all_schedules_that_flush_equal_one_device(layout: str, devices: int, count: int) -> None:
    case = mlp(4 * devices // 2, samples=4 * count)
    first, *others = of_layout(layout, devices, count)
    run, expected = pipelined(case, first), case.expected(count)
    check(run, case, expected)
    for schedule in others:
        check(run.scheduled(schedule), case, expected)
    assert len(others) == {"1F1B": 3, "Interleaved1F1B": 0, "ZB-V": 3}[layout]


@pytest.mark.slow  # test_pipelined_step.py has layers in a loop, and weights that two stages read are above
@pytest.mark.parametrize(
    "schedule",
    [one_forward_one_backward(2, 4), zero_bubble_h1(4, 4), zero_bubble_v(2, 4), interleaved(2, 4)],
    ids=lambda one: f"{one.name} {one.num_devices}",
)
def test_layers_in_a_loop_with_tied_embeddings(schedule: Schedule) -> None:
    case = small_gpt(4)
    run = pipelined(case, schedule)
    names = [name for name, _ in jax.tree_util.tree_leaves_with_path(case.params)]
    loop = [one for own in run.ownership.pieces for one in own if one.rows is not None]
    assert {str(names[one.leaf][0]) for one in loop} == {"['layers']"}
    assert len({one.owner for read in run.ownership.reads for one in read}) == schedule.num_stages
    table = names.index(next(name for name in names if "table" in str(name)))
    readers = [stage for stage, reads in enumerate(run.ownership.reads) if table in [one.piece.leaf for one in reads]]
    assert readers == [0, schedule.num_stages - 1]
    check(run, case, case.expected(4))


def test_several_devices_a_stage_divide_the_samples_and_one_stage_runs_again() -> None:
    case = mlp(2)
    run = pipelined(case, one_forward_one_backward(2, 4), inner=2, recompute=(True, False))
    assert [len(one.ran_shardings.kept) > 0 for one in run.stage_programs] == [False, True]
    check(run, case, case.expected(4))
    x = gradients_of(run, case).results[2]
    assert x.sharding.spec == jax.P(("data",))
    assert x.sharding.device_set == {*jax.devices()[2:4]}


def test_rows_that_none_reads_lie_with_a_neighbor() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for at in range(1, 4):
            x = jnp.tanh(x @ jax.lax.slice_in_dim(params["stack"], at, at + 1)[0])
        return ((x.sum(-1) + params["places"][:4].sum() - batch["y"]) ** 2).mean()

    params = {"stack": draw(6, 4, 4), "places": draw(9)}
    case = Case(loss, params, {}, {"x": draw(8, 4, seed=50), "y": draw(8, seed=51)})
    run = pipelined(case, gpipe(3, 2))
    owned = [[piece.rows for piece in own if piece.leaf == 1] for own in run.ownership.pieces]
    assert owned == [[(0, 2)], [(2, 3)], [(3, 6)]]  # read are 1 to 4
    check(run, case, case.expected(2))


@pytest.mark.slow
def test_many_microbatches_on_several_devices_a_stage() -> None:
    """More programs than XLA takes at once for CPU devices that wait for one another."""
    case = mlp(4, samples=128)
    check(pipelined(case, gpipe(2, 64), inner=2), case, case.expected(64))


def test_large_arrays_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "SMALL_BYTES", 0)
    case = mlp(4, samples=8)
    run = pipelined(case, zero_bubble_v(2, 2))
    assert all(len(one.flat.alone_places) == len(one.read_pieces) for one in run.stage_programs)
    check(run, case, case.expected(2))


@pytest.mark.parametrize("make", [one_forward_one_backward, zero_bubble_h1])
def test_sums_of_long_weights_lie_turned(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the table, whose gradient is no product, and what is wide or square."""
    monkeypatch.setattr(flat, "SMALL_BYTES", 0)
    sizes = {"table": (9, 6), "long": (6, 4), "wide": (4, 8), "longer": (8, 3), "square": (3, 3)}

    def loss(params: Any, batch: Any, key: Any, variables: Any) -> Any:
        x = params["table"][batch["ids"]]
        for name in ("long", "wide", "longer", "square"):
            x = jnp.tanh(x @ params[name])
        return ((x.sum(-1) - batch["y"]) ** 2).mean(), {"variables": variables}

    params = {name: draw(*size, seed=at) for at, (name, size) in enumerate(sizes.items())}
    batch = {"ids": jnp.arange(16, dtype=jnp.int32) % 9, "y": draw(16, seed=9)}
    case = Case(loss, params, {}, batch)
    run = pipelined(case, make(2, 4))
    forms = [
        programs.sums.specs[leaf].shape for programs in run.stage_programs for leaf in sorted(programs.sums.turned)
    ]
    assert sorted(forms) == [(6, 4), (8, 3)]
    check(run, case, case.expected(4))


def test_one_microbatch_and_one_stage() -> None:
    case = mlp(2, samples=4)
    check(pipelined(case, gpipe(1, 1)), case, case.expected(1))


def test_variables_change_with_each_microbatch_where_they_lie() -> None:
    """Statistics of a batch, from microbatch to microbatch, as on one device."""
    made = residual(norm=True)
    params, variables, key, _ = made.args

    def loss(params: Any, batch: Any, variables: Any) -> Any:
        return made.loss(params, variables, key, batch)

    batch = {"image": draw(8, 8, 8, 3, seed=30), "label": jnp.arange(8, dtype=jnp.int32) % 5}
    case = Case(loss, params, variables, batch)
    run = pipelined(case, zero_bubble_h1(2, 2))
    assert {one.stage for one in run.carried} == {0, 1}
    check(run, case, case.expected(2))


def test_nothing_is_traced_or_compiled_again() -> None:
    case = mlp(2)
    run = pipelined(case, zero_bubble_h1(2, 4))
    given = *placed(run, case), *key_and_batch(run, case)
    with recorded_events() as first:
        run.gradients(*given)
    with recorded_events() as second:
        for _ in range(2):
            run.gradients(*given)
    compiled = [event for event in first if event.endswith("backend_compile_duration")]
    assert 0 < len(compiled) <= 2 * 9
    assert not [event for event in second if "compile" in event or "trace" in event]


def test_memory_of_sums_and_of_what_came_in_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = mlp(2)
    run = of_two_stages()
    dead: list[Any] = []
    first, last = run.stage_programs
    passes = (first, "backward", first.backward), (last.forward_backward, "whole", last.forward_backward.whole)
    for owner, name, run_it in passes:

        def backward(sums: Any, moved: Any, *rest: Any, then: Any = run_it) -> Any:
            result = then(sums, moved, *rest)
            dead.extend((*sums, *moved))
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(rest))
            return result

        monkeypatch.setattr(owner, name, backward)
    given = placed(run, case)
    run.gradients(*given, *key_and_batch(run, case))
    assert len(dead) >= 2 * 4 + 4
    assert all(one.is_deleted() for one in dead)
    assert not any(one.is_deleted() for one in jax.tree.leaves((given, case.batch)))


def test_each_leaf_of_a_batch_goes_to_the_stages_that_use_it() -> None:
    run = of_two_stages()
    assert run.batch_homes == [1, 0, 1]  # mask, x, y
    assert [sorted(one.batch) for one in run.feeding] == [[1], [0, 2]]


def test_a_schedule_from_csv_is_run() -> None:
    case = mlp(2)
    schedule = parse_csv(format_csv(gpipe(2, 4)))
    assert schedule.lists == gpipe(2, 4).lists
    run = of_two_stages().scheduled(schedule)
    check(run, case, case.expected(4))


def refuse(case: Case, schedule: Schedule, *, stages: int | None = None, meshes: int | None = None) -> Pipelined:
    program = case.traced(schedule.num_microbatches)
    own = stages_of(program, schedule.num_stages if stages is None else stages)
    return Pipelined(program, own, schedule, meshes_of(schedule.num_devices if meshes is None else meshes))


def reading_late() -> Case:
    """The first layer reads what the last one changes."""

    def loss(params: Any, batch: Any, variables: Any) -> Any:
        x = jnp.tanh(batch @ params["a"] * variables["scale"])
        x = jnp.tanh(x @ params["b"])
        return (x @ params["c"]).sum(), {"variables": {"scale": jnp.abs(x).max()}}

    return Case(loss, {name: draw(4, 4) for name in "abc"}, {"scale": jnp.ones(())}, draw(4, 4))


@pytest.mark.parametrize(
    ("made", "make", "words"),
    [
        (
            mlp,
            lambda case: refuse(case, pipedream(2, 4)),
            "params/tied is read by stages 0 and 1, and by sched",
        ),
        (
            mlp,
            lambda case: refuse(case, gpipe(2, 4)).scheduled(pipedream(2, 4)),
            "schedule has num_updates=4, expected 1, for which stages are compiled",
        ),
        (mlp, lambda case: refuse(case, gpipe(2, 4), stages=3), "stages has 3, and schedule 'GPipe' is of 2 on 2 dev"),
        (mlp, lambda case: refuse(case, gpipe(2, 4), meshes=3), "meshes has 3, and schedule 'GPipe' has lists for 2"),
        (
            mlp,
            lambda case: refuse(case, gpipe(2, 4)).scheduled(gpipe(2, 8)),
            "schedule has num_microbatches=8, expected",
        ),
        (
            reading_late,
            lambda case: refuse(case, gpipe(3, 2)),
            "variables/scale is changed with each microbatch by stage 2 and read by stage 0",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(made: Any, make: Any, words: str) -> None:
    case = made()
    with refused(ArgumentError, words):
        make(case)


def test_a_batch_that_microbatches_do_not_divide_is_refused() -> None:
    case, run = mlp(2), of_two_stages()
    short = replace(case, batch=jax.tree.map(lambda leaf: leaf[:15], case.batch))
    with refused(ArgumentError, r"batch/mask is \[15\], expected \[16\]: 4 microbatches of \[4\]"):
        run.gradients(*placed(run, short), *key_and_batch(run, short))
