"""Groups by an integer, in C: keys, counts and what is made of values, beside NumPy."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from braidax.frame.summing import groups_binding
from braidax.frame.summing.groups import groups_of

LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
KINDS = ["dense", "around zero", "sparse", "at both ends", "at the upper end", "one", "multiples"]


def _keys(kind: str, rows: int, rng: np.random.Generator) -> NDArray[np.int64]:
    few = rng.integers(0, max(1, rows // 2), rows)
    match kind:
        case "dense":
            return few
        case "around zero":
            return few - rows // 4
        case "sparse":
            return few * 1_000_003 - (1 << 40)
        case "at both ends":
            return np.where(few % 2 == 0, LEAST + few, MOST - few)
        case "at the upper end":
            return MOST - few
        case "one":
            return np.full(rows, -7)
        case _:
            return few << 40  # whose lower bits are all the same
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_groups_of_one_table(kind: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    keys = _keys(kind, rows, rng)
    found = groups_of([keys])
    expected, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(found.keys)
    np.testing.assert_array_equal(found.keys[order], expected)
    np.testing.assert_array_equal(found.counts[0][order], counts)
    np.testing.assert_array_equal(found.keys[found.of[0]], expected[inverse])
    assert found.is_ascending == (len(expected) == 1 or kind not in ("sparse", "at both ends", "multiples"))
    assert not found.is_ascending or np.all(np.diff(found.keys) > 0)
    np.testing.assert_array_equal(found.sizes, found.counts[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "others"), [(1000, 300), (300, 1000), (1, 5), (5, 1)])
def test_groups_of_two_tables_are_those_that_both_have_rows_of(kind: str, rows: int, others: int) -> None:
    rng = np.random.default_rng(0)
    keys = [_keys(kind, count, rng) for count in (rows, others)]
    found = groups_of(keys)
    expected = np.intersect1d(keys[0], keys[1])
    np.testing.assert_array_equal(np.sort(found.keys), expected)
    for one, of, counts in zip(keys, found.of, found.counts, strict=True):
        has_group = np.isin(one, expected)
        np.testing.assert_array_equal(of == len(expected), ~has_group)
        np.testing.assert_array_equal(found.keys[of[has_group]], one[has_group])
        np.testing.assert_array_equal(counts, [(one == key).sum() for key in found.keys])
    np.testing.assert_array_equal(found.sizes, found.counts[0] * found.counts[1])


@pytest.mark.parametrize("table", [0, 1])
def test_what_is_made_of_values_is_that_of_the_rows_of_the_join(table: int) -> None:
    rng = np.random.default_rng(1)
    keys = [rng.integers(0, 50, 400), rng.integers(20, 70, 300)]
    found = groups_of(keys)
    left, right = np.nonzero(keys[0][:, None] == keys[1][None, :])
    rows, joined = (left, right)[table], keys[0][left]
    whole = rng.integers(LEAST, MOST, len(keys[table]))
    floats = rng.integers(-1000, 1000, len(keys[table])) / 8
    for what, values, of in [("Sum", whole, np.sum), ("Min", whole, np.min), ("Max", whole, np.max)]:
        expected = [of(values[rows[joined == key]]) for key in found.keys]
        np.testing.assert_array_equal(found.combined(what, values, table), expected)
    expected = [floats[rows[joined == key]].sum() for key in found.keys]
    np.testing.assert_array_equal(found.combined("Sum", floats, table), expected)


@pytest.mark.parametrize(("rows", "others"), [(0, 3), (3, 0), (0, 0)])
def test_a_table_without_rows_has_no_groups(rows: int, others: int) -> None:
    found = groups_of([np.arange(rows), np.arange(others)])
    assert len(found.keys) == 0
    assert [len(of) for of in found.of] == [rows, others]
    assert found.combined("Sum", np.arange(rows), 0).shape == (0,)
    assert len(groups_of([np.arange(0)]).keys) == 0


def test_tables_that_share_no_key_have_no_groups() -> None:
    for keys in ([1, 2], [30, 40]), ([1, 2], [1 << 40, 1 << 50]), ([1 << 40, 1], [1 << 50, 2]):
        found = groups_of([np.array(one) for one in keys])
        assert len(found.keys) == 0
        assert [of.tolist() for of in found.of] == [[0, 0], [0, 0]]


def _buffers(**other: Any) -> list[Any]:
    given = {
        "own": np.arange(3),
        "others": np.arange(4),
        "own_groups": np.zeros(3, np.uint32),
        "other_groups": np.zeros(4, np.uint32),
        "keys": np.zeros(3, np.int64),
        "own_counts": np.zeros(3, np.int64),
        "other_counts": np.zeros(3, np.int64),
    }
    return list({**given, **other}.values())


@pytest.mark.usefixtures("unchecked")
def test_buffers_that_do_not_fit_are_refused() -> None:
    assert groups_binding.joined(*_buffers()) == (3, 1)
    for name in ("own_groups", "other_groups", "keys", "own_counts", "other_counts"):
        with pytest.raises(ValueError, match="expected buffers of the lengths of two sides"):
            groups_binding.joined(*_buffers(**{name: np.zeros(2, np.uint32)}))
    with pytest.raises(ValueError, match="expected buffers of the lengths of a side"):
        groups_binding.grouped(np.arange(3), np.zeros(3, np.uint32), np.zeros(2, np.int64), np.zeros(3, np.int64))
    values, out = np.arange(3), np.zeros(2, np.int64)
    for what, of in [("i", [0, 1, 2]), ("i", [0, 1]), ("?", [0, 1, 1])]:  # the first one has a group of no place
        with pytest.raises(ValueError, match="expected i, f, < or >, values of 8 bytes, and a group for each"):
            groups_binding.combine(what, values, np.array(of, np.uint32), out)
