"""The site of the documentation, read without building it: pages, links, anchors, names of the reference."""

import ast
import functools
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.tree import SRC, Module, origin_of, parsed

# Rooms that are imported by their own names; the others are names of the face.
APART = ("report", "spans", "torch", "tune.study")
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ENTRY = re.compile(r"^::: (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Named:
    """Where a public name is defined, and its docstring."""

    home: str
    docstring: str | None


def pages_in_nav(config: str) -> list[str]:
    """Returns the pages in the navigation of `mkdocs.yml`, relative to `docs/`."""
    nav = config.partition("\nnav:\n")[2]
    return re.findall(r"(?:- |: )(\S+\.md)$", nav, re.MULTILINE)


def pages_from_outside(hooks: str) -> dict[str, str]:
    """Returns the pages that are made of files outside `docs/`: path in the repository to page."""
    for node in ast.parse(hooks).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES":
            return ast.literal_eval(node.value)
    raise AssertionError("hooks without PAGES")


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page: of its headings, as GitHub makes them, and of its entries of the reference."""
    found = set(ENTRY.findall(text))
    for heading in re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def dead_links(root: Path, paths: list[str]) -> list[str]:
    """Returns the relative links that lead to no file, or to no anchor of a page."""
    found: list[str] = []
    anchors_of = functools.cache(lambda path: anchors((root / path).read_text()))
    for path in paths:
        for link in LINK.findall(re.sub(r"`[^`\n]+`", "", FENCE.sub("", (root / path).read_text()))):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path
            if not (root / linked).is_file():
                found.append(f"{path}: {link}: no such file")
            elif anchor and linked.endswith(".md") and anchor not in anchors_of(linked):
                found.append(f"{path}: {link}: no such anchor")
    return found


def rooms(source: Path = SRC) -> list[str]:
    """Returns the public modules: the face, those that are names of it, and those imported by their own names."""
    names = public_names(module_of("braidax", source))
    return [
        "braidax",
        *(f"braidax.{name}" for name in names if _path_of(f"braidax.{name}", source)),
        *(f"braidax.{name}" for name in APART if _path_of(f"braidax.{name}", source)),
    ]


def unlisted(reference: Path, source: Path = SRC) -> list[str]:
    """Returns the public names without a docstring or without an entry in the reference, and the entries of no name."""
    found: list[str] = []
    texts = {room: _read(reference / f"{room.rpartition('.')[2]}.md") for room in rooms(source)}
    entries = {room: ENTRY.findall(text) for room, text in texts.items()}
    on_face = {defined(entry, source).home for entry in entries["braidax"]}
    for room, text in texts.items():
        for name in public_names(module_of(room, source)):
            full = f"{room}.{name}"
            named = defined(full, source)
            if name != "__version__" and not named.docstring:
                found.append(f"{full} has no docstring")
            elif full in texts or name == "__version__" or full in entries[room]:
                continue
            elif named.home not in on_face or f"](braidax.md#braidax.{name})" not in text:
                found.append(f"{full} is not on the reference")
    every = [entry for listed in entries.values() for entry in listed]
    return found + [
        f"{entry}: {'listed twice' if every.count(entry) > 1 else 'no such name'}"
        for entry in dict.fromkeys(every)
        if every.count(entry) > 1 or not defined(entry, source).home
    ]


def public_names(module: Module) -> list[str]:
    """Returns what a module shows: its `__all__`; of a package the imports `X as X`, else what it defines."""
    body = list(_statements(module.syntax))
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    if module.is_package:
        aliases = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
        return [alias.name for alias in aliases if alias.asname == alias.name]
    return [name for node in body for name in _defines(node) if not name.startswith("_")]


@functools.cache
def defined(full: str, source: Path = SRC) -> Named:
    """Returns where a dotted name leads, through all imports; an empty `home` where there is no such name."""
    owner, _, name = full.rpartition(".")
    module = module_of(owner, source) if owner and _path_of(owner, source) else None
    body = list(_statements(module.syntax)) if module else []
    for number in reversed(range(len(body))):  # the last one, which is behind its overloads
        node = body[number]
        if isinstance(node, ast.ImportFrom) and module:
            origins = [item.name for item in node.names if (item.asname or item.name) == name]
            target = f"{origin_of(module, node)}.{origins[0]}" if origins else full
            if target != full:
                return defined(target, source)
        elif name in _defines(node):
            return Named(full, _docstring(node, body[number + 1 : number + 2]))
    return Named(full, ast.get_docstring(module_of(full, source).syntax)) if _path_of(full, source) else Named("", None)


def _docstring(node: ast.stmt, following: list[ast.stmt]) -> str | None:
    """Returns the docstring of a function or class, or the text behind an assignment."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ast.get_docstring(node)
    text = following[0].value if following and isinstance(following[0], ast.Expr) else None
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else None


def module_of(name: str, source: Path = SRC) -> Module:
    """Returns one module of the tree."""
    path = _path_of(name, source)
    assert path is not None, name
    return parsed(name, path.relative_to(source).as_posix(), path.read_text())


def _path_of(name: str, source: Path) -> Path | None:
    stem = source / name.replace(".", "/")
    return next((path for path in (stem / "__init__.py", stem.with_suffix(".py")) if path.is_file()), None)


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _statements(syntax: ast.Module) -> Iterator[ast.stmt]:
    for node in syntax.body:
        yield node
        if isinstance(node, ast.If):
            yield from node.body
            yield from node.orelse


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def strange_messages(page: str, sources: Iterable[Path]) -> list[str]:
    """Returns the messages that a page of troubleshooting quotes, and that stand in no file of the sources.

    They are the code in the first column of its tables, `…` standing for what differs.
    """
    texts = "\n".join(path.read_text() for path in sources)
    joined = re.sub(r'(?<!\\)["\']\s*\n\s*f?["\']', "", texts)  # one message on several lines
    quoted = [code for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for code in re.findall(r"`([^`]+)`", row)]
    return [code for code in quoted if not all(part.strip() in joined for part in code.split("…"))]
