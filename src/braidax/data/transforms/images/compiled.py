"""Kernels: loops over whole windows of samples, compiled by Numba, that run without the GIL.

Imported by the files that hold kernels, which in turn are imported when a kernel is needed first.
"""

import inspect
from collections.abc import Callable
from typing import Any

from braidax.errors import import_extra

_numba = import_extra("numba", "images", purpose="resizing images")


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function compiled for the types it is called with; machine code is kept on disk between runs."""
    plain = inspect.unwrap(function)  # while tests run, annotated functions are wrapped by what checks them
    return _numba.njit(nogil=True, cache=True, error_model="numpy")(plain)
