"""Makes the site of the repository: files outside `docs/` become pages, and links to them hold.

MkDocs calls the functions whose names begin with `on_`. What a page links to is included: the README as the first page,
the benchmarks with their plots, and any file of source as a page of its own.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from docstrings import ENTRIES
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
BOOST = {
    "reference/braidax.md": 2.0,
    "benchmarks.md": 0.3,
    "changelog.md": 0.3,
    "design.md": 0.3,
}  # what is found first
CODE = re.compile(r"(?<![`\[\w])`(?:bx|braidax)\.([A-Za-z_.]+)(?:\([^`]*\))?`(?![`\]])")
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)((?:#[^)\s]*)?)(?=\))")


def on_config(config: MkDocsConfig) -> None:
    """Lets names in signatures lead to the reference alone: a type `bytes` is not the heading *Bytes* of a page."""
    config.plugins["autorefs"].scan_toc = False  # pyright: ignore[reportAttributeAccessIssue]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures that lie outside `docs/`."""
    for origin, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / origin)))
    origins = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by)]
    for origin in origins:
        for path, _ in LINK.findall(outside_code((ROOT / origin).read_text())):
            linked = resolved(origin, path)
            if linked.startswith("docs/") or linked in PAGES or not (ROOT / linked).is_file():
                continue
            if Path(linked).suffix in (".png", ".svg"):
                files.append(File.generated(config, linked, abs_src_path=str(ROOT / linked)))
            elif files.get_file_from_path(target_of(linked)) is None:
                files.append(File.generated(config, target_of(linked), content=shown(linked)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns what GitHub shows into what the site shows."""
    target = page.file.src_uri
    if target.startswith("files/"):
        return markdown
    page.meta.setdefault("search", {})["boost"] = BOOST.get(target, 1.0)
    origin = next((origin for origin, included in PAGES.items() if included == target), f"docs/{target}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    seen: set[str] = set()
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = part.replace("```python no-run", "```python", 1)
        else:
            part = LINK.sub(lambda match: linked_from(origin, target, match), part)
            parts[number] = "".join(with_entries(line, seen) for line in part.splitlines(keepends=True))
    return "".join(parts)


def with_entries(line: str, seen: set[str]) -> str:
    """Returns a line in which a name leads to the reference, where the page has it for the first time."""

    def linked(match: re.Match[str]) -> str:
        name = f"braidax.{match[1]}"
        if name not in ENTRIES or name in seen:
            return match[0]
        seen.add(name)
        return f"[{match[0]}][{name}]"

    return line if line.startswith("#") else CODE.sub(linked, line)


def linked_from(origin: str, target: str, match: re.Match[str]) -> str:
    """Returns a link of the file `origin` as the page `target` has it."""
    linked = resolved(origin, match[1])
    if not (ROOT / linked).is_file():
        return match[0]
    return posixpath.relpath(target_of(linked), posixpath.dirname(target) or ".") + match[2]


def target_of(path: str) -> str:
    """Returns the page, or the picture, of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if Path(path).suffix in (".png", ".svg"):
        return path
    return PAGES.get(path, f"files/{path}.md")


def resolved(origin: str, path: str) -> str:
    """Returns the path in the repository of what the file `origin` calls `path`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))


def outside_code(markdown: str) -> str:
    """Returns a text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)


def shown(path: str) -> str:
    """Returns the page that shows a file of source, or a notebook."""
    if path.endswith(".ipynb"):
        return f"---\nsearch:\n  exclude: true\n---\n{notebook(path)}"
    language = {".py": "python", ".sh": "bash", ".toml": "toml", ".c": "c"}.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n`````{language}\n{(ROOT / path).read_text()}`````\n"


def notebook(path: str) -> str:
    """Returns the cells of a notebook as Markdown."""
    parts: list[str] = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        text = "".join(cell["source"])
        links = LINK.sub(lambda match: linked_from(path, target_of(path), match), text)
        parts.append(links if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"
