"""Gangs of processes that save and restore together."""

import contextlib
import functools
from pathlib import Path

import pytest

from braidax.gang import LocalGang
from tests.support.data.jax_gang import jax_gang

_STACK = contextlib.ExitStack()


@functools.cache
def _gang(num_processes: int) -> LocalGang:
    return _STACK.enter_context(jax_gang(num_processes, 8 // num_processes))


@pytest.fixture(scope="module")
def two() -> LocalGang:
    """Two processes of four devices each, which the tests of several files share."""
    return _gang(2)


@pytest.fixture(scope="module")
def four() -> LocalGang:
    """Four processes of two devices each, likewise."""
    return _gang(4)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends them when tests elsewhere follow, some of which look for threads that are left."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        _STACK.close()
        _gang.cache_clear()
