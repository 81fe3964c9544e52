"""Tables of each shape, made once for all tests of frames."""

from collections.abc import Callable

import pytest

from tests.frame.tables import SHAPES, Tables


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tables]:
    """Returns the tables of a shape, by its name."""
    made: dict[str, Tables] = {}

    def tables_of(shape: str) -> Tables:
        if shape not in made:
            made[shape] = Tables(SHAPES[shape], folder=tmp_path_factory.mktemp("tables"))
        return made[shape]

    return tables_of
