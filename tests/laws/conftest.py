"""A broken tree in a temporary folder, on which each law shows that it can fail."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.tree import parsed


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forgets what laws have parsed when tests elsewhere follow: millions of nodes, which later collections of garbage
    would walk."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        parsed.cache_clear()


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Returns a function that writes files, by path, into a fresh folder and returns that folder."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return tmp_path

    return write
