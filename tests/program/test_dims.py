"""Which dims belong together, and what it costs to divide them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.program import Dims, find_dims, named_leaves, trace
from tests.support.program.losses import draw, ids

B, T, D, F, H, K = 4, 5, 6, 8, 2, 3


def together(fn: Callable[..., Any], params: Any, *args: Any) -> tuple[Dims, dict[frozenset[str], Any]]:
    names = [name for name, _ in named_leaves(params)]
    found = find_dims(trace(fn, params, *args))
    groups = {frozenset(f"{names[leaf]}.{dim}" for leaf, dim in group.leaves): group for group in found.groups.values()}
    return found, groups


def mlp(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


MLP = {"up": draw(D, F), "bias": draw(F), "down": draw(F, D)}


def test_the_hidden_dim_of_an_mlp() -> None:
    found, groups = together(mlp, MLP, draw(B, D))
    hidden = groups[frozenset({"up.1", "bias.0", "down.0"})]
    assert (hidden.divisor, hidden.blocked) == (F, "")
    # Forward the result is summed over devices, backward the gradient of the input.
    assert hidden.summed_bytes == 2 * B * D * 4
    first, second = found.dots
    (root,) = (root for root, group in found.groups.items() if group is hidden)
    assert (first.spreads(root), first.contracts(root)) == (0, False)
    assert (second.spreads(root), second.contracts(root)) == (None, True)
    assert "it is a dim of the batch" in groups[frozenset({"up.0"})].blocked


def attention(p: Any, x: jax.Array) -> jax.Array:
    h = x * p["scale"]
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return x + jnp.einsum("bhts,bshk->bthk", scores, v).reshape(B, T, H * K) @ p["out"]


def test_heads_through_a_merging_reshape() -> None:
    params = {**{name: draw(D, H, K) for name in "qkv"}, "out": draw(H * K, D), "scale": draw(D)}
    found, groups = together(attention, params, draw(B, T, D))
    heads = groups[frozenset({"q.1", "k.1", "v.1", "out.0"})]
    assert (heads.divisor, heads.blocked) == (H, "")
    # Queries, keys and values are made of one value: its gradient is summed once.
    assert heads.summed_bytes == 2 * B * T * D * 4
    assert len({dot.origins[0] for dot in found.dots[:3]}) == 1
    assert "merged behind another dim by reshape at test_dims.py:" in groups[frozenset({"v.2"})].blocked
    assert groups[frozenset({"q.2", "k.2"})].blocked == ""


def test_layers_in_a_loop() -> None:
    def layers(p: Any, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (x + mlp(w, x), None))
        return jax.lax.scan(layer, x @ p["first"], p["layers"])[0]

    stacked = {name: jnp.stack([leaf] * 3) for name, leaf in MLP.items()}
    found, groups = together(layers, {"first": draw(F, D), "layers": stacked}, draw(B, F))
    hidden = groups[frozenset({"layers/up.2", "layers/bias.1", "layers/down.1"})]
    assert (hidden.blocked, hidden.summed_bytes) == ("", 3 * 2 * B * D * 4)
    residual = groups[frozenset({"first.1", "layers/up.1", "layers/down.2"})]
    assert [root for root, group in found.groups.items() if group is residual and root in hidden.conflicts]
    assert "sliced step by step by scan at test_dims.py:" in groups[frozenset({"layers/up.0"})].blocked


def test_a_vocabulary() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(p["table"][x] @ p["table"].T), x[:, None], axis=1).mean()

    _, groups = together(loss, {"table": draw(F, D)}, ids(B))
    assert groups[frozenset({"table.0"})].blocked == ""
    # What is read, the gradient of what is multiplied, and for each sample a maximum, a sum and the label's own.
    assert groups[frozenset({"table.0"})].summed_bytes == 2 * B * D * 4 + 3 * B * 4


@pytest.mark.parametrize(
    ("fn", "shape", "why"),
    [
        (lambda w, x: x @ w + (x @ w)[:, ::-1], (D, F), "used by rev at"),
        (lambda w, x: jnp.concatenate([x @ w, x], axis=1), (D, F), "put together with others by concatenate at"),
        (lambda w, x: (x @ w)[:, 1:], (D, F), "taken in parts by slice at"),
        (lambda w, x: jnp.split(x @ w, 2, axis=1)[0], (D, F), "taken in parts by split at"),
        (lambda w, x: jnp.sort(x @ w), (D, F), "used by sort at"),
        (lambda w, x: jnp.cumsum(x @ w, axis=1), (D, F), "used by cumsum at"),
        (lambda w, x: jax.lax.top_k(x @ w, 2)[0], (D, F), "used by top_k at"),
        (lambda w, x: x + jnp.tanh(x @ w) @ w, (D, D), "it is a dim of the batch"),
        (lambda w, x: jnp.tanh(w) @ w, (D, D), "two dims of one value belong to it"),
        (lambda w, x: jax.lax.fori_loop(0, 2, lambda _, y: y @ w, w), (D, D), "two dims of one value belong to it"),
        (lambda w, x: jax.nn.relu(jnp.flip(x @ w, 1)), (D, F), "used by rev at"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided(fn: Any, shape: tuple[int, ...], why: str) -> None:
    _, groups = together(lambda p, x: fn(p["w"], x), {"w": draw(*shape)}, draw(B, D))
    blocked = next(group for names, group in groups.items() if "w.1" in names).blocked
    assert why in blocked, blocked


def test_inside_of_a_custom_derivative() -> None:
    """It is looked into, and nothing there is replaced."""

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, back: (back @ kept[1].T, kept[0].T @ back))
    found, groups = together(lambda p, x: product(product(x, p["up"]), p["down"]), MLP, draw(B, D))
    assert groups[frozenset({"up.1", "down.0"})].blocked == ""
    assert {dot.origins for dot in found.dots} == {(None, None)}
