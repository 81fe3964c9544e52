"""Gangs that tests of servers share: with its first step a server imports JAX, which takes longer than a test."""

import contextlib
from collections.abc import Iterator

import pytest

from braidax.gang import LocalGang


@pytest.fixture(scope="session")
def gangs() -> Iterator[dict[int, LocalGang]]:
    """Gangs of 1, 2 and 3 ranks. A test that kills a rank, or changes what it runs, starts a gang of its own."""
    with contextlib.ExitStack() as stack:
        yield {size: stack.enter_context(LocalGang(size)) for size in (1, 2, 3)}
