"""Arrays that others have written, in the form in which a tree wants them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.checkpoint.padding import Conversion

# JAX leaves some of itself unannotated.
_jax: Any = jax

Read = Callable[[tuple[slice, ...]], np.ndarray]
"""Returns a part of an array, in memory of its own."""


def placed(read: Read, like: Any) -> Any:
    """Reads an array to where another one is.

    **Arguments:** `read`: reads a part of it; on each process what its devices need. `like`: of the same shape and
    dtype: a NumPy array or scalar, a `jax.Array` or a `jax.ShapeDtypeStruct`.

    **Returns:** what `like` is, on its devices.
    """
    everything = (slice(None),) * len(like.shape)
    if isinstance(like, np.ndarray):
        return read(everything)
    if isinstance(like, np.generic):
        return read(everything)[()]
    sharding = sharding_of(like)
    if sharding is not None and not sharding.is_fully_addressable:
        return _jax.make_array_from_callback(like.shape, sharding, read)
    array = read(everything)
    return _jax.device_put(weakly_typed(array) if like.weak_type else array, sharding)


def sharding_of(like: Any) -> Any:
    """Returns where an array of JAX is committed to, None where it is to none: then it can meet those on a mesh."""
    return None if isinstance(like, jax.Array) and not like.committed else like.sharding


def weakly_typed(array: np.ndarray) -> Any:
    """Returns an array of JAX whose type is as weak as a Python number's, if its dtype is one of those."""
    # Else the step would be compiled again, and its dtypes could come out wider.
    zero = array.dtype.type(0).item()
    return jnp.full(array.shape, zero).at[...].set(array) if jnp.result_type(zero) == array.dtype else array


def extended(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array with zeros behind the ends of its dims, of another shape; itself where it has that."""
    missing = [(0, wanted - size) for size, wanted in zip(array.shape, shape, strict=True)]
    return np.pad(array, missing) if array.shape != shape else array


def converted(array: np.ndarray, how: Conversion | None, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a table by rows in the form of another shape; rows that it does not have are zero. None: as it is."""
    if how is None:
        return array
    inner = how.saved.inner(array.shape)
    found = np.zeros(shape, array.dtype)
    found.reshape(-1, *inner)[: how.saved.num_rows] = array.reshape(-1, *inner)[: how.saved.num_rows]
    return found
