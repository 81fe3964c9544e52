"""Shardings that come from a compiled step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.data import DataLoader
from braidax.errors import ArgumentError, SpecError
from tests.support.data.numbered import Numbers, check

BATCH = {"x": jax.ShapeDtypeStruct((16, 6), np.float32), "id": jax.ShapeDtypeStruct((16,), np.int32)}


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def step(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + batch["x"].sum() + batch["id"].sum(), state)


def compiled(mesh: Mesh, batch: Any = BATCH, specs: Any = None, state: Any = None) -> Any:
    state = {"w": jax.ShapeDtypeStruct((3,), np.float32)} if state is None else state
    given = specs or {"x": P("data", "model"), "id": P(("data", "model"))}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), given, is_leaf=lambda leaf: isinstance(leaf, P))
    return jax.jit(step, in_shardings=(None, shardings)).lower(state, batch).compile()


def test_batches_are_made_as_the_step_takes_them(mesh: Mesh) -> None:
    form = compiled(mesh)
    with DataLoader(Numbers(64), like=form) as loader:
        assert loader.batch_size == 16
        for batch in loader:
            check(batch)
            assert batch["x"].sharding == NamedSharding(mesh, P("data", "model"))
            assert batch["id"].sharding == NamedSharding(mesh, P(("data", "model")))
            form(jax.tree.map(jnp.zeros_like, {"w": np.zeros(3, np.float32)}), batch)  # takes it without a copy


def test_stacks_of_microbatches(mesh: Mesh) -> None:
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, 8, *leaf.shape[1:]), leaf.dtype), BATCH)
    form = compiled(mesh, batch, {"x": P(None, "data"), "id": P(None, "data")})
    with DataLoader(Numbers(64), like=form, microbatches=2, seed=None) as loader:
        assert loader.batch_size == 16
        first = next(iter(loader))
        assert first["id"].sharding == NamedSharding(mesh, P(None, "data"))
        np.testing.assert_array_equal(np.asarray(first["id"]), np.arange(16).reshape(2, 8))
        loader.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"like": step}, "like=function: expected a compiled step"),
        ({"mesh": 1}, "like= was given beside mesh= or specs="),
        ({"batch_size": 8}, "batch_size=8, but the step of like= was compiled for 16"),
    ],
)
def test_what_does_not_go_together_is_refused(mesh: Mesh, given: dict[str, Any], said: str) -> None:
    arguments = {"like": compiled(mesh), **given}
    if "mesh" in given:
        arguments["mesh"] = mesh
    with pytest.raises(ArgumentError, match=said.replace("(", "\\(")):
        DataLoader(Numbers(64), **arguments)


def test_a_step_that_takes_no_such_batch_is_refused(mesh: Mesh) -> None:
    batch = {**BATCH, "x": jax.ShapeDtypeStruct((16, 8), np.float32)}
    with pytest.raises(ArgumentError, match="no argument of the compiled step look like a batch"):
        DataLoader(Numbers(64), like=compiled(mesh, batch))


def test_a_step_that_takes_two_is_refused(mesh: Mesh) -> None:
    with pytest.raises(ArgumentError, match="2 arguments of the compiled step look like a batch"):
        DataLoader(Numbers(64), like=compiled(mesh, state=BATCH))


def test_a_step_without_named_shardings_is_refused() -> None:
    form = jax.jit(step).lower({"w": jax.ShapeDtypeStruct((3,), np.float32)}, BATCH).compile()
    with pytest.raises(SpecError, match="expected a NamedSharding: compile the step with in_shardings"):
        DataLoader(Numbers(64), like=form)
