"""Budgets: how long, how wide, how tangled and how silent code may be."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.suite_time import (
    BUDGET_SECONDS,
    LONG_FILES,
    SAME_GANGS,
    SAME_PROCESS,
    begin_long_ones_first,
    over_budget,
    scope_of,
)
from tests.support.tree import ROOT, SRC, Definition, decorators, definitions, imports, is_dunder, modules

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
EXCEPTIONS: dict[str, str] = {
    "braidax/comm/progress.py": "one lock, and all that it guards: who moves messages, and how the epoch ends",
    "braidax/comm/rendezvous.py connect": "the face of comm: each option is a question that users ask",
    "braidax/loop/fitting.py fit": "the face of the loop: each option is a question that users ask",
    "braidax/data/loader.py DataLoader.__init__": "the face of data: each option is a question that users ask",
    "braidax/data/open.py open": "one door for all formats; an option of another format is an error",
    "braidax/parallel/parallelize.py parallelize": "the face of parallel: each option is a question that users ask",
    "braidax/parallel/plan/model.py Model": "what a strategy may ask of a traced loss, each found when it is asked",
    "braidax/tune/planning.py plan": "the face of the search: each option is a question that users ask",
    "braidax/torch/loader.py DataLoader.__init__": "a drop-in takes what it stands in for takes",
}  # "path qualname": why it may be larger than the budget

Function = ast.FunctionDef | ast.AsyncFunctionDef


def oversized(source: Path) -> list[str]:
    """Returns the files, functions and public parameter lists that are larger than their budget."""
    found: list[str] = []
    for module in modules(source):
        num_lines = len(module.text.splitlines())
        if num_lines > MAX_FILE_LINES and module.path not in EXCEPTIONS:
            found.append(f"{module.path} has {num_lines} lines")
        for node in module.nodes:
            if isinstance(node, Function):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES and f"{module.path} {node.name}" not in EXCEPTIONS:
                    found.append(f"{module.path}:{node.lineno} {node.name} has {num_lines} lines")
        for definition in definitions(module):
            num_parameters = len(_parameters(definition))
            excused = f"{module.path} {definition.qualname}" in EXCEPTIONS
            if definition.is_public and num_parameters > MAX_PARAMETERS and not excused:
                found.append(f"{definition.where} has {num_parameters} parameters")
    return found


def cycles(source: Path) -> list[str]:
    """Returns the circles of modules that import one another, each once."""
    tree = modules(source)
    known = {module.name for module in tree}
    graph = {module.name: {line.target for line in imports(module, known)} & known for module in tree}
    found: dict[frozenset[str], list[str]] = {}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            found.setdefault(frozenset(circle), [*circle, name])
        elif name not in done:
            for target in sorted(graph[name] - {name}):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return [" → ".join(circle) for circle in found.values()]


def unannotated(source: Path) -> list[str]:
    """Returns the public functions with a parameter or a result that is not annotated."""
    found: list[str] = []
    for module in modules(source):
        for definition in definitions(module):
            node = definition.node
            if isinstance(node, Function) and definition.is_public:
                bare = [
                    argument.arg
                    for argument in _parameters(definition)
                    if isinstance(argument, ast.arg) and not argument.annotation
                ]
                bare += ["return"] if node.returns is None else []
                found += [f"{definition.where} leaves {', '.join(bare)} without annotation"] if bare else []
    return found


def undocumented(source: Path) -> list[str]:
    """Returns the public modules, classes and functions without docstring.

    A method that a documented method of a class it inherits from already explains may do without; so may dunders.
    """
    found: list[str] = []
    explained: set[str] = set()
    silent: list[Definition] = []
    for module in modules(source):
        if ast.get_docstring(module.syntax) is None and (module.syntax.body or module.name == "braidax"):
            found.append(f"{module.path} has no docstring")
        for definition in definitions(module):
            if not definition.is_public or is_dunder(definition.node.name):
                continue
            if ast.get_docstring(definition.node) is not None:
                explained |= {f"{definition.owner.name}.{definition.node.name}"} if definition.owner else set()
            elif not decorators(definition.node) & {"overload", "setter"}:
                silent.append(definition)
    bases = {
        definition.node.name: [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in definition.node.bases]
        for module in modules(source)
        for definition in definitions(module)
        if isinstance(definition.node, ast.ClassDef)
    }
    for definition in silent:
        above = _ancestors(definition.owner.name, bases) if definition.owner else []
        if not any(f"{name}.{definition.node.name}" in explained for name in above):
            found.append(f"{definition.where} has no docstring")
    return sorted(found)


def _parameters(definition: Definition) -> list[ast.arg | ast.AnnAssign]:
    """Returns the parameters of a function, or of the constructor that a dataclass makes from its fields."""
    node = definition.node
    if isinstance(node, ast.ClassDef):
        if "dataclass" not in decorators(node):
            return []
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        return [
            item for item in fields if "init=False" not in ast.unparse(item) and "ClassVar" not in ast.unparse(item)
        ]
    spec = node.args
    named = [*spec.posonlyargs, *spec.args]
    if definition.owner and "staticmethod" not in decorators(node):
        named = named[1:]
    return [*named, *spec.kwonlyargs, *(item for item in (spec.vararg, spec.kwarg) if item)]


def _ancestors(name: str, bases: dict[str, list[str]]) -> Iterator[str]:
    for base in bases.get(name, []):
        yield base
        yield from _ancestors(base, bases)


def test_nothing_is_larger_than_its_budget() -> None:
    assert oversized(SRC) == []


def test_no_modules_import_one_another() -> None:
    assert cycles(SRC) == []


def test_the_public_api_is_annotated() -> None:
    assert unannotated(SRC) == []


def test_the_public_api_is_documented() -> None:
    assert undocumented(SRC) == []


def test_an_oversized_part_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    many = ", ".join(f"p{number}" for number in range(9))
    fields = "\n".join(f"    f{number}: int" for number in range(9))
    tree = plant(
        {
            "braidax/long.py": "x = 1\n" * 401,
            "braidax/tall.py": "def f():\n" + "    x = 1\n" * 60,
            "braidax/wide.py": f"class A:\n    def __init__(self, {many}): ...\ndef _private({many}): ...\n",
            "braidax/options.py": f"@dataclass(frozen=True)\nclass Options:\n{fields}\n    g: int = field(init=False)",
        }
    )
    assert oversized(tree) == [
        "braidax/long.py has 401 lines",
        "braidax/options.py:2 Options has 9 parameters",
        "braidax/tall.py:1 f has 61 lines",
        "braidax/wide.py:2 A.__init__ has 9 parameters",
    ]


def test_a_cycle_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "braidax/__init__.py": "from braidax import a",
            "braidax/a.py": "from braidax.b import x",
            "braidax/b.py": "from .c import y",
            "braidax/c.py": "def f():\n    from braidax import a",
            "braidax/d.py": "import braidax.a",
        }
    )
    assert cycles(tree) == ["braidax.a → braidax.b → braidax.c → braidax.a"]


def test_a_missing_annotation_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant({"braidax/a.py": "def f(x: int, *, y): ...\ndef _g(x): ...\nclass A:\n    def h(self) -> None: ...\n"})
    assert unannotated(tree) == ["braidax/a.py:1 f leaves y, return without annotation"]


def test_a_missing_docstring_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "braidax/a.py": '''
                class A:
                    """An A."""
                    def told(self): "Tells."
                    def untold(self): ...
                class B(A):
                    """A B."""
                    def told(self): ...
                    def __len__(self): ...
                '''
        }
    )
    assert undocumented(tree) == ["braidax/a.py has no docstring", "braidax/a.py:5 A.untold has no docstring"]


def test_every_folder_of_tests_has_a_budget_and_all_fit_into_ten_minutes_on_two_cores() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*") if any(path.parent.rglob("test_*.py"))}
    assert folders | {"tests"} == set(BUDGET_SECONDS)
    assert sum(BUDGET_SECONDS.values()) <= 2 * 10 * 60


def test_long_files_begin_first() -> None:
    assert [path for path in LONG_FILES if not (ROOT / path).exists()] == []
    paths = ["tests/a.py", "tests/b.py", "tests/b.py", LONG_FILES[1], LONG_FILES[0], LONG_FILES[0]]
    items: Any = [SimpleNamespace(location=(path, number, "")) for number, path in enumerate(paths)]
    begin_long_ones_first(items)
    assert [item.location[1] for item in items] == [4, 5, 3, 1, 2, 0]


def test_files_that_share_gangs_come_one_after_the_other() -> None:
    assert [path for path in SAME_GANGS if not (ROOT / path).exists()] == []
    served, long, other = "tests/parallel/served/test_disk.py", "tests/parallel/workers/test_apart.py", "tests/a.py"
    paths = [other, other, other, LONG_FILES[0], served, served, long]
    items: Any = [SimpleNamespace(location=(path, number, "")) for number, path in enumerate(paths)]
    begin_long_ones_first(items)
    assert [item.location[1] for item in items] == [6, 4, 5, 3, 0, 1, 2]


def test_files_that_share_what_takes_long_to_make_go_to_one_process() -> None:
    assert [path for path in SAME_PROCESS if not (ROOT / path).exists()] == []
    assert scope_of("tests/laws/test_words.py") == scope_of("tests/laws/test_budgets.py")
    assert scope_of("tests/laws/test_docs.py") == "tests/laws/test_docs.py"
    served, workers = "tests/parallel/served/test_disk.py", "tests/parallel/workers/test_apart.py"
    assert scope_of(served) == scope_of(workers) == "tests/parallel/served/"
    assert scope_of("tests/parallel/test_plan.py") == "tests/parallel/test_plan.py"


def test_a_folder_over_its_budget_is_found() -> None:
    assert over_budget(BUDGET_SECONDS) == []
    (words,) = over_budget({**BUDGET_SECONDS, "gang": 1000.4})
    budget, all_budgets = BUDGET_SECONDS["gang"], sum(BUDGET_SECONDS.values())
    slower = (all_budgets - budget + 1000.4) / all_budgets
    told = f"at most 1.6 times its budget of {budget} s, on a machine that took {slower:.1f} times"
    assert words.startswith(f"tests/gang took 1000 s: {told}")
    assert over_budget({"new": 0.1}) == [
        "tests/new took 0 s: at most 1.6 times its budget of 0 s, on a machine that took 1.0 times all budgets; "
        "make it quicker, or mark the long ones slow"
    ]


def test_a_folder_is_not_over_its_budget_because_the_machine_is_slow() -> None:
    slow = {folder: 7.0 * budget for folder, budget in BUDGET_SECONDS.items()}
    assert over_budget(slow) == []
    assert len(over_budget({**slow, "gang": 2 * slow["gang"]})) == 1
