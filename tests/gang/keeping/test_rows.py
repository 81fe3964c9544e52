"""Rows of arrays and tables, divided evenly."""

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.errors import ArgumentError
from braidax.gang.calling.parcels import pack
from braidax.gang.keeping.rows import divided


def table(numbers: Any) -> pa.Table:
    """Returns a table with columns of several kinds, in two chunks."""
    numbers = list(numbers)
    columns = {
        "number": pa.array(numbers, pa.int64()),
        "text": pa.array([None if number % 3 == 0 else str(number) for number in numbers], pa.string()),
        "list": pa.array([list(range(number % 4)) for number in numbers], pa.list_(pa.int32())),
        "kind": pa.array([f"k{number % 2}" for number in numbers], pa.string()).dictionary_encode(),
    }
    whole = pa.table(columns).replace_schema_metadata({"made": "here"})
    return pa.concat_tables([whole.slice(0, len(numbers) // 2), whole.slice(len(numbers) // 2)])


def batch(numbers: Any) -> pa.RecordBatch:
    """Returns a record batch."""
    return pa.record_batch({"number": pa.array(list(numbers), pa.int64())}, metadata={"made": "here"})


def rows(part: Any) -> list[Any]:
    """Returns the rows of any kind of part."""
    if isinstance(part, np.ndarray):
        return part.tolist()
    return part.rows() if isinstance(part, pl.DataFrame) else part.to_pylist()


MAKERS = [
    lambda numbers: np.array(list(numbers), np.int64),
    table,
    batch,
    lambda numbers: pl.DataFrame({"number": pl.Series(list(numbers), dtype=pl.Int64)}),
]


@pytest.mark.parametrize("make", MAKERS)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), size=st.integers(1, 5))
def test_rows_are_divided_evenly_and_in_order(make: Any, lengths: list[int], size: int) -> None:
    ends = np.cumsum(lengths).tolist()
    values = [make(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
    parts = divided(values, size)
    assert [type(part) for part in parts] == [type(values[0])] * size
    sizes = [len(rows(part)) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert [row for part in parts for row in rows(part)] == [row for value in values for row in rows(value)]
    if hasattr(values[0], "schema"):
        assert all(part.schema == values[0].schema for part in parts)
        assert all(
            getattr(part.schema, "metadata", None) == getattr(values[0].schema, "metadata", None) for part in parts
        )


@pytest.mark.parametrize("make", MAKERS)
def test_a_part_is_sent_without_the_rest(make: Any) -> None:
    """Whoever pickles a slice of an Arrow table sends all that it is a slice of."""
    whole = make(range(100_000))
    sizes = [sum(memoryview(piece).nbytes for piece in pack(part)) for part in divided([whole], 100)]
    assert max(sizes) < sum(memoryview(piece).nbytes for piece in pack(whole)) / 20


def test_a_part_of_one_array_is_not_copied() -> None:
    whole = np.arange(10)
    assert all(np.shares_memory(part, whole) for part in divided([whole], 3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [np.arange(2), [1]],
            r"values\[1\] is a builtins.list, whose rows cannot be divided: expected NumPy arrays, ta",
        ),
        ([np.array(1)], r"values\[0\] is a numpy.ndarray, whose rows cannot be divided"),
        (
            [np.arange(2), np.ones(2)],
            r"values\[1\] is an array of float64 with rows of shape \(\), values\[0\] an array of",
        ),
        (
            [np.ones((2, 3)), np.ones((2, 4))],
            r"rows of shape \(4,\), values\[0\] an array of float64 with rows of shape",
        ),
        (
            [table([1]), batch([1])],
            r"values\[1\] is a pyarrow.RecordBatch of \{number: int64\}, values\[0\] a pyarrow.Tab",
        ),
        (
            [pl.DataFrame({"a": [1]}), pl.DataFrame({"b": [1]})],
            r"values\[1\] is a polars.DataFrame of \{b: Int64\}, values\[0\] a polars.DataFrame of \{a: Int64\}: expe",
        ),
    ],
)
def test_what_does_not_fit_is_named(values: list[Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        divided(values, 4)
