"""Floors: imports run downward only, lazy ones included, and each stranger is let in by one door."""

import tomllib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tree import ROOT, SRC, imports, modules, third_party

# A room may import rooms of lower floors. On one floor rooms do not meet, except errors below spans and, at the top,
# the face below the tasks below the command line.
FLOORS = (
    ("errors", "pictures"),
    ("spans", "lifeline", "bindings", "cores", "objects", "extras", "first_use", "host_shard", "connections"),
    ("comm", "program"),
    ("gang", "data", "checkpoint"),
    ("parallel", "frame", "torch"),
    ("report",),
    ("loop",),
    ("tune",),
    ("__init__",),
    ("tasks",),
    ("cli",),
    ("__main__",),
)
STRANGERS = (
    {"data", "checkpoint", "parallel", "frame"},  # they meet only through JAX's values
    {"data", "comm"},  # who needs messages takes them as an argument
    {"checkpoint", "comm"},
)
FORMER_PLACES = {"braidax/data/torch.py"}  # re-exports for programs that import by the old name; nothing here does
ALWAYS_THERE = {"jaxlib"}  # comes with JAX
OF_ITS_OWN = {"spectrax", "daft", "duckdb", "pandas", "pysail", "pyspark"}  # peers with environments of the Makefile
DISTRIBUTIONS = {
    "cv2": "opencv_python_headless",
    "jax_plugins": "jax_cuda12_pjrt",
    "google": "protobuf",
    "orbax": "orbax_checkpoint",
    "libucx": "libucx_cu12",
    "sklearn": "scikit_learn",
    "xdist": "pytest_xdist",
    "tensorflow": "tensorflow_cpu",
    "PIL": "pillow",
}  # where the names differ
TRACER = "jax.core.Tracer"  # what JAX documents for asking whether a value is traced
INTERNALS = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jaxlib")


def room(name: str) -> str:
    """Returns the room of a module: `braidax.data.formats.npy` is in `data`, `braidax` itself is `__init__`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def upward(source: Path) -> list[str]:
    """Returns every import that does not run downward."""
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    tree = modules(source)
    known = {module.name for module in tree}
    found: list[str] = []
    for module in tree:
        here = room(module.name)
        if here not in floor:
            found.append(f"{module.path}: the room {here!r} has no floor")
            continue
        for line in imports(module, known):
            if line.target.partition(".")[0] != "braidax" or room(line.target) == here or module.path in FORMER_PLACES:
                continue
            there = room(line.target)
            strangers = any({here, there} <= group for group in STRANGERS)
            if strangers or floor.get(there, len(FLOORS)) >= floor[here]:
                found.append(f"{module.path}:{line.line} imports {line.target}: {here} may not import {there}")
    return found


def strangers(source: Path, pyproject: Path) -> list[str]:
    """Returns every third-party import that is not declared, or comes in by a second door or without `import_extra`.

    Models are written in the library that they are written in: `tasks` imports its extra as any program does.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    core = {_distribution(line) for line in project["dependencies"]}
    extras = {name: {_distribution(line) for line in lines} for name, lines in project["optional-dependencies"].items()}
    doors: defaultdict[str, set[str]] = defaultdict(set)
    found: list[str] = []
    for module in modules(source):
        for line in imports(module, set()):
            name = third_party(line.target)
            if name is None or name in ALWAYS_THERE:
                continue
            where, distribution = f"{module.path}:{line.line}", DISTRIBUTIONS.get(name, name).lower()
            if distribution in core:
                continue
            if not any(distribution in extra for extra in extras.values()):
                found.append(f"{where} imports {name}, which pyproject.toml does not declare")
            if line.way == "import_extra" and distribution not in extras.get(line.extra, ()):
                found.append(f"{where} imports {name} from the extra {line.extra!r}, which does not install it")
            if room(module.name) != "tasks":
                doors[name].add(module.path)
                if line.way == "import":
                    found.append(f"{where} imports {name} without import_extra")
    found += [
        f"{name} is imported in {sorted(paths)}, not in one file" for name, paths in doors.items() if len(paths) > 1
    ]
    return found


