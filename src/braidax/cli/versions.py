"""What `braidax --version` tells beside the version: what a report of an error needs, known without importing JAX."""

import platform
from importlib.metadata import PackageNotFoundError, version

from braidax.bindings import BINDINGS, missing_bindings

_SHOWN = {"JAX": "jax", "jaxlib": "jaxlib", "NumPy": "numpy"}
_PAGE = "docs/install.md#what-is-compiled says how to get them"


def describe_versions() -> str:
    """Returns two lines: the versions of Python and JAX with the platform, and which bindings in C are there."""
    found = [f"Python {platform.python_version()}", *(f"{name} {_version(of)}" for name, of in _SHOWN.items())]
    return f"{', '.join(found)}, {platform.system()} {platform.machine()}\n{describe_bindings(missing_bindings())}"


def describe_bindings(missing: dict[str, str]) -> str:
    """Returns a line on the bindings in C. **Arguments:** `missing`: as `missing_bindings` returns it."""
    there = [name for name in BINDINGS if name not in missing]
    line = f"compiled: {', '.join(there) or 'nothing'}"
    if missing:
        line += f"; without: {', '.join(f'{name} ({why})' for name, why in missing.items())}; {_PAGE}"
    return line


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "is not installed"
