"""Tables of each shape, and ranks to ask for them, made once for all tests of frames."""

from collections.abc import Callable, Iterator

import pytest

from braidax.frame.operators import small_sides
from braidax.frame.operators.reading import scanning
from tests.support.frame.tables import SHAPES, Tables
from tests.support.frame.worlds import Worlds


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
