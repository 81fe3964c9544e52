"""How parts of weights are handed on: ahead or in place, whole or slice by slice."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.parallel.plan import compiling
from braidax.parallel.plan.plan import layouts_of
from braidax.program import collectives_of, total_sent
from tests.support.parallel.dense.models import BATCH, MODELS, VOCABULARY, Model
from tests.support.parallel.dense.rotated import OPTIMIZER, STRATEGIES, by_heads
from tests.support.parallel.dense.steps import assert_as_on_one_device, make_step

IN_PLACE = bx.RotatedTensorParallel(min_bytes=0, hops="in place")
SGD = optax.sgd(0.1)  # compiles to less
SLOW = pytest.mark.slow


@pytest.fixture
def hops_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are handed on as for GPUs and TPUs."""
    monkeypatch.delitem(compiling._RING_FORMS, "cpu")  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are cut again that are not long."""
    monkeypatch.setattr("braidax.program.rotation.checked._LEAST_SLICE", 2)


@pytest.mark.parametrize(
    ("model", "mesh", "strategies"),
    [
        pytest.param("gpt", "8 auto", "one axis", marks=SLOW),
        pytest.param("gpt", "4x2 auto", "sharded on", marks=SLOW),
        pytest.param("mlp", "4x2 explicit", "beside rows", marks=SLOW),
        pytest.param("resnet", "8 auto", "one axis", marks=SLOW),
        pytest.param("bert", "8 auto", "one axis", marks=SLOW),
    ],
)
def test_in_place_it_trains_as_on_one_device(model: str, mesh: str, strategies: str) -> None:
    step = make_step(MODELS[model], STRATEGIES[strategies], mesh, optimizer=OPTIMIZER)
    assert_as_on_one_device(step, MODELS[model], optimizer=OPTIMIZER)


@pytest.mark.parametrize(("least_bytes", "of_heads", "of_wider"), [pytest.param(0, 7, 7, marks=SLOW), (2049, 3, 4)])
def test_short_parts_go_around_as_one(
    least_bytes: int, of_heads: int, of_wider: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_short_parts(least_bytes, of_heads, of_wider, monkeypatch)


@SLOW  # test_choosing.py trains with hops in place
@pytest.mark.parametrize(("least_bytes", "of_heads", "of_wider"), [(0, 7, 7), (2049, 3, 4)])
def test_with_short_parts_it_trains_as_on_one_device(
    least_bytes: int, of_heads: int, of_wider: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, model = of_short_parts(least_bytes, of_heads, of_wider, monkeypatch)
    keyed = model._replace(loss=lambda params, batch, key: model.loss(params, batch))
    assert_as_on_one_device(step, keyed, optimizer=SGD, num_updates=2)


def of_short_parts(
    least_bytes: int, of_heads: int, of_wider: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[bx.Step, Model]:
    """Returns a step, whose hops are as many as they should be, and its model."""
    form = compiling.ring_form("cpu")._replace(least_bytes=least_bytes)
    monkeypatch.setitem(compiling._RING_FORMS, "cpu", form)  # pyright: ignore[reportPrivateUsage]
    model = by_heads(8)  # two layers, whose parts have 1,024 and 2,048 bytes
    step = make_step(model, {"data": STRATEGIES["one axis"]["data"]}, "8 auto", optimizer=SGD)
    sent = collectives_of(step.lower().gradients.compile().as_text() or "")
    # Two leaves of each, forward, backward and their gradients; the table is used outside of loops.
    hops = sum(one.times for one in sent if one.kind == "collective-permute")
    assert hops == 2 * 2 * 3 * (of_heads + of_wider) + 3 * 7
    weights = sum(one.num_bytes for one in step.plan.variables) + 4 * 16 * (-VOCABULARY % 8)
    assert total_sent(sent)["collective-permute"] == pytest.approx(3 * 7 / 8 * weights)
    return step, model


@pytest.mark.usefixtures("hops_ahead")
def test_a_plan_says_what_hops_cost_and_replays_them() -> None:
    model = MODELS["mlp"]
    ahead, in_place = (make_step(model, {"data": one}) for one in (STRATEGIES["one axis"]["data"], IN_PLACE))
    (why,) = {one.why for one in ahead.plan.variables if one.path == "params/dense/0/w"}
    (why_in_place,) = {one.why for one in in_place.plan.variables if one.path == "params/dense/0/w"}
    assert "two parts of 5.7 KB at a time and hops under products" in why
    assert "one part of 5.7 KB at a time and products waiting for hops" in why_in_place
    again = bx.Plan.from_json(in_place.plan.to_json())
    assert again == in_place.plan
    assert {one.ring.in_place for one in layouts_of(again) if one.ring} == {True}
    assert {one.ring.in_place for one in layouts_of(ahead.plan) if one.ring} == {False}
    assert "rotated 1, in place" in str(again)
    assert repr(IN_PLACE) == "RotatedTensorParallel(min_bytes=0, hops='in place')"
    texts = [one.lower().gradients.as_text() for one in (ahead, in_place, make_step(model, None, plan=again))]
    assert texts[1] == texts[2] != texts[0]


@pytest.mark.usefixtures("in_slices")
@pytest.mark.parametrize("num_devices", [2, pytest.param(8, marks=SLOW)])
@pytest.mark.parametrize("hops", ["ahead", pytest.param("in place", marks=SLOW)])
def test_slices_of_parts_give_the_same(num_devices: int, hops: Any, request: pytest.FixtureRequest) -> None:
    if hops == "ahead":
        request.getfixturevalue("hops_ahead")
    model, mesh = by_heads(8), jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.batch(0))
    step = bx.parallelize(model.loss, SGD, mesh, {"data": STRATEGIES["one axis"]["data"]}, init=model.init, batch=batch)
    # 25 words on 2 devices make 4 slices of 7, and 7 words on 8 devices 3 slices of 3; the last two overlap.
    found = step.lower().gradients.compile()
    sent = total_sent(collectives_of(found.as_text() or ""))["collective-permute"]
    words = {2: 2 * 4 * 7, 8: 8 * 3 * 3}[num_devices]
    weights = sum(one.num_bytes for one in step.plan.variables) + 4 * 16 * (words - VOCABULARY)
    assert sent == pytest.approx(3 * (num_devices - 1) / num_devices * weights)
    keyed = model._replace(loss=lambda params, batch, key: model.loss(params, batch))
    assert_as_on_one_device(step, keyed, optimizer=SGD, num_updates=3)


@pytest.mark.parametrize("counts", [(2, 8), pytest.param((2, 4, 8), marks=SLOW)])
def test_memory_halves_with_twice_as_many_devices(counts: tuple[int, ...]) -> None:
    """Of a vocabulary, which is most of the model."""

    def init(key: jax.Array) -> Any:
        return {"table": jax.random.normal(key, (33_000, 64))}

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = jnp.tanh(batch["x"]) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).mean()

    def held(num_devices: int, strategy: Any) -> int:
        mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
        size = BATCH * num_devices
        batch = {"x": jax.ShapeDtypeStruct((size, 64), jnp.float32), "ids": jax.ShapeDtypeStruct((size,), jnp.int32)}
        step = bx.parallelize(loss, optax.sgd(0.1), mesh, {"data": strategy}, init=init, batch=batch)
        memory = step.lower().gradients.compile().memory_analysis()
        assert memory is not None
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    found = {count: held(count, bx.RotatedTensorParallel()) for count in counts}
    for count, size in found.items():
        assert count * size < 1.1 * 2 * found[2]
    assert found[2] < held(2, bx.FullySharded())
    assert found[8] < 4 * 33_000 * 64 / 8 * 3.6  # of a part: itself, its gradient, and slices on their way
