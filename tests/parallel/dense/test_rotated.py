"""Weights on rings: the numbers of one device, 1/N of everything, and the hops of the formula."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.dense import passes
from braidax.parallel.plan import compiling
from braidax.parallel.plan.compiling import RingForm
from braidax.parallel.plan.placements import check_hops
from braidax.program import collectives_of, total_sent
from tests.support.parallel.dense.decorated import assert_as_on_one_device as assert_decorated
from tests.support.parallel.dense.decorated import begin, whole_step
from tests.support.parallel.dense.models import BATCH, LENGTH, MODELS, VOCABULARY, WIDTH
from tests.support.parallel.dense.rotated import ALL, OPTIMIZER, STRATEGIES, by_heads
from tests.support.parallel.dense.steps import assert_as_on_one_device, make_step
from tests.support.parallel.models import make_mesh

SGD = optax.sgd(0.1)  # compiles to less
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def hops_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are handed on as for GPUs and TPUs; `test_hops.py` has them in place, as for CPUs."""
    monkeypatch.delitem(compiling._RING_FORMS, "cpu")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("model", "mesh", "strategies"),
    [
        pytest.param("gpt", "8 explicit", "one axis", marks=SLOW),  # below whole, by heads and decorated
        pytest.param("gpt", "4x2 auto", "sharded on", marks=SLOW),  # test_choosing.py has a mixture of both
        pytest.param("gpt", "4x2 explicit", "replicas", marks=SLOW),
        pytest.param("gpt", "4x2 auto", "beside tensor", marks=SLOW),
        pytest.param("gpt, fused", "8 auto", "one axis", marks=SLOW),
        pytest.param("gpt, kept", "8 auto", "one axis", marks=SLOW),
        pytest.param("mlp", "4x2 explicit", "beside rows", marks=SLOW),  # below it has microbatches
        pytest.param("mlp", "4x2 auto", "gathered on", marks=SLOW),
        pytest.param("resnet", "8 auto", "one axis", marks=SLOW),
        pytest.param("lstm", "8 explicit", "one axis", marks=SLOW),
        pytest.param("dlrm", "8 auto", "one axis", marks=SLOW),
        pytest.param("bert", "8 auto", "one axis", marks=SLOW),
    ],
)
def test_it_trains_as_on_one_device(model: str, mesh: str, strategies: str) -> None:
    step = make_step(MODELS[model], STRATEGIES[strategies], mesh, optimizer=OPTIMIZER)
    assert any(isinstance(one, bx.Rotated) for variable in step.plan.variables for one in variable.placements)
    assert_as_on_one_device(step, MODELS[model], optimizer=OPTIMIZER)


def test_as_it_is_written_for_accelerators_it_trains_as_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "ring_form", lambda _: RingForm(unroll=2, keeps_wide=True, lets_last_move=True))
    model = by_heads(8)
    step = make_step(model, {"data": ALL}, "8 auto", optimizer=SGD)
    sent = total_sent(collectives_of(step.lower().gradients.compile().as_text() or ""))
    weights = sum(one.num_bytes for one in step.plan.variables) + 4 * 16 * (-VOCABULARY % 8)
    assert sent["collective-permute"] == pytest.approx(3 * 7 / 8 * weights)
    assert_as_on_one_device(step, model._replace(loss=_keyed(model.loss)), optimizer=SGD, num_updates=2)


@pytest.mark.parametrize("model", [pytest.param("gpt, bfloat16", marks=SLOW)])
def test_in_bfloat16(model: str) -> None:
    step = make_step(MODELS[model], {"data": ALL}, optimizer=OPTIMIZER)
    assert_as_on_one_device(step, MODELS[model], optimizer=OPTIMIZER, num_updates=2, atol=2e-2)


def test_microbatches_and_frozen_weights() -> None:
    model = MODELS["mlp"]
    step = make_step(model, {"data": ALL}, "4x2 auto", optimizer=OPTIMIZER, microbatches=2)
    assert_as_on_one_device(step, model, optimizer=OPTIMIZER, num_updates=3)
    frozen = make_step(
        model, {"data": ALL}, "8 auto", optimizer=OPTIMIZER, trainable=["params/dense/[12]*", "params/table"]
    )
    state = frozen.init(jax.random.key(0))
    before = np.asarray(state.params["dense"][0]["w"])
    after, _ = frozen.update(state, model.batch(0))
    np.testing.assert_array_equal(np.asarray(after.params["dense"][0]["w"]), before)


