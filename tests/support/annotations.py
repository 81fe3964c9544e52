"""The check of annotations on every function of braidax while tests run."""

import dataclasses
import functools
import math
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

MOST_CALLS = math.inf if os.environ.get("BRAIDAX_TESTS_COMPILE") == "fully" else 50
"""So many calls of a function are checked in a process; by `make nightly` all are."""

unreadable: list[str] = []  # functions whose annotations cannot be checked; tests/laws says that there are none


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that checks its arguments and its result; an `int` will do for a `float`."""
    try:
        return _beartype(function)
    except BeartypeDecorHintException as error:
        unreadable.append(f"{function.__module__}.{function.__qualname__}: {error}")
        return function


def check_quickly() -> None:
    """Has jaxtyping's import hook put its own check, of shapes across arguments, only where shapes are annotated.

    All other functions get `checked` itself, which takes a tenth of the time. Called before braidax is imported.
    """
    jaxtyping.jaxtyped = _jaxtyped


def make_checks() -> None:
    """Makes the checks of all functions, which else are made when a function is called for the first time."""
    while _waiting:
        _waiting.pop()()


_waiting: list[Callable[[], Any]] = []
_beartype: Callable[[Any], Any] = beartype(conf=BeartypeConf(is_pep484_tower=True))
_with_shapes = jaxtyping.jaxtyped


def _jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorate(decorated: Any) -> Any:
        if _has_shapes(decorated.__module__):
            return _with_shapes(decorated, typechecker=typechecker)
        if not isinstance(decorated, type):
            return _switched(decorated, typechecker)
        if dataclasses.is_dataclass(decorated) and "__init__" in vars(decorated):
            decorated.__init__ = _switched(decorated.__init__, typechecker)
        return decorated

    return decorate


def _switched(function: Callable[..., Any], typechecker: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is checked, unless jaxtyping's switch is off: the fixture `unchecked`."""
    checks: Callable[..., Any] | None = None
    calls = 0

    def made() -> Callable[..., Any]:
        nonlocal checks
        found = checks
        if found is None:
            hints = function.__annotations__
            known = dict(hints)
            if any(isinstance(hint, str) for hint in hints.values()):
                known = {name: hint if _is_known(hint, function) else Any for name, hint in hints.items()}
            found = checks = typechecker(function if known == hints else _annotated(function, known))
        return found

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        if calls >= MOST_CALLS or jaxtyping.config.jaxtyping_disable:
            return function(*args, **options)
        calls += 1
        return (checks or made())(*args, **options)

    if "<locals>" not in function.__qualname__:
        _waiting.append(made)
    return call


def _is_known(hint: Any, function: Callable[..., Any]) -> bool:
    """Says whether all names in an annotation are there, and none was imported for type checkers only."""
    try:
        typing.get_type_hints(types.SimpleNamespace(__annotations__={"hint": hint}), function.__globals__)
    except NameError:
        return False
    return True


def _annotated(function: Any, hints: dict[str, Any]) -> Callable[..., Any]:
    """Returns a copy of a function with other annotations."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, hints
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


@functools.cache
def _has_shapes(module: str) -> bool:
    return any(getattr(value, "__module__", "") == "jaxtyping" for value in vars(sys.modules[module]).values())
