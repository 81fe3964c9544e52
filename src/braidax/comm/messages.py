"""How values become messages: a head that says what they are, and their bytes as they lie in memory.

An array arrives as an array of the same dtype and shape, any other buffer as a `memoryview`, and a list of buffers,
which is one message, as a list of them, each at a multiple of `ALIGNMENT`. Nothing is pickled.

What is sent first fits in `FIRST_BYTES`, so that it can be received by somebody who knows nothing of it: the lengths
of head and body, a number, and the head and the body as far as there is room for them whole. What had no room follows
as one message, which is known by the number.
"""

import ctypes
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from braidax.comm.transports.transport import Buffer
from braidax.errors import ArgumentError, CommError

Value = Any
"""What is sent: a NumPy array, a buffer (`bytes`, `memoryview`, `pyarrow.Buffer` …), or a list of buffers."""

FIRST_BYTES = 1 << 13
ALIGNMENT = 64
"""Bytes: as Arrow wants its buffers, and vector instructions theirs."""

HEAD_ALIGNMENT = 16
"""Bytes: what the body of a small value begins at a multiple of."""

LENGTHS = struct.Struct("<QQQ")
"""What a first message begins with: the lengths of head and body; the number of the second message."""
_SHORT_BYTES = 256  # of heads that are remembered
_ZEROS = memoryview(bytes(ALIGNMENT))


@dataclass(frozen=True)
class Head:
    """What the bytes of a value are. **Fields:** `lengths`: bytes of each part; `dtype`, `shape`: of an array."""

    lengths: tuple[int, ...]
    form: str
    dtype: Any = None
    shape: tuple[int, ...] = ()

    @cached_property
    def begins(self) -> list[int]:
        """Where each part begins in the body, and where the body ends."""
        if len(self.lengths) == 1:
            return [0, self.lengths[0]]
        begins, position = [0], 0
        for length in self.lengths[:-1]:
            position = _rounded_up(position + length)
            begins.append(position)
        return [*begins, position + self.lengths[-1]] if self.lengths else begins

    @cached_property
    def about(self) -> bytes:
        """What stands for this in a message; the body behind it is aligned for every dtype, where the message is."""
        words = json.dumps([self.form, self.dtype, self.shape, self.lengths]).encode()
        return words + b" " * (-(LENGTHS.size + len(words)) % HEAD_ALIGNMENT)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Of an array. **Raises:** what NumPy and ml_dtypes raise for one that they do not know."""
        return _dtype(self.dtype)


def parts_of(value: Value, name: str = "value") -> tuple[Head, list[Buffer]]:
    """Returns the head of a value and its bytes, which are copied only where they are not contiguous.

    **Arguments:** `name`: of the parameter, for errors.

    **Raises:** `ArgumentError` for what is no array and no buffer, and for arrays of Python objects.
    """
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(cast("NDArray[Any]", value))
        if array.dtype.hasobject:
            raise ArgumentError(
                f"{name}= has dtype={array.dtype}: expected numbers or bytes; Python objects do not travel"
            )
        buffer = bytes_of(array)
        return head_of_array(array.dtype, array.shape), [buffer]
    buffers = buffers_of(value, name)
    return Head(tuple(map(len, buffers)), "buffers" if isinstance(value, list | tuple) else "buffer"), buffers


def buffers_of(value: Value, name: str = "value") -> list[Buffer]:
    """Returns the bytes of a value alone. **Arguments, Raises:** as `parts_of`."""
    if isinstance(value, list | tuple):
        return [_buffer(part, name, index) for index, part in enumerate(cast("Sequence[Any]", value))]
    if isinstance(value, np.ndarray | np.generic):
        return parts_of(cast("NDArray[Any]", value), name)[1]
    return [_buffer(value, name)]


def copied(value: Value) -> Value:
    """Returns a copy of a value, which arrives as the value would. **Raises:** as `parts_of`."""
    head, parts = parts_of(value)
    memory = empty(head.begins[-1] if head.lengths else 0)
    for begin, part in zip(head.begins, parts, strict=False):
        memory.data[begin : begin + len(part)] = part
    return value_of(head, memory)


@lru_cache(1024)
def head_of_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Head:
    """Returns what an array is."""
    return Head((math.prod(shape) * dtype.itemsize,), "array", _dtype_name(dtype), shape)


def bytes_of(array: NDArray[Any]) -> Buffer:
    """Returns the bytes of an array in row-major order: its own memory where it is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(bytearray())