def test_heads_that_nothing_divides_are_padded() -> None:
    model = by_heads(6)
    step = make_step(model, {"data": ALL}, "8 explicit", optimizer=OPTIMIZER)
    assert step.init(jax.random.key(0)).params["layers"]["qkv"].shape == (2, 16, 3, 8, 4)
    assert_as_on_one_device(step, model._replace(loss=_keyed(model.loss)), optimizer=OPTIMIZER, num_updates=3)
    most = make_step(by_heads(11), {"data": ALL}, "8 auto", optimizer=OPTIMIZER)
    assert most.state_specs.params["layers"]["qkv"].shape == (2, 16, 3, 16, 4)


def of_five_heads() -> bx.Step:
    step = make_step(by_heads(5), {"data": ALL}, "8 auto", optimizer=OPTIMIZER)  # longer by 60 %
    assert step.state_specs.params["layers"]["qkv"].shape == (2, 16, 3, 5, 4)
    return step


def test_heads_that_would_be_padded_by_more_are_whole() -> None:
    placed = {one.path: one.placements[0] for one in of_five_heads().plan.variables}
    assert [type(placed[f"params/layers/{name}"]) for name in ("qkv", "out")] == [bx.Rotated] * 2


@SLOW
def test_heads_that_would_be_padded_by_more_are_whole_and_their_weights_go_around_alone() -> None:
    step = of_five_heads()
    sent = total_sent(collectives_of(step.lower().gradients.compile().as_text() or ""))
    weights = sum(one.num_bytes for one in step.plan.variables) + 4 * 16 * (-VOCABULARY % 8)
    assert sent["collective-permute"] == pytest.approx(3 * 7 / 8 * weights)
    assert sent["all-gather"] == 7 / 8 * 4 * BATCH * LENGTH  # ids of words


BY_HEADS = {"params/layers/qkv": bx.Split(3), "params/layers/out": bx.Split(1)}
WIDER = {"params/layers/up": bx.Split(2), "params/layers/down": bx.Split(1)}
IN_PIECES = {"params/layers/up": bx.Split(2, pieces=(72, 72)), "params/layers/down": bx.Split(1)}


@pytest.mark.parametrize(
    ("model", "overrides", "mesh", "num_microbatches"),
    [
        ("by heads", BY_HEADS, "8 auto", 1),
        pytest.param("by heads", {**BY_HEADS, **WIDER}, "4x2 explicit", 2, marks=SLOW),
        pytest.param("gpt, fused", IN_PIECES, "8 explicit", 1, marks=SLOW),
    ],
)
def test_weights_that_stay_are_brought_the_samples_of_all_devices(
    model: str, overrides: Any, mesh: str, num_microbatches: int
) -> None:
    found = by_heads(8) if model == "by heads" else MODELS[model]
    found = found._replace(loss=_keyed(found.loss)) if model == "by heads" else found
    stays = bx.RotatedTensorParallel(overrides, min_bytes=0)
    strategies = {"data": stays} if mesh.startswith("8") else {"data": bx.FullySharded(min_bytes=0), "model": stays}
    step = make_step(found, strategies, mesh, optimizer=OPTIMIZER, microbatches=num_microbatches)
    if mesh == "8 auto":
        sent = total_sent(collectives_of(step.lower().gradients.compile().as_text() or ""))
        activations, ids = 2 * 4 * BATCH * LENGTH * 16, 4 * BATCH * LENGTH  # of two layers
        assert sent["all-gather"] == 7 / 8 * (3 * activations + ids)
        assert sent["reduce-scatter"] == 7 / 8 * 2 * activations
    assert_as_on_one_device(step, found, optimizer=OPTIMIZER, num_updates=2)


def _keyed(loss: Any) -> Any:
    return lambda params, batch, key: loss(params, batch)


def test_a_decorated_step() -> None:
    model = MODELS["gpt"]
    train_step = whole_step(model)
    step = bx.parallelize(make_mesh("8 auto"), {"data": ALL})(train_step)
    state = begin(model)
    assert_decorated(step, train_step, state, [model.batch(seed) for seed in range(3)])
    placed = {one.path: str(one.placements[0]) for one in step.plan.variables}
    assert placed["state/params/layers/up"] == placed["state/opt_state/1/0/mu/layers/up"] == "rotated, dim 2"
    assert placed["state/params/embedding"] == "rotated, dim 1"  # 8 devices do not divide 50 words


