"""Gangs of processes that save and restore together."""

from collections.abc import Iterator

import pytest

from braidax.gang import LocalGang
from tests.support.data.jax_gang import jax_gang


@pytest.fixture(scope="module")
def two() -> Iterator[LocalGang]:
    with jax_gang(2, 4) as running:
        yield running


@pytest.fixture(scope="module")
def four() -> Iterator[LocalGang]:
    with jax_gang(4, 2) as running:
        yield running
