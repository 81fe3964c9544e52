"""Words: names that say nothing, or say it in a picture instead of the field's words, are not used.

In what is read, one thing has one word: pages and docstrings have none of those that the glossary rules out.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tree import ROOT, SRC, definitions, modules

FORBIDDEN = {"manager", "engine", "util", "utils", "helper", "helpers", "base", "common"}
BRITISH = re.compile(
    r"\b(?:\w*(?:colour|behaviour|neighbour|favour|honour|catalogue)\w*|centred?|grey|whilst|learnt|licence|defence"
    r"|(?:un|re|de)?(?:initial|optim|normal|serial|synchron|parallel|recogn|organ|util|minim|maxim|summar|token|quant"
    r"|vector|real|general|material|special|stabil)is(?:e[ds]?|ing|ation)|(?:travel|label|model)l(?:ed|ing))\b",
    re.IGNORECASE,
)
OTHERS = {"DataLoader", "datasets"}  # a class of torch and of ours, a library
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


def ruled_out(glossary: str) -> dict[str, str]:
    """Returns the words that are not used, by the table of the glossary, and what is said instead."""
    table = glossary.partition("## Words that are not used")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    return {word: instead for words, instead in rows for word in re.findall(r"`([^`]+)`", words)}


def spoken(text: str) -> str:
    """Returns Markdown, or a docstring, without code, the targets of links, and what others are quoted with.

    Lines stay where they are.
    """
    quoted = r"^```.*?^```$|`[^`]*`|(?<=\])\([^)\s]*\)|^ *>.*?$|\"[^\"\n]*\n?[^\"\n]*\"|^:::.*?$"
    return re.sub(quoted, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def misnamed(text: str, words: dict[str, str], where: str, first_line: int = 1) -> list[str]:
    """Returns where a text uses words that are ruled out, or spells as the British do.

    **Arguments:** `words`: as `ruled_out`. `where`, `first_line`: of the text.
    """
    said = spoken(text)
    pattern = r"(?<![.\w])(?:" + "|".join(map(re.escape, words)) + r")(?:e?s|\b)"
    pattern = pattern.replace(r"directory)", r"directory|directorie)").replace(r"\ ", r"\s+")
    found = [*re.finditer(pattern, said, re.IGNORECASE), *BRITISH.finditer(said)]
    return [
        f"{where}:{first_line + said.count(chr(10), 0, match.start())}: {' '.join(match[0].split())}"
        for match in found
        if match[0] not in OTHERS
    ]


def docstrings(source: Path) -> list[tuple[str, int, str]]:
    """Returns path, line and text of each docstring of modules, classes and functions."""
    found: list[tuple[str, int, str]] = []
    for module in modules(source):
        for node in module.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    found.append((module.path, first.lineno, str(first.value.value)))
    return found


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_names_say_something(folder: str) -> None:
    assert empty_words(ROOT / folder) == []


def test_names_are_words_of_the_field() -> None:
    assert pictures(ROOT / "src") == []


def test_pages_say_one_word_for_one_thing() -> None:
    words = ruled_out((ROOT / "docs" / "glossary.md").read_text())
    pages = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [misnamed(page.read_text(), words, page.relative_to(ROOT).as_posix()) for page in sorted(pages)]
    assert [line for lines in found for line in lines] == []


def test_docstrings_say_one_word_for_one_thing() -> None:
    words = ruled_out((ROOT / "docs" / "glossary.md").read_text())
    found = [misnamed(text, words, path, line) for path, line, text in docstrings(SRC)]
    assert [line for lines in found for line in lines] == []


def test_a_word_that_is_ruled_out_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    glossary = "| `axis` | a `b` |\n## Words that are not used\n\n| not | but |\n| --- | --- |\n"
    glossary += "| `dataset`, `data loader` | *source* |\n| `directory` | *folder* |\n"
    words = ruled_out(glossary)
    assert words == {"dataset": "*source*", "data loader": "*source*", "directory": "*folder*"}
    text = 'A `dataset` of [x](dataset.md), "dataset".\n```\ndataset\n```\n> dataset\n'
    text += "Datasets: a data\nloader, directories. Behaviour, raises; datasets of HF, torch's DataLoader\n"
    assert misnamed(text, words, "a.md") == [
        "a.md:6: Datasets",
        "a.md:6: data loader",
        "a.md:7: directories",
        "a.md:7: Behaviour",
    ]
    tree = plant({"braidax/a.py": '"""First."""\n\nclass A:\n    def b(self):\n        """Second."""\n'})
    assert docstrings(tree) == [("braidax/a.py", 1, "First."), ("braidax/a.py", 5, "Second.")]


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
