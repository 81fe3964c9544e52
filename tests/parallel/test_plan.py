"""A plan is data: it prints, and it survives JSON."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.plan.layout import Axis, Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.plan import Costs, follow, make_plan, shardings_of
from braidax.parallel.plan.replaying import anywhere
from braidax.program import collectives_of, named_leaves, total_sent
from tests.support.parallel.dense.models import MODELS
from tests.support.parallel.models import init, make_mesh, specs
from tests.support.pictures import Parsed, needs_nothing_else


def plan() -> bx.Plan:
    variables = dict(named_leaves(jax.eval_shape(init, jax.random.key(0)), "params"))
    return make_plan(make_mesh(), {"data": bx.DataParallel()}, Model(variables, 4, microbatches=2))


def test_it_says_what_and_why() -> None:
    assert anywhere(plan()) == bx.Plan(
        axes=(bx.PlannedAxis("data", 4, "DataParallel()"), bx.PlannedAxis("model", 2, None)),
        batch_axes=("data",),
        microbatches=2,
        variables=tuple(
            bx.PlannedVariable(
                path,
                shape,
                "float32",
                num_bytes,
                (bx.Replicated(), bx.Replicated()),
                "data: data parallel: gradient all-reduced; model: no strategy",
            )
            for path, shape, num_bytes in (("params/embedding", (10, 6), 240), ("params/weight", (6, 3), 72))
        ),
    )


def test_it_prints_a_table() -> None:
    lines = str(plan()).splitlines()
    assert lines[0] == "mesh          data=4 (DataParallel()), model=2 (no strategy: replicated)"
    assert lines[1] == "batch         split over data, microbatches=2"
    assert lines[3].split() == ["variable", "shape", "dtype", "placement,", "dim", "bytes", "why"]
    assert lines[5].split() == ["params/embedding", "10×6", "float32", "replicated", "240", "bytes", "[1]"]
    assert lines[8] == "2 variables, 312 bytes"
    assert lines[10:] == ["[1]  data: data parallel: gradient all-reduced; model: no strategy"]


def gpt(strategies: Any, mesh: Any = None, **options: Any) -> bx.Step:
    model = MODELS["gpt"]
    mesh = jax.make_mesh((8,), ("data",)) if mesh is None else mesh
    options = {"init": model.init, "batch": specs(model.batch(0)), **options}
    return bx.parallelize(model.loss, optax.adam(1e-3), mesh, strategies, **options)


def test_it_says_what_a_device_holds_and_sends() -> None:
    step = gpt({"data": bx.FullySharded(min_bytes=0)})
    costs = [one.costs for one in step.plan.variables]
    compiled = step.lower().gradients.compile()
    held = sum(one.held_bytes or 0 for one in costs)
    assert held == sum(one.num_bytes for one in step.plan.variables) / 8
    assert sum(one.gradient_bytes or 0 for one in costs) == held
    assert sum(one.state_bytes or 0 for one in costs) == 2 * held
    sent = sum(total_sent(collectives_of(compiled.as_text() or "")).values())
    assert sum(one.sent_bytes or 0 for one in costs) == pytest.approx(sent, rel=0.03)
    assert 'optimizer\'s state 22.4 KB\nactivations come on top: compile_for("here")' in str(step.plan)


def test_penalties_send_nothing_and_lookups_their_rows() -> None:
    model, mesh = MODELS["gpt, fused"], jax.make_mesh((8,), ("data",))
    strategies = {"data": bx.RotatedTensorParallel(min_bytes=0)}
    step = bx.parallelize(model.loss, optax.sgd(0.1), mesh, strategies, init=model.init, batch=specs(model.batch(0)))
    costs = {one.path: one.costs.sent_bytes for one in step.plan.variables}
    assert costs["params/layers/down"] == 3 * 7 / 8 * 2 * 72 * 24 * 4  # its penalty is taken of its parts
    padded, rows, ids = 56 * 24 * 4, 16 * 6 / 8 * 24 * 4, 16 * 6 * 4
    assert costs["params/embedding"] == 3 * 7 / 8 * padded + 2 * 7 / 8 * (padded / 8 + rows) + 7 / 8 * ids
    sent = sum(total_sent(collectives_of(step.lower().gradients.compile().as_text() or "")).values())
    assert sum(one or 0 for one in costs.values()) == pytest.approx(sent, rel=0.01)


def test_tables_by_rows_hold_their_state_and_send_rows() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return (params["table"][batch] @ params["w"]["table"]).mean()

    def first(key: jax.Array) -> Any:
        return {"table": jnp.ones((800, 4)), "w": {"table": jnp.ones((4, 7))}}

    batch = jax.ShapeDtypeStruct((16, 2), jnp.int32)
    mesh = jax.make_mesh((8,), ("data",))
    plan = bx.parallelize(loss, optax.adam(1e-3), mesh, {"data": bx.Hybrid()}, init=first, batch=batch).plan
    table, dense = (one.costs for one in plan.variables)
    assert (table.held_bytes, table.gradient_bytes) == (800 * 4 * 4 / 8, 0)
    assert 2 * (table.held_bytes or 0) < (table.state_bytes or 0) < 2.3 * (table.held_bytes or 0)  # and when rows moved
    assert table.sent_bytes == 4 * (4 + 2 * 16)
    assert (dense.held_bytes, dense.gradient_bytes, dense.state_bytes) == (112, 112, 224)
    assert dense.sent_bytes == 2 * 112 * 7 / 8


def test_it_fits_a_page_whatever_its_names_are() -> None:
    long = {f"a_block_of_many_{'layers_' * n}with_a_name": jax.ShapeDtypeStruct((8, 8), jnp.float32) for n in (1, 20)}
    mesh = jax.make_mesh((2, 2, 2), ("a_long_axis", "another_long_axis", "and_one_more_axis"))
    made = make_plan(mesh, dict.fromkeys(mesh.axis_names, bx.FullySharded(min_bytes=0)), Model(long, 8))
    lines = str(made).splitlines()
    assert max(map(len, lines)) <= 120
    assert any("…" in line for line in lines)
    assert all(axis in str(made) for axis in mesh.axis_names)


def test_a_page_draws_the_batch_on_its_mesh_and_what_a_device_holds() -> None:
    made = plan()
    page = Parsed(made.to_html())
    assert needs_nothing_else(made.to_html())
    words, tips = set(page.words), [tip for _, _, _, tip in page.boxes if tip]
    assert {"data 3", "model 1", "part 4 of 4"} <= words
    assert "data 2, model 1: part 3 of 4" in tips
    assert str(made) in words
    step = gpt({"data": bx.FullySharded()})
    page = Parsed(step.plan.to_html())
    for one in step.plan.variables:
        told = f"{one.path}, {'×'.join(map(str, one.shape))} {one.dtype}: "
        assert any(tip.startswith(told) for _, _, _, tip in page.boxes)
    roles = {role for role, _, _, tip in page.boxes if tip.startswith("params/")}
    assert roles == {"f-parameters", "f-gradients", "f-state"}


def test_a_page_of_a_large_plan_stays_small() -> None:
    names = [bx.PlannedVariable(f"params/{at}", (9,), "float32", 36, (bx.Replicated(),), "why") for at in range(2000)]
    large = replace(names[0], path="params/large", num_bytes=36_000)
    page = bx.Plan((bx.PlannedAxis("data", 4096, "DataParallel()"),), ("data",), 1, (large, *names)).to_html()
    words = Parsed(page).words
    assert "2000 smaller variables: 72 KB" in [tip for _, _, _, tip in Parsed(page).boxes]
    assert "16 of 4,096 devices; the others go on like these" in words
    assert any(word.startswith("108 KB in 2001 variables; on all devices") for word in words)


def test_plans_are_compared() -> None:
    one, other = gpt({"data": bx.FullySharded(min_bytes=0)}).plan, gpt({"data": bx.DataParallel()}).plan
    assert one.compare(one) == "the plans are alike"
    lines = one.compare(other).splitlines()
    assert lines[0] == "mesh: data=8 (FullySharded(min_bytes=0)) → data=8 (DataParallel())"
    row = next(line for line in lines if line.startswith("params/layers/up")).split("  ")
    assert [cell.strip() for cell in row if cell] == [
        "params/layers/up", "3×24×96", "gathered 1 → replicated", "13.8 KB → 111 KB", "72.6 KB → 48.4 KB"
    ]  # fmt: skip
    assert max(map(len, lines)) <= 120
    totals = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[-9:]]
    assert [totals[0], totals[2], totals[-1]] == [
        ["in all", "this plan", "the other"], ["variables", "8", "8"], ["a device sends a step", "238 KB", "157 KB"]
    ]  # fmt: skip
    unknown = replace(one, variables=tuple(replace(each, costs=Costs()) for each in one.variables))
    assert unknown.compare(one).splitlines()[-1].split("  ")[-1].strip() == "238 KB"


def test_json_there_and_back() -> None:
    text = plan().to_json()
    assert json.loads(text)["variables"][1]["placements"][0] == {"placement": "Replicated"}
    again = bx.Plan.from_json(text)
    assert again == plan()
    assert hash(again) == hash(plan())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"axes": [{"nome": 1}]}', '{"axes": 3}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"text is no plan .*expected what Plan\.to_json returns"):
        bx.Plan.from_json(text)


def test_a_placement_unknown_to_this_version_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Folded"):
        bx.Plan.from_json(plan().to_json().replace("Replicated", "Folded"))


def test_keys_are_counted_by_their_data() -> None:
    made = make_plan(make_mesh(), {}, Model({"key": jax.eval_shape(lambda: jax.random.key(0))}, 1))
    assert (made.variables[0].path, made.variables[0].num_bytes, made.batch_axes) == ("key", 8, ())
    assert "split over nothing" in str(made)


def test_shardings_come_from_the_plan() -> None:
    variables = jax.eval_shape(init, jax.random.key(0))
    shardings = shardings_of(plan(), make_mesh(), variables)
    assert shardings == jax.tree.map(lambda _: NamedSharding(make_mesh(), PartitionSpec()), variables)


def whole_of(spec: jax.ShapeDtypeStruct) -> Layout:
    return Layout.whole(spec.shape)


def test_moments_follow_their_variables_and_counts_do_not() -> None:
    params = {"a": jnp.zeros((4, 2)), "b": {"a": jnp.zeros((8, 2)), "bias": jnp.zeros(4)}}
    whole, axis = jax.tree.map(lambda leaf: Layout.whole(leaf.shape), params), Axis("data", 2)
    layouts = {
        "a": whole["a"].split(0, axis),
        "b": {"a": whole["b"]["a"].split(1, axis), "bias": whole["b"]["bias"].split(0, axis)},
    }
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    moments = follow(params, layouts, state, whole_of)[0]
    assert moments.count == Layout.whole(())
    assert moments.mu == moments.nu == layouts
    # Factored moments keep the path and lose a dim: they are not the variable's shape, so they stay whole.
    factored = follow(params, layouts, {"row": {"a": jax.ShapeDtypeStruct((4,), "float32")}}, whole_of)
    assert factored == {"row": {"a": Layout.whole((4,))}}