def flat_bytes(buffer: Any) -> Buffer:
    """Returns the bytes of an array that `memoryview` cannot cast: empty, or of a dtype that it does not know."""
    if isinstance(buffer, np.ndarray) and buffer.flags.c_contiguous:
        return bytes_of(cast("NDArray[Any]", buffer))
    raise ArgumentError(
        f"buffer= is a {type(buffer).__name__}: expected a contiguous NumPy array or buffer of bytes; copy it first"
    )


@dataclass(frozen=True)
class Parcel:
    """A value on its way.

    **Fields:** `first`: buffers of the first message. `rest`: of the second, if there is one. `number`: of the second.
    """

    first: list[Buffer]
    rest: list[Buffer]
    number: int


def pack(value: Value, number: int = 0) -> Parcel:
    """Returns the messages of a value. **Arguments:** `number`: of the second one. **Raises:** as `parts_of`."""
    head, parts = parts_of(value)
    about = head.about
    num_bytes = head.begins[-1]
    lengths = LENGTHS.pack(len(about), num_bytes, number)
    body = _spaced(parts)
    room = FIRST_BYTES - LENGTHS.size - len(about)
    if room >= num_bytes:
        return Parcel([memoryview(lengths + about), *body], [], number)
    if room >= 0:
        return Parcel([memoryview(lengths + about)], body, number)
    return Parcel([memoryview(lengths)], [memoryview(about), *body], number)


def _spaced(parts: list[Buffer]) -> list[Buffer]:
    """Returns buffers with zeros between them, so that each begins where `Head.begins` says."""
    spaced: list[Buffer] = []
    for part in parts[:-1]:
        spaced.append(part)
        if short := -len(part) % ALIGNMENT:
            spaced.append(_ZEROS[:short])
    return [*spaced, *parts[-1:]]


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def first_and_rest(data: NDArray[np.uint8]) -> tuple[int, int]:
    """Returns the bytes of the first message of a value, and those of the second one, as the first one says.

    **Raises:** `CommError` for what says nothing.
    """
    if len(data) < LENGTHS.size:
        raise _no_value(f"one of {len(data)} bytes")
    head_bytes, body_bytes, _ = LENGTHS.unpack_from(data.data)
    room = FIRST_BYTES - LENGTHS.size - head_bytes
    num_rest = 0 if room >= body_bytes else body_bytes + (head_bytes if room < 0 else 0)
    return LENGTHS.size + (head_bytes if room >= 0 else 0) + (0 if num_rest else body_bytes), num_rest


