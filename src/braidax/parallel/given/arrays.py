"""Bringing arrays to where a step wants them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from braidax.errors import ArgumentError
from braidax.program import named_leaves, specs_of


def place(tree: Any, shardings: Any) -> Any:
    """Moves those leaves that are not yet where they belong.

    Host memory is copied, so that the caller may write to it as soon as this returns. Where a mesh spans processes, an
    array that is not global must be the same in every process.

    **Arguments:** `tree`: PyTree of arrays. `shardings`: PyTree of shardings, alike.

    **Returns:** the PyTree of `jax.Array`.
    """
    leaves, structure = jax.tree.flatten(tree)
    wanted: list[Sharding] = jax.tree.leaves(shardings)
    moved = [_place(leaf, sharding) for leaf, sharding in zip(leaves, wanted, strict=True)]
    return jax.tree.unflatten(structure, moved)


def adopt(tree: Any, shardings: Any) -> Any:
    """Moves leaves as `place` does, for a caller that will donate the result.

    What is moved is copied on the devices too: a moved array may share its memory with the one that it came from,
    and with others that came from it, and memory that is donated twice crashes the process.
    """
    leaves, structure = jax.tree.flatten(tree)
    wanted: list[Sharding] = jax.tree.leaves(shardings)
    moved = [_place(leaf, sharding) for leaf, sharding in zip(leaves, wanted, strict=True)]
    owned = [new if new is old else jnp.copy(new) for old, new in zip(leaves, moved, strict=True)]
    return jax.tree.unflatten(structure, owned)


def check_made(params: Any) -> None:
    """Raises `ArgumentError` for parameters of which some are shapes only, such as those that no file had."""
    shapes = [path for path, leaf in named_leaves(params, "params") if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes:
        others = f" (and {len(shapes) - 1} others)" if len(shapes) > 1 else ""
        raise ArgumentError(
            f"{shapes[0]}{others} is a jax.ShapeDtypeStruct, expected an array: restore a part of the parameters into "
            "step.init(key) in place of step.state_specs, and the others stay as init makes them"
        )


def _place(leaf: Any, sharding: Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and (leaf.sharding is sharding or leaf.sharding == sharding):
        return leaf
    if not sharding.is_fully_addressable and not (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return _spread(leaf, sharding)
    if isinstance(leaf, jax.Array | bool | int | float | complex):
        return jax.device_put(leaf, sharding)  # keeps the weak type of a Python number
    return jax.device_put(np.array(leaf), sharding)


def _spread(leaf: Any, sharding: Sharding) -> jax.Array:
    """Makes a global array of what every process holds alike; each takes what its own devices need."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _spread(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.array(leaf)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def strong(tree: Any) -> Any:
    """Takes the weak type off every leaf, so that a state has the same types after each update."""
    return jax.tree.map(_strong, tree)


def _strong(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return jax.lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def typed_key(key: Any) -> Any:
    """Wraps a key of `jax.random.PRNGKey`, of the implementation that JAX is configured for."""
    form = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    is_raw = (getattr(key, "dtype", None), getattr(key, "shape", None)) == (form.dtype, form.shape)
    return jax.random.wrap_key_data(key) if is_raw else key


def with_shardings(specs: Any, shardings: Any) -> Any:
    """Specs of arrays that lie where a step has them: what is lowered from these is compiled once, with its calls."""
    return jax.tree.map(lambda spec, on: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=on), specs, shardings)


def canonical(batch: Any) -> Any:
    """The specs of a batch of device or host arrays, with the dtypes that JAX will give them."""
    return specs_of(batch) if any(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)) else batch
