import re
from typing import Any, NamedTuple

import datasets
import jax
import ml_dtypes
import numpy as np
import pytest
from PIL import Image

import braidax.data as sources
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats.reading import assert_equal, read


def raised(kind: type[Exception], items: Any, indices: list[int] | None = None) -> str:
    with pytest.raises(kind) as caught:
        read(sources.open(items), indices)
    return str(caught.value)


class Pair(NamedTuple):
    x: Any
    y: Any


def test_structure_is_kept() -> None:
    items = [Pair({"b": np.full(2, row, np.int16), "a": row}, (row / 2, row > 1)) for row in range(3)]
    window = read(sources.open(items))
    expected = Pair(
        {"b": np.array([[0, 0], [1, 1], [2, 2]], np.int16), "a": np.arange(3, dtype=np.int32)},
        (np.array([0, 0.5, 1], np.float32), np.array([False, False, True])),
    )
    assert_equal(window, expected)
    assert jax.tree.map(lambda leaf: leaf.dtype, window) == jax.tree.map(lambda leaf: leaf.dtype, expected)


@pytest.mark.parametrize(
    ("sample", "shape", "dtype"),
    [
        (3, (), "int32"),
        (3.5, (), "float32"),
        (True, (), "bool"),
        ([1, 2, 3], (3,), "int32"),
        ([[1.0], [2.0]], (2, 1), "float32"),
        (np.int64(3), (), "int32"),
        (np.zeros((2, 3)), (2, 3), "float32"),
        (np.zeros(2, ml_dtypes.bfloat16), (2,), "bfloat16"),
        (jax.numpy.zeros(2), (2,), "float32"),
        (Image.new("RGB", (5, 4)), (4, 5, 3), "uint8"),
        (Image.new("L", (5, 4)), (4, 5, 1), "uint8"),
        (Image.new("1", (5, 4)), (4, 5, 1), "uint8"),
        (Image.new("P", (5, 4)), (4, 5, 3), "uint8"),
        (Image.new("RGBA", (5, 4)), (4, 5, 4), "uint8"),
    ],
)
def test_leaves(sample: Any, shape: tuple[int, ...], dtype: str) -> None:
    source = sources.open([sample, sample])
    assert (source.sample_spec.shape, source.sample_spec.dtype.name) == (shape, dtype)
    np.testing.assert_array_equal(read(source)[1].reshape(-1)[:1], np.asarray(sample).reshape(-1)[:1])


def test_64_bits_where_jax_keeps_them() -> None:
    with jax.enable_x64(True):
        spec = sources.open([(3, 2**40, 1.5, np.int64(3), np.float64(3))]).sample_spec
    assert [leaf.dtype.name for leaf in spec] == ["int32", "int64", "float32", "int64", "float64"]


def test_hugging_face_dataset() -> None:
    pictures = [Image.fromarray(np.full((2, 3, 3), row, np.uint8)) for row in range(3)]
    table = datasets.Dataset.from_dict(
        {"image": pictures, "label": [2, 1, 0]},
        features=datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(3)),
    )
    window = read(sources.open(table), [2, 0])
    assert window["label"].tolist() == [0, 2]
    assert window["image"].tolist() == [np.full((2, 3, 3), row).tolist() for row in (2, 0)]
    numpy_window = read(sources.open(table.with_format("numpy")), [2, 0])
    assert_equal(numpy_window, window)


class Many:
    """Counts how it is asked for samples."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it has __getitems__")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [{"x": index} for index in indices]


def test_getitems_is_used() -> None:
    items = Many()
    assert read(sources.open(items), [4, 0, 4])["x"].tolist() == [4, 0, 4]
    assert items.calls == [[0], [4, 0, 4]]


def test_getitems_of_another_length() -> None:
    class Short(Many):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [{"x": 1}]

    assert "__getitems__ returned 1 samples for 3 indices; expected as many" in raised(RecordError, Short(), [1, 2, 3])


class Faulty:
    """Raises at record 3."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("lost")
        return index


class FaultyMany(Faulty):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Faulty, FaultyMany])
def test_what_the_object_raises_is_told_with_its_record(kind: type[Any]) -> None:
    source = sources.open(kind())
    assert read(source, [0, 4]).tolist() == [0, 4]
    with pytest.raises(
        RecordError, match=rf"'{kind.__name__}', record 3: its __getitem__ raised KeyError: 'lost'"
    ) as caught:
        read(source, [0, 3])
    assert isinstance(caught.value.__cause__, KeyError)


def test_getitems_that_raises_for_no_single_record() -> None:
    class OnlyMany(Faulty):
        def __getitem__(self, index: int) -> Any:
            return index

        def __getitems__(self, indices: list[int]) -> list[Any]:
            if len(indices) > 1:
                raise OSError("too many")
            return indices

    assert "one of the records [1, 2]: its __getitems__ raised OSError: too many" in raised(
        RecordError, OnlyMany(), [1, 2]
    )


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (
            {"x": np.zeros(3), "y": 1},
            "record 1: leaf 'x' is float64 [3], expected float64 [2] as in record 0; pad, crop",
        ),
        ({"x": np.zeros(2, "f4"), "y": 1}, "record 1: leaf 'x' is float32 [2], expected float64 [2] as in record 0"),
        ({"x": np.zeros(2), "y": 1.5}, "record 1: leaf 'y' is float64 [], expected int64 [] as in record 0"),
        ({"x": np.zeros(2)}, "record 1: its structure is PyTreeDef({'x': *}), expected that of record 0"),
        ({"x": np.zeros(2), "y": 2**31}, "record 1: leaf 'y' holds 2147483648 (int64), which does not fit in int32"),
        ({"x": np.zeros(2), "y": 2**70}, "record 1: field 'y' is int 1180591620717411303424 (dtype object)"),
        ({"x": np.zeros(2), "y": None}, "record 1: field 'y' is NoneType None; expected numbers"),
        ({"x": [[1.0], [1.0, 2.0]], "y": 1}, "record 1: field 'x' (list) is no rectangular array of numbers"),
    ],
)
def test_a_later_sample_that_differs(later: Any, message: str) -> None:
    items = [{"x": np.zeros(2), "y": 1}, later]
    read(sources.open(items), [0])
    with pytest.raises((RecordError, FormatError), match=re.escape(message)):
        read(sources.open(items), [0, 1])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "hello"}, "record 0: field 'text' is str 'hello'; expected numbers: remove the field, or turn it"),
        ({"raw": b"x"}, "record 0: field 'raw' is bytes b'x'"),
        ({"x": ["a"]}, "record 0: field 'x' is list ['a'] (dtype <U1)"),
        ({"x": object()}, "record 0: field 'x' is object <object object at"),
        ({}, "record 0: has no leaf at all"),
    ],
)
def test_fields_that_are_no_numbers(sample: Any, message: str) -> None:
    assert message in raised(FormatError, [sample])


def test_objects_that_are_no_samples() -> None:
    assert "object of type 'list': it holds 0 samples" in raised(FormatError, [])
    message = raised(ArgumentError, iter([1]))
    assert "path_or_object: a list_iterator; expected a path, a source" in message


def test_describe() -> None:
    assert sources.open(Many()).describe()["format"].endswith("test_indexable.Many")
