import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

from braidax.data.source import batch_spec, gather, loader_dtype, narrow
from braidax.errors import FormatError, RecordError


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [
        ("int64", "int32"),
        (">i8", "int32"),
        ("uint64", "uint32"),
        ("float64", "float32"),
        ("complex128", "complex64"),
        (">f4", "float32"),
        ("float16", "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        ("uint8", "uint8"),
        ("bool", "bool"),
    ],
)
def test_64_bits_are_loaded_as_32(stored: str, loaded: str) -> None:
    dtype = loader_dtype(np.dtype(stored), where="a", leaf="x")
    assert dtype.name == loaded
    assert dtype.isnative


def test_64_bits_are_kept_where_jax_keeps_them() -> None:
    with jax.enable_x64(True):
        assert loader_dtype(np.dtype(">i8"), where="a", leaf="x") == np.int64
        assert loader_dtype(np.dtype("f8"), where="a", leaf="x") == np.float64


@pytest.mark.parametrize("dtype", ["S3", "U3", "O", "M8[s]", "m8[s]", "i4,f4", "f16"])
def test_dtypes_that_jax_lacks(dtype: str) -> None:
    with pytest.raises(FormatError, match=r"a\.npy: leaf 'x' has dtype .*, which is no JAX dtype; expected bool"):
        loader_dtype(np.dtype(dtype), where="a.npy", leaf="x")


@pytest.mark.parametrize(
    ("values", "dtype", "value"),
    [
        (np.array([1, -(2**31), 2**31]), np.int32, "2147483648 (int64)"),
        (np.array([1, 2, -(2**31) - 1]), np.int32, "-2147483649 (int64)"),
        (np.array([1, 2, 2**32], np.uint64), np.uint32, "4294967296 (uint64)"),
        (np.array([np.inf, np.nan, -1e300]), np.float32, "-1e+300 (float64)"),
        (np.array([1, 2, 1e300j]), np.complex64, "1e+300j (complex128)"),
    ],
)
def test_a_value_that_does_not_fit(values: np.ndarray, dtype: type, value: str) -> None:
    out = np.empty(3, dtype)
    with pytest.raises(RecordError, match=re.escape(f"a.npy, record 9: leaf 'x' holds {value}, which does not fit")):
        narrow(values, out, np.array([7, 8, 9]), where="a.npy", leaf="x")
    narrow(values[:2], out[:2], np.array([7, 8]), where="a.npy", leaf="x")
    np.testing.assert_array_equal(out[:2], values[:2].astype(dtype))


def test_gather_names_the_record_in_its_file() -> None:
    with pytest.raises(RecordError, match="record 101:"):
        gather(np.array([0, 2**40]), np.array([0, 1]), np.empty(2, np.int32), where="a", leaf="x", first_record=100)


@pytest.mark.parametrize("layout", ["plain", "fortran", "unaligned", "strided"])
def test_gather_from_any_layout(layout: str) -> None:
    values = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
    array = {
        "plain": lambda: values,
        "fortran": lambda: np.asfortranarray(values),
        "unaligned": lambda: np.frombuffer(b"x" + values.tobytes(), np.float32, offset=1).reshape(values.shape),
        "strided": lambda: np.repeat(values, 2, axis=0)[::2],
    }[layout]()
    indices = np.array([9, 0, 0, 4])
    out = np.full((4, 3, 2), -1, np.float32)
    gather(array, indices, out, where="a", leaf="x")
    np.testing.assert_array_equal(out, values[indices])


def test_batch_spec() -> None:
    spec = {"x": jax.ShapeDtypeStruct((3,), np.float32), "y": (jax.ShapeDtypeStruct((), np.int32),)}
    assert batch_spec(spec, 5) == {
        "x": jax.ShapeDtypeStruct((5, 3), np.float32),
        "y": (jax.ShapeDtypeStruct((5,), np.int32),),
    }


@pytest.mark.parametrize("layout", ["unaligned", "fortran"])
def test_gather_does_not_copy_the_whole_array(layout: str) -> None:
    num_bytes = 4 << 20
    array = np.frombuffer(bytes(num_bytes + 1), np.float32, offset=1).reshape(-1, 4)
    if layout == "fortran":
        array = np.asfortranarray(array)
    out = np.empty((2, 4), np.float32)
    tracemalloc.start()
    try:
        gather(array, np.array([5, 7]), out, where="a", leaf="x")
        assert tracemalloc.get_traced_memory()[1] < num_bytes // 8
    finally:
        tracemalloc.stop()
