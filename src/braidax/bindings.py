"""What is compiled of braidax: modules in C, which are not there where it was installed without a compiler."""

import importlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

BINDINGS = {
    "tcp": "comm.transports.tcp_binding",
    "ucx": "comm.transports.ucx_binding",
    "frame": "frame.moving.scatter_binding",
    "groups": "frame.summing.groups_binding",
    "servers": "parallel.served.rows_binding",
    "records": "data.storage.record_binding",
    "order": "data.sampling.permutation_binding",
}
"""By what each is for: the module inside of `braidax`.

The first two are transports; then rows of frames, groups of these, rows of servers, records of files, and the order of
samples.
"""


def import_binding(name: str) -> ModuleType | None:
    """Returns a module in C, or None where it is not compiled. **Arguments:** `name`: such as `a.b_binding`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def missing_bindings(package: Path | None = None) -> dict[str, str]:
    """Says which of `BINDINGS` are not there, and why, without importing the packages that they are in.

    **Arguments:** `package`: the folder of `braidax`, by default the one that runs.

    **Returns:** by the name in `BINDINGS`: that it is not compiled, or why it cannot be loaded.
    """
    package = Path(__file__).parent if package is None else package
    reasons = {name: _problem(package, module) for name, module in BINDINGS.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _problem(package: Path, module: str) -> str | None:
    import ctypes

    parts = package.joinpath(*module.split("."))
    files = [file for suffix in EXTENSION_SUFFIXES if (file := parts.with_name(parts.name + suffix)).exists()]
    if not files:
        return "not compiled"
    try:
        ctypes.CDLL(str(files[0]))  # as a library: a second module of it would take the types of the first
    except OSError as error:
        return f"cannot be loaded: {error}"
    return None