def test_a_device_has_its_part_of_everything() -> None:
    step = make_step(MODELS["gpt"], {"data": ALL})
    state = step.init(jax.random.key(0))
    shapes = {name: leaf.addressable_shards[0].data.shape for name, leaf in state.params["layers"].items()}
    assert shapes == {
        "qkv": (3, 3, 3, 2, 12), "out": (3, 2, 12, 3), "up": (3, 24, 12), "down": (3, 12, 24), "bias": (3, 12),
        "scale": (3, 3),
    }  # fmt: skip
    assert state.params["embedding"].addressable_shards[0].data.shape == (7, WIDTH)
    for leaf in jax.tree.leaves(state.opt_state[1][0].mu):
        (shard, *_) = leaf.addressable_shards
        assert shard.data.size * 8 == leaf.size, leaf.shape
    whys = {one.path: one.why for one in step.plan.variables}
    told = "goes around a ring, with its gradient, two parts of {} at a time and hops under products"
    assert whys["params/embedding"].endswith(f"{told.format('672 bytes')}; its rows are looked up")
    assert whys["params/layers/up"] == whys["params/layers/down"]
    assert whys["params/layers/up"].endswith(told.format("2.35 KB"))  # 24 x 12 of each, and 12 of a bias
    assert re.search(r"no product uses it at models\.py:\d+: gathered where", whys["params/positions"])


@functools.cache
def by_eight_heads(num_devices: int) -> tuple[bx.Step, str]:
    """A step, which keeps no state, and the text of its gradients."""
    model, mesh = by_heads(8), jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.batch(0))
    step = bx.parallelize(model.loss, optax.sgd(0.1), mesh, {"data": ALL}, init=model.init, batch=batch)
    return step, step.lower().gradients.compile().as_text() or ""


@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=SLOW), 8])
def test_each_part_makes_one_hop_less_than_there_are_devices_each_way(num_devices: int) -> None:
    step, text = by_eight_heads(num_devices)
    sent = dict(total_sent(collectives_of(text)))
    padded = 4 * 16 * (-VOCABULARY % num_devices)
    weights = sum(one.num_bytes for one in step.plan.variables) + padded
    others = (num_devices - 1) / num_devices
    # Forward, backward and for gradients, whatever is computed again; nothing is gathered but ids and their rows.
    # Two devices need the same hop of the table forward and backward, outside of loops: the compiler keeps it.
    table = 4 * 16 * VOCABULARY + padded
    kept = others * table if num_devices == 2 else 0
    assert sent["collective-permute"] == pytest.approx(3 * others * weights - kept)
    rows, ids = 4 * BATCH * LENGTH * 16, 4 * BATCH * LENGTH
    if num_devices == 2:  # the rows of all samples, and their gradients
        assert sent["all-gather"] == pytest.approx(others * (rows + ids))
        assert sent["reduce-scatter"] == pytest.approx(others * rows)
    else:  # the table's columns instead
        assert sent["all-gather"] == pytest.approx(others * ids)
        assert sent["all-to-all"] == pytest.approx(2 * others * (table + rows) / num_devices)
    assert sent["all-reduce"] <= 16


def test_what_is_between_is_never_whole() -> None:
    _, text = by_eight_heads(8)
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}
    samples = BATCH // 8
    assert (samples, LENGTH, 16) in shapes
    hidden = [shape for shape in shapes if samples in shape and 128 in shape]  # of the wider part
    heads = [shape for shape in shapes if shape.count(LENGTH) == 2 and 8 in shape]
    logits = [shape for shape in shapes if 50 in shape or 56 in shape]
    assert (hidden, heads) == ([], [])
    assert all({16, 2} & {*shape} for shape in logits)  # of the table only, or its columns


def test_what_is_taken_apart_goes_around_in_pieces() -> None:
    step = make_step(MODELS["gpt, fused"], {"data": ALL}, "4x2 auto")
    (found,) = (one for one in step.plan.variables if one.path == "params/layers/up")
    assert found.placements[0] == bx.Rotated(2, pieces=(72, 72))
    assert str(found.placements[0]) == "rotated, dim 2 in 2 pieces"
    assert bx.Plan.from_json(step.plan.to_json()) == step.plan


