"""The knobs of a plan: their ranges, in JSON and in print; and the machine that a plan is for."""

import json
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.compiler_options import compiler_options
from tests.support.parallel.models import make_mesh

SPECS = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)}


def make(strategies: Any = None, **options: Any) -> bx.Step:
    return bx.parallelize(
        lambda params, batch: (batch @ params["w"]).mean(),
        optax.sgd(0.1),
        make_mesh("8 explicit") if options.pop("eight", False) else jax.make_mesh((4,), ("data",)),
        strategies,
        init=lambda key: {"w": jax.random.normal(key, (4, 8))},
        batch=jax.ShapeDtypeStruct((8, 4), jnp.float32),
        **options,
    )


@pytest.fixture(scope="module")
def plan() -> bx.Plan:
    return make({"data": bx.DataParallel()}).plan


CHANGED = {"loading.threads": 4, "checkpointing.every": 200, "checkpointing.snapshot": "at once"}


def test_json_keeps_them_and_may_be_without(plan: bx.Plan) -> None:
    changed = replace(plan, knobs=plan.knobs.with_values({**CHANGED, "loading.hedge_seconds": math.inf}))
    assert bx.Plan.from_json(changed.to_json()) == changed
    assert hash(bx.Plan.from_json(changed.to_json())) == hash(changed)
    tree = json.loads(plan.to_json())
    del tree["knobs"]
    assert bx.Plan.from_json(json.dumps(tree)) == bx.anywhere(plan)
    tree["knobs"] = {"loading": {"threads": 3}}
    assert bx.Plan.from_json(json.dumps(tree)).knobs.changed() == {"loading.threads": 3}


def test_those_that_were_changed_are_shown_and_compared(plan: bx.Plan) -> None:
    changed = replace(plan, knobs=plan.knobs.with_values(CHANGED))
    told = "loading.threads=4, checkpointing.every=200, checkpointing.snapshot='at once'"
    assert f"knobs         {told}" in str(changed).splitlines()
    assert "knobs" not in str(plan)
    lines = plan.compare(changed).splitlines()
    assert lines[:3] == [
        "knob loading.threads: None → 4",
        "knob checkpointing.every: None → 200",
        "knob checkpointing.snapshot: under step → at once",
    ]
    assert plan.compare(bx.Plan.from_json(plan.to_json())) == "the plans are alike"
    assert plan.compare(bx.anywhere(plan)).startswith(f"machine: {plan.knobs.machine} → None")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("loading.threads", 0, "1 or more, or None: the loader adapts it"),
        ("loading.threads", True, "1 or more, or None: the loader adapts it"),
        ("loading.prefetch", 1.5, "0 or more, or None: the loader adapts it"),
        ("loading.read_bytes", None, "1 or more"),
        ("loading.hedge_seconds", -1.0, "0 or more, or None: when it takes much longer than the others"),
        ("loading.workers", "fibers", r"threads \| processes"),
        ("checkpointing.overhead", 0.0, "more than 0"),
        ("checkpointing.overhead", math.inf, "more than 0"),
        ("checkpointing.max_lost_seconds", math.nan, "more than 0, or None: no limit"),
        ("checkpointing.limit_bytes_per_second", 0, "more than 0, or None: as fast as it can"),
        ("checkpointing.snapshot", "later", r"under step \| at once"),
        ("computing.combine_bytes", -1, "0 or more, or None: by the sizes of variables"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_value_out_of_range_is_named(plan: bx.Plan, name: str, value: Any, expected: str) -> None:
    part, knob = name.split(".")
    match = rf"^knob {part}\.{knob}={value!r} is out of its range: expected {expected}$"
    with pytest.raises(ArgumentError, match=match):
        plan.knobs.with_values({name: value})
    tree = json.loads(plan.to_json())
    tree["knobs"][part][knob] = value
    with pytest.raises(ArgumentError, match=match):
        bx.Plan.from_json(json.dumps(tree))


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_knob_is_named(plan: bx.Plan) -> None:
    with pytest.raises(ArgumentError, match=r"knob 'loading\.fibers' is not known: expected one of loading\.threads, "):
        plan.knobs.with_values({"loading.fibers": 1})
    tree = json.loads(plan.to_json())
    tree["knobs"]["loading"]["fibers"] = 1
    with pytest.raises(ArgumentError, match=r"text is no plan .*fibers"):
        bx.Plan.from_json(json.dumps(tree))
    tree = json.loads(plan.to_json())
    tree["knobs"]["machine"]["num_cores"] = 0
    with pytest.raises(ArgumentError, match="machine has num_cores=0: expected a positive whole number"):
        bx.Plan.from_json(json.dumps(tree))


def test_combined_gradients_are_a_knob_of_the_plan(plan: bx.Plan) -> None:
    asked = {"data": bx.DataParallel(combine_bytes=1 << 16)}
    assert make(asked).plan.knobs.changed() == {"computing.combine_bytes": 1 << 16}
    mesh, name = jax.make_mesh((4,), ("data",)), "xla_gpu_all_reduce_combine_threshold_bytes"
    given = replace(plan, knobs=plan.knobs.with_values({"computing.combine_bytes": 4096}))
    assert compiler_options(mesh, given, {}, None).gradients == {name: 4096}
    assert compiler_options(mesh, given, asked, None).gradients == {name: 1 << 16}
    assert compiler_options(mesh, plan, {}, None).gradients == {}


def with_machine(plan: bx.Plan, **fields: Any) -> bx.Plan:
    assert plan.knobs.machine is not None
    return replace(plan, knobs=replace(plan.knobs, machine=replace(plan.knobs.machine, **fields)))


def test_a_plan_of_other_devices_is_refused_saying_what_differs(plan: bx.Plan) -> None:
    other = with_machine(plan, platform="gpu", device_kind="NVIDIA H100")
    match = (
        "^plan is of another machine: platform is gpu, here it is cpu; device_kind is NVIDIA H100, here it is cpu: "
        r"plan anew, or take braidax\.parallel\.anywhere\(plan\)"
    )
    with pytest.raises(ArgumentError, match=match):
        make(plan=other)
    assert make(plan=bx.anywhere(other)).plan == bx.anywhere(plan)
    assert make(plan=with_machine(plan, num_cores=4096)).plan.variables == plan.variables  # the host is not its concern
    with pytest.raises(ArgumentError, match=r"^plan is for a mesh \{'data': 4\}, and mesh is \{'data': 2\}"):
        bx.check_plan(plan, jax.make_mesh((2,), ("data",)))


def test_a_plan_is_checked_for_the_host_and_the_model(plan: bx.Plan) -> None:
    mesh = jax.make_mesh((4,), ("data",))
    bx.check_plan(plan, mesh, SPECS)
    assert plan.knobs.machine is not None
    cores = plan.knobs.machine.num_cores
    bx.check_plan(with_machine(plan, memory_bytes=int(1.03 * plan.knobs.machine.memory_bytes)), mesh)
    other = with_machine(plan, num_cores=cores + 1, memory_bytes=3 << 50)
    memory = f"{plan.knobs.machine.memory_bytes / 1e9:.1f} GB"
    match = f"num_cores is {cores + 1}, here it is {cores}; memory_bytes is 3377699.7 GB, here it is {memory}"
    with pytest.raises(ArgumentError, match=match):
        bx.check_plan(other, mesh)
    bigger = {"w": jax.ShapeDtypeStruct((4, 9), jnp.float32)}
    match = r"^plan is of another model: params/w is float32\[4, 8\] in the plan, and float32\[4, 9\] in the model"
    with pytest.raises(ArgumentError, match=match):
        bx.check_plan(plan, mesh, bigger)
