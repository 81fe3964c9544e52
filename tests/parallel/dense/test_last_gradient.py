"""The gradient of the weight that is used last, which is made and scattered in pieces."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.parallel.dense import last_gradient, passes
from braidax.program import collectives_of
from tests.support.parallel.dense.models import Model
from tests.support.parallel.dense.rotated import OPTIMIZER  # whose step compiles to less than Adam's
from tests.support.parallel.dense.steps import assert_as_on_one_device, make_step

WIDTH, WORDS, SAMPLES = 16, 83, 16
PIECE = 8 * WIDTH * 4  # bytes: so there are eight of ten or eleven words each


def _init(key: jax.Array) -> Any:
    table, layer, head = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(table, (WORDS, WIDTH)) / 4,
        "layers": jax.random.normal(layer, (3, WIDTH, WIDTH)) / 4,
        "head": jax.random.normal(head, (WIDTH, WORDS)) / 4,
    }


def _batch(seed: int) -> Any:
    return {"ids": np.random.default_rng(seed).integers(0, WORDS, (SAMPLES, 5)).astype(np.int32)}


@functools.cache
def _loss(form: str) -> Any:
    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(
            jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), params["table"][batch["ids"]], params["layers"]
        )
        logits = {
            "tied": lambda: x @ params["table"].T,
            "head": lambda: x @ params["head"],
            "head first": lambda: jnp.einsum("dv,btd->vbt", params["head"], x).transpose(1, 2, 0),
            "used twice": lambda: jnp.tanh(x @ params["head"]) @ params["head"].T @ params["head"],
            "head stopped": lambda: jnp.tanh(x @ params["table"].T) + jax.lax.stop_gradient(x @ params["head"]),
            "tied stopped": lambda: x @ params["head"] + jax.lax.stop_gradient(x @ params["table"].T),
        }[form]()
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).mean()

    return loss


@pytest.mark.parametrize(
    "form",  # of whole weights one is used twice below
    ["tied", *(pytest.param(form, marks=pytest.mark.slow) for form in ("head", "head first", "used twice"))],
)
def test_it_trains_as_on_one_device(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_gradient, "_LEAST_BYTES", PIECE)
    monkeypatch.setattr(passes, "keeps_order", lambda _: True)
    model = Model(_loss(form), _init, _batch)
    step = make_step(model, {"data": bx.FullySharded(min_bytes=0)}, optimizer=OPTIMIZER)
    text = step.lower().gradients.compile().as_text() or ""
    scattered = [one for one in collectives_of(text) if one.kind == "reduce-scatter" and one.times == 1]
    assert len(scattered) == (1 if form == "used twice" else 8)
    assert_as_on_one_device(step, model, optimizer=OPTIMIZER)


@pytest.mark.slow  # below weights are whole over two axes, above pieces of one
@pytest.mark.parametrize("form", ["tied", "head"])
def test_over_two_axes_it_trains_as_on_one_device(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_gradient, "_LEAST_BYTES", PIECE)
    model, all_of_it = Model(_loss(form), _init, _batch), bx.FullySharded(min_bytes=0)
    step = make_step(model, {"data": all_of_it, "model": all_of_it}, "4x2 auto", optimizer=OPTIMIZER)
    assert_as_on_one_device(step, model, optimizer=OPTIMIZER)


@pytest.mark.parametrize(
    ("form", "axes"),
    [
        ("tied", ("data", "model")),
        pytest.param("head", ("data",), marks=pytest.mark.slow),
        pytest.param("head first", ("data", "model"), marks=pytest.mark.slow),
        ("used twice", ("data",)),
        *(pytest.param(form, ("data",), marks=pytest.mark.slow) for form in ("tied", "head first")),
        *(pytest.param(form, ("data", "model"), marks=pytest.mark.slow) for form in ("head", "used twice")),
    ],
)
def test_all_uses_of_a_whole_weight_cross_once(form: str, axes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_gradient, "_LEAST_BYTES", PIECE)
    model = Model(_loss(form), _init, _batch)
    strategies, mesh = {axis: bx.DataParallel() for axis in axes}, "8 explicit" if len(axes) == 1 else "4x2 auto"
    step = make_step(model, strategies, mesh, optimizer=OPTIMIZER)
    found = collectives_of(step.lower().gradients.compile().as_text() or "")
    used = {name: leaf for name, leaf in step.state_specs.params.items() if form != "tied" or name != "head"}
    assert {one.kind for one in found} == {"all-reduce"}
    assert sum(one.times * one.result_bytes for one in found) == 4 * (1 + sum(leaf.size for leaf in used.values()))
    assert_as_on_one_device(step, model, optimizer=OPTIMIZER)


@pytest.mark.parametrize(("form", "is_put_off"), [("head", False), ("tied", True)])
def test_few_pieces_of_a_whole_weight_are_made_where_they_save_bytes(
    form: str, is_put_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    for size in (2 * PIECE, 2**23):
        monkeypatch.setattr(last_gradient, "_LEAST_BYTES", size)
        step = make_step(Model(_loss(form), _init, _batch), {"data": bx.DataParallel()})
        texts.append(step.lower().gradients.as_text())
    assert (texts[0] != texts[1]) is is_put_off


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        ("head stopped", bx.FullySharded(min_bytes=0)),
        pytest.param("tied stopped", bx.DataParallel(), marks=pytest.mark.slow),
        pytest.param("head stopped", bx.DataParallel(), marks=pytest.mark.slow),
        pytest.param("tied stopped", bx.FullySharded(min_bytes=0), marks=pytest.mark.slow),
    ],
)
def test_uses_without_a_gradient(form: str, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_gradient, "_LEAST_BYTES", PIECE)
    model = Model(_loss(form), _init, _batch)
    assert_as_on_one_device(make_step(model, {"data": strategy}, optimizer=OPTIMIZER), model, optimizer=OPTIMIZER)


def test_small_gradients_stay_in_one_piece() -> None:
    step = make_step(Model(_loss("head"), _init, _batch), {"data": bx.FullySharded(min_bytes=0)})
    text = step.lower().gradients.compile().as_text() or ""
    assert len([one for one in collectives_of(text) if one.kind == "reduce-scatter" and one.times == 1]) == 1


def test_the_head_needs_its_table_with_logits_and_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_gradient, "_LEAST_BYTES", 1)
    words, width, samples, length = 4096, 64, 16, 64
    table, logits = 4 * words * width, 4 * samples // 8 * length * words

    def init(key: jax.Array) -> Any:
        return {"table": jax.random.normal(key, (words, width)), "layers": jnp.ones((2, width, width))}

    batch = {"ids": jax.ShapeDtypeStruct((samples, length), jnp.int32)}
    model = Model(_loss("tied"), init, lambda _: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), batch))
    compiled = make_step(model, {"data": bx.FullySharded(min_bytes=0)}).lower().gradients.compile()
    sent = [one for one in collectives_of(compiled.as_text() or "") if one.kind == "reduce-scatter" and one.times == 1]
    assert len(sent) == 1  # a compiler that keeps to no order would cut out all pieces at once
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.05 * (table + 2 * logits)
