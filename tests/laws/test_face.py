"""The face: what `import braidax` shows is re-exported, listed, documented and little."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import braidax
from tests.support.tree import SRC

MAX_NAMES = 36


def faults(face: Path) -> list[str]:
    """Returns what is wrong with the `__init__.py` of the package."""
    listed: list[str] = []
    homes: dict[str, tuple[str, ...]] = {}
    typed: dict[str, tuple[str, ...]] = {}
    found: list[str] = []
    for number, node in enumerate(ast.parse(face.read_text()).body):
        target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                typed[str(line.module)] = tuple(alias.asname or alias.name for alias in line.names)
        elif isinstance(node, ast.Assign) and target == "__all__":
            listed = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and target == "_HOMES":
            homes = ast.literal_eval(node.value)
        elif not (
            (number == 0 and isinstance(node, ast.Expr))
            or ast.unparse(node) == "import sys"
            or (isinstance(node, ast.If) and _refuses_a_platform(node))
            or (isinstance(node, ast.ImportFrom) and node.module in ("importlib", "typing"))
            or (isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"))
            or target == "__version__"
        ):
            found.append(f"line {node.lineno} is no re-export: {ast.unparse(node)}")
    bound = {"__version__", *(name for names in homes.values() for name in names)}
    if listed != sorted(listed, key=_order):
        found.append("__all__ is not sorted")
    if len(listed) > MAX_NAMES:
        found.append(f"__all__ has {len(listed)} names, more than {MAX_NAMES}")
    if set(listed) != bound or len(set(listed)) < len(listed):
        found.append(f"__all__ and the names bound differ in {sorted(set(listed) ^ bound)}")
    if list(homes.items()) != list(typed.items()):
        differing = dict(set(homes.items()) ^ set(typed.items()))
        found.append(f"_HOMES and the imports for type checkers differ in {sorted(differing) or 'their order'}")
    return found


def _refuses_a_platform(node: ast.If) -> bool:
    """Says whether it does that alone, which has to come before any module that the platform cannot import."""
    *imports, last = node.body
    is_refusal = isinstance(last, ast.Raise) and all(isinstance(line, ast.ImportFrom) for line in imports)
    return ast.unparse(node.test).startswith("sys.platform == ") and is_refusal and not node.orelse


def undocumented(names: dict[str, object]) -> list[str]:
    """Returns the names whose class, function or module has no docstring of its own."""
    return [
        name
        for name, value in names.items()
        if (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value))
        and not vars(value).get("__doc__")
        and not (inspect.isroutine(value) and value.__doc__)
    ]


def _order(name: str) -> tuple[bool, str]:
    return name[0].islower(), name


def test_the_face_is_in_order() -> None:
    assert faults(SRC / "braidax" / "__init__.py") == []


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("", marks=pytest.mark.slow),
        "import braidax.loop",
        pytest.param("from braidax.data import open", marks=pytest.mark.slow),
    ],
)
def test_a_name_is_the_same_whatever_was_imported_before(first: str) -> None:
    code = f"{first}\nimport braidax\nprint(*[type(getattr(braidax, name)).__name__ for name in braidax.__all__])"
    command = [sys.executable, "-c", code]
    seen = subprocess.run(command, cwd=SRC, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert seen == [type(getattr(braidax, name)).__name__ for name in braidax.__all__]


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match="module 'braidax' has no attribute 'trainer'"):
        braidax.trainer  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_every_name_is_there_and_documented() -> None:
    assert undocumented({name: getattr(braidax, name) for name in braidax.__all__}) == []


def test_faults_of_a_face_are_found(plant: Callable[[dict[str, str]], Path]) -> None:
    names = [f"name{number:02}" for number in range(37)]
    tree = plant(
        {
            "__init__.py": f'''
                """A face."""
                import jax
                if TYPE_CHECKING:
                    from braidax.x import {", ".join(names)}
                __version__ = "1"
                __all__ = {[*reversed(names), "missing"]}
                _HOMES = {{"braidax.x": {(*names, "forgotten")}}}
                '''
        }
    )
    assert faults(tree / "__init__.py") == [
        "line 3 is no re-export: import jax",
        "__all__ is not sorted",
        "__all__ has 38 names, more than 36",
        "__all__ and the names bound differ in ['__version__', 'forgotten', 'missing']",
        "_HOMES and the imports for type checkers differ in ['braidax.x']",
    ]


def test_a_name_without_docstring_is_found() -> None:
    class Documented:
        """Says what it is."""

    class Silent(Documented):
        pass

    assert undocumented({"Documented": Documented, "Silent": Silent, "number": 3}) == ["Silent"]
