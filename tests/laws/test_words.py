"""Words: names that say nothing are not used."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.laws.tree import ROOT, definitions, modules

FORBIDDEN = {"manager", "engine", "util", "utils", "helper", "helpers", "base", "common"}


def empty_words(source: Path) -> list[str]:
    """Returns the files, classes and functions whose name holds a forbidden word."""
    found: list[str] = []
    for module in modules(source):
        found += [module.path] if FORBIDDEN & _words(module.path) else []
        found += [item.where for item in definitions(module) if FORBIDDEN & _words(item.node.name)]
    return found


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_names_say_something(folder: str) -> None:
    assert empty_words(ROOT / folder) == []


def test_an_empty_word_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "braidax/data/utils.py": "def based(): ...",
            "braidax/gang.py": "class WorkerManager:\n    def to_base(self): ...\nclass HTTPEngine: ...\n",
        }
    )
    assert empty_words(tree) == [
        "braidax/data/utils.py",
        "braidax/gang.py:1 WorkerManager",
        "braidax/gang.py:2 WorkerManager.to_base",
        "braidax/gang.py:3 HTTPEngine",
    ]
