"""Docs: every Python example in the README and in `docs/` runs, block after block, in an empty folder; some by night.

Each page runs in a process of its own, on a machine that has one device: a page that needs more says so at its top.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.laws.pages import Pages, blocks, fresh_processes, run, strange
from tests.support.tree import ROOT

# These take longest, and what they show is tested by day where it is at home: tests/parallel, tests/data, tests/frame,
# tests/checkpoint, tests/torch, tests/gang, tests/tune, tests/cli, tests/test_loop.py. Of these pages the names and the
# keywords are looked at by day.
BY_NIGHT = (
    "docs/attribution.md",
    "docs/coming_from.md",
    "docs/coming_from_orbax.md",
    "docs/coming_from_torchrec.md",
    "docs/coming_from_trainers.md",
    "docs/failures.md",
    "docs/frames.md",
    "docs/images.md",
    "docs/loader.md",
    "docs/loop.md",
    "docs/many_machines.md",
    "docs/one_to_many.md",
    "docs/own_model.md",
    "docs/parallelize.md",
    "docs/pipelines.md",
    "docs/rotated.md",
    "docs/servers.md",
    "docs/sources.md",
    "docs/stalls.md",
    "docs/strategies.md",
    "docs/tables.md",
    "docs/torch.md",
    "docs/tuning.md",
)


def documents() -> list[Any]:
    """Returns the paths of all documents that have examples, relative to the repository."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in paths if blocks(path.read_text())]
    return [pytest.param(name, marks=pytest.mark.slow if name in BY_NIGHT else ()) for name in names]


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    with fresh_processes() as pages:
        yield pages


@pytest.mark.parametrize("document", documents())
def test_examples_run(document: str, pages: Pages, tmp_path: Path) -> None:
    status, output = pages.run(ROOT / document, tmp_path)
    assert status == 0, output


@pytest.mark.parametrize("document", BY_NIGHT)
def test_pages_of_the_night_use_what_there_is(document: str) -> None:
    assert strange((ROOT / document).read_text()) == []


def test_names_and_keywords_that_are_not_there_are_found() -> None:
    code = (
        "import braidax as bx\nfrom braidax.data import Nothing\nbx.Loader\nbx.DataLoader.none\n"
        "bx.Every(minutes=3)\nbx.Every(3)\nx = bx.checkpoint.restore(1).nothing\n"
    )
    assert strange(f"Text\n{code_of(code)}") == [
        "line 4: Nothing",
        "line 5: bx.Loader",
        "line 6: bx.DataLoader.none",
        "line 7: bx.Every(…, minutes=…)",
    ]


def test_a_page_runs_on_one_device_and_a_broken_one_is_found(
    plant: Callable[[dict[str, str]], Path], pages: Pages
) -> None:
    code = "import jax\nprint(jax.device_count())\njax.make_mesh((2,), ('data',))"
    folder = plant({"a.md": f"\n```python\n{code}\n```\n"})
    status, output = pages.run(folder / "a.md", folder)
    assert status == 1
    assert output.startswith("1\nTraceback")
    assert 'a.md", line 5' in output
    more = plant({"b.md": "```python\nimport jax\njax.config.update('jax_num_cpu_devices', 8)\n```\n" + code_of(code)})
    assert pages.run(more / "b.md", more) == (0, "8\n")


def code_of(code: str) -> str:
    """Returns a block of Python."""
    return f"```python\n{code}\n```\n"


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