def undeclared(folder: Path, pyproject: Path, extra: str) -> list[str]:
    """Returns every third-party import below a folder that neither the core nor the extra installs."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines, installed = [*project["dependencies"], f"braidax[{extra}]"], set[str]()
    while lines:
        line = lines.pop()
        if line.startswith("braidax["):
            names = line.removeprefix("braidax[").removesuffix("]").split(",")
            lines += [line for name in names for line in project["optional-dependencies"][name]]
        installed.add(_distribution(line))
    return [
        f"{module.path}:{line.line} imports {name}, which the extra {extra!r} does not install"
        for module in modules(folder)
        for line in imports(module, set())
        for name in [third_party(line.target)]
        if line.way != "import_extra" and name not in (None, "benchmarks", "tests", *ALWAYS_THERE, *OF_ITS_OWN)
        if DISTRIBUTIONS.get(name, name).lower() not in installed
    ]


def internals(source: Path) -> list[str]:
    """Returns every contact with JAX's internals outside `program`."""
    found: list[str] = []
    for module in modules(source):
        if room(module.name) == "program":
            continue
        known: set[str] = {*INTERNALS, TRACER}  # so that `from jax import core` counts
        lines = module.text.splitlines()
        touched = {
            (line.line, line.target) for line in imports(module, known) if lines[line.line - 1] != "import jax.core"
        }
        touched |= {
            (number, word)
            for number, text in enumerate(lines, 1)
            for word in INTERNALS
            if f"{word}." in text.replace(TRACER, "")
        }
        for number, target in sorted(touched):
            if target != TRACER and any(target == word or target.startswith(f"{word}.") for word in INTERNALS):
                found.append(f"{module.path}:{number} touches {target}")
    return found


def _distribution(requirement: str) -> str:
    for mark in "[<>=!~; ":
        requirement = requirement.partition(mark)[0]
    return requirement.lower().replace("-", "_")


def test_imports_run_downward() -> None:
    assert upward(SRC) == []


def test_strangers_come_in_by_one_door() -> None:
    assert strangers(SRC, ROOT / "pyproject.toml") == []


@pytest.mark.parametrize(("folder", "extra"), [("tests", "test"), ("benchmarks", "bench")])
def test_an_extra_installs_what_its_folder_imports(folder: str, extra: str) -> None:
    assert undeclared(ROOT / folder, ROOT / "pyproject.toml", extra) == []


def test_only_program_touches_internals_of_jax() -> None:
    assert internals(SRC) == []


def test_an_upward_import_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "braidax/__init__.py": "",
            "braidax/errors.py": "",
            "braidax/spans.py": "from . import errors",
            "braidax/data/__init__.py": "from braidax import spans",
            "braidax/data/loader.py": "def f():\n    from ..checkpoint import save",
            "braidax/checkpoint/__init__.py": "import importlib\nimportlib.import_module('braidax.loop')",
            "braidax/parallel/__init__.py": "from braidax.data.loader import x",
            "braidax/loop.py": "import braidax",
            "braidax/attic.py": "",
        }
    )
    assert upward(tree) == [
        "braidax/attic.py: the room 'attic' has no floor",
        "braidax/checkpoint/__init__.py:2 imports braidax.loop: checkpoint may not import loop",
        "braidax/data/loader.py:2 imports braidax.checkpoint: data may not import checkpoint",
        "braidax/loop.py:1 imports braidax: loop may not import __init__",
        "braidax/parallel/__init__.py:1 imports braidax.data.loader: parallel may not import data",
    ]


def test_a_second_door_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "pyproject.toml": """
                [project]
                dependencies = ["jax>=0.10"]
                optional-dependencies = { images = ["opencv-python-headless>=4"] }
                """,
            "src/braidax/data/png.py": "import jax\ncv2 = import_extra('cv2', 'images', purpose='x')",
            "src/braidax/data/jpeg.py": "cv2 = import_extra('cv2', 'pictures', purpose='x')\nimport requests",
            "src/braidax/tasks/bert.py": "import cv2",
        }
    )
    assert strangers(tree / "src", tree / "pyproject.toml") == [
        "braidax/data/jpeg.py:1 imports cv2 from the extra 'pictures', which does not install it",
        "braidax/data/jpeg.py:2 imports requests, which pyproject.toml does not declare",
        "braidax/data/jpeg.py:2 imports requests without import_extra",
        "cv2 is imported in ['braidax/data/jpeg.py', 'braidax/data/png.py'], not in one file",
    ]


def test_an_undeclared_import_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "pyproject.toml": """
                [project]
                dependencies = ["jax>=0.10"]
                [project.optional-dependencies]
                images = ["pillow>=11"]
                bench = ["braidax[images]", "matplotlib>=3.9"]
                """,
            "benchmarks/naive.py": "import os\nimport jax\nimport PIL.Image\nfrom benchmarks import x",
            "benchmarks/grain.py": "def f():\n    import grain",
        }
    )
    assert undeclared(tree / "benchmarks", tree / "pyproject.toml", "bench") == [
        "grain.py:2 imports grain, which the extra 'bench' does not install"
    ]


def test_a_contact_with_internals_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "braidax/program/trace.py": "import jax.extend.core",
            "braidax/data/a.py": "import jax\njax.core.Jaxpr",
            "braidax/data/b.py": "from jax._src import core",
            "braidax/data/c.py": "def f():\n    from jax import core",
            "braidax/data/d.py": "from jax.core import Tracer\nimport jax\nisinstance(x, jax.core.Tracer)",
        }
    )
    assert internals(tree) == [
        "braidax/data/a.py:2 touches jax.core",
        "braidax/data/b.py:1 touches jax._src",
        "braidax/data/c.py:2 touches jax.core",
    ]
