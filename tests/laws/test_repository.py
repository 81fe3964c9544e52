"""The repository: nothing in it belongs to one machine, nothing is large, and what tests share has its own place."""

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
BORROWED = re.compile(
    r"\b(?:from|import) tests(?:\.(?!support\b)\w| import\b).*|\b(?:tests|benchmarks)(?:\.\w+)*\.test_\w+"
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


def borrowed(root: Path, paths: Iterable[str]) -> list[str]:
    """Returns the lines of Python that import from tests, but for `tests.support`, or name a test module.

    Programs that are strings count as well.
    """
    found: list[str] = []
    for path in paths:
        if path.endswith(".py"):
            text = (root / path).read_text()
            for match in BORROWED.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path}:{line}: {match[0]}")
    return found


def misplaced(paths: Iterable[str]) -> list[str]:
    """Returns what is no test module and lies among them, and the test modules that lie in `tests/support`."""
    found: list[str] = []
    for path in map(Path, paths):
        if path.parts[0] == "tests" and path.suffix == ".py":
            is_test = path.name.startswith("test_") or path.name == "conftest.py"
            if is_test == (path.parts[1] == "support"):
                found.append(path.as_posix())
    return found


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


def test_nothing_is_imported_from_a_test_module() -> None:
    """What two of them share belongs into `tests/support`."""
    assert borrowed(ROOT, tracked(ROOT)) == []


def test_what_tests_share_lies_in_a_place_of_its_own() -> None:
    assert misplaced(tracked(ROOT)) == []


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


def test_an_import_from_a_test_module_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "tests/a/test_a.py": "import jax.test_util\nfrom tests.support.a import b\nfrom te"
            + "sts.b.test_c import d\n",
            "tests/support/a.py": "def f():\n    import te" + "sts.b.test_c as c\n",
            "benchmarks/a.py": "PROGRAM = '''\nimport sys\nfrom te" + "sts.b import test_c\n'''\n",
            "benchmarks/b.py": "COMMAND = [sys.executable, '-m', 'te" + "sts.b.test_c']\n",
            "benchmarks/c.md": "from te" + "sts.b.test_c import d\n",
        }
    )
    paths = ["tests/a/test_a.py", "tests/support/a.py", "benchmarks/a.py", "benchmarks/b.py", "benchmarks/c.md"]
    assert borrowed(tree, paths) == [
        "tests/a/test_a.py:3: from te" + "sts.b.test_c import d",
        "tests/support/a.py:2: import te" + "sts.b.test_c as c",
        "benchmarks/a.py:3: from te" + "sts.b import test_c",
        "benchmarks/b.py:1: te" + "sts.b.test_c",
    ]


def test_what_is_out_of_place_is_found() -> None:
    paths = ["tests/a/test_a.py", "tests/a/a.py", "tests/conftest.py", "tests/support/a.py", "tests/support/test_b.py"]
    assert misplaced([*paths, "tests/a/texts/a.hlo", "src/a.py"]) == ["tests/a/a.py", "tests/support/test_b.py"]