@pytest.mark.parametrize(
    ("model", "whole"),
    [pytest.param("gpt", "/bias", marks=SLOW), pytest.param("bert", "/bias", marks=SLOW), ("mlp", "/b")],
)
def test_a_short_bias_stays_whole_beside_weights_that_go_around(model: str, whole: str) -> None:
    with_short_biases(model, whole)


@SLOW  # above weights go around beside others that are whole
@pytest.mark.parametrize(("model", "whole"), [("gpt", "/bias"), ("bert", "/bias"), ("mlp", "/b")])
def test_beside_a_short_bias_it_trains_as_on_one_device(model: str, whole: str) -> None:
    assert_as_on_one_device(with_short_biases(model, whole), MODELS[model], optimizer=OPTIMIZER, num_updates=2)


def with_short_biases(model: str, whole: str) -> bx.Step:
    step = make_step(MODELS[model], {"data": bx.RotatedTensorParallel(min_bytes=1000)}, "8 auto", optimizer=OPTIMIZER)
    placed = {one.path: one.placements[0] for one in step.plan.variables}
    biases = {one for path, one in placed.items() if path.endswith(whole)}
    assert biases == {bx.Replicated()}
    assert sum(isinstance(one, bx.Rotated) for one in placed.values()) >= 3
    return step


def test_evaluation_gathers_nothing() -> None:
    step, _ = by_eight_heads(8)
    state = step.init(jax.random.key(0))
    batch = by_heads(8).batch(0)
    found = step.evaluate(state, batch)["loss"]
    expected = jax.jit(by_heads(8).loss)(jax.device_get(step.to_dense(state).params), batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    sent = total_sent(collectives_of(step.wrap(by_heads(8).loss).lower().compile().as_text() or ""))
    assert sent["all-gather"] == pytest.approx(7 / 8 * 4 * BATCH * LENGTH)  # ids
    padded = 4 * 16 * (-VOCABULARY % 8)
    assert sent["collective-permute"] == pytest.approx(7 / 8 * (sum(v.num_bytes for v in step.plan.variables) + padded))


def test_no_device_has_all_of_a_state_when_it_is_born() -> None:
    step = make_step(by_heads(8, layers=16), {"data": ALL}, "8 auto", optimizer=optax.adam(0.1))
    memory = step._init.lower(jax.random.key(0)).compile().memory_analysis()  # pyright: ignore[reportPrivateUsage]
    state = 3 * sum(one.num_bytes for one in step.plan.variables)
    assert memory.output_size_in_bytes < 1.01 * state / 8
    assert memory.temp_size_in_bytes < state / 3 / 3  # random bits of a few weights at once


def test_one_device_and_two_rings() -> None:
    model = MODELS["mlp"]
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.batch(0))
    step = bx.parallelize(model.loss, OPTIMIZER, one, {"data": ALL}, init=model.init, batch=batch)
    assert {str(variable.placements[0]) for variable in step.plan.variables} == {"replicated"}
    assert "the axis has one device" in step.plan.variables[0].why
    two = make_step(model, {"data": ALL, "model": ALL}, "4x2 auto", optimizer=OPTIMIZER)
    placed = {type(placement) for variable in two.plan.variables for placement in variable.placements[1:]}
    assert bx.Rotated not in placed
    assert "another axis is a ring already" in str(two.plan)


def test_overrides_and_what_cannot_be() -> None:
    model = MODELS["mlp"]
    step = make_step(model, {"data": bx.RotatedTensorParallel({"*/1/w": bx.Rotated(1)}, min_bytes=0)})
    assert step.init(jax.random.key(0)).params["dense"][1]["w"].shape == (64, 40)  # of 33 columns
    assert bx.Plan.from_json(step.plan.to_json()) == step.plan
    assert repr(ALL) == "RotatedTensorParallel(min_bytes=0)"
    with pytest.raises(ArgumentError, match=r"table cannot be placed by Rotated\(dim=2.*expected 0 <= dim < 2"):
        make_step(model, {"data": bx.DataParallel({"*/table": bx.Rotated(2)})})
    with pytest.raises(ArgumentError, match=r"min_bytes=-1: expected a size in bytes"):
        bx.RotatedTensorParallel(min_bytes=-1)
    with pytest.raises(ArgumentError, match=r"hops='late': expected \"ahead\" or \"in place\""):
        check_hops("late")
    with pytest.raises(ArgumentError, match=r"goes around along another axis: give it Gathered\(dim\) on one of them"):
        both = bx.DataParallel({"*/0/w": bx.Rotated(0)})
        make_step(model, {"data": both, "model": both}, "4x2 auto")
    with pytest.raises(ArgumentError, match=r"dim 0 of params/layers/up, which a loop takes apart"):
        make_step(MODELS["gpt"], {"data": bx.RotatedTensorParallel({"*/up": bx.Rotated(0)})})


