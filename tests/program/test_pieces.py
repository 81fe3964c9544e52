"""Weights in pieces: the same numbers, and dims that can be divided where a program takes them apart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.program import Cut, Dims, find_dims, find_dims_in_pieces, in_pieces, named_leaves, trace
from tests.support.program.losses import draw

B, T, H, K = 4, 5, 2, 3
D = H * K
PARAMS: dict[str, Any] = {"qkv": draw(D, 3 * D), "bias": draw(3 * D), "out": draw(D, D)}


def attended(query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array) -> jax.Array:
    query, key, value = (one.reshape(B, T, H, K) for one in (query, key, value))
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query, key))
    return jnp.einsum("bhts,bshk->bthk", scores, value).reshape(B, T, D) @ out


def by_split(p: Any, x: jax.Array) -> jax.Array:
    query, key, value = jnp.split(x @ p["qkv"] + p["bias"], 3, axis=-1)
    return attended(query, key, value, p["out"])


def by_slices(p: Any, x: jax.Array) -> jax.Array:
    made = jnp.einsum("btd,de->bte", x, p["qkv"].astype(jnp.bfloat16)).astype(jnp.float32) + p["bias"]
    rest = made[..., D:]
    return attended(made[..., :D], rest[..., :D], rest[..., D:], p["out"])


def by_reshape(p: Any, x: jax.Array) -> jax.Array:
    made = (x @ p["qkv"] + p["bias"]).reshape(B, T, 3, H, K)
    query, key, value = jnp.moveaxis(made, 2, 0)
    return attended(query, key, value, p["out"])


@jax.jit
def _made(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return x @ w + b


def by_parts_of_programs(p: Any, x: jax.Array) -> jax.Array:
    """A jitted function that gives them, remat, a loop that shares the weight, a branch, and whole uses."""

    def layer(x: jax.Array, rate: jax.Array) -> Any:
        query, rest = jnp.split(jax.checkpoint(_made)(x, p["qkv"], p["bias"]), [D], axis=-1)
        return x + rate * attended(query, rest[..., :D], rest[..., D:], p["out"]), None

    x, _ = jax.lax.scan(layer, x, jnp.arange(3.0))
    branch = jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x @ (2 * w), p["qkv"])
    return x + branch[..., :D] + (p["qkv"] ** 2).sum() + (p["bias"] * jnp.arange(3.0 * D)).max()


def cuts_of(found: Dims, params: Any) -> dict[str, Cut]:
    names = [name for name, _ in named_leaves(params)]
    return {names[leaf]: cut for leaf, cut in found.cuts.items()}


@pytest.mark.parametrize("fn", [by_split, by_slices, by_reshape, by_parts_of_programs])
def test_it_means_the_same(fn: Any) -> None:
    x = draw(B, T, D)
    program = trace(lambda p, x: (fn(p, x) ** 2).sum(), PARAMS, x)
    found = find_dims_in_pieces(program)
    sizes = (D, 2 * D) if fn is by_parts_of_programs else (D, D, D)
    assert cuts_of(found, PARAMS) == {"qkv": Cut(1, sizes), "bias": Cut(0, sizes)}
    ends = np.cumsum(sizes)[:-1].tolist()
    given = {name: tuple(jnp.split(PARAMS[name], ends, axis=-1)) for name in ("qkv", "bias")} | {"out": PARAMS["out"]}
    opened = in_pieces(program, found.cuts)
    expected, of_whole = jax.jit(jax.value_and_grad(program))(PARAMS, x)
    got, of_pieces = jax.jit(jax.value_and_grad(opened))(given, x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for name, gradient in of_whole.items():
        pieces = of_pieces[name] if name == "out" else jnp.concatenate(of_pieces[name], -1)
        np.testing.assert_allclose(pieces, gradient, rtol=1e-3, atol=1e-3 * float(jnp.abs(gradient).max()))


@pytest.mark.parametrize("fn", [by_split, by_slices, by_reshape])
def test_heads_that_one_weight_makes(fn: Any) -> None:
    program = trace(fn, PARAMS, draw(B, T, D))
    groups, names = find_dims_in_pieces(program).groups.values(), [name for name, _ in named_leaves(PARAMS)]
    told = {frozenset(f"{names[leaf]}.{dim}" for leaf, dim in group.leaves): group for group in groups}
    heads = told[frozenset({"qkv.1", "bias.0", "out.0"})]
    assert (heads.divisor, heads.blocked) == (H, "")
    (whole,) = (group for group in find_dims(program).groups.values() if group.borders)
    assert "taken in parts by" in whole.blocked


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda w, x: jnp.split(x @ w, 3, axis=-1)[0][..., ::-1], "taken in parts by split at test_pieces.py:"),
        (lambda w, x: jnp.concatenate(jnp.split(x @ w, 3, axis=-1)[::-1], -1), "taken in parts by split at"),
        (lambda w, x: (x @ w)[..., ::2], "taken in parts by slice at"),
        (lambda w, x: jax.lax.dynamic_slice_in_dim(x @ w, 1, D, axis=-1), "taken in parts by dynamic_slice at"),
        (lambda w, x: (x @ w).reshape(B, T, 6, D // 2)[:, :, ::-1][:, :, :3], "used by rev at"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_says_why(fn: Any, why: str) -> None:
    found = find_dims_in_pieces(trace(lambda p, x: fn(p["w"], x), {"w": draw(D, 3 * D)}, draw(B, T, D)))
    blocked = next(group.blocked for group in found.groups.values() if (0, 1) in group.leaves)
    assert why in blocked, blocked


def test_pieces_of_other_sizes() -> None:
    """Two queries for each key and value; a part of a piece; nothing is cut where nothing is taken apart."""

    def gated(p: Any, x: jax.Array) -> jax.Array:
        wide, narrow = jnp.split(x @ p["w"], [2 * D], axis=-1)
        return jnp.tanh(wide).reshape(B, T, D, 2).sum(-1) * narrow @ p["out"]

    params = {"w": draw(D, 3 * D), "out": draw(D, D)}
    found = find_dims_in_pieces(trace(gated, params, draw(B, T, D)))
    assert cuts_of(found, params) == {"w": Cut(1, (2 * D, D))}
    (group,) = (one for one in found.groups.values() if (1, 1) in one.leaves)
    assert (group.divisor, group.blocked, group.leaves) == (D, "", ((0, 0), (1, 1)))
    assert find_dims_in_pieces(trace(lambda p, x: x @ p["out"], params, draw(B, T, D))).cuts == {}
