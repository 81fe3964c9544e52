"""Tensor parallel training: the numbers of one device, parts of what goes together, and the bytes of the formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.plan.placements import check_activations
from braidax.parallel.plan.strategy import in_words
from braidax.program import collectives_of, total_sent
from tests.support.parallel.dense.models import MODELS, Model
from tests.support.parallel.dense.steps import ALL, assert_as_on_one_device, make_step
from tests.support.parallel.models import assert_close, copied, on_one_device, specs

TENSOR = bx.TensorParallel(min_bytes=0)
SLOW = pytest.mark.slow
STRATEGIES: dict[str, Any] = {
    "alone": {"model": TENSOR},
    "and data": {"data": bx.DataParallel(), "model": TENSOR},
    "and sharded": {"data": ALL, "model": TENSOR},
    "by sequence": {"data": ALL, "model": bx.TensorParallel(min_bytes=0, activations="by sequence")},
    "and rows": {"data": bx.Hybrid({"params/table": bx.Rows()}, dense=ALL), "model": TENSOR},
}
LAYERS, BATCH, LENGTH, WIDTH, HIDDEN, HEADS, VOCABULARY = 3, 8, 16, 32, 128, 4, 64


def placed(step: bx.Step, axis: int = 1) -> dict[str, str]:
    return {one.path.removeprefix("params/"): str(one.placements[axis]) for one in step.plan.variables}


@pytest.mark.parametrize(
    ("model", "mesh", "strategies"),
    [
        pytest.param("gpt", "4x2 explicit", "and data", marks=SLOW),
        pytest.param("gpt", "4x2 auto", "alone", marks=SLOW),
        pytest.param("gpt, kept", "4x2 auto", "and sharded", marks=SLOW),
        pytest.param("mlp", "4x2 explicit", "and rows", marks=SLOW),
        pytest.param("mlp", "4x2 auto", "and sharded", marks=SLOW),  # by sequence below
        ("gpt", "4x2 explicit", "by sequence"),
        pytest.param("gpt, fused", "4x2 explicit", "and sharded", marks=SLOW),
        pytest.param("gpt, kept", "4x2 auto", "by sequence", marks=SLOW),
        pytest.param("resnet", "4x2 auto", "and sharded", marks=SLOW),
        pytest.param("lstm", "4x2 explicit", "and data", marks=SLOW),
    ],
)
def test_it_trains_as_on_one_device(model: str, mesh: str, strategies: str) -> None:
    # Adam divides by the gradient's size: of a small one it moves what the order of a sum has left.
    assert_as_on_one_device(make_step(MODELS[model], STRATEGIES[strategies], mesh), MODELS[model], atol=2e-5)


@pytest.mark.slow  # a table by rows beside parts of weights is in test_rotated.py
def test_a_table_by_rows_and_by_columns() -> None:
    """Momentum, which compiles to half of what the Adam of other cases would."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2, momentum=0.9))
    step = make_step(MODELS["mlp"], STRATEGIES["and rows"], "4x2 explicit", optimizer=optimizer)
    assert_as_on_one_device(step, MODELS["mlp"], optimizer=optimizer)


def test_what_goes_together_is_split() -> None:
    assert placed(make_step(MODELS["gpt"], STRATEGIES["and data"], "4x2 auto")) == {
        "embedding": "split, dim 0", "positions": "replicated",
        "layers/qkv": "split, dim 3", "layers/out": "split, dim 1",
        "layers/up": "split, dim 2", "layers/bias": "split, dim 1", "layers/down": "split, dim 1",
        "layers/scale": "replicated",
    }  # fmt: skip


def test_what_one_weight_makes_is_split_piece_by_piece() -> None:
    """The weight is exchanged once before all layers, its gradient once behind them; a layer sums four times."""
    step = make_step(MODELS["gpt, fused"], STRATEGIES["and data"], "4x2 auto", optimizer=optax.sgd(0.1))
    assert placed(step) == {
        "embedding": "split, dim 0", "layers/qkv": "split, dim 2 in 3 pieces", "layers/out": "split, dim 1",
        "layers/up": "split, dim 2 in 2 pieces", "layers/down": "split, dim 1",
        "layers/bias": "split, dim 1 in 3 pieces",
    }  # fmt: skip
    why = {one.path.removeprefix("params/"): one.why for one in step.plan.variables}
    assert "dim 2 split in pieces 24+12+12, which are exchanged; a device sends" in why["layers/qkv"]
    assert "dim 2 split in pieces 2×72, which are exchanged; a device sends" in why["layers/up"]
    state = step.init(jax.random.key(0))
    assert state.params["layers"]["qkv"].shape == (2, 24, 48)
    assert state.params["layers"]["qkv"].addressable_shards[0].data.shape == (1, 24, 48)
    found = [one for one in collectives_of(step.lower().gradients.compile().as_text() or "") if one.group_size == 2]
    exchanged = [one.result_bytes for one in found if one.kind == "all-to-all"]
    assert sorted(exchanged) == [48 * 4] * 2 + [24 * 48 * 4] * 2 + [24 * 144 * 4] * 2
    activations = 16 // 4 * 6 * 24 * 4
    of_layers = [one for one in found if one.times == 2 and one.result_bytes >= activations]
    assert [one.kind for one in of_layers] == [
        "all-reduce"
    ] * 5  # and again what a remat computes, but for the last sum
    assert bx.Plan.from_json(step.plan.to_json()) == step.plan