ON_H100S: dict[str, Any] = {
    "ahead": bx.RotatedTensorParallel(hops="ahead"),
    "in place": bx.RotatedTensorParallel(hops="in place"),
    "fully sharded": bx.FullySharded(),
}


@functools.cache
def for_h100s(strategy: str) -> bx.CompiledStep:
    """Layers in a loop, and words, on eight of them."""

    def init(key: jax.Array, layers: int = 3, width: int = 256) -> Any:
        first, second, third = jax.random.split(key, 3)
        return {
            "up": jax.random.normal(first, (layers, width, 4 * width)),
            "down": jax.random.normal(second, (layers, 4 * width, width)),
            "table": jax.random.normal(third, (4096, width)),
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            return x + jnp.tanh(jnp.tanh(x) @ w["up"]) @ w["down"], None

        layers = {name: params[name] for name in ("up", "down")}
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["table"][batch["ids"]], layers)
        logits = jnp.tanh(x) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).mean()

    batch, mesh = {"ids": jax.ShapeDtypeStruct((64, 128), jnp.int32)}, jax.make_mesh((8,), ("data",))
    step = bx.parallelize(loss, optax.sgd(1e-3), mesh, {"data": ON_H100S[strategy]}, init=init, batch=batch)
    return step.compile_for("h100:8")


def assert_covered(found: bx.CompiledStep, *, covered: bool) -> None:
    """Fails unless all hops are under products, or none is."""
    weights = 4 * (3 * 8 * 256 * 256 + 4096 * 256)
    hops = [one for one in found.collectives if one.kind == "collective-permute"]
    assert sum(one.times * one.sent_bytes for one in hops) == pytest.approx(3 * 7 / 8 * weights)
    assert [one.op_name for one in hops if one.is_covered != covered] == []


@pytest.mark.usefixtures("aot")
def test_every_hop_is_under_a_product() -> None:
    found = for_h100s("ahead")
    assert_covered(found, covered=True)
    # The last gradient of the words is made while those of their lookups are on their way back.
    back = [one for one in found.collectives if one.kind == "all-to-all" and "transpose" in one.op_name]
    assert sum(one.sent_bytes for one in back if one.is_covered) >= 7 / 8 * 4 * 4096 * 256 / 8


@SLOW  # test_hops.py counts hops in place, and what devices hold
@pytest.mark.usefixtures("aot")
def test_no_hop_in_place_is_under_a_product_and_either_way_holds_less_than_fully_sharded() -> None:
    found, in_place = for_h100s("ahead"), for_h100s("in place")
    assert_covered(in_place, covered=False)
    assert found.peak_bytes < 0.7 * for_h100s("fully sharded").peak_bytes
    assert in_place.peak_bytes < found.peak_bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("aot")
def test_layers_are_not_copied_for_the_products_of_a_tpu() -> None:
    layers, width, tokens = 24, 2048, 4096

    def init(key: jax.Array) -> Any:
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (layers, width, 4 * width)),
            "down": jax.random.normal(down, (layers, 4 * width, width)),
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            return x + jnp.tanh(jnp.tanh(x) @ w["up"]) @ w["down"], None

        return jnp.square(jax.lax.scan(jax.checkpoint(layer), batch, params)[0]).mean()

    batch, mesh = jax.ShapeDtypeStruct((8, tokens, width), jnp.float32), jax.make_mesh((8,), ("data",))
    made = bx.parallelize(loss, optax.sgd(1e-3), mesh, {"data": bx.RotatedTensorParallel()}, init=init, batch=batch)
    found = made.compile_for("v5e:2x4")
    activation = 4 * tokens * width
    assert found.programs["gradients"].memory.temporaries < (layers + 8) * activation  # copies are as large as six
    assert found.exposed_part < 0.05