class Unpacking:
    """A value that arrives: made of its first message, then given the rest.

    **Arguments:** `first`: the first message, nothing else. `make`: memory of so many bytes for the second one.

    **Fields:** `first`. `rest`: memory for the second message, None without one; may be put here later, with the
    message in it. `num_rest`: its bytes. `number`: of the second message.

    **Raises:** `CommError` for what is no first message of a value.
    """

    def __init__(self, first: NDArray[np.uint8], make: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        num_first, num_rest = first_and_rest(first)
        self._head_bytes, self._body_bytes, self.number = LENGTHS.unpack_from(first.data)
        self.first = first
        self.num_rest = num_rest
        self._has_head = self._head_bytes <= FIRST_BYTES - LENGTHS.size
        if len(first) != num_first:
            raise _no_value(f"{len(first)} bytes that announce {num_first:,}")
        try:
            self.rest = (make or empty)(num_rest) if num_rest else None
        except (MemoryError, ValueError, OverflowError) as error:
            raise CommError(
                f"a message announces {num_rest:,} bytes, for which this process has no memory ({error}); send less at "
                "once"
            ) from error

    def value(self) -> Value:
        """Returns the value, once the rest is there. **Raises:** as `value_of`."""
        start = LENGTHS.size
        about = self.first[start:] if self._has_head or self.rest is None else self.rest
        head = _head(about[: self._head_bytes], self._body_bytes)
        if self.rest is not None:
            return value_of(head, self.rest if self._has_head else aligned(self.rest[self._head_bytes :]))
        return value_of(head, aligned(self.first[start + self._head_bytes :]))


@lru_cache(1024)
def parsed(about: bytes) -> Head:
    """Returns the head of which `about` stands in a message. **Raises:** `ValueError`, `TypeError` where it is none."""
    form, dtype, shape, lengths = json.loads(about.decode())  # of bytes it would guess the encoding
    return Head(tuple(lengths), form, dtype, tuple(shape))


def _head(data: NDArray[np.uint8], num_bytes: int) -> Head:
    """Returns the head of a body of so many bytes."""
    about = data.tobytes()
    try:
        head = parsed(about) if len(about) <= _SHORT_BYTES else parsed.__wrapped__(about)
        fits = head.begins[-1] == num_bytes and all(length >= 0 for length in head.lengths)
    except (ValueError, TypeError) as error:
        raise _no_value(f"a head of {len(data):,} bytes that says nothing ({error})") from error
    if not fits:
        raise _no_value(f"a head of parts of {head.lengths} bytes with a body of {num_bytes:,}")
    return head


def _no_value(what: str) -> CommError:
    return CommError(
        f"a message is no value: {what}; expected what send() sends: install the same version of braidax on all hosts"
    )


def aligned(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a copy of bytes in memory of their own, aligned for every dtype."""
    copy = empty(len(data))
    copy[:] = data
    return copy


def value_of(head: Head, data: NDArray[np.uint8]) -> Value:
    """Returns the value that a head and its bytes make; it shares their memory.

    **Raises:** `CommError` for a head that fits nothing: the ranks run different versions of braidax or dtypes.
    """
    if head.form == "array":
        try:
            dtype = head.numpy_dtype
            return data.view(dtype).reshape(head.shape) if dtype.itemsize else np.empty(head.shape, dtype)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError, SyntaxError) as error:
            raise CommError(
                f"a message announced an array of dtype={head.dtype!r} and shape={head.shape!r} in {len(data):,} bytes "
                f"({error}); expected one that NumPy or ml_dtypes knows here: install the same versions on all hosts"
            ) from error
    view = data.data
    if head.form == "buffer":
        return view
    return [view[begin : begin + length] for begin, length in zip(head.begins, head.lengths, strict=False)]


def empty(num_bytes: int) -> NDArray[np.uint8]:
    """Returns memory for a message, which begins at a multiple of `ALIGNMENT`."""
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory.data)) % ALIGNMENT
    return memory[begin : begin + num_bytes]


def _buffer(value: Any, name: str, index: int | None = None) -> Buffer:
    """Returns the bytes of a buffer. **Arguments:** `index`: in the value `name`, where that is a list."""
    try:
        view = memoryview(value)
    except TypeError as error:
        where = name if index is None else f"{name}[{index}]"
        raise ArgumentError(
            f"{where}= is a {type(value).__name__}: expected a NumPy array, a buffer of bytes, or a list of buffers; "
            "make an array of it with numpy.asarray, or bytes by your own means"
        ) from error
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def _dtype_name(dtype: np.dtype[Any]) -> Any:
    if dtype.isbuiltin == 2:  # registered by ml_dtypes
        return {"name": dtype.name}
    return np.lib.format.dtype_to_descr(dtype)


def _dtype(name: Any) -> np.dtype[Any]:
    if isinstance(name, dict):
        return np.dtype(getattr(ml_dtypes, cast("dict[str, str]", name)["name"]))
    return np.lib.format.descr_to_dtype(_tupled(name))


def _tupled(descr: Any) -> Any:
    """Makes tuples of the lists that JSON made of them."""
    if not isinstance(descr, list):
        return descr
    fields = cast("list[list[Any]]", descr)
    return [tuple(tuple(part) if index == 2 else _tupled(part) for index, part in enumerate(item)) for item in fields]
