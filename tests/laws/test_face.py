"""The face: what `import braidax` shows is re-exported, listed, documented and little."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path

import braidax
from tests.laws.tree import SRC

MAX_NAMES = 30


def faults(face: Path) -> list[str]:
    """Returns what is wrong with the `__init__.py` of the package."""
    listed: list[str] = []
    bound: set[str] = set()
    found: list[str] = []
    for number, node in enumerate(ast.parse(face.read_text()).body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__version__"):
            if ast.unparse(node.targets[0]) == "__all__":
                listed = ast.literal_eval(node.value)
            else:
                bound.add("__version__")
        elif not (number == 0 and isinstance(node, ast.Expr)):
            found.append(f"line {node.lineno} is no re-export: {ast.unparse(node)}")
    bound = {name for name in bound if not name.startswith("_") or name == "__version__"}
    if listed != sorted(listed, key=_order):
        found.append("__all__ is not sorted")
    if len(listed) > MAX_NAMES:
        found.append(f"__all__ has {len(listed)} names, more than {MAX_NAMES}")
    if set(listed) != bound or len(set(listed)) < len(listed):
        found.append(f"__all__ and the names bound differ in {sorted(set(listed) ^ bound)}")
    return found


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


def test_every_name_is_there_and_documented() -> None:
    assert undocumented({name: getattr(braidax, name) for name in braidax.__all__}) == []


def test_faults_of_a_face_are_found(plant: Callable[[dict[str, str]], Path]) -> None:
    names = [f"name{number:02}" for number in range(31)]
    tree = plant(
        {
            "__init__.py": f'''
                """A face."""
                from braidax.x import {", ".join(names)}, forgotten
                print("hello")
                __all__ = {[*reversed(names), "missing"]}
                '''
        }
    )
    assert faults(tree / "__init__.py") == [
        "line 4 is no re-export: print('hello')",
        "__all__ is not sorted",
        "__all__ has 32 names, more than 30",
        "__all__ and the names bound differ in ['forgotten', 'missing']",
    ]


def test_a_name_without_docstring_is_found() -> None:
    class Documented:
        """Says what it is."""

    class Silent(Documented):
        pass

    assert undocumented({"Documented": Documented, "Silent": Silent, "number": 3}) == ["Silent"]
