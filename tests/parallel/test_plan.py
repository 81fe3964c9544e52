"""A plan is data: it prints, and it survives JSON."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.plan.layout import Axis, Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.plan import follow, make_plan, shardings_of
from braidax.program import named_leaves
from tests.parallel.models import init, make_mesh


def plan() -> bx.Plan:
    variables = dict(named_leaves(jax.eval_shape(init, jax.random.key(0)), "params"))
    return make_plan(make_mesh(), {"data": bx.DataParallel()}, Model(variables, 4, microbatches=2))


def test_it_says_what_and_why() -> None:
    assert plan() == bx.Plan(
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
    assert lines[5].split()[:5] == ["params/embedding", "10×6", "float32", "240", "replicated"]
    assert lines[-1] == "2 variables, 312 bytes"


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
