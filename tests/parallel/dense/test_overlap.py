"""What runs while weights are gathered and gradients are summed, by the compilers for H100s and TPUs."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.parallel.plan.compiling import Sizes, options_that_hide

LAYERS, WIDTH, SAMPLES, LENGTH, DEVICES = 6, 512, 64, 128, 8
VOCABULARY = 65536
LAYER = 4 * 2 * WIDTH * 4 * WIDTH
MIB = 2**20


def init(key: jax.Array, vocabulary: int) -> Any:
    up, down, table = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)),
        "down": jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)),
        "table": jax.random.normal(table, (vocabulary, WIDTH)),
        "positions": jnp.zeros((LENGTH, WIDTH)),
    }


def compiled(strategies: Mapping[str, Any], vocabulary: int = 4096, target: str = "h100:8") -> bx.CompiledStep:
    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(jnp.tanh(x) @ w["up"]) @ w["down"], None

        layers = {name: params[name] for name in ("up", "down")}
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["table"][batch["ids"]] + params["positions"], layers)
        logits = jnp.tanh(x) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).mean()

    batch = {"ids": jax.ShapeDtypeStruct((SAMPLES, LENGTH), jnp.int32)}
    mesh = jax.make_mesh((DEVICES,), ("data",))
    step = bx.parallelize(
        loss, optax.sgd(1e-3), mesh, strategies, init=partial(init, vocabulary=vocabulary), batch=batch
    )
    assert step.plan.compiler_options == ()  # for CPU there are none
    return step.compile_for(target)


@cache
def replicated() -> bx.CompiledStep:
    return compiled({"data": bx.DataParallel()}, VOCABULARY)


@pytest.mark.usefixtures("aot")
@pytest.mark.parametrize(
    ("vocabulary", "waiting"), [pytest.param(2048, 1.0, marks=pytest.mark.slow), (VOCABULARY, 0.75)]
)
def test_only_the_first_gather_and_the_last_sum_of_fully_sharded_layers_wait(vocabulary: int, waiting: float) -> None:
    found = compiled({"data": bx.FullySharded()}, vocabulary)
    table = 4 * vocabulary * WIDTH
    part = (DEVICES - 1) / DEVICES
    exposed: defaultdict[str, float] = defaultdict(float)
    for one in found.collectives:
        if not one.is_covered:
            exposed[one.kind] += one.times * one.sent_bytes
    ids = 4 * SAMPLES * LENGTH
    rows = 4 * SAMPLES * LENGTH * WIDTH / DEVICES
    positions = 4 * LENGTH * WIDTH  # they are needed first, and the table last: it does not come with them
    assert exposed["all-gather"] <= part * (LAYER + ids + positions)
    assert exposed["reduce-scatter"] <= part * (LAYER + waiting * table + positions)
    assert exposed["all-to-all"] <= 2 * part * rows
    # Weights of layers cross twice, and their gradients; the table, whose rows are looked up in parts, once each way.
    assert found.sent_bytes == pytest.approx(part * (3 * LAYERS * LAYER + 2 * table + 2 * rows + ids), rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("aot")
def test_tpus_gather_a_layer_under_another_one() -> None:
    found = compiled({"data": bx.FullySharded()}, target="v5e:2x4")
    gathers = [one for one in found.collectives if one.kind == "all-gather"]
    in_loops = sorted((one.times, one.is_covered) for one in gathers if one.times > 1)
    # Forward a layer is one fusion of both products, which hides one gather.
    assert in_loops == [(LAYERS - 1, False), *[(LAYERS - 1, True)] * 3]
    (table,) = (one for one in gathers if one.result_bytes == 2 * 4096 * WIDTH)
    assert table.is_covered


@pytest.mark.usefixtures("aot")
def test_gradients_of_replicated_layers_are_summed_under_the_next_ones() -> None:
    found = replicated()
    in_loops = [one for one in found.collectives if one.times > 1]
    assert sum(one.times * one.result_bytes for one in in_loops) == pytest.approx((LAYERS - 1) * LAYER, rel=0.01)
    assert all(one.is_covered for one in in_loops)


@pytest.mark.usefixtures("aot")
def test_a_replicated_tables_gradient_crosses_once_and_only_its_last_piece_waits() -> None:
    found = replicated()
    assert {one.kind for one in found.collectives} == {"all-reduce"}
    layers, table = LAYERS * LAYER, 4 * VOCABULARY * WIDTH
    positions = 4 * LENGTH * WIDTH
    assert found.sent_bytes == pytest.approx(2 * (DEVICES - 1) / DEVICES * (layers + table + positions), rel=0.001)
    assert sum(one.result_bytes for one in found.collectives if not one.is_covered) <= 1.001 * table / 8


def test_options_follow_what_is_sent_and_the_platform() -> None:
    axis = bx.Axis("data", 8)
    whole, several = bx.Layout.whole((16, 16)), "experimental_parallel_collective_overlap_limit"
    gathered = whole.split(0, axis, how="gathered")
    names = {
        case: {one.name.removeprefix("xla_gpu_").removeprefix("enable_") for one in options_that_hide("gpu", variables)}
        for case, variables in {
            "whole": [(whole, 10)],
            "gathered": [(gathered, 10), (whole, 5)],
            "rows": [(whole.split(0, axis, how="by rows"), 9)],
            "rotated": [(whole.split(0, axis, how="rotated"), 9)],
        }.items()
    }  # fmt: skip
    assert names == {
        "whole": {"pipelined_all_reduce"},
        "gathered": {"pipelined_all_gather", "all_gather_combine_by_dim", "reduce_scatter_combine_by_dim"},
        "rows": set(),
        "rotated": {several},
    }
    (*_, combined) = options_that_hide("gpu", [(gathered, 10)], Sizes(50_000_000))
    assert (combined.name, combined.value) == ("xla_gpu_all_gather_combine_threshold_bytes", 50_000_000)
    large, small = Sizes(layer=5, longest=6), Sizes(layer=5, longest=5)
    for sizes in ([large, small], [small, large]):
        found = [{one.name for one in options_that_hide("gpu", [(kind, 10)], *sizes)} for kind in (gathered, whole)]
        assert [f"xla_gpu_{several}" in names for names in found] == [one is large for one in sizes]
    together: dict[Sizes, list[Any]] = {}
    for sizes in (
        Sizes(0, 3 * MIB),
        Sizes(5 * MIB, 3 * MIB),
        Sizes(0, MIB // 2),
        Sizes(5 * MIB, 0),
        Sizes(0, 30 * MIB),
    ):
        options = options_that_hide("gpu", [(whole, 40 * MIB)], whole=sizes)
        together[sizes] = [one.value for one in options if one.name == "xla_gpu_all_reduce_combine_threshold_bytes"]
    assert list(together.values()) == [[3 * MIB], [5 * MIB], [MIB], [], []]
    few = options_that_hide("gpu", [(whole, MIB)], whole=Sizes(0, MIB))
    assert not any("combine" in one.name for one in few)
    assert options_that_hide("cpu", [(gathered, 10)]) == ()
    assert options_that_hide("tpu", [(whole, 10)], device_kind="TPU v5 lite") == ()
    assert options_that_hide("tpu", [(gathered, 10)], device_kind="TPU v6 lite") == ()
    selective = ["xla_latency_hiding_scheduler_enable_selective_resources", "xla_lhs_make_all_gather_selective"]
    products = dict.fromkeys(selective, True)
    earlier = {"xla_tpu_enable_ici_ag_pipelining": True, "xla_tpu_max_ag_pipelining_per_loop": 2}
    for sizes, expected in ((Sizes(layer=5), {**earlier, **products}), (Sizes(longest=5), products)):
        found = options_that_hide("tpu", [(gathered, 10), (whole, 20)], sizes, device_kind="TPU v5 lite")
        assert {one.name: one.value for one in found} == expected
