"""Weights that loops read: the same values and gradients, summed over the devices once."""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from braidax.program import trace, with_sums_behind_loops
from tests.support.program.losses import SHAPES, draw

N, T, D = 8, 5, 6


def weights() -> dict[str, Any]:
    return {"w": draw(D, D) / 3, "v": draw(D, D, seed=1) / 3, "b": draw(D, seed=2)}


def recurrent(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A loss over sequences `[N, T, D]`, by `step(params, state, x) -> (state, y)`."""

    def loss(params: Any, batch: Any) -> Any:
        first = jnp.zeros_like(batch[:, 0])
        _, outputs = jax.lax.scan(lambda state, x: step(params, state, x), first, jnp.swapaxes(batch, 0, 1), **options)
        return (outputs**2).mean()

    return loss


def plain(params: Any, state: Any, x: Any) -> Any:
    state = jnp.tanh(x @ params["w"] + state @ params["v"] + params["b"])
    return state, state


def joined(params: Any, state: Any, x: Any) -> Any:
    kernel = jnp.concatenate([params["w"], 2 * params["v"]], axis=1)  # the same in every step, made in each
    left, right = jnp.split(state @ kernel, 2, axis=1)
    state = jnp.tanh(left * params["b"] + jax.nn.silu(right) + x)
    return state, state


def halves(params: Any, state: Any, x: Any) -> Any:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    state = jnp.tanh(x.astype(jnp.bfloat16) @ low["w"] + state.astype(jnp.bfloat16) @ low["v"]).astype(x.dtype)
    return state, state * params["b"]


def branching(params: Any, state: Any, x: Any) -> Any:
    def through(state: Any) -> Any:
        return state @ params["w"]

    state = jax.lax.cond(state.sum() > 0, through, lambda state: -through(state), state)
    state = jax.checkpoint(lambda state: jnp.sin(state @ params["v"] + x))(state) @ params["w"]
    return state, state


def nested(params: Any, state: Any, x: Any) -> Any:
    def inner(state: Any, scale: Any) -> Any:
        state = jnp.tanh(scale * (state @ params["w"]) + params["b"])
        return state, state.sum()

    state, sums = jax.lax.scan(inner, state + x @ params["v"], jnp.array([0.5, -1.0, 2.0]).astype(x.dtype))
    return state, state * sums.sum()


def squared(params: Any, state: Any, x: Any) -> Any:
    """Both sides of a product hang on the same weight, and one product has no weight."""
    state = (state @ params["w"]) * (x @ params["w"]) + x * x
    return jnp.sin(state), state


def gradient_inside(params: Any, state: Any, x: Any) -> Any:
    state = jax.grad(lambda state: jnp.sum(jnp.sin(state @ params["w"])))(state + x)
    return state, state


def counted(params: Any, batch: Any) -> Any:
    """A carry of integers and keys, and outputs that nobody reads."""

    def step(carry: Any, x: Any) -> Any:
        count, key, state = carry
        key, noise = jax.random.split(key)
        state = jnp.tanh((state + x) @ params["w"]) + 0.1 * jax.random.normal(noise, state.shape, state.dtype)
        return (count + 1, key, state), (count, state * params["b"])

    first = (0, jax.random.key(3), jnp.zeros_like(batch[:, 0]))
    (count, _, state), (counts, _) = jax.lax.scan(step, first, jnp.swapaxes(batch, 0, 1))
    return (state**2).mean() * count + counts.sum()


def stacked(params: Any, batch: Any) -> Any:
    """Layers that are scanned have weights of their own; in each, a loop over time shares them."""
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), params)

    def layer(outputs: Any, own: Any) -> Any:
        _, outputs = jax.lax.scan(lambda state, x: plain(own, state, x), jnp.zeros_like(outputs[0]), outputs)
        return outputs, None

    outputs, _ = jax.lax.scan(layer, jnp.swapaxes(batch, 0, 1), layers)
    return (outputs**2).mean()


def convolved(params: Any, state: Any, x: Any) -> Any:
    def along(rows: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(rows[:, None], kernel[:1, None, :3], (1,), "SAME")[:, 0]

    state = jnp.tanh(along(state, params["w"]) + x)
    return state, state


LOOPS: dict[str, Callable[..., Any]] = {
    "plain": recurrent(plain),
    "reverse": recurrent(plain, reverse=True),
    "unrolled": recurrent(plain, unroll=2),
    "joined": recurrent(joined),
    "branching": recurrent(branching),
    "nested": recurrent(nested),
    "squared": recurrent(squared),
    "gradient inside": recurrent(gradient_inside),
    "convolved": recurrent(convolved),
    "checkpoint around": lambda params, batch: jax.checkpoint(recurrent(plain))(params, batch),
    "jit around": lambda params, batch: jax.jit(recurrent(joined))(params, batch),
    "counted": counted,
    "stacked": stacked,
}


def programs(loss: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The traced loss, and the same summing behind loops."""
    program = trace(loss, *args)
    return program.__call__, with_sums_behind_loops(program).__call__


@pytest.mark.parametrize("name", LOOPS)
def test_values_and_gradients_stay(name: str) -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), weights())
        batch = draw(N, T, D, seed=7).astype(jnp.float64)
        before, after = programs(LOOPS[name], params, batch)
        assert after != before
        assert float(jax.jit(after)(params, batch)) == float(jax.jit(before)(params, batch))
        wanted = jax.jit(jax.value_and_grad(before, argnums=(0, 1)))(params, batch)
        got = jax.jit(jax.value_and_grad(after, argnums=(0, 1)))(params, batch)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12), got, wanted)
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted[1][0])) > 1e-3