def test_pieces_that_cannot_be() -> None:
    model, data = MODELS["gpt, fused"], bx.DataParallel()
    for placement, told in (
        (
            bx.Split(2, pieces=(24, 12)),
            r"pieces=\[24, 12\] of a dim of 48: expected sizes that 2 divides, and that are 48",
        ),
        (bx.Split(2, pieces=(25, 23)), r"pieces=\[25, 23\] of a dim of 48: expected sizes that 2 divides"),
        (bx.Split(3, pieces=(24, 24)), r"dim=3 of \[2, 24, 48\] would be split in pieces, and is split otherwise"),
    ):
        with pytest.raises(ArgumentError, match=told):
            make_step(model, {"data": data, "model": bx.TensorParallel({"*/qkv": placement})}, "4x2 auto")
    both = {"data": bx.DataParallel({"*/qkv": bx.Gathered(2)}), "model": TENSOR}
    with pytest.raises(ArgumentError, match=r"dim=2 is split in pieces on the axis model"):
        make_step(model, both, "4x2 auto")


def test_what_cannot_be_says_why() -> None:
    step = make_step(MODELS["lstm"], STRATEGIES["and data"], "4x2 auto")
    why = {one.path.removeprefix("params/"): one.why for one in step.plan.variables}
    assert "model: tensor parallel: whole: taken in parts by split at models.py:" in why["both"]
    assert "dim 0 split; a device sends" in why["embedding"]
    step = make_step(MODELS["resnet"], STRATEGIES["and data"], "4x2 auto")
    assert "two dims of one value belong to it" in next(v.why for v in step.plan.variables if "blocks/0" in v.path)
    small = make_step(MODELS["gpt"], {"model": bx.TensorParallel(min_bytes=50_000)}, "4x2 auto")
    assert {path for path, one in placed(small).items() if one != "replicated"} == {
        "layers/up", "layers/bias", "layers/down",
    }  # fmt: skip
    with pytest.raises(
        ArgumentError, match=r"up cannot be placed by Split\(dim=3, .*\) on the axis 'model': dim=3 of a "
    ):
        make_step(MODELS["gpt"], {"model": bx.TensorParallel({"*/up": bx.Split(3)})}, "4x2 auto")
    with pytest.raises(ArgumentError, match=r"min_bytes=-1: expected a size in bytes"):
        bx.TensorParallel(min_bytes=-1)
    with pytest.raises(ArgumentError, match=r"activations='sequence': expected \"whole\" or \"by sequence\""):
        check_activations("sequence")


def test_an_override_of_one_weight_is_right() -> None:
    model = MODELS["mlp"]
    split = {"*/0/w": bx.Split(1), "*/1/w": bx.Split(1), "*": bx.Replicated()}  # 33 columns, over 2 devices
    step = make_step(model, {"data": bx.DataParallel(), "model": bx.TensorParallel(split)}, "4x2 auto")
    assert step.init(jax.random.key(0)).params["dense"][1]["w"].shape == (64, 34)
    assert_as_on_one_device(step, model, num_updates=2)


def _ids(seed: int, samples: int, length: int, words: int) -> Any:
    return {"ids": np.random.default_rng(seed).integers(0, words, (samples, length)).astype(np.int32)}


def _gpt(*, vocabulary: bool = True, remat: bool = False) -> Model:
    """Attention with a weight each for queries, keys and values."""
    shapes = {
        "query": (LAYERS, WIDTH, HEADS, 8), "key": (LAYERS, WIDTH, HEADS, 8), "value": (LAYERS, WIDTH, HEADS, 8),
        "out": (LAYERS, HEADS, 8, WIDTH), "up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH),
        "scale": (LAYERS, WIDTH),
    }  # fmt: skip

    def init(key: jax.Array) -> Any:
        return {
            "layers": {name: jax.random.normal(key, shape) / 8 for name, shape in shapes.items()},
            "table": jax.random.normal(key, (VOCABULARY, WIDTH)),
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            h = x * w["scale"] * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
            query, key, value = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in ("query", "key", "value"))
            scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query, key))
            x = x + jnp.einsum("bhts,bshk,hkd->btd", scores, value, w["out"])
            return x + jax.nn.gelu((x * w["scale"]) @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, params["table"][batch["ids"]], params["layers"])
        if not vocabulary:
            return (x**2).mean()
        logits = x @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:]).mean()

    def batch(seed: int) -> Any:
        return _ids(seed, BATCH, LENGTH, VOCABULARY)

    return Model(loss, init, batch)


