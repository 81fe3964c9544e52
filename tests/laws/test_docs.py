"""Docs: every Python example in the README and in `docs/` runs, block after block, in an empty folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.laws.tree import ROOT


def blocks(text: str) -> list[tuple[int, str, bool]]:
    """Returns the Python blocks of a Markdown text: line of the first statement, code, and whether to run it.

    A block that opens with "```python no-run" is compiled, not run.
    """
    found: list[tuple[int, str, bool]] = []
    lines = text.splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```python"):
            start = number + 1
        elif start is not None and line.startswith("```"):
            found.append((start + 1, "\n".join(lines[start:number]), "no-run" not in lines[start - 1]))
            start = None
    return found


def run(document: Path) -> None:
    """Runs the blocks of one document in one namespace; a failure shows the document's own line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, code, runs in blocks(document.read_text()):
        compiled = compile("\n" * (line - 1) + code, str(document), "exec")
        if runs:
            exec(compiled, namespace)


def documents() -> list[str]:
    """Returns the paths of all documents, relative to the repository."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in paths]


@pytest.mark.parametrize("document", documents())
def test_examples_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(ROOT / document)


def test_a_broken_example_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    text = (
        "\n```python\nx = 1\n```\n```python no-run\nx = wait_for_ever()\n```\n\n```python\nx += 1\nassert x == 3\n```\n"
    )
    document = plant({"a.md": text}) / "a.md"
    assert [(line, runs) for line, _, runs in blocks(text)] == [(3, True), (6, False), (10, True)]
    with pytest.raises(AssertionError) as caught:
        run(document)
    assert caught.traceback[-1].lineno == 10  # counted from 0


def test_an_example_that_is_not_run_must_still_be_python(plant: Callable[[dict[str, str]], Path]) -> None:
    with pytest.raises(SyntaxError):
        run(plant({"a.md": "```python no-run\nfor\n```\n"}) / "a.md")
