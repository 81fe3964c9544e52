"""Tables of each shape, and ranks to ask for them, made once for all tests of frames."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from braidax.frame.operators import small_sides
from braidax.frame.operators.reading import scanning
from braidax.gang import LocalGang
from tests.support.frame.tables import SHAPES, Tables
from tests.support.frame.worlds import Worlds
from tests.support.gang.forks import fork_children

_STACK = contextlib.ExitStack()


@functools.cache
def _gang() -> LocalGang:
    # Polars itself has threads as soon as it is imported, so that each fork does that.
    fork_children(_STACK.enter_context(pytest.MonkeyPatch.context()), "braidax.gang.child", "braidax.frame.collecting")
    return _STACK.enter_context(LocalGang(3))


@pytest.fixture(scope="module")
def started() -> LocalGang:
    """Three ranks in processes, which tests of several files share: each imports Polars, which takes a second."""
    return _gang()


@pytest.fixture
def gang(started: LocalGang) -> LocalGang:
    """The same: all ranks live and keep nothing, whatever another test did to them."""
    started.replace()
    for name in started.names():
        started.delete(name)
    return started


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends them when tests elsewhere follow, some of which look for threads that are left."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        _STACK.close()
        _gang.cache_clear()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks share even what reads so little that one of them would compute it."""
    monkeypatch.setattr(scanning, "_LITTLE_BYTES", 0)


@pytest.fixture
def dealt(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks deal even what is so small that all of them would have it in full."""
    monkeypatch.setattr(scanning, "_SMALL_BYTES", -1)
    monkeypatch.setattr(small_sides, "_SMALL_BYTES", -1)
    monkeypatch.setattr(small_sides, "_MOST_BYTES", -1)


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tables]:
    """Returns the tables of a shape, by its name."""
    made: dict[str, Tables] = {}

    def tables_of(shape: str) -> Tables:
        if shape not in made:
            made[shape] = Tables(SHAPES[shape], folder=tmp_path_factory.mktemp("tables"))
        return made[shape]

    return tables_of


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Returns ranks that are threads, 1 to 4 of them, which end with the file: other tests count threads."""
    found = Worlds((1, 2, 3, 4))
    yield found
    found.close()
