"""Layouts: where the parts of a variable are, and the form in which it is stored."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from braidax.errors import ArgumentError
from braidax.parallel import Axis, Gathered, Layout, Replicated, Rows, Split

DATA, MODEL = Axis("data", 4), Axis("model", 2)


def test_placements_refine_one_another() -> None:
    layout = Gathered(1).refine(Replicated().refine(Layout.whole((6, 8)), DATA), MODEL)
    assert (layout.spec, layout.gathered) == (P(None, "model"), {"model"})
    layout = Gathered(1).refine(Gathered(1).refine(Layout.whole((6, 8)), DATA), MODEL)
    assert (layout.spec, layout.num_parts(1), layout.axes_of(1)) == (P(None, ("data", "model")), 8, ("data", "model"))


def test_a_table_by_rows_and_split_by_columns() -> None:
    layout = Rows().refine(Layout.whole((37, 6)), DATA).split(1, MODEL)
    assert layout.spec == P(None, ("data",), "model")


@pytest.mark.parametrize("shape", [(37, 6), (8,), (13, 5, 3), (7,)])
def test_there_and_back(shape: tuple[int, ...]) -> None:
    layout = Layout.whole(shape).split(0, DATA)
    array = jnp.arange(float(np.prod(shape))).reshape(shape) + 1
    stored = layout.store(array)
    assert stored.shape == (-(-shape[0] // 4) * 4, *shape[1:])
    assert stored.sum() == array.sum()
    np.testing.assert_array_equal(layout.load(stored), array)


def test_what_cannot_be_split() -> None:
    with pytest.raises(ArgumentError, match=r"dim=2 of a variable of shape \[3, 4\], expected 0 <= dim < 2"):
        Layout.whole((3, 4)).split(2, DATA)
    with pytest.raises(ArgumentError, match="dim=0 would be split by rows on one of the axes data and model"):
        Gathered(0).refine(Rows().refine(Layout.whole((3, 4)), DATA), MODEL)
    words = r"dim=1 of a variable by rows, of shape \[3, 5\], would be divided among 2 .* whole along the axes model"
    with pytest.raises(ArgumentError, match=words):
        Gathered(1).refine(Rows().refine(Layout.whole((3, 5)), DATA), MODEL)
    with pytest.raises(ArgumentError, match=words):
        Rows().refine(Gathered(1).refine(Layout.whole((3, 5)), MODEL), DATA)


def test_what_a_loss_takes_apart_is_stored_along_another_dim() -> None:
    split = Split(1, pieces=(8, 4)).refine(Layout.whole((6, 12)), MODEL)
    assert (split.spec, split.is_split, split.padding) == (P("model"), True, (0, 0))
    assert [(one.shape, one.spec) for one in split.used()] == [((6, 8), P(None, "model")), ((6, 4), P(None, "model"))]
    # What is exchanged lies within what is gathered, whatever came first.
    both = Gathered(0).refine(split, Axis("data", 3))
    assert (both.spec, both.used()[0].spec) == (P(("data", "model")), P("data", "model"))
    assert both == Split(1, pieces=(8, 4)).refine(Gathered(0).refine(Layout.whole((6, 12)), Axis("data", 3)), MODEL)
    assert Split(0, pieces=(8, 4)).refine(Layout.whole((12,)), MODEL).spec == P()  # whole, where no other dim is even


def test_columns_that_are_split_twice_beside_rows() -> None:
    layout = Split(1).refine(Rows().refine(Split(1).refine(Layout.whole((37, 8)), MODEL), DATA), Axis("third", 2))
    assert layout.spec == P(None, ("data",), ("model", "third"))
