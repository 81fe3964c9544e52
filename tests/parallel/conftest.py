"""Gangs that tests of servers share: with its first step a server imports JAX, which takes longer than a test."""

import contextlib
from pathlib import Path

import pytest

from braidax.gang import LocalGang

_GANGS: dict[int, LocalGang] = {}
_STACK = contextlib.ExitStack()


@pytest.fixture(scope="module")
def gangs() -> dict[int, LocalGang]:
    """Gangs of 1, 2 and 3 ranks. A test that kills a rank, or changes what it runs, starts a gang of its own."""
    for size in (1, 2, 3):
        if size not in _GANGS:
            _GANGS[size] = _STACK.enter_context(LocalGang(size))
    return _GANGS


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends them when tests elsewhere follow, some of which look for threads that are left."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        _STACK.close()
        _GANGS.clear()
