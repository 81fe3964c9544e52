"""Reads the package for the reference: griffe, which mkdocstrings asks, calls the methods that begin with `on_`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

LISTED = re.compile(r"^\*\*(Arguments|Fields):\*\* *")
ITEM = re.compile(r"(?:^|(?<=[.;)])\s+)(?=(?:`[\w*]+`(?:, | and )?)+:)")
HEADING = re.compile(r"\s+(?=\*\*(?:Arguments|Fields|Returns|Yields|Raises):\*\*)")
NAME = re.compile(r"(?<![`\[\w])`([A-Za-z_.]+)`(?![`\]])")


def _entries() -> dict[str, str]:
    """Returns the entries of the reference: by their names with all dots, and classes by their last names as well."""
    pages = (Path(__file__).parents[1] / "reference").glob("*.md")
    names = [name for page in sorted(pages) for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    last = [name.rpartition(".")[2] for name in names]
    classes = {short: name for short, name in zip(last, names, strict=True) if short[0].isupper()}
    return {name: name for name in names} | {short: name for short, name in classes.items() if last.count(short) == 1}


ENTRIES = _entries()


class Reference(griffe.Extension):
    """Sets docstrings as lists, and prefers a function to the module that it comes from where both have one name."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Is called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = NAME.sub(_link, listed(obj.docstring.value))

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Is called once the package is read: `braidax.data.open` is the function of the module `open` from then on."""
        modules = list(_modules(pkg))
        hidden: set[str] = set()
        for module in modules:
            for name, path in module.imports.items():
                member = module.members.get(name)
                if isinstance(member, griffe.Module) and path == f"{member.path}.{name}":
                    module.members[name] = griffe.Alias(name, member.members[name], parent=module)
                    hidden.add(member.path)
        for module in modules:  # what was resolved before
            for name, member in module.members.items():
                if isinstance(member, griffe.Alias) and member.target_path in hidden:
                    module.members[name] = griffe.Alias(name, member.target_path, parent=module)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _modules(member)


def _link(match: re.Match[str]) -> str:
    return f"[{match[0]}][{ENTRIES[match[1]]}]" if match[1] in ENTRIES else match[0]


def listed(text: str) -> str:
    """Returns a docstring with a line for each argument and field, and a paragraph for what is returned and raised."""
    return "\n\n".join(_listed(paragraph) for paragraph in re.split(r"\n{2,}", text))


def _listed(paragraph: str) -> str:
    if not HEADING.search("\n" + paragraph):
        return paragraph
    parts = HEADING.split(paragraph)
    for number, part in enumerate(parts):
        found = LISTED.match(part)
        items = [item.strip() for item in ITEM.split(part[found.end() :])] if found else []
        if found and len(items) > 1:
            lines = "\n".join(f"- {' '.join(item.split())}" for item in items[1:])
            parts[number] = "\n\n".join(part for part in (f"**{found[1]}:**", items[0], lines) if part)
    return "\n\n".join(parts)
