"""Python examples in Markdown: how they are found, and how a page or a script runs as a user would run it.

As a program it takes pages, notebooks and scripts from its input, and runs each in a process of its own in which JAX
has not begun: a fork, so that libraries are imported once. JAX finds the machine as it is: on CPU one device, unless
the page asks for more. What pages compile they share.
"""

import ast
import importlib
import inspect
import json
import os
import runpy
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.compiled import share_compiled
from tests.support.tree import ROOT

_IMPORTED = (
    "jax",
    "numpy",
    "optax",
    "braidax",
    "braidax.data",
    "braidax.parallel",
    "braidax.checkpoint",
    "braidax.comm",
)
_MISSING = object()
_OUTPUT = "output.txt"
_LIMIT_SECONDS = 200  # of a page


def blocks(text: str) -> list[tuple[int, str, bool]]:
    """Returns the Python blocks of a Markdown text: line of the first statement, code, and whether to run it.

    A block that opens with "```python no-run" is compiled, not run.
    """
    found: list[tuple[int, str, bool]] = []
    lines = text.splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```python"):
            start = number + 1
        elif start is not None and line.startswith("```"):
            found.append((start + 1, "\n".join(lines[start:number]), "no-run" not in lines[start - 1]))
            start = None
    return found


def cells(text: str) -> list[tuple[int, str, bool]]:
    """Returns the cells of code of a notebook, as `blocks` does; lines are counted through all of them."""
    found: list[tuple[int, str, bool]] = []
    line = 1
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            found.append((line, "".join(cell["source"]), True))
            line += len(cell["source"])
    return found


def strange(text: str) -> list[str]:
    """Returns the names of modules of ours that the blocks of a Markdown text use and that are not there, and the
    keywords that what they call does not take."""
    known: dict[str, Any] = {}
    found: list[str] = []
    nodes = [node for line, code, _ in blocks(text) for node in ast.walk(_parsed(line, code))]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "braidax":
                    module = importlib.import_module(alias.name)
                    known[alias.asname or "braidax"] = module if alias.asname else importlib.import_module("braidax")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "braidax":
            module = importlib.import_module(str(node.module))
            known |= {alias.asname or alias.name: getattr(module, alias.name, _MISSING) for alias in node.names}
            found += [f"line {node.lineno}: {one.name}" for one in node.names if not hasattr(module, one.name)]
    for node in nodes:
        if isinstance(node, ast.Attribute) and _named(node, known) is _MISSING:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and callable(called := _named(node.func, known)):
            given = inspect.signature(called).parameters.values()
            if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in given):
                taken = {parameter.name for parameter in given}
                more = [one.arg for one in node.keywords if one.arg and one.arg not in taken]
                found += [f"line {node.lineno}: {ast.unparse(node.func)}(…, {word}=…)" for word in more]
    return found


def _parsed(line: int, code: str) -> ast.Module:
    return ast.increment_lineno(ast.parse(code), line - 1)


def _named(node: ast.AST, known: dict[str, Any]) -> Any:
    """Returns what an expression names, `_MISSING` where a module or a class has no such name, and else None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _named(node.value, known)
    if not isinstance(owner, types.ModuleType | type):
        return None
    return getattr(owner, node.attr, _MISSING)


def run(document: Path, *arguments: str) -> None:
    """Runs the blocks of one document, or the cells of a notebook, in one namespace, or a script with its arguments.

    A failure shows the document's own line.
    """
    if document.suffix == ".py":
        sys.argv = [str(document), *arguments]
        runpy.run_path(str(document), run_name="__main__")
        return
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = cells(document.read_text()) if document.suffix == ".ipynb" else blocks(document.read_text())
    for line, code, runs in found:
        compiled = compile("\n" * (line - 1) + code, str(document), "exec")
        if runs:
            exec(compiled, namespace)


class Pages:
    """Runs pages in fresh processes."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child

    def run(self, document: Path, folder: Path, *arguments: str) -> tuple[int, str]:
        """Runs a page, or a script with its arguments, in a folder. **Returns:** the exit status, and what it wrote."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([str(document), str(folder), *arguments]) + "\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline()), (folder / _OUTPUT).read_text()


@contextmanager
def fresh_processes() -> Generator[Pages, None, None]:
    """Starts the process whose forks run pages, and ends it behind the block."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    command = [sys.executable, "-W", "error", "-m", "tests.support.laws.pages"]
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        try:
            yield Pages(child)
        finally:
            child.kill()


def _serve(requests: IO[str], answers: IO[str]) -> None:
    share_compiled()
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in requests:
        document, folder, *arguments = json.loads(line)
        with warnings.catch_warnings():  # JAX warns of forks for its threads' sake: before it begins, there are none
            warnings.simplefilter("ignore")
            process = os.fork()
        if process == 0:
            sys.exit(_run_here(Path(document), Path(folder), arguments))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n")
        answers.flush()


def _run_here(document: Path, folder: Path, arguments: list[str]) -> int:
    """Runs a page or a script in this process, which ends at the limit; its output goes to a file.

    **Returns:** the exit status.
    """
    os.chdir(folder)
    signal.alarm(_LIMIT_SECONDS)
    output = os.open(_OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    run(document, *arguments)
    return 0


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