def test_low_precision_stays_low() -> None:
    params, batch = weights(), draw(N, T, D, seed=7)
    before, after = programs(recurrent(halves), params, batch)
    assert "bf16[5,8,6]" in str(jax.make_jaxpr(jax.grad(after))(params, batch))
    got, wanted = (jax.jit(jax.grad(program))(params, batch) for program in (after, before))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0.05, atol=2e-3), got, wanted)


def test_no_weight_no_change() -> None:
    program, after = programs(lambda params, batch: jnp.cumsum(batch @ params["w"], 0).sum(), weights(), draw(N, D))
    assert after == program

    def own_weights(params: Any, batch: Any) -> Any:  # in each step
        return jax.lax.scan(lambda x, w: (x @ w, None), batch, params)[0].sum()

    program, after = programs(own_weights, draw(T, D, D), draw(N, D))
    assert after == program


def test_what_is_not_differentiated_leaves_nothing() -> None:
    """The gradient with respect to what steps put in is the loop's own: no product is stacked for it."""
    params, batch = weights(), draw(N, T, D, seed=7)
    before, after = programs(recurrent(plain), params, batch)
    got, wanted = (jax.make_jaxpr(jax.grad(program, argnums=1))(params, batch) for program in (after, before))
    assert _num_stacked(got) == _num_stacked(wanted)


def _num_stacked(closed: Any) -> int:
    return len(re.findall(rf":f32\[{T},{N},{D}\]", str(closed)))


@pytest.mark.parametrize("name", SHAPES)
def test_losses_without_shared_products_stay_as_they_are(name: str) -> None:
    """Lookups in loops, rematerialised or by layer, are no products."""
    loss, params, batch = SHAPES[name].make()
    program = trace(loss, params, batch)
    assert with_sums_behind_loops(program) is program


def attending(params: Any, batch: Any) -> Any:
    """A decoder, all steps of which attend to what was made of the samples."""
    memory = jnp.tanh(batch @ params["w"])  # [N, T, D]

    def step(state: Any, _: Any) -> Any:
        seen = jax.nn.softmax(jnp.einsum("nd,ntd->nt", state, memory))
        return jnp.einsum("nt,ntd->nd", seen, memory) + state * memory[:, 0], None

    return jax.lax.scan(step, jnp.ones_like(batch[:, 0]), length=T)[0].mean()


def test_what_goes_along_the_samples_is_no_weight() -> None:
    """Its gradient is summed over no device, so nothing is stacked for it."""
    params, batch = weights(), draw(N, T, D, seed=7)
    program = trace(attending, params, batch)
    assert with_sums_behind_loops(program) is not program
    assert with_sums_behind_loops(program, {1: 0}) is program

    def both(params: Any, batch: Any) -> Any:
        memory = jnp.einsum("ntd,nte->nde", batch @ params["w"], batch)

        def step(x: Any, _: Any) -> Any:
            return jnp.tanh(jnp.einsum("nd,nde->ne", x @ params["v"], memory)), None

        return jax.lax.scan(step, batch[:, 0], length=T)[0].mean()

    program = trace(both, params, batch)
    after = with_sums_behind_loops(program, {1: 0})
    got, expected = (jax.jit(jax.grad(one))(params, batch) for one in (after.__call__, program.__call__))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), got, expected)
    by_shape = with_sums_behind_loops(program)
    stacked = [_num_stacked(jax.make_jaxpr(jax.grad(one.__call__))(params, batch)) for one in (by_shape, after)]
    assert stacked[0] > stacked[1] > 0


@pytest.mark.parametrize("cell", [pytest.param(nn.OptimizedLSTMCell, marks=pytest.mark.slow), nn.GRUCell])
def test_devices_sum_once(cell: Any) -> None:
    model = nn.RNN(cell(D))
    batch = draw(N, T, D)
    params = jax.jit(model.init)(jax.random.key(0), batch)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    replicated, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))
    sums: list[list[str]] = []
    results: list[Any] = []
    for program in programs(lambda params, batch: (model.apply(params, batch) ** 2).mean(), params, batch):
        gradient = jax.jit(jax.grad(program), in_shardings=(replicated, split), out_shardings=replicated)
        text = gradient.lower(params, batch).compile().as_text()
        sums.append([line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)])
        results.append(gradient(params, batch))
    in_loop, behind = ([line for line in lines if "while/body" in line] for lines in sums)
    assert in_loop
    assert not behind
    assert sums[1]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6), *results)
