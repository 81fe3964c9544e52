"""The repository: nothing in it belongs to one machine, and nothing in it is large."""

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.support.tree import ROOT

MAX_BYTES = 1_000_000
# Written with classes of one letter, so that this file does not find itself.
FOREIGN = re.compile(
    r"(?<![\w.])/(?:[h]ome|[r]oot|[U]sers|[w]ork|[t]mp|[o]pt)/\w"
    r"|[p]ypi\.org|[p]ythonhosted\.org|[c]onda\.anaconda|[a]rtifactory|--(?:[e]xtra-)?index-url|--[f]ind-links"
)


def foreign(root: Path, paths: Iterable[str]) -> list[str]:
    """Returns the lines that name a path of one machine, or the host of a package registry."""
    found: list[str] = []
    for path in paths:
        content = (root / path).read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            found += [f"{path}:{number}: {match[0]}" for match in [FOREIGN.search(line)] if match]
    return found


def large(root: Path, paths: Iterable[str]) -> list[str]:
    """Returns the files over a megabyte."""
    sizes = {path: (root / path).stat().st_size for path in paths}
    return [f"{path} has {size} bytes" for path, size in sizes.items() if size > MAX_BYTES]


def tracked(root: Path) -> list[str]:
    """Returns the files that git tracks and that are there; of an unpacked release, all that came with it."""
    if not (root / ".git").exists():
        parts = [root / "src", root / "tests", *(path for path in root.iterdir() if path.is_file())]
        files = [path for part in parts for path in [part, *part.rglob("*.py")] if path.is_file()]
        return [path.relative_to(root).as_posix() for path in files]
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    return [path for path in result.stdout.split("\0") if path and (root / path).is_file()]


def test_no_file_names_a_machine_or_a_registry() -> None:
    assert foreign(ROOT, tracked(ROOT)) == []


def test_no_file_is_large() -> None:
    assert large(ROOT, tracked(ROOT)) == []


def test_what_is_tracked_is_what_git_says() -> None:
    assert {"pyproject.toml", "src/braidax/__init__.py", "tests/laws/test_repository.py"} <= set(tracked(ROOT))


def test_a_foreign_line_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "a.md": "fine: docs/home/page, src/work/x\n" + "/ho" + "me/ada/data\n",
            "b.toml": "index = 'https://py" + "pi.org/simple'\n",
        }
    )
    assert foreign(tree, ["a.md", "b.toml"]) == ["a.md:2: /ho" + "me/a", "b.toml:1: py" + "pi.org"]


def test_a_large_file_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant({"a.txt": "x" * 1_000_001, "b.txt": "x" * 1_000_000})
    assert large(tree, ["a.txt", "b.txt"]) == ["a.txt has 1000001 bytes"]
