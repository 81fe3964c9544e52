"""Programs for servers, written down once: all workers of a test send the same ones, and so do many tests."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import core

from braidax.parallel.served import programs
from braidax.parallel.workers import programs as of_workers

_write, _written, _lock = programs.exported, dict[bytes, bytes](), threading.Lock()


def exported(fn: Callable[..., Any], *specs: Any) -> bytes:
    """As `exported` of the servers, which is asked once for all functions that JAX traces alike.

    Processes that tests start write down their own: those of several workers are compared there as ever.
    """
    traced = jax.jit(fn).trace(*specs).jaxpr
    key = hashlib.sha256(repr(specs).encode() + str(traced).encode())
    for one in _constants(traced):
        key.update(np.asarray(one).tobytes())
    with _lock:
        if key.digest() not in _written:
            _written[key.digest()] = _write(fn, *specs)
        return _written[key.digest()]


def write_once(patch: pytest.MonkeyPatch) -> None:
    """Puts it in place of the one of steps that are made in this process."""
    for module in (programs, of_workers):
        patch.setattr(module, "exported", exported)


def _constants(closed: Any) -> Iterator[Any]:
    """Yields all arrays that a trace holds, which its text does not show whole."""
    yield from closed.consts
    for equation in closed.jaxpr.eqns:
        yield from (one.val for one in equation.invars if isinstance(one, core.Literal) and np.ndim(one.val))
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=_is_trace):
            if isinstance(value, core.Jaxpr):
                value = core.ClosedJaxpr(value, ())
            if isinstance(value, core.ClosedJaxpr):
                yield from _constants(value)


def _is_trace(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)
