"""Names of dims that Flax keeps with parameters: honored like overrides."""

from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import braidax.parallel as bx
from braidax.errors import ArgumentError, SpecError
from braidax.parallel.given.dim_names import dim_names
from tests.support.parallel.models import assert_close, copied, make_mesh

BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)
RULES = [("mlp", "model"), ("embed", None)]
KERNEL = nn.initializers.lecun_normal()


class Model(nn.Module):
    """Two layers, one with logical names, one with those of axes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up = nn.with_logical_partitioning(KERNEL, ("embed", "mlp"))
        x = jnp.tanh(nn.Dense(32, kernel_init=up, bias_init=nn.with_logical_partitioning(nn.zeros, ("mlp",)))(x))
        x = jnp.tanh(nn.Dense(16, kernel_init=nn.with_logical_partitioning(KERNEL, ("mlp", "embed")))(x))
        return nn.Dense(8, kernel_init=nn.with_partitioning(KERNEL, ("data", None)))(x)


def init(key: jax.Array) -> Any:
    return Model().init(key, jnp.ones((1, 8)))["params"]


def loss(params: Any, batch: Any) -> jax.Array:
    return (Model().apply({"params": params}, batch) ** 2).mean()  # pyright: ignore


def make(strategies: Any, **options: Any) -> bx.Step:
    options = {"init": init, "batch": BATCH, **options}
    return bx.parallelize(loss, optax.adam(1e-2), make_mesh(), strategies, **options)


def test_names_are_honored_and_the_numbers_stay() -> None:
    step = make({"data": bx.DataParallel()}, rules=RULES)
    placed = {one.path: tuple(map(str, one.placements)) for one in step.plan.variables}
    whole = "replicated"
    assert placed == {
        "params/Dense_0/bias/value": (whole, "split, dim 0"),
        "params/Dense_0/kernel/value": (whole, "split, dim 1"),
        "params/Dense_1/bias": (whole, whole),
        "params/Dense_1/kernel/value": (whole, "split, dim 0"),
        "params/Dense_2/bias": (whole, whole),
        "params/Dense_2/kernel/value": ("gathered, dim 0", whole),
    }
    assert make({}, plan=step.plan).plan == step.plan
    plain = make({"data": bx.DataParallel({"params/*": bx.Replicated()})})
    states = [one.init(jax.random.key(0)) for one in (step, plain)]
    batch = np.random.default_rng(0).normal(size=BATCH.shape).astype(np.float32)
    for _ in range(3):
        states = [one.update(state, batch)[0] for one, state in zip((step, plain), states, strict=True)]
    assert_close(copied(step.to_dense(states[0]).params), copied(plain.to_dense(states[1]).params), atol=1e-5)


def test_overrides_come_first_and_names_without_a_rule_are_told() -> None:
    step = make({"data": bx.FullySharded({"params/Dense_2/*": bx.Replicated()})})
    by_path = {one.path: one for one in step.plan.variables}
    assert str(by_path["params/Dense_2/kernel/value"].placements[0]) == "replicated"
    assert "no rule says where 'embed', 'mlp' goes" in by_path["params/Dense_0/kernel/value"].why


def test_variables_of_nnx_keep_theirs() -> None:
    before = flax.config.flax_always_shard_variable  # pyright: ignore
    flax.config.update("flax_always_shard_variable", False)
    try:
        made = nnx.with_partitioning(KERNEL, ("embed", "mlp"))
        params = jax.eval_shape(lambda key: nnx.split(nnx.Linear(4, 8, rngs=nnx.Rngs(key), kernel_init=made))[1],
                                jax.random.key(0))  # fmt: skip
        assert dim_names(params) == {"params/kernel/value": ("embed", "mlp")}
    finally:
        flax.config.update("flax_always_shard_variable", before)


def test_rules_that_cannot_be_are_said() -> None:
    with pytest.raises(SpecError, match=r"rules gives 'mlp' the axis 'tensor', and the mesh has \('data', 'model'\)"):
        make({"data": bx.DataParallel()}, rules={"mlp": "tensor"})
    with pytest.raises(ArgumentError, match="rules is given, and no dim of the parameters has a name: keep Flax'"):
        make({"data": bx.DataParallel()}, rules=RULES, init=lambda key: nn.unbox(init(key)))


class Mlp(nnx.Module):
    """Two layers that say which axis of a mesh their hidden dim is for."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        up, down = nnx.with_partitioning(KERNEL, (None, "mlp")), nnx.with_partitioning(KERNEL, ("mlp", None))
        self.up = nnx.Linear(8, 16, rngs=rngs, kernel_init=up)
        self.down = nnx.Linear(16, 8, rngs=rngs, kernel_init=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def test_a_decorated_step_honors_those_of_nnx() -> None:
    with nnx.use_eager_sharding(False):
        model, alone = Mlp(nnx.Rngs(0)), Mlp(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        other = nnx.Optimizer(alone, optax.adam(1e-2), wrt=nnx.Param)

        def train_step(model: Mlp, optimizer: Any, x: jax.Array) -> jax.Array:
            value, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, gradients)
            return value

        mesh = make_mesh("4x2 auto")
        step = bx.parallelize(mesh, {"data": bx.DataParallel()}, rules={"mlp": "model"})(train_step)
        x, on_one = jax.random.normal(jax.random.key(0), (16, 8)), nnx.jit(train_step)
        for _ in range(3):
            value, expected = step(model, optimizer, x), on_one(alone, other, x)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert model.up.kernel.get_value().sharding.spec == P(None, "model")
        assert model.down.kernel.get_value().sharding.spec == P("model")
        by_path = {one.path: one for one in step.plan.variables}
        assert "by the name of dim 1" in by_path["state/model/up/kernel/value"].why
        with pytest.raises(ArgumentError, match="given metrics as a decorator, which a whole step says itself"):
            bx.parallelize(mesh, {"data": bx.DataParallel()}, metrics=["grad_norm"])  # pyright: ignore
