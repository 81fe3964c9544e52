"""What is asked of servers and answered, as lists of buffers: a head in JSON, then arrays."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from braidax.errors import CommError

_MAX_DIMS = 8


class Message(NamedTuple):
    """A request or an answer. **Fields:** `kind`: what is wanted. `fields`: JSON values. `arrays`, by name."""

    kind: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]


def packed(kind: str, fields: Mapping[str, Any] | None = None, arrays: Mapping[str, Any] | None = None) -> list[Any]:
    """Returns a message as a value to `ask` with, or to answer with."""
    given = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    told = [[name, str(array.dtype), list(array.shape)] for name, array in given.items()]
    head = json.dumps([kind, fields or {}, told]).encode()
    return [head, *(array.reshape(-1).view(np.uint8) for array in given.values())]


def unpacked(value: Any) -> Message:
    """Undoes `packed`; arrays are views of what came. **Raises:** `CommError` for what is no such message."""
    try:
        if not isinstance(value, list) or not value:
            raise ValueError(f"a {type(value).__name__} in place of a list of buffers")
        parts: Sequence[Any] = value
        kind, fields, told = json.loads(bytes(parts[0]))
        if not isinstance(kind, str) or not isinstance(fields, dict) or len(told) != len(parts) - 1:
            raise ValueError(f"a head that does not fit its {len(parts) - 1} arrays")
        arrays = {str(name): _array(part, *form) for (name, *form), part in zip(told, parts[1:], strict=True)}
    except (ValueError, TypeError, KeyError) as error:
        raise CommError(f"a message about served tables is none: {error}; expected one of this version") from error
    return Message(kind, fields, arrays)  # pyright: ignore[reportUnknownArgumentType]


def _array(part: Any, dtype: str, shape: list[int]) -> NDArray[Any]:
    kind = np.dtype(jnp.dtype(dtype))
    if kind.hasobject or len(shape) > _MAX_DIMS or any(size < 0 for size in shape):
        raise ValueError(f"an array {dtype}{shape}")
    if memoryview(part).nbytes != kind.itemsize * math.prod(shape):
        raise ValueError(f"{memoryview(part).nbytes} bytes for an array {dtype}{shape}")
    return np.frombuffer(part, kind).reshape(shape) if math.prod(shape) else np.empty(shape, kind)
