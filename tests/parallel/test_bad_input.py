"""What cannot be is said before anything is compiled: overrides, batches, constraints."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import braidax.parallel as bx
from braidax.errors import ArgumentError, SpecError
from tests.support.parallel.models import make_mesh, refused

BATCH = {"ids": jax.ShapeDtypeStruct((16, 3), jnp.int32)}
KERNEL = "params/kernel"


def init(key: jax.Array) -> Any:
    return {"table": jax.random.normal(key, (6, 8)), "kernel": jax.random.normal(key, (4, 8, 8))}


def loss(params: Any, batch: Any, constrained: Any = None) -> jax.Array:
    x = params["table"][batch["ids"]].mean(1)
    if constrained is not None:
        x = jax.lax.with_sharding_constraint(x, constrained)
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["kernel"])[0].sum()


def make(strategies: Any, constrained: Any = None, **options: Any) -> bx.Step:
    def given(params: Any, batch: Any) -> jax.Array:
        return loss(params, batch, constrained)

    return bx.parallelize(given, optax.sgd(0.1), make_mesh(), strategies, init=init, batch=BATCH, **options)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (bx.Hybrid(dense=bx.DataParallel({"x": bx.Replicated()})), r"overrides\['x'\] names no variable: expected a"),
        (bx.FullySharded({KERNEL: bx.Gathered(3)}), r"params/kernel cannot be placed by Gathered\(dim=3\) on the axi"),
        (bx.FullySharded({KERNEL: bx.Gathered(0)}), r"dim 0 of params/kernel, which a loop takes apart: .* \[1, 2\]"),
        (bx.TensorParallel({KERNEL: bx.Split(0)}), r"dim 0 of params/kernel, which a loop takes apart: .* \[1, 2\]"),
        (
            bx.RotatedTensorParallel({KERNEL: bx.Rotated(0)}),
            r"dim 0 of params/kernel, which a loop takes apart: .* \[1, 2",
        ),
        (bx.RotatedTensorParallel({KERNEL: bx.Rotated(3)}), r"params/kernel cannot be placed by Rotated\(dim=3"),
        (bx.Hybrid({KERNEL: bx.Rows()}), r"\['params/kernel'\] asks for the rows of params/kernel, and these cannot"),
    ],
)
def test_an_override_that_cannot_be(strategy: Any, words: str) -> None:
    with refused(ArgumentError, words):
        make({"data": strategy})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", ["model", bx.Replicated])
def test_what_is_no_placement(wrong: Any) -> None:
    with refused(ArgumentError, r"overrides\['params/kernel'\] is .*, expected a placement object such"):
        make({"data": bx.FullySharded({KERNEL: wrong})})


def test_more_devices_than_samples() -> None:
    with refused(SpecError, "batch/ids has 4 samples, which do not divide among the 8 devices along"):
        bx.parallelize(
            loss, optax.sgd(0.1), make_mesh("8 auto"), {"data": bx.DataParallel()}, init=init,
            batch={"ids": jax.ShapeDtypeStruct((4, 3), jnp.int32)},
        )  # fmt: skip


def test_an_axis_that_the_mesh_has_not() -> None:
    with refused(SpecError, r"names the mesh axis 'rows', and the mesh has \('data', 'model'\): use one of"):
        make({"rows": bx.DataParallel()})


def test_a_plan_that_cannot_be_replayed_and_a_table_of_fewer_rows_than_devices() -> None:
    """The table of 6 rows, padded among 8 devices, has the numbers of whole ones."""
    fully = make({"data": bx.FullySharded(min_bytes=0)}).plan
    (kernel, *others) = fully.variables
    assert kernel.path == KERNEL
    for placement in (bx.Gathered(0), bx.Split(0), bx.Rotated(0)):
        plan = replace(fully, variables=(replace(kernel, placements=(placement, bx.Replicated())), *others))
        with refused(ArgumentError, r"plan asks for dim 0 of params/kernel, which a loop .*: plan anew"):
            make(None, plan=plan)
    plan = replace(fully, variables=(replace(kernel, placements=(bx.Rotated(1), bx.Rotated(2))), *others))
    with refused(ArgumentError, r"params/kernel cannot be placed by Rotated\(dim=2.*goes around along another axis"):
        make(None, plan=plan)
    table = {"params/table": bx.Rows()}
    batch = {"ids": np.arange(48, dtype=np.int32).reshape(16, 3) % 6}
    losses: list[Any] = []
    for strategies in (
        {"data": bx.Hybrid(table), "model": bx.Hybrid(table)},
        {"data": bx.DataParallel(), "model": bx.DataParallel()},
    ):
        step = make(strategies)
        state, _ = step.update(step.init(jax.random.key(0)), batch)
        losses.append(step.update(state, batch)[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_constraints_of_the_loss() -> None:
    fully = {"data": bx.FullySharded(min_bytes=0)}
    with refused(SpecError, r"loss_fn given has a .*Resource axis: rows of P\('rows',\) is not fo"):
        make(fully, jax.P("rows"))
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with refused(SpecError, r"on a mesh {'x': 8}, and the mesh is {'data': 4, 'model': 2}: name"):
        make(fully, NamedSharding(other, jax.P("x")))
    batch = {"ids": np.arange(48, dtype=np.int32).reshape(16, 3) % 6}
    losses: list[Any] = []
    for constrained in (None, jax.P("data", "model")):
        step = make(fully, constrained, microbatches=2)
        state, _ = step.update(step.init(jax.random.key(0)), batch)
        losses.append(step.update(state, batch)[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
