"""What is asked of a step besides: the norm of gradients, what optimizers take besides, keys, a mesh that is set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from tests.support.parallel.models import assert_close, copied, init, make_batch, make_mesh, masked_loss, specs

PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0.5)
ROWS = 301


def rows_init(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {"table": jax.random.normal(first, (ROWS, 8)), "kernel": jax.random.normal(second, (8, 33))}


def rows_loss(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(params["table"][batch["ids"]].mean(1) @ params["kernel"])
    return ((hidden.sum(-1) - batch["target"]) ** 2).mean(), {"largest": hidden.max()}


def samples(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (16, 3)).astype(np.int32)
    return {"ids": ids, "target": random.normal(size=16).astype(np.float32)}


def make(strategies: Any, optimizer: Any, **options: Any) -> bx.Step:
    options = {"init": rows_init, "batch": specs(samples(0)), "metrics": ["grad_norm"], **options}
    return bx.parallelize(rows_loss, optimizer, make_mesh(), strategies, **options)


def single_device(params: Any, optimizer: Any, num_updates: int) -> tuple[Any, list[Any], Any]:
    optimizer = optax.with_extra_args_support(optimizer)
    opt_state, norms = optimizer.init(params), []

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        (loss, _), gradients = jax.value_and_grad(rows_loss, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, optax.tree.norm(gradients)

    for seed in range(num_updates):
        params, opt_state, norm = update(params, opt_state, samples(seed))
        norms.append(norm)
    return params, norms, opt_state


@pytest.mark.parametrize(
    ("strategies", "optimizer", "microbatches"),
    [
        pytest.param({"data": bx.DataParallel()}, optax.chain(optax.adam(1e-2), PLATEAU), 1, marks=pytest.mark.slow),
        ({"data": bx.FullySharded({"params/kernel": bx.Gathered(1)}, 0)}, optax.polyak_sgd(0.1), 2),
        ({"data": bx.Hybrid(), "model": bx.Hybrid()}, optax.chain(optax.sgd(0.1), PLATEAU), 1),
        pytest.param(
            {"data": bx.Hybrid(dense=bx.FullySharded(min_bytes=0))}, optax.polyak_sgd(0.1), 2, marks=pytest.mark.slow
        ),
    ],
    ids=["whole", "padded, microbatches", "rows on two axes", "rows, gathered, microbatches"],
)
def test_the_norm_is_exact_and_optimizers_are_told_the_loss(strategies: Any, optimizer: Any, microbatches: int) -> None:
    step = make(strategies, optimizer, microbatches=microbatches)
    by_rows = {one.path for one in step.plan.variables if isinstance(one.placements[0], bx.Rows)}
    assert by_rows == ({"params/table"} if isinstance(strategies["data"], bx.Hybrid) else set())
    state = step.init(jax.random.key(0))
    params = jax.tree.map(jnp.asarray, copied(step.to_dense(state).params))
    norms: list[Any] = []
    for seed in range(3):
        state, metrics = step.update(state, samples(seed))
        norms.append(metrics["grad_norm"])
    params, expected, opt_state = single_device(params, optimizer, 3)
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    found = step.to_dense(state)
    assert_close(copied(found.params), copied(params), atol=2e-5)
    if (scale := optax.tree.get(opt_state, "scale", None)) is not None:
        assert float(scale) < 1
        np.testing.assert_allclose(optax.tree.get(found.opt_state, "scale"), scale)
    assert "grad_norm" not in step.evaluate(state, samples(0))


def test_a_table_that_moves_by_the_loss_without_gradients_stays_dense() -> None:
    step = make({"data": bx.Hybrid()}, optax.chain(optax.adam(1e-2), PLATEAU))
    kernel, table = step.plan.variables
    assert table.placements[0] == kernel.placements[0] == bx.Replicated()
    assert "that depends on the loss (value): the updates that a row has missed cannot be made up for" in table.why


def test_what_no_step_has_is_said() -> None:
    with pytest.raises(ArgumentError, match=r"asks for more than a step has, .*'value_fn'; choose one without"):
        make({"data": bx.DataParallel()}, optax.lbfgs())
    with pytest.raises(ArgumentError, match=r"metrics names \['grad'\], expected 'grad_norm'"):
        make({"data": bx.DataParallel()}, optax.sgd(0.1), metrics=["grad"])
    with pytest.raises(ArgumentError, match="asks for 'grad_norm', and loss_fn <lambda> returns one: rename"):
        bx.parallelize(
            lambda params, batch: (masked_loss(params, batch, jax.random.key(0))[0], {"grad_norm": 1.0}),
            optax.sgd(0.1), make_mesh(), {}, init=init, batch=specs(make_batch()), metrics=["grad_norm"],
        )  # fmt: skip


@pytest.mark.parametrize("impl", ["rbg", pytest.param("unsafe_rbg", marks=pytest.mark.slow)])
def test_a_key_of_any_implementation(impl: str) -> None:
    options: dict[str, Any] = {"init": init, "batch": specs(make_batch())}
    step = bx.parallelize(masked_loss, optax.sgd(0.1), make_mesh(), {"data": bx.FullySharded(min_bytes=0)}, **options)
    state = step.init(jax.random.key(0, impl=impl))
    key, params = jax.random.wrap_key_data(np.array(jax.random.key_data(state.key)), impl=impl), copied(state.params)
    assert step.state_specs.key.dtype == state.key.dtype == key.dtype
    expected, _ = jax.jit(masked_loss)(params, make_batch(), jax.random.fold_in(key, 0))
    state, metrics = step.update(state, make_batch())
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    with pytest.raises(ArgumentError, match=r"state/key is key<fry>\[\], expected key<u?rbg>"):
        step.update(bx.State(state.step, state.params, state.opt_state, {}, jax.random.key(0)), make_batch())


def test_the_mesh_that_is_set() -> None:
    options: dict[str, Any] = {"init": init, "batch": specs(make_batch())}
    with jax.set_mesh(make_mesh()):
        step = bx.parallelize(masked_loss, optax.sgd(0.1), strategies={"data": bx.DataParallel()}, **options)
        metrics = step.update(step.init(jax.random.key(0)), make_batch())[1]
        assert np.isfinite(metrics["loss"])
    assert step.mesh == make_mesh()
    with pytest.raises(ArgumentError, match=r"mesh is None, and no mesh is set: give mesh=jax\.make_mesh"):
        bx.parallelize(masked_loss, optax.sgd(0.1), strategies={"data": bx.DataParallel()}, **options)


def test_options_of_the_compiler_reach_both_programs() -> None:
    options: dict[str, Any] = {"init": init, "batch": specs(make_batch())}
    unheard = {"xla_unheard_of": 1}
    for given, raises in ((unheard, True), ({"cpu": unheard}, True), ({"tpu": unheard}, False)):
        step = bx.parallelize(masked_loss, optax.sgd(0.1), make_mesh(), {}, compiler_options=given, **options)
        for lowered in step.lower():
            if raises:
                with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_unheard_of'"):
                    lowered.compile()
            else:
                lowered.compile()
