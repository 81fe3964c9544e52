"""Where leaves are used, as what, and by which value they come there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.program import Site, find_sites, trace
from tests.support.program.losses import draw, ids

B, D, F, L = 4, 6, 8, 3


def sites_of(fn: Callable[..., Any], *args: Any) -> list[Site]:
    return list(find_sites(trace(fn, *args)))


def scanned(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def shared(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0]


@pytest.mark.parametrize(
    ("fn", "args", "roles"),
    [
        (lambda w, x: x @ w, (draw(D, F), draw(B, D)), ["product"]),
        (lambda w, x: w @ x.T, (draw(F, D), draw(B, D)), ["product"]),
        (lambda w, x: w[x], (draw(D, F), ids(B)), ["rows"]),
        (lambda w, x: w[:, x], (draw(D, F), ids(B)), ["other"]),
        (lambda w, x: x + w, (draw(D), draw(B, D)), ["elementwise"]),
        (lambda w, x: w @ w, (draw(D, D), draw(B, D)), ["other", "other"]),
        (lambda w, x: jnp.einsum("bd,vd->bv", w[x], w), (draw(D, F), ids(B)), ["rows", "product"]),
        (lambda w, x: (x @ w, w)[1], (draw(D, F), draw(B, D)), ["product", "other"]),
        (lambda w, x: jax.nn.relu(x @ jax.nn.relu(w)), (draw(D, F), draw(B, D)), ["other"]),
        (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w + 1), (draw(D, D), draw(B, D)),
         ["product", "product"]),
        (lambda w, x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ w, x), (draw(D, D), draw(B, D)),
         ["product"]),
        (lambda w, x: jax.lax.fori_loop(0, 3, lambda _, w: w + 1, w), (draw(D, D), draw(B, D)), ["other"]),
    ],
)  # fmt: skip
def test_roles(fn: Any, args: Any, roles: list[str]) -> None:
    assert [site.role for site in sites_of(fn, *args)] == roles


def test_a_kernel() -> None:
    def conv(w: Any, x: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w.astype(x.dtype), (1, 1), "SAME")

    (site,) = sites_of(conv, jnp.zeros((3, 2, 3, 3), jnp.bfloat16), draw(B, 2, 5, 5))
    assert (site.role, site.operand, len(site.value.casts)) == ("kernel", 1, 1)


def test_a_slice_of_a_loop_enters_its_body() -> None:
    (site,) = sites_of(scanned, draw(L, D, D), draw(B, D))
    entry = site.value.entry
    assert (entry.level, entry.dims, entry.lengths) == (site.path[:-1], (1, 2), (L,))
    assert not site.value.in_loop


def test_what_a_loop_shares_enters_before_it() -> None:
    (site,) = sites_of(shared, draw(D, D), draw(B, D))
    assert (site.value.entry.level, site.value.in_loop, len(site.path)) == ((), True, 3)


def test_what_is_computed_again_enters_there() -> None:
    (site,) = sites_of(jax.checkpoint(lambda w, x: x @ w), draw(D, D), draw(B, D))
    assert site.value.remat
    assert site.value.entry.level == site.path[:-1] != ()
    # But not in a loop that shares it, where it would enter at every step.
    (site,) = sites_of(lambda w, x: shared_again(w, x), draw(D, D), draw(B, D))
    assert (site.value.entry.level, site.value.in_loop, site.value.remat) == ((), True, False)


def shared_again(w: Any, x: Any) -> Any:
    step = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    return jax.lax.scan(lambda x, _: (step(x, w), None), x, None, length=5)[0]


def test_types_first_and_shapes_behind() -> None:
    def loss(w: Any, x: Any) -> Any:
        return x @ w.T.astype(jnp.float16).reshape(D, 2, F // 2)[:, 0].astype(jnp.float32)

    sites = sites_of(loss, draw(F, D), draw(B, D))
    assert [site.role for site in sites] == ["other"]  # a slice is no view
    (site,) = sites_of(lambda w, x: x @ w.T.astype(jnp.float16).reshape(D, F), draw(F, D), jnp.zeros((B, D), "float16"))
    assert [one.primitive.name for one in site.value.casts] == ["convert_element_type"]
    assert site.value.view[0].primitive.name == "transpose"


def test_dims_are_followed_into_loops_and_lost_by_reshapes() -> None:
    (site,) = sites_of(lambda w, x: scanned(jnp.moveaxis(w, 2, 0), x), draw(D, D, L), draw(B, D))
    assert site.value.entry.dims == (0, 1)
    (site,) = sites_of(lambda w, x: scanned(w.reshape(L, D, D), x), draw(L * D, D), draw(B, D))
    assert (site.role, site.within) == ("other", True)
