"""Fully sharded training: the numbers of one device, one part of everything a device, and the bytes of the formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.plan.layout import Axis, Layout
from braidax.program import collectives_of, total_sent
from tests.support.parallel.dense.models import BATCH, LENGTH, MODELS, WIDTH, Model
from tests.support.parallel.dense.steps import ALL, assert_as_on_one_device, fully_sharded, make_step
from tests.support.parallel.models import assert_close, copied

SLOW = pytest.mark.slow
STRATEGIES: dict[str, Any] = {
    "one axis": {"data": ALL},
    "two axes": {"data": ALL, "model": ALL},
    "hybrid sharding": {"data": bx.DataParallel(), "model": ALL},
    "replicas": {"data": ALL, "model": bx.DataParallel()},
    "not all axes": {"model": ALL},
    "rows": {"data": bx.Hybrid({"params/table": bx.Rows()}, dense=ALL)},
}


@pytest.mark.parametrize(
    ("model", "mesh", "strategies"),
    [
        pytest.param("gpt", "8 explicit", "one axis", marks=SLOW),  # test_decorated.py has it, too
        pytest.param("gpt", "4x2 auto", "two axes", marks=SLOW),
        pytest.param("gpt", "4x2 explicit", "hybrid sharding", marks=SLOW),
        pytest.param("gpt", "4x2 explicit", "replicas", marks=SLOW),
        pytest.param("gpt", "4x2 explicit", "not all axes", marks=SLOW),
        pytest.param("gpt, kept", "8 auto", "one axis", marks=SLOW),
        pytest.param("mlp", "8 explicit", "rows", marks=SLOW),
        pytest.param("mlp", "8 auto", "one axis", marks=SLOW),  # and padded below
        pytest.param("mlp", "4x2 explicit", "two axes", marks=SLOW),
        pytest.param("resnet", "8 explicit", "one axis", marks=SLOW),
        pytest.param("resnet", "4x2 explicit", "hybrid sharding", marks=SLOW),  # test_restored.py has it beside rows
        pytest.param("lstm", "8 auto", "one axis", marks=SLOW),  # test_in_parts.py has it, too
        pytest.param("lstm", "4x2 auto", "two axes", marks=SLOW),
    ],
)
def test_it_trains_as_on_one_device(model: str, mesh: str, strategies: str) -> None:
    told = STRATEGIES[strategies]
    step = fully_sharded(model, mesh) if strategies == "one axis" else make_step(MODELS[model], told, mesh)
    assert_as_on_one_device(step, MODELS[model])


@pytest.mark.parametrize("model", [pytest.param("gpt, bfloat16", marks=SLOW)])
def test_in_bfloat16(model: str) -> None:
    assert_as_on_one_device(make_step(MODELS[model], {"data": ALL}), MODELS[model], num_updates=2, atol=2e-2)


def test_a_device_has_its_part_of_everything() -> None:
    step = fully_sharded("gpt", "8 auto")
    state = step.init(jax.random.key(0))
    for leaf in (*jax.tree.leaves(state.params), *jax.tree.leaves(state.opt_state[1][0].mu)):
        (shard, *_) = leaf.addressable_shards
        assert shard.data.size * 8 == leaf.size, leaf.shape
    assert {str(placement) for one in step.plan.variables for placement in one.placements} == {
        "gathered, dim 1",
        "gathered, dim 3",
    }


def test_what_no_axis_divides_is_whole_or_padded() -> None:
    model, path = MODELS["mlp"], "params/dense/1/b"
    step = fully_sharded("mlp")
    (found,) = (one for one in step.plan.variables if one.path == path)
    assert (str(found.placements[0]), found.shape) == ("replicated", (33,))
    assert "no dim of it is a multiple of 8 in each part (Gathered(dim) pads): whole" in found.why

    step = make_step(model, {"data": bx.FullySharded({path: bx.Gathered(0), "*/1/w": bx.Gathered(1)}, min_bytes=0)})
    state = step.init(jax.random.key(0))
    assert (state.params["dense"][1]["b"].shape, state.params["dense"][1]["w"].shape) == ((40,), (64, 40))
    for batch in (model.batch(0), model.batch(1)):
        state, _ = step.update(state, batch)
    assert np.abs(np.asarray(state.params["dense"][1]["w"])[:, 32]).min() > 0
    np.testing.assert_array_equal(np.asarray(state.params["dense"][1]["w"])[:, 33:], 0)
    np.testing.assert_array_equal(np.asarray(state.opt_state[1][0].nu["dense"][1]["w"])[:, 33:], 0)
    assert_as_on_one_device(step, model)


def _sent(step: bx.Step) -> dict[str, float]:
    return dict(total_sent(collectives_of(step.lower().gradients.compile().as_text() or "")))


def test_it_sends_the_bytes_of_the_formula() -> None:
    step = fully_sharded("gpt", "8 auto")
    sent = _sent(step)
    gathered = {one.path: one.num_bytes for one in step.plan.variables}
    # Weights of layers are gathered forward and backward; positions, which nothing needs again, once. What stands
    # outside of the loop may be kept from the forward pass: XLA's CPU sees that it is the same.
    layers = sum(size for path, size in gathered.items() if "/layers/" in path)
    embedding, positions = gathered["params/embedding"], gathered["params/positions"]
    least = 2 * layers + embedding + positions
    ids = BATCH * LENGTH * 4
    assert 7 / 8 * least <= sent["all-gather"] <= 7 / 8 * (least + embedding + ids)
    scale = gathered["params/layers/scale"]  # no sample meets it before 1 is added: XLA sums its gradient
    assert sent["reduce-scatter"] == pytest.approx(7 / 8 * (sum(gathered.values()) - scale))
    assert sent["all-reduce"] < 2 * scale
    # Rows of the embedding are looked up on shards: ids are gathered, rows exchanged, and so are their gradients.
    assert sent["all-to-all"] == pytest.approx(2 * 7 / 8 * BATCH * LENGTH * WIDTH * 4 / 8)


def test_one_gather_and_one_sum_for_all_uses_of_a_weight() -> None:
    sent = _sent(fully_sharded("lstm", "8 auto"))
    loop, embedding = (48 + 1) * 96 * 4, 50 * 24 * 4
    # The loop's weights cross once each way, however many steps the loop has.
    assert sent["reduce-scatter"] == pytest.approx(7 / 8 * (loop + embedding))
    assert sent["all-gather"] <= 7 / 8 * (loop + 2 * embedding)


def test_temporaries_hold_no_layers_but_one() -> None:
    memory = make_step(_deep(24), {"data": ALL}, "8 auto").lower().gradients.compile().memory_analysis()
    whole = 24 * 2 * 32 * 128 * 4
    assert whole / 8 <= memory.argument_size_in_bytes <= whole / 8 + 512  # its samples
    assert memory.temp_size_in_bytes < whole / 6


def _deep(layers: int) -> Model:
    def init(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {"up": jax.random.normal(first, (layers, 32, 128)), "down": jax.random.normal(second, (layers, 128, 32))}

    def loss(params: Any, batch: Any) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: Any) -> Any:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()

    return Model(loss, init, lambda seed: np.ones((16, 32), np.float32))


def _kept(model: str, *paths: str) -> bx.FullySharded:
    """Keeps variables of a model where it gathers them; of all, if none is named."""
    plan = fully_sharded(model, "8 auto").plan
    placed = {one.path: one.placements[0] for one in plan.variables if not paths or one.path.endswith(paths)}
    overrides = {path: bx.Gathered(one.dim, "kept") for path, one in placed.items() if isinstance(one, bx.Gathered)}
    return bx.FullySharded(overrides, min_bytes=0)


@pytest.mark.parametrize(
    ("model", "paths", "strategies"),
    [
        ("gpt", (), "one axis"),
        pytest.param("gpt", ("/up", "/qkv", "/positions"), "one axis", marks=SLOW),
        pytest.param("mlp", (), "one axis", marks=SLOW),
        pytest.param("resnet", (), "one axis", marks=SLOW),
        pytest.param("lstm", (), "one axis", marks=SLOW),
        pytest.param("gpt, kept", (), "one axis", marks=SLOW),
        pytest.param("gpt", (), "two axes", marks=SLOW),
    ],
)
def test_what_is_kept_trains_as_on_one_device(model: str, paths: tuple[str, ...], strategies: str) -> None:
    kept = _kept(model, *paths)
    given = {"data": kept} if strategies == "one axis" else {"data": kept, "model": ALL}
    step = make_step(MODELS[model], given, "8 auto" if strategies == "one axis" else "4x2 auto")
    assert any(one.costs.kept_bytes for one in step.plan.variables) == (strategies == "one axis")
    assert_as_on_one_device(step, MODELS[model])


def test_what_is_kept_is_gathered_once_and_takes_room() -> None:
    whole, again = 24 * 2 * 32 * 128 * 4, {"all-gather": 2, "reduce-scatter": 1}
    for sent, strategy in ((again, ALL), ({**again, "all-gather": 1}, bx.FullySharded({"*": bx.Gathered(1, "kept")}))):
        step = make_step(_deep(24), {"data": strategy}, "8 auto")
        compiled = step.lower().gradients.compile()
        found = dict(total_sent(collectives_of(compiled.as_text() or "")))
        assert {name: found[name] for name in sent} == {name: 7 / 8 * whole * times for name, times in sent.items()}
        held = whole if sent["all-gather"] == 1 else 0
        assert held <= compiled.memory_analysis().temp_size_in_bytes < held + whole / 6
        assert sum(one.costs.kept_bytes for one in step.plan.variables) == held
        assert sum(one.costs.sent_bytes or 0 for one in step.plan.variables) == 7 / 8 * whole * sum(sent.values())
        assert ("gathered and kept" in str(step.plan)) == bool(held)


@pytest.mark.usefixtures("unchecked")
def test_another_word_for_what_becomes_of_it_is_refused() -> None:
    word: Any = "never"
    with pytest.raises(ArgumentError, match=r'^backward=.never.: expected "again" or "kept"$'):
        bx.Gathered(0, word)


def test_of_several_axes_all_must_keep() -> None:
    again, kept = bx.Gathered(0), bx.Gathered(0, "kept")
    for first, second in ((kept, again), (again, kept), (kept, kept)):
        layout = first.refine(Layout.whole((8,)), Axis("a", 2))
        assert second.refine(layout, Axis("b", 2)).keeps == (first == second)


def test_small_weights_stay_whole() -> None:
    step = make_step(MODELS["gpt"], {"data": bx.FullySharded(min_bytes=4000)})
    placed = {one.path.split("/")[-1]: str(one.placements[0]) for one in step.plan.variables}
    # Of a loop over layers a layer's part counts: 2,304 bytes of `out`.
    assert placed == {
        "embedding": "gathered, dim 1", "positions": "replicated", "qkv": "gathered, dim 1", "out": "replicated",
        "up": "gathered, dim 1", "down": "gathered, dim 1", "bias": "replicated", "scale": "replicated",
    }  # fmt: skip


def test_overrides_and_what_cannot_be() -> None:
    one = make_step(MODELS["mlp"], {"data": bx.FullySharded({"*/table": bx.Replicated()}, min_bytes=0)})
    assert {str(v.placements[0]) for v in one.plan.variables if v.path == "params/table"} == {"replicated"}
    assert repr(bx.FullySharded(min_bytes=0)) == "FullySharded(min_bytes=0)"
    with pytest.raises(ArgumentError, match=r"table cannot be placed by Gathered\(dim=2\) .*expected 0 <= dim < 2"):
        make_step(MODELS["mlp"], {"data": bx.DataParallel({"*/table": bx.Gathered(2)})})
    with pytest.raises(ArgumentError, match=r"min_bytes=-1: expected a size in bytes"):
        bx.FullySharded(min_bytes=-1)


def test_the_plan_survives_json() -> None:
    plan = fully_sharded("gpt", "8 auto").plan
    assert bx.Plan.from_json(plan.to_json()) == plan
    assert "FullySharded(min_bytes=0)" in str(plan)


def test_a_state_goes_on_whole() -> None:
    model = MODELS["mlp"]
    sharded, whole = fully_sharded("mlp"), make_step(model, {"data": bx.DataParallel()})
    state, _ = sharded.update(sharded.init(jax.random.key(1)), model.batch(0))
    expected = copied(sharded.to_dense(state))
    dense = whole.adopt(state, sharded)
    assert_close(copied(dense.params), expected.params, atol=0)
    again = sharded.adopt(dense, whole)
    assert_close(copied(again.opt_state), copied(state.opt_state), atol=0)
