"""Values on their way: what is packed is what is unpacked, however long head and body are."""

import contextlib
import random
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from braidax.comm.messages import FIRST_BYTES, Unpacking, pack
from braidax.errors import CommError

DTYPES = [*map(np.dtype, "?bBhHiIlLefdFD"), np.dtype("U3"), np.dtype("S2"), np.dtype("M8[us]"), np.dtype("i4,f8")]


def travel(value: Any) -> Any:
    """Packs a value and unpacks it from the bytes of its messages."""
    parcel = pack(value)
    first = b"".join(parcel.first)
    assert len(first) <= FIRST_BYTES
    arriving = Unpacking(np.frombuffer(first, np.uint8))
    rest = b"".join(parcel.rest)
    assert (arriving.rest is None) == (not parcel.rest)
    if arriving.rest is not None:
        assert arriving.rest.nbytes == len(rest)
        arriving.rest[:] = np.frombuffer(rest, np.uint8)
    return arriving.value()


@given(st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))))
def test_arrays(array: Any) -> None:
    found = travel(array)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("length", [0, 1, 8000, 8100, 8101, 8150, 8192, 8193, 100_000])
def test_lengths_around_what_the_first_message_holds(length: int) -> None:
    array = np.arange(length, dtype=np.uint8)
    assert travel(array).tobytes() == array.tobytes()
    assert bytes(travel(array.data)) == array.tobytes()
    parts = [array.data, b"tail"]
    assert list(map(bytes, travel(parts))) == list(map(bytes, parts))


@given(st.lists(st.binary(max_size=50), max_size=4000))
def test_lists_of_buffers(parts: list[bytes]) -> None:
    assert list(map(bytes, travel(parts))) == parts


def test_a_head_that_fits_in_no_first_message() -> None:
    parts = [b"ab"] * 5000
    assert list(map(bytes, travel(parts))) == parts
    assert list(map(bytes, travel([bytes(1_000_000), *parts]))) == [bytes(1_000_000), *parts]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4", "float8_e5m2"])
def test_dtypes_that_numpy_lacks(name: str) -> None:
    array = np.arange(5).astype(getattr(ml_dtypes, name))
    found = travel(array)
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


def test_memory_is_not_copied() -> None:
    array = np.arange(10_000)
    parcel = pack(array)
    assert np.shares_memory(np.frombuffer(parcel.rest[0], np.uint8), array)
    strided = array[::2]
    assert not np.shares_memory(np.frombuffer(pack(strided).rest[0], np.uint8), array)


def test_a_dtype_that_nobody_knows_is_an_error() -> None:
    data = b"".join(pack(np.zeros(2, ml_dtypes.bfloat16)).first).replace(b"bfloat16", b"cfloat16")
    with pytest.raises(CommError, match=r"announced an array of dtype={'name': 'cfloat16'} and shape=\(2,\)"):
        Unpacking(np.frombuffer(data, np.uint8)).value()


@pytest.mark.parametrize("value", [np.arange(6.0).reshape(2, 3), b"some bytes", [b"ab", bytes(100)], np.zeros(9000)])
def test_what_is_no_value_is_an_error(value: Any) -> None:
    """Bytes that changed on their way make a value, another one perhaps, or an error of braidax; nothing else."""
    parcel = pack(value)
    first, draw = b"".join(parcel.first), random.Random(0)
    for _ in range(150):
        data = bytearray(first[: draw.randrange(len(first) + 1)] if draw.random() < 0.2 else first)
        for _ in range(draw.randrange(3)):
            if data:
                data[draw.randrange(min(len(data), 120))] = draw.randrange(256)
        with contextlib.suppress(CommError):
            arriving = Unpacking(np.frombuffer(bytes(data), np.uint8))
            if arriving.rest is not None:
                arriving.rest[: 1 << 20] = 0  # of gigabytes, perhaps
            arriving.value()


def test_a_message_that_announces_more_than_there_is_memory_is_an_error() -> None:
    data = struct.pack("<QQQ", 20, 1 << 60, 0) + b" " * 20
    with pytest.raises(CommError, match=r"announces 1,152,921,504,606,846,976 bytes"):
        Unpacking(np.frombuffer(data, np.uint8))
