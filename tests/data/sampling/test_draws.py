"""Random numbers of samples: pure functions of seed, epoch, sample and place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.data.sampling.draws import Draws
from braidax.errors import ArgumentError

GOLDEN_KEYS = [14341024535407912957, 15527424932092238940, 16541392391813444234]
GOLDEN_INTEGERS = [[325, 633], [56, 650], [823, 639]]
MANY = np.arange(20_000)


def draws(indices: np.ndarray = MANY, *, seed: int | None = 0, epoch: int = 0, place: str = "a") -> Draws:
    return Draws(indices, seed=seed, epoch=epoch, place=place)


def test_the_numbers_never_change() -> None:
    few = draws(np.array([0, 1, 10**12]), seed=7, epoch=3, place="crop/0")
    assert few.keys.tolist() == GOLDEN_KEYS
    assert few.integers(0, 1000, (2,)).tolist() == GOLDEN_INTEGERS


@given(st.lists(st.integers(0, 1 << 62), min_size=1, max_size=9), st.integers(0, 8))
def test_a_sample_has_its_own_numbers(indices: list[int], place: int) -> None:
    whole = draws(np.array(indices))
    place %= len(indices)
    alone, taken = draws(np.array(indices[place : place + 1])), whole.alone(place)
    for shape in ((), (3,), (2, 2)):
        rows = whole.random(shape)
        assert rows.shape == (len(indices), *shape)
        np.testing.assert_array_equal(rows[place], alone.random(shape)[0])
        np.testing.assert_array_equal(rows[place], taken.random(shape)[0])
    np.testing.assert_array_equal(whole.normal((4,))[place], alone.normal((4,))[0])


def test_everything_that_names_them_changes_them() -> None:
    some = [draws(), draws(seed=1), draws(epoch=1), draws(place="b"), draws(MANY + 20_000), draws(seed=None)]
    numbers = np.stack([each.random() for each in some] + [some[0].random()])
    assert np.abs(np.corrcoef(numbers) - np.eye(len(numbers))).max() < 0.04


def test_uniform_and_normal() -> None:
    numbers = draws().uniform(-2, 6, (5,))
    counts, _ = np.histogram(numbers, 20, (-2, 6))
    assert counts.sum() == numbers.size
    assert np.abs(counts / 5000 - 1).max() < 0.06
    normal = draws().normal((5,))
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert abs((np.abs(normal) < 1).mean() - 0.6827) < 0.005


def test_integers() -> None:
    counts = np.bincount(draws().integers(0, 7), minlength=7)
    assert len(counts) == 7
    assert np.abs(counts / (20_000 / 7) - 1).max() < 0.08
    assert set(draws().integers(-3, -1).tolist()) == {-3, -2}
    with pytest.raises(ArgumentError, match=r"integers got low=3, high=3; expected low < high"):
        draws().integers(3, 3)