def sent(step: bx.Step) -> dict[int, float]:
    """Bytes by the number of devices that take part together."""
    found: dict[int, float] = {}
    for one in collectives_of(step.lower().gradients.compile().as_text() or ""):
        found[one.group_size] = found.get(one.group_size, 0.0) + total_sent([one]).get(one.kind, 0.0)
    return found


def _on_four(model: Model, strategies: Any, *, rate: float = 0.1) -> bx.Step:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return bx.parallelize(model.loss, optax.sgd(rate), mesh, strategies, init=model.init, batch=specs(model.batch(0)))


def test_activations_by_sequence() -> None:
    """What layers keep is a quarter; the sums of a layer are scatters and gathers, one gather for each again."""
    whole, split = (
        _on_four(
            _gpt(remat=True, vocabulary=False),
            {"data": bx.DataParallel(), "model": bx.TensorParallel(min_bytes=0, activations=activations)},
        )
        for activations in ("whole", "by sequence")
    )
    assert placed(split)["layers/up"] == "split, dim 2, activations by sequence"
    programs = [step.lower().gradients.compile() for step in (whole, split)]
    saved = [program.memory_analysis().temp_size_in_bytes for program in programs]
    activations = BATCH // 2 * LENGTH * WIDTH * 4
    assert saved[0] - saved[1] >= (LAYERS - 1) * activations * 3 / 4
    found = [one for one in collectives_of(programs[1].as_text() or "") if one.group_size == 4]
    by_kind = total_sent(one for one in found if one.times == LAYERS)
    # Forward two of each, again but for the last sum, backward two of each.
    assert by_kind["all-gather"] == LAYERS * 6 * activations * 3 / 4
    assert by_kind["reduce-scatter"] == LAYERS * 5 * activations * 3 / 4
    assert by_kind["all-reduce"] < activations / 2  # of the scales' gradients


@pytest.mark.parametrize("data", [pytest.param("data parallel", marks=SLOW), "fully sharded"])
def test_four_all_reduces_a_layer(data: str) -> None:
    model = _gpt()
    strategies = {"data": {"data parallel": bx.DataParallel(), "fully sharded": ALL}[data], "model": TENSOR}
    step = _on_four(model, strategies)
    activations = BATCH // 2 * LENGTH * WIDTH * 4
    of_layers, of_vocabulary = 4 * LAYERS * activations, 2 * activations
    # The cross entropy sums the largest logits and their exponentials, and reads those of the labels.
    of_entropy = 3 * BATCH // 2 * LENGTH * 4
    found = sent(step)
    assert set(found) == {2, 4}
    (why,) = (one.why for one in step.plan.variables if one.path == "params/layers/up")
    assert f"dim 2 split; a device sends {in_words(3 * LAYERS * activations)} a step for 2 of them" in why
    least = 2 * 3 / 4 * (of_layers + of_vocabulary)
    assert least <= found[4] <= least + 2 * 3 / 4 * of_entropy
    if data == "data parallel":  # along the other axis, gradients of parts, and the loss
        whole = LAYERS * WIDTH * 4
        total = sum(one.num_bytes for one in step.plan.variables)
        least = (total - whole) / 4 + whole
        tied = VOCABULARY * WIDTH  # both uses of the table, a quarter of 4 bytes each; and of the scale
        assert least <= found[2] <= least + tied + whole + 16


def _entropies(params: Any, batch: Any) -> Any:
    """Cross entropies as people write them, of an output layer of its own and of a tied one; and guesses."""
    x, ids = jnp.tanh(params["table"][batch["ids"]] @ params["w"]), batch["ids"]
    free, tied = x @ params["head"] + params["bias"], (x @ params["table"].T).astype(jnp.float32)
    log_probs = jax.nn.log_softmax(tied)
    losses = [
        optax.softmax_cross_entropy_with_integer_labels(free[:, :-1], ids[:, 1:]).mean(),
        optax.softmax_cross_entropy(free, optax.smooth_labels(jax.nn.one_hot(ids, 1024), 0.1)).mean(),
        -jnp.take_along_axis(log_probs[:, 1:], ids[:, :-1, None], axis=-1).mean(),
        -(log_probs * jax.nn.one_hot(ids, 1024)).sum(-1).mean(),
        (jax.nn.logsumexp(tied, -1) ** 2).mean(),
    ]
    both = (free, jnp.round(tied))  # of the largest the first
    guesses = [logits.argmax(-1).astype(jnp.float32).mean() for logits in both]
    return sum(losses), {"guesses": jnp.stack(guesses)}


