"""Sums over devices, in islands, and what becomes one in a gradient."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_NARROW = (jnp.bfloat16, jnp.float16)


def psum(value: Any, axes: str | Sequence[str]) -> Any:
    """Returns `jax.lax.psum(value, axes)`."""
    wide = _wide(value)
    return jax.lax.psum(wide, axes).astype(value.dtype)


def psum_scatter(value: Any, axis: str | Sequence[str], *, dim: int) -> Any:
    """Returns the part that a device has of a sum, along a dim: `jax.lax.psum_scatter`, tiled."""
    found = jax.lax.psum_scatter(_wide(value), axis, scatter_dimension=dim, tiled=True)
    return found.astype(value.dtype)


def all_gather(value: Any, axis: str | Sequence[str], *, dim: int) -> Any:
    """Returns all parts along a dim: `jax.lax.all_gather`, tiled. Its gradient is a sum."""
    return jax.lax.all_gather(_wide(value), axis, axis=dim, tiled=True).astype(value.dtype)


def _wide(value: Any) -> Any:
    """On CPUs XLA adds 16 bits as 32 anyway; and it ends the process where an island leaves it an axis (JAX 0.10.2)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    on_cpu = device is not None and device.platform == "cpu"
    return value.astype(jnp.float32) if on_cpu and value.dtype in _NARROW else value
