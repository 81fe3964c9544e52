"""Steps as hypothesis draws them: any strategies, on any axes, of any model, train as a single device does."""

import functools
import math
from operator import itemgetter
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.program import named_leaves
from tests.support.parallel.dense.decorated import OPTIMIZER, begin, whole_step
from tests.support.parallel.dense.models import MODELS
from tests.support.parallel.models import assert_close, copied, specs

NUM_UPDATES = 10
AXES = ("data", "model", "third")
SHAPES = ((8,), (4, 2), (2, 4), (2, 2, 2))
SIZES = (0, 2000, 8000)  # of what stays whole
LEAVES = {
    name: [(path, leaf.ndim) for path, leaf in named_leaves(jax.eval_shape(model.init, jax.random.key(0)))]
    for name, model in MODELS.items()
}


class Drawn(NamedTuple):
    """**Fields:** `shape`: of the mesh. `told`: what each axis is for. `microbatches`: None of a decorated step."""

    model: str
    shape: tuple[int, ...]
    kind: AxisType
    told: tuple[Any, ...]
    microbatches: int | None

    @property
    def strategies(self) -> dict[str, Any]:
        """By axis, where there is one."""
        made = {axis: one.made() for axis, one in zip(AXES, self.told, strict=False)}
        return {axis: strategy for axis, strategy in made.items() if strategy is not None}


# A step takes seconds to compile: a failing draw is shown as it was drawn.
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate]
CHECKS = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much]
QUICKLY = hypothesis.settings(
    max_examples=1, derandomize=True, deadline=None, phases=PHASES, suppress_health_check=CHECKS
)


class OneAxis(NamedTuple):
    """What one axis is for; told in words, because what checks our annotations draws numbers itself.

    **Fields:** `strategy`. `override`: a variable, what is asked for it, and the dim, or nothing. `min_bytes`.
    `activations`: of tensor parallelism.
    """

    strategy: str
    override: tuple[str, str, int] | None
    min_bytes: int
    activations: Any

    def made(self) -> Any:
        """The strategy itself; None for no strategy."""
        overrides, size = dict[str, Any](), self.min_bytes
        if self.override is not None:
            name, asked, dim = self.override
            dims = {"Gathered": (dim,), "Split": (dim,), "Rotated": (dim,)}.get(asked, ())
            overrides[f"*/{name}"] = getattr(bx, asked)(*dims)
        sharded = bx.FullySharded(overrides, min_bytes=size)
        several = {
            "data parallel": bx.DataParallel(overrides), "sharded": sharded, "hybrid": bx.Hybrid(overrides),
            "hybrid, sharded": bx.Hybrid(overrides, dense=bx.FullySharded(min_bytes=size)),
            "tensor": bx.TensorParallel(overrides, size, self.activations),
            "rotated": bx.RotatedTensorParallel(overrides, min_bytes=size),
            "hybrid, rotated": bx.Hybrid(overrides, dense=bx.RotatedTensorParallel(min_bytes=size)),
        }  # fmt: skip
        return several.get(self.strategy)


STRATEGIES = ("sharded", "rotated", "tensor", "hybrid, sharded", "hybrid, rotated", "hybrid", "data parallel", "none")


@st.composite
def axes_of(draw: st.DrawFn, model: str) -> OneAxis:
    """Any strategy, with at most one override, which may ask for what cannot be."""
    override = None
    if draw(st.integers(0, 3)) == 3:
        name, ndim = draw(st.sampled_from(LEAVES[model]))
        asked = draw(st.sampled_from(["Replicated", "Gathered", "Split", "Rotated", "Rows"]))
        override = name, asked, draw(st.integers(0, max(0, ndim - 1)))
    activations = draw(st.sampled_from(["whole", "by sequence"]))
    return OneAxis(draw(st.sampled_from(STRATEGIES)), override, draw(st.sampled_from(SIZES)), activations)


@st.composite
def drawn_steps(draw: st.DrawFn) -> Drawn:
    """Any step."""
    model, shape = draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from(SHAPES))
    told = tuple(draw(axes_of(model)) for _ in shape)
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    return Drawn(model, shape, kind, told, draw(st.sampled_from([None, 1, 2])))