def test_logits_stay_split() -> None:
    """Nothing that is sent along the axis has the size of a part of the logits; no kind of loss gathers them."""
    batch = BATCH * 2

    def init(key: jax.Array) -> Any:
        shapes = {"table": (1024, WIDTH), "w": (WIDTH, WIDTH), "head": (WIDTH, 1024), "bias": (1024,)}
        return {name: jax.random.normal(key, shape) / 4 for name, shape in shapes.items()}

    def tokens(seed: int) -> Any:
        return _ids(seed, batch, 16, 1024)

    model = Model(_entropies, init, tokens)
    step = _on_four(model, {"data": bx.DataParallel(), "model": TENSOR}, rate=1.0)
    assert placed(step) == {
        "table": "split, dim 0", "w": "replicated", "head": "split, dim 1", "bias": "split, dim 0",
    }  # fmt: skip
    found = collectives_of(step.lower().gradients.compile().as_text() or "")
    along = [one.result_bytes for one in found if one.group_size == 4]
    logits = batch // 2 * 16 * 1024 * 4
    assert max(along) < logits / 4
    state = step.init(jax.random.key(0))
    before, first = on_one_device(step.to_dense(state).params), model.batch(0)
    (_, aux), gradient = jax.jit(jax.value_and_grad(_entropies, has_aux=True))(before, first)
    state, metrics = step.update(state, first)
    np.testing.assert_allclose(metrics["guesses"], aux["guesses"], rtol=1e-2)
    expected = jax.tree.map(jnp.subtract, before, gradient)
    assert_close(copied(step.to_dense(state).params), copied(expected), atol=2e-6)


def test_a_table_by_columns() -> None:
    model = _gpt(vocabulary=False)
    step = make_step(model, STRATEGIES["and data"], "4x2 auto", optimizer=optax.sgd(0.1))
    assert placed(step)["table"] == "split, dim 1"
    gathers = [
        one for one in collectives_of(step.lower().gradients.compile().as_text() or "") if one.kind == "all-gather"
    ]
    assert [(one.result_bytes, one.group_size) for one in gathers] == [(BATCH // 4 * LENGTH * WIDTH * 4, 2)]


@jax.jit
def _projected(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def _otherwise(params: Any, x: jax.Array) -> jax.Array:
    """Products behind jit borders, in a branch, in a loop that shares its weights, and of experts."""
    h = jax.jit(jnp.tanh)(x @ params["in"])
    both = _projected(h, params["up"]) * _projected(h, params["gate"])
    chosen = jax.lax.cond(x[0, 0, 0] > -100, lambda h: _projected(h, params["up"]) @ params["down"], lambda h: h, h)
    experts = jnp.einsum(
        "ebtf,efd->btd", jax.nn.relu(jnp.einsum("btd,edf->ebtf", h, params["first"])), params["second"]
    )
    h = h + both @ params["down"] + chosen + experts
    y, _ = jax.lax.scan(
        lambda y, rate: (y + rate * _projected(h, params["up"]) @ params["down"], None), h, jnp.arange(3.0)
    )
    return (y**2).mean()


@pytest.mark.parametrize("activations", [pytest.param("whole", marks=SLOW), "by sequence"])
def test_where_products_stand_otherwise(activations: Any) -> None:
    shapes = {
        "in": (8, 16), "up": (16, 32), "gate": (16, 32), "down": (32, 16), "first": (4, 16, 32), "second": (4, 32, 16),
    }  # fmt: skip

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(shapes))
        return {name: jax.random.normal(one, shapes[name]) / 4 for name, one in zip(shapes, keys, strict=True)}

    model = Model(_otherwise, init, lambda seed: np.random.default_rng(seed).normal(size=(8, 4, 8)).astype(np.float32))
    step = _on_four(model, {"data": ALL, "model": bx.TensorParallel(min_bytes=0, activations=activations)}, rate=1.0)
    assert {name: one.split(",")[1] for name, one in placed(step).items() if name != "in"} == {
        "up": " dim 1", "gate": " dim 1", "down": " dim 0", "first": " dim 0", "second": " dim 0",
    }  # fmt: skip
    state = step.init(jax.random.key(0))
    before, batch = on_one_device(step.to_dense(state).params), model.batch(0)
    expected = jax.tree.map(jnp.subtract, before, jax.jit(jax.grad(_otherwise))(before, batch))
    state, _ = step.update(state, batch)
    assert_close(copied(step.to_dense(state).params), copied(expected), atol=2e-6)
