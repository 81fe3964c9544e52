"""What is compiled of braidax: modules in C, which are not there where it was installed without a compiler."""

import importlib
from types import ModuleType


def import_binding(name: str) -> ModuleType | None:
    """Returns a module in C, or None where it is not compiled. **Arguments:** `name`: such as `a.b_binding`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
