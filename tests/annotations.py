"""The check of annotations that jaxtyping puts on every function of braidax while tests run."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

unreadable: list[str] = []  # functions whose annotations cannot be checked; tests/laws says that there are none


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that checks its arguments and its result; an `int` will do for a `float`."""
    try:
        return _beartype(function)
    except BeartypeDecorHintException as error:
        unreadable.append(f"{function.__module__}.{function.__qualname__}: {error}")
        return function


_beartype: Callable[[Any], Any] = beartype(conf=BeartypeConf(is_pep484_tower=True))
