"""Messages: every parameter that an error names exists."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.tree import SRC, Module, last_name, modules

# `name=`: not `==`, nor the tail of an option such as --name=, nor an environment variable, which is all capitals.
NAMED = re.compile(r"(?<![\w.\-])(?![A-Z_0-9]+=)([A-Za-z_]\w*)=(?!=)")


def unknown_parameters(source: Path) -> list[str]:
    """Returns every `name=` in the message of one of our errors that no function and no class in the tree takes."""
    tree = modules(source)
    errors = {
        node.name
        for module in tree
        if module.name == "braidax.errors"
        for node in module.syntax.body
        if isinstance(node, ast.ClassDef)
    }
    taken = {name for module in tree for name in _parameters(module)}
    return [
        f"{module.path}:{call.lineno} names {name}="
        for module in tree
        for call in module.nodes
        if isinstance(call, ast.Call) and last_name(call.func) in errors
        for name in NAMED.findall(_message(call))
        if name not in taken
    ]


def _parameters(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id


def _message(call: ast.Call) -> str:
    texts: list[str] = []
    for argument in call.args:
        for node in ast.walk(argument):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_every_parameter_named_in_an_error_exists() -> None:
    assert unknown_parameters(SRC) == []


def test_a_parameter_that_does_not_exist_is_found(plant: Callable[[dict[str, str]], Path]) -> None:
    tree = plant(
        {
            "braidax/errors.py": "class SpecError(Exception): ...",
            "braidax/a.py": """
                def f(batch_size, *, seed=0):
                    raise SpecError(f"{batch_size=} is not 3 (seed={seed}); pass allow_ragged={True} or A=3")
                """,
        }
    )
    assert unknown_parameters(tree) == ["braidax/a.py:3 names allow_ragged="] * 2
