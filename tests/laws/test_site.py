"""The site: every page is reached, every link leads somewhere, every public name is documented; nothing is built."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from tests.support.laws.site import (
    anchors,
    dead_links,
    defined,
    pages_from_outside,
    pages_in_nav,
    public_names,
    rooms,
    strange_messages,
    unlisted,
)
from tests.support.tree import ROOT, SRC, parsed

DOCS = ROOT / "docs"
OUTSIDE = pages_from_outside((DOCS / "site" / "hooks.py").read_text())


def pages() -> list[str]:
    """Returns the files of Markdown that are pages of the site, relative to the repository."""
    return [*OUTSIDE, *(path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md")))]


def test_every_page_is_in_the_navigation_once() -> None:
    nav = pages_in_nav((ROOT / "mkdocs.yml").read_text())
    assert sorted(nav) == sorted(OUTSIDE.get(page, page.removeprefix("docs/")) for page in pages())


def test_no_link_is_dead() -> None:
    assert dead_links(ROOT, pages()) == []


def test_every_public_name_is_documented_and_on_the_reference() -> None:
    assert unlisted(DOCS / "reference") == []


def test_every_message_of_troubleshooting_is_one_of_ours() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    assert strange_messages(page, [ROOT / "hatch_build.py", *SRC.rglob("*.py")]) == []


def test_every_extra_is_on_the_page_of_the_installation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[^|]+) \|", (DOCS / "install.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == sorted(extras)


def test_the_rooms_are_those_that_users_import() -> None:
    assert {"braidax", "braidax.data", "braidax.errors", "braidax.torch", "braidax.tune.study"} <= set(rooms())
    assert "braidax.program" not in rooms()


def test_a_page_in_the_navigation_is_found() -> None:
    config = "docs_dir: docs\nnav:\n  - Start:\n      - index.md\n      - Your first: one.md\n  - A: two/b.md\n"
    assert pages_in_nav(config) == ["index.md", "one.md", "two/b.md"]


def test_anchors_are_those_of_github() -> None:
    text = "# `s3://`, [gs](a.md) – and more\n## Rows_ahead, 2×\n```\n# no heading\n```\n::: braidax.open\n"
    assert anchors(text) == {"s3-gs--and-more", "rows_ahead-2", "braidax.open"}


def test_a_dead_link_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "a.md": "[one](docs/b.md#second) [two](docs/b.md#third) [three](c.md) [web](https://x.org) `[no](link)`\n",
            "docs/b.md": "## Second\n[self](#second) [gone](#first)\n```\n[no](link)\n```\n",
        }
    )
    assert dead_links(tree, ["a.md", "docs/b.md"]) == [
        "a.md: docs/b.md#third: no such anchor",
        "a.md: c.md: no such file",
        "docs/b.md: #first: no such anchor",
    ]


def test_a_name_that_is_not_documented_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "src/braidax/__init__.py": """
                if TYPE_CHECKING:
                    from braidax import data
                    from braidax.data import load
                __version__ = "1"
                __all__ = ["__version__", "data", "load"]
                """,
            "src/braidax/data/__init__.py": '''
                """Data."""
                from .load import load as load
                from .load import SIZE as SIZE, silent as silent
                from .load import hidden
                ''',
            "src/braidax/data/load.py": '''
                def load(a: int): ...
                def load(a):
                    """Loads."""
                SIZE = 3
                """A size."""
                def silent(): ...
                ''',
            "reference/braidax.md": "::: braidax.load\n::: braidax.gone\n",
            "reference/data.md": "::: braidax.data.silent\n",
        }
    )
    assert unlisted(tree / "reference", tree / "src") == [
        "braidax.data.load is not on the reference",
        "braidax.data.SIZE is not on the reference",
        "braidax.data.silent has no docstring",
        "braidax.gone: no such name",
    ]
    (tree / "reference/data.md").write_text("[`load`](braidax.md#braidax.load)\n::: braidax.data.SIZE\n" * 2)
    assert unlisted(tree / "reference", tree / "src") == [
        "braidax.data.silent has no docstring",
        "braidax.gone: no such name",
        "braidax.data.SIZE: listed twice",
    ]


def test_a_message_that_nobody_raises_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    raised = """
        raise ArgumentError(
            f"{size=} is odd; "
            f"expected {one}, "
            "or two"
        )
        """
    page = "| you see | why |\n| --- | --- |\n| `is odd; expected …, or two`, `or three` | `other` |\n"
    assert strange_messages(page, [plant({"a.py": raised}) / "a.py"]) == ["or three"]


def test_what_a_module_shows_is_what_it_lists_or_defines() -> None:
    text = "import os\n_A = 1\nB: int = 2\nclass C: ...\ndef d(): ...\n"
    assert public_names(parsed("m", "m.py", text)) == ["B", "C", "d"]
    assert public_names(parsed("m", "m.py", text + "__all__ = ['d']\n")) == ["d"]
    assert public_names(parsed("m", "m/__init__.py", "from .a import b as b, c\n")) == ["b"]


def test_a_name_leads_to_its_definition() -> None:
    assert defined("braidax.open").home == "braidax.data.open.open"
    assert defined("braidax.data").home == "braidax.data"
    assert defined("braidax.data.nothing").home == ""