@functools.cache
def on_one_device(model: str, microbatches: int | None) -> tuple[Any, Any, list[Any]]:
    """Parameters before and after all updates, and the losses, of plain JAX."""
    loss, state, losses = MODELS[model].loss, begin(MODELS[model]), list[Any]()
    train_step = jax.jit(whole_step(MODELS[model]))
    if microbatches is None:
        for seed in range(NUM_UPDATES):
            state, metrics = train_step(state, MODELS[model].batch(seed))
            losses.append(metrics["loss"])
        return begin(MODELS[model])["params"], copied(state["params"]), losses

    @jax.jit
    def update(params: Any, opt_state: Any, key: jax.Array, batch: Any) -> Any:
        def mean(params: Any) -> jax.Array:
            if microbatches == 1:
                return loss(params, batch, key)
            slices = [itemgetter(slice(at, None, microbatches)) for at in range(microbatches)]
            pieces = [jax.tree.map(one, batch) for one in slices]
            losses = [loss(params, piece, jax.random.fold_in(key, at)) for at, piece in enumerate(pieces)]
            return jnp.stack(losses).mean()

        value, gradients = jax.value_and_grad(mean)(params)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    first = born(model)
    params, opt_state = first.params, OPTIMIZER.init(first.params)
    for seed in range(NUM_UPDATES):
        key = jax.random.fold_in(first.key, seed)
        params, opt_state, value = update(params, opt_state, key, jax.tree.map(jnp.asarray, MODELS[model].batch(seed)))
        losses.append(value)
    return first.params, copied(params), losses


@functools.cache
def born(model: str) -> bx.State:
    """What a step begins with, on one device."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    one, batch = MODELS[model], specs(MODELS[model].batch(0))
    state = bx.parallelize(one.loss, OPTIMIZER, mesh, {}, init=one.init, batch=batch).init(jax.random.key(3))
    return jax.device_put(state, jax.devices()[0])


def trained(drawn: Drawn) -> tuple[Any, list[Any]]:
    """Parameters after all updates, and the losses."""
    model, batches = MODELS[drawn.model], [MODELS[drawn.model].batch(seed) for seed in range(NUM_UPDATES)]
    kinds = (drawn.kind,) * len(drawn.shape)
    mesh, losses = jax.make_mesh(drawn.shape, AXES[: len(drawn.shape)], axis_types=kinds), list[Any]()
    if drawn.microbatches is None:
        step, state = bx.parallelize(mesh, drawn.strategies)(whole_step(model)), begin(model)
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        return copied(state["params"]), losses
    options: dict[str, Any] = {"init": model.init, "batch": specs(batches[0]), "microbatches": drawn.microbatches}
    step = bx.parallelize(model.loss, OPTIMIZER, mesh, drawn.strategies, **options)
    state = step.init(jax.random.key(3))
    assert_close(copied(step.to_dense(state).params), copied(born(drawn.model).params))
    for batch in batches:
        state, metrics = step.update(state, batch)
        losses.append(metrics["loss"])
    return copied(step.to_dense(state).params), losses


def check(drawn: Drawn) -> None:
    """Fails where a drawn step trains otherwise than a single device."""
    divided = [drawn.shape[at] for at, axis in enumerate(AXES[: len(drawn.shape)]) if _splits(drawn, axis)]
    hypothesis.assume(16 % (math.prod(divided) * (drawn.microbatches or 1)) == 0)
    asked = any(one.override for one in drawn.told)
    try:
        params, losses = trained(drawn)
    except ArgumentError:
        hypothesis.assume(not asked)
        raise
    _, expected, expects = on_one_device(drawn.model, drawn.microbatches)
    atol = 0.2 if "bfloat16" in drawn.model else 1e-4
    assert_close(copied(losses), copied(expects), atol=atol)
    assert_close(params, expected, atol=atol)


def _splits(drawn: Drawn, axis: str) -> bool:
    return axis in drawn.strategies and drawn.strategies[axis].splits_batch


@pytest.mark.slow  # the other files have each strategy by day, by hand
@QUICKLY
@hypothesis.given(drawn_steps())
def test_it_trains_as_on_one_device(drawn: Drawn) -> None:
    check(drawn)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@hypothesis.settings(QUICKLY, max_examples=200, derandomize=False)
@hypothesis.given(drawn_steps())
def test_many_train_as_on_one_device(drawn: Drawn) -> None:
    check(drawn)
