"""The dim of the batch, followed through what models do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.program import automatic, batch_dims_of_results, equation_at, find_batch_dims, trace
from tests.support.program.losses import SHAPES, draw, ids
from tests.support.program.paths import paths

B, T, D = 4, 3, 6


def dims_at(fn: Callable[..., Any], name: str, *args: Any, which: int = -1, **options: Any) -> tuple[int | None, ...]:
    """The batch dims of the operands of one equation, by the name of its primitive."""
    program = trace(fn, *args)
    path = paths(program.closed.jaxpr, name)[which]
    found = find_batch_dims(program, [path], **{"divided": {1: 0}, **options})
    assert list(found) == [path]
    return found[path]


def dim_of(fn: Callable[..., Any], *args: Any) -> int | None:
    """The batch dim of the result of `fn(params, batch)`."""
    return dims_at(lambda *args: jnp.sin(fn(*args)), "sin", *args)[0]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda p, x: x, 0),
        (lambda p, x: p, None),
        (lambda p, x: 1.0 - x + p[0], 0),
        (lambda p, x: x.T, 2),
        (lambda p, x: jnp.moveaxis(x, 0, 1), 1),
        (lambda p, x: x.reshape(B * T, D), 0),
        (lambda p, x: x.reshape(B * T, D).reshape(B, T, D), 0),
        (lambda p, x: x.reshape(1, B, T * D), 1),
        (lambda p, x: x.reshape(2, 36), 0),
        (lambda p, x: jnp.moveaxis(x, 0, 1).reshape(T * B, D), None),
        (lambda p, x: x[None, ..., None], 1),
        (lambda p, x: x.sum(1), 0),
        (lambda p, x: x.sum(0), None),
        (lambda p, x: jnp.moveaxis(x, 0, 2).max(1), 1),
        (lambda p, x: x @ p, 0),
        (lambda p, x: jnp.einsum("dk,btd->kbt", p, x), 1),
        (lambda p, x: jnp.einsum("btd,bsd->bts", x, x), 0),
        (lambda p, x: jnp.einsum("btd,bte->de", x, x), None),
        (lambda p, x: jnp.einsum("tde,btd->tbe", jnp.stack([p] * T), x), 1),
        (lambda p, x: jax.nn.softmax(x), 0),
        (lambda p, x: jax.nn.gelu(jax.nn.relu(x)), 0),
        (lambda p, x: x[:, 0], 0),
        (lambda p, x: x[:2], None),
        (lambda p, x: x[:, ::-1], 0),
        (lambda p, x: jnp.concatenate([p[None, :T].repeat(B, 0), x], 1), 0),
        (lambda p, x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))), 0),
        (lambda p, x: jnp.split(x, 2, axis=2)[1], 0),
        (lambda p, x: jnp.sort(x, axis=1), 0),
        (lambda p, x: jnp.cumsum(x, axis=0), None),
        (lambda p, x: jnp.take(x, jnp.array([0, 2]), axis=1), 0),
        (lambda p, x: jnp.take_along_axis(x, jnp.argmax(x, 1)[:, None], axis=1), 0),
        (lambda p, x: jnp.broadcast_to(x[:, None], (B, 2, T, D)), 0),
        (lambda p, x: jax.vmap(lambda row: jnp.tanh(row @ p))(x), 0),
        (lambda p, x: jax.checkpoint(lambda x: x @ p)(x), 0),
        (lambda p, x: jax.lax.optimization_barrier((p, x))[1], 0),
        (lambda p, x: jax.lax.cond(p[0, 0] > 0, lambda: p[:4, 0], lambda: x[:, 0, 0]), 0),
        (lambda p, x: jax.lax.scan(lambda h, t: (h + t, h * t), jnp.zeros((B, D)), jnp.moveaxis(x, 1, 0))[0], 0),
        (lambda p, x: jax.lax.scan(lambda h, t: (h + t, h * t), jnp.zeros((B, D)), jnp.moveaxis(x, 1, 0))[1], 1),
        (lambda p, x: jax.lax.scan(lambda h, row: (h + row, None), jnp.zeros((T, D)), x)[0], None),
        (lambda p, x: jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + x, jnp.zeros((B, T, D))), 0),
        (lambda p, x: jnp.linalg.inv(x @ jnp.moveaxis(x, 1, 2)), None),
    ],
)
def test_results(fn: Callable[..., Any], expected: int | None) -> None:
    assert dim_of(fn, draw(D, D), draw(B, T, D)) == expected


def test_operands_of_a_convolution_and_a_gather() -> None:
    def conv(kernel: Any, images: Any) -> Any:
        out = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        pooled = jax.lax.reduce_window(out, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.sin(pooled)

    assert dims_at(conv, "conv_general_dilated", draw(3, 3, 2, 5), draw(B, 4, 4, 2)) == (0, None)
    assert dims_at(conv, "sin", draw(3, 3, 2, 5), draw(B, 4, 4, 2)) == (0,)
    assert dims_at(lambda t, i: t[i.T], "gather", draw(9, D), ids(B, T)) == (None, 1)
    assert dim_of(lambda t, i: t[i.T], draw(9, D), ids(B, T)) == 1


def test_inside_loops_the_last_pass_counts() -> None:
    """The hidden state starts as zeros; only the carry of the first pass tells that it has the batch."""

    def loss(weight: Any, batch: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            hidden, cell = carry
            return (cell + 1.0, hidden @ weight + row), None

        start = (jnp.zeros((B, D)), jnp.zeros((B, D)))
        return jax.lax.scan(step, start, jnp.moveaxis(batch, 1, 0))[0][0].sum()

    assert dims_at(loss, "dot_general", draw(D, D), draw(B, T, D)) == (0, None)


def test_arguments_say_what_is_batch() -> None:
    assert dims_at(lambda a, b, c: b @ a + c, "dot_general", draw(D, D), draw(B, D), draw(D), divided={2: 0}) == (
        None, None,
    )  # fmt: skip
    loss, params, batch = SHAPES["linen"].make()
    program = trace(loss, params, batch)
    path = paths(program.closed.jaxpr, "gather")[0]
    assert find_batch_dims(program, [path], {1: 0}) == {path: (None, 0)}
    assert equation_at(program.closed.jaxpr, path).primitive.name == "gather"


def test_what_an_island_gives_is_divided_as_what_it_takes_where_that_is_asked_for() -> None:
    mesh = automatic(jax.make_mesh((2,), ("data",)))

    def run(weights: Any, x: Any) -> Any:
        def local(x: Any, weights: Any) -> Any:
            return jnp.stack([x @ weights] * 2), weights

        specs = (jax.P(("data",)), jax.P())
        return jax.shard_map(local, in_specs=specs, out_specs=(jax.P(None, ("data",)), jax.P()))(x + 1.0, weights)

    program = trace(run, draw(D, D), draw(B, D), mesh=mesh)
    assert batch_dims_of_results(program, {1: 0}, islands=True) == [1, None]
    assert batch_dims_of_results(program, {1: 0}) == [None, None]
    assert batch_dims_of_results(program, {}, islands=True) == [None, None]
