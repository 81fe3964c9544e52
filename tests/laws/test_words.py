"""Words: names that say nothing, or say it in a picture instead of the field's words, are not used."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.laws.tree import ROOT, definitions, modules

FORBIDDEN = {"manager", "engine", "util", "utils", "helper", "helpers", "base", "common"}
PICTURES = {"around", "near", "behind", "together", "star", "port", "shelf"}


def empty_words(source: Path) -> list[str]:
    """Returns the files, classes and functions whose name holds a forbidden word."""
    found: list[str] = []
    for module in modules(source):
        found += [module.path] if FORBIDDEN & _words(module.path) else []
        found += [item.where for item in definitions(module) if FORBIDDEN & _words(item.node.name)]
    return found


def pictures(source: Path) -> list[str]:
    """Returns the files whose name holds a picture, and the classes and functions whose name is one."""
    found: list[str] = []
    for module in modules(source):
        found += [module.path] if PICTURES & _words(Path(module.path).stem) else []
        found += [item.where for item in definitions(module) if item.node.name.strip("_").lower() in PICTURES]
    return found


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_names_say_something(folder: str) -> None:
    assert empty_words(ROOT / folder) == []


def test_names_are_words_of_the_field() -> None:
    assert pictures(ROOT / "src") == []


def test_a_picture_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "braidax/comm/serial_port.py": "def free_port(): ...",  # a port of TCP is the field's word
            "braidax/portable.py": "class Star:\n    def _near(self): ...\n    def start(self): ...\n",
        }
    )
    assert pictures(tree) == [
        "braidax/comm/serial_port.py",
        "braidax/portable.py:1 Star",
        "braidax/portable.py:2 Star._near",
    ]


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
