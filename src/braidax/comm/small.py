"""Small values at once: the same bytes as `pack` makes and `Unpacking` reads, in a fraction of the time."""

import math
import struct
from functools import lru_cache, partial
from typing import Any

import numpy as np

from braidax.comm.messages import FIRST_BYTES, HEAD_ALIGNMENT, LENGTHS, Head, Value, head_of_array, parsed
from braidax.comm.transports.transport import SmallValues

WHOLE_BYTES = 1 << 16
"""What of a request or an answer goes with its first message, though it does not fit in that of other values."""
HEADER = struct.Struct("<QQ")
"""What a word of those who ask and serve begins with: its kind, and the number of the request where that is new."""
_MAX_BYTES = FIRST_BYTES // 2
_SHORT_BYTES = 256  # of what says what a value is
_Array: type = np.ndarray  # found quicker than an attribute of NumPy


def encoded(value: Value) -> tuple[bytes, Any] | None:
    """Returns the first message of a small array or of bytes, what it begins with and the value, which is the rest.

    None for all that `pack` is to look at. Whether an array is contiguous is not asked: a send of it raises where not.
    """
    kind = type(value)
    if kind is _Array:
        start = _start_of_array(value.dtype, value.shape)
    elif kind is bytes:
        start = _start_of_buffer(len(value))
    else:
        return None
    return None if start is None else (start, value)


def decoded(message: bytearray, begin: int = 0) -> tuple[Value] | None:
    """Returns the value of a first message, alone in a tuple, whose memory is that of the message.

    None for all that `Unpacking` is to look at. **Arguments:** `begin`: where the value's message begins in its memory,
    a multiple of 16.
    """
    try:
        body = begin + LENGTHS.size + message[begin]  # the length of a short head is one byte
        num_bytes, shape, dtype = _known(bytes(message[begin:body]))
        if body + num_bytes != len(message):
            return None
        if dtype is None:
            return (memoryview(message)[body:],)
        return (np.ndarray(shape, dtype, message, body),)
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
        MemoryError,
        SyntaxError,
        struct.error,
    ):
        return None


@lru_cache(1024)
def _start_of_array(dtype: np.dtype[Any], shape: tuple[int, ...], max_bytes: int = _MAX_BYTES) -> bytes | None:
    if dtype.hasobject:
        return None
    head = head_of_array(dtype, shape)
    return _start(head) if head.begins[-1] <= max_bytes else None


@lru_cache(1024)
def _start_of_buffer(num_bytes: int, max_bytes: int = _MAX_BYTES) -> bytes | None:
    return _start(Head((num_bytes,), "buffer")) if num_bytes <= max_bytes else None


def _start(head: Head) -> bytes | None:
    start = LENGTHS.pack(len(head.about), head.begins[-1], 0) + head.about
    return start if len(start) <= _SHORT_BYTES else None


@lru_cache(1024)
def _known(start: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any] | None]:
    """Returns the bytes, the shape and the dtype of a value, none of a buffer.

    **Arguments:** `start`: of its first message, all but the value. **Raises:** for what is long, or no value.
    """
    head_bytes, body_bytes, _ = LENGTHS.unpack_from(start)
    head = parsed(start[LENGTHS.size :])
    dtype = None if head.form == "buffer" else head.numpy_dtype
    num_bytes = head.lengths[0] if dtype is None else math.prod(head.shape) * dtype.itemsize
    is_small = head_bytes == len(start) - LENGTHS.size and len(start) % HEAD_ALIGNMENT == 0
    is_plain = dtype is None or (head.form == "array" and dtype.itemsize > 0 and not dtype.hasobject)
    if not (is_small and is_plain and head.lengths == (body_bytes,) and num_bytes == body_bytes):
        raise ValueError(start)
    return num_bytes, head.shape, dtype


SMALL: SmallValues = (
    np.empty,
    partial(_start_of_array, max_bytes=WHOLE_BYTES),
    partial(_start_of_buffer, max_bytes=WHOLE_BYTES),
    _known,
)
"""What a transport knows small requests and answers by."""
