"""Reads a tree of Python files without running it: the modules, and what each imports, lazily or not."""

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"


@dataclass(frozen=True)
class Module:
    """A parsed file: `name` is dotted (a package is named without `__init__`), `path` is relative to the tree."""

    name: str
    path: str
    text: str
    syntax: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes, which several laws look at: to find them takes longer than to look."""
        return tuple(ast.walk(self.syntax))

    @cached_property
    def typing_only(self) -> frozenset[ast.AST]:
        """The nodes that are there for type checkers alone."""
        return frozenset(
            inner
            for node in self.nodes
            if isinstance(node, ast.If) and any(last_name(part) == "TYPE_CHECKING" for part in ast.walk(node.test))
            for inner in ast.walk(node)
        )


@dataclass(frozen=True)
class Import:
    """One import: the dotted `target`, the line, the way (`import`, `import_extra`, `types`) and, if any, the extra."""

    target: str
    line: int
    way: str
    extra: str = ""


def modules(source: Path = SRC) -> list[Module]:
    """Returns every module below a source folder, sorted by path."""
    found: list[Module] = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(parsed(name, relative.as_posix(), path.read_text()))
    return found


@functools.cache
def parsed(name: str, path: str, text: str) -> Module:
    """Returns a module, parsed once for all laws of a file, which ask for the same ones."""
    return Module(name, path, text, ast.parse(text, path))


def imports(module: Module, known: set[str]) -> list[Import]:
    """Returns all imports of a module, those inside functions included.

    `from package import name` counts as an import of `package.name` where that is one of the modules `known`.
    """
    found: list[Import] = []
    for node in module.nodes:
        way = "types" if node in module.typing_only else "import"
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, way) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = origin_of(module, node)
            for alias in node.names:
                longer = f"{origin}.{alias.name}"
                found.append(Import(longer if longer in known else origin, node.lineno, way))
        elif isinstance(node, ast.Call):
            called = last_name(node.func)
            if called in ("import_module", "__import__", "import_extra") and node.args:
                target = node.args[0]
                if isinstance(target, ast.Constant) and isinstance(target.value, str):
                    way = "import_extra" if called == "import_extra" else "import"
                    extra = str(ast.literal_eval(node.args[1])) if way == "import_extra" else ""
                    found.append(Import(target.value, node.lineno, way, extra))
    return sorted(found, key=lambda line: line.line)


def last_name(node: ast.AST) -> str:
    """Returns `c` of `a.b.c`, and nothing of what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def origin_of(module: Module, node: ast.ImportFrom) -> str:
    """Returns the dotted name of the module that `from … import` names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts if module.is_package else parts[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])


def third_party(target: str) -> str | None:
    """Returns the top-level name of an import that is neither ours nor Python's own."""
    top = target.partition(".")[0]
    return None if top == "braidax" or top in sys.stdlib_module_names else top


@dataclass(frozen=True)
class Definition:
    """A function or class as it stands in a file: `qualname` is dotted, `owner` the class around it."""

    module: Module
    qualname: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    owner: ast.ClassDef | None

    @property
    def where(self) -> str:
        return f"{self.module.path}:{self.node.lineno} {self.qualname}"

    @property
    def is_public(self) -> bool:
        names = [*self.module.name.split("."), *self.qualname.split(".")]
        return not any(name.startswith("_") and not is_dunder(name) for name in names)


def is_dunder(name: str) -> bool:
    """Says whether a name is one of Python's own, such as `__init__`."""
    return name.startswith("__") and name.endswith("__")


def definitions(module: Module) -> Iterator[Definition]:
    """Yields the functions and classes of a module and, of its classes, the methods; nothing inside a function."""
    yield from _definitions(module, module.syntax.body, "", None)


def _definitions(module: Module, body: list[ast.stmt], prefix: str, owner: ast.ClassDef | None) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Definition(module, prefix + node.name, node, owner)
        if isinstance(node, ast.ClassDef):
            yield from _definitions(module, node.body, f"{prefix}{node.name}.", node)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _definitions(module, node.body, prefix, owner)


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Returns the last names of the decorators: `overload` for `@typing.overload`."""
    return {last_name(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list}
