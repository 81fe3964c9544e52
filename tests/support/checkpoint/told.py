"""What the processes of a gang say when they call something, errors included."""

from collections.abc import Callable
from typing import Any

from braidax.errors import BraidaxError
from braidax.gang import LocalGang
from tests.support.data.jax_gang import RUN_SECONDS


def told(gang: LocalGang, fn: Callable[..., Any], *args: Any) -> list[str]:
    """Calls `fn(comm, *args)` on all; returns by process what it raised, or else what it returned, in words."""
    return gang.run(_caught, fn, args, timeout_seconds=RUN_SECONDS)


def _caught(comm: Any, fn: Any, args: Any) -> str:
    try:
        return str(fn(comm.split(0), *args))
    except BraidaxError as error:
        return f"{type(error).__name__}: {error}"
