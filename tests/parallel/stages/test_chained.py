"""Stages one behind the other give what the loss gives, and its gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.parallel.stages.chained import forward, joined, value_and_gradients
from braidax.parallel.stages.passes import Passes
from braidax.program import Chain
from tests.support.program.cutting.models import Case, gpt, layers, residual

CASES = {"layers": layers(4), "gpt": gpt(3), "residual": residual(norm=True)}


@pytest.mark.parametrize(
    ("name", "places", "recompute"),
    [
        ("layers", slice(None), True),
        pytest.param("gpt", slice(2, None, 2), False, marks=pytest.mark.slow),
        pytest.param("residual", slice(None), False, marks=pytest.mark.slow),
    ],
)
def test_stages_equal_the_whole_loss(name: str, places: slice, recompute: bool) -> None:
    case = CASES[name]
    program = case.traced()
    chain = Chain(program)
    stages = chain.stages(chain.borders()[places])
    assert len(stages) > 2

    def staged(*args: Any) -> Any:
        return value_and_gradients(stages, program.out_specs, *args, recompute=recompute)

    got = jax.jit(staged)(*case.args)
    expected = jax.jit(jax.value_and_grad(case.loss, has_aux=True))(*case.args)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-6), got, expected)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(expected[1]))


def test_values_are_those_of_the_loss_bit_for_bit() -> None:
    case = CASES["layers"]
    program = case.traced()
    chain = Chain(program)
    got = forward(chain.stages(chain.borders()), program.out_specs, *case.args)
    jax.tree.map(np.testing.assert_array_equal, got, program(*case.args))


def test_a_forward_pass_keeps_no_weights_and_no_casts_of_them() -> None:
    case = CASES["gpt"]
    chain = Chain(case.traced())
    stage = chain.stages(chain.borders()[1:3])[1]
    passes = Passes(stage)
    *taken, incoming = stage.program.in_specs
    made = jax.eval_shape(passes.forward, taken, incoming)
    assert [one.shape for one in made.kept] == [(1,), (1, 4, 5, 8)]  # remat: what comes in, and the layer's key
    assert passes.kept_bytes == 4 * 5 * 8 * 2 + 8
    again = Passes(stage, recompute=True)
    assert jax.eval_shape(again.forward, taken, incoming).kept == []
    assert again.kept_bytes == sum(one.size * one.dtype.itemsize for one in incoming)


def test_what_comes_in_is_held_and_not_kept_twice() -> None:
    chain = Chain(CASES["layers"].traced())
    stage = chain.stages(chain.borders())[1]
    *taken, incoming = stage.program.in_specs
    made = Passes(stage).forward(*jax.tree.map(lambda one: jnp.full(one.shape, 0.1, one.dtype), (taken, incoming)))
    assert [one.shape for one in made.kept] == [(8, 4)]  # a layer's product: tanh is made again
    assert not any((one == 0.1).all() for one in made.kept)
    assert Passes(stage).kept_bytes == 2 * 8 * 4 * 4  # and its input, for the weights' gradient


def test_gradients_are_joined_by_rows_and_added_up() -> None:
    chain = Chain(CASES["gpt"].traced())
    stages = chain.stages(chain.borders()[1:2])
    params = CASES["gpt"].args[0]
    trees = [
        jax.tree.map(lambda leaf, at=at: np.full(leaf.shape, at + 1.0, np.float32), stage.program.in_specs[0])
        for at, stage in enumerate(stages)
    ]
    whole = jax.jit(lambda trees: joined(stages, trees, params))(trees)
    assert whole["table"][0, 0] == 3  # of both
    assert whole["places"][0, 0] == 1
    assert whole["layers"]["scale"][:, 0].tolist() == [1, 2, 2]


def test_what_no_stage_reads_has_no_gradient() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return (jnp.tanh(batch @ params["a"]) @ params["b"]).sum()

    params = {"a": jnp.ones((3, 3)), "b": jnp.ones((3, 2)), "none": jnp.ones(4)}
    case = Case(loss, (params, jnp.ones((2, 3))))
    program = case.traced()
    chain = Chain(program)
    stages = chain.stages(chain.borders())
    _, gradients = jax.jit(lambda *args: value_and_gradients(stages, program.out_specs, *args))(*case.args)
    assert gradients["none"].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(gradients["b"], jax.jit(jax.grad(loss))(*case.args)["b"], rtol=1e-6)
