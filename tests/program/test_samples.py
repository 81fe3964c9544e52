"""Which uses of weights samples meet, there or in what is made of it, and which they never do."""

from typing import Any

import jax
import jax.numpy as jnp

from braidax.program import find_meetings, find_sites, trace


def meetings(loss: Any, params: Any, batch: Any) -> dict[str, list[bool | None]]:
    """Returns for each weight, of its uses in their order, whether samples meet it there; None: never."""
    program = trace(loss, params, batch)
    names, sites = sorted(params), find_sites(program)
    found = find_meetings(program, {site.path for site in sites}, {1: 0})
    told: dict[str, list[bool | None]] = {name: [] for name in names}
    for site in sites:
        told[names[site.value.entry.leaf]].append(found.get(site.path))
    return told


def test_penalties_and_statistics_of_weights_meet_no_samples() -> None:
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones(4), "c": jnp.ones((4, 4)), "d": jnp.ones((3, 4))}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = x @ params["a"] * (1 + params["b"]) + params["d"][jnp.array([2, 0, 1, 1])].sum(0)
        x = x @ (params["c"] / jnp.linalg.norm(params["c"]))
        penalty = sum((params[name] ** 2).sum() for name in "ab")
        return x.mean() + penalty * (params["a"] @ params["a"].T).mean()

    assert meetings(loss, params, jnp.ones((8, 4))) == {
        "a": [True, None, None, None],
        "b": [False, None],
        "c": [None, None, False],
        "d": [None],
    }


def test_in_loops_under_a_remat_and_in_what_is_not_entered() -> None:
    params = {"stack": jnp.ones((3, 4, 4)), "shared": jnp.ones(4), "scale": jnp.ones(4), "branch": jnp.ones(4)}

    @jax.custom_vjp
    def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * scale

    scaled.defvjp(lambda x, scale: (x * scale, (x, scale)), lambda kept, back: (back * kept[1], back * kept[0]))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return x @ w.T + params["shared"], (w**2).sum()

        x, squares = jax.lax.scan(layer, x, params["stack"])
        x = jax.lax.cond(squares.sum() > 1, lambda: x * params["branch"], lambda: x)
        return scaled(x, params["scale"]).mean() + squares.sum()

    assert meetings(loss, params, jnp.ones((8, 4))) == {
        "stack": [True, None],
        "shared": [True],
        "scale": [True],
        "branch": [True],
    }
