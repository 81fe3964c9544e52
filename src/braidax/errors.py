"""Every error that braidax raises.

```
BraidaxError
├── ArgumentError (ValueError)      a parameter has a value that cannot work
│   └── SpecError                   a sharding does not fit the mesh or the batch
├── DataError                       data on disk, or from an object, is not usable
│   ├── FormatError                 a file is missing, truncated or of no known format
│   └── RecordError                 one record cannot be read, decoded or stacked
├── StateError                      state changed inside a traced function and was not returned
├── CheckpointError                 a checkpoint cannot be written or restored
├── WaitTimeout (TimeoutError)      a wait on the host passed its limit
└── MissingExtra (ImportError)      an optional dependency is not installed
```

A message names the parameter or file, the value, what was expected, and the remedy.
"""

import importlib
from types import ModuleType


class BraidaxError(Exception):
    """The root of the tree: `except BraidaxError` catches all that braidax raises on purpose."""


class ArgumentError(BraidaxError, ValueError):
    """A parameter has a value that cannot work."""


class SpecError(ArgumentError):
    """A `PartitionSpec` or `NamedSharding` does not fit the mesh or the batch."""


class DataError(BraidaxError):
    """Data on disk, or from an indexable object, is not usable."""


class FormatError(DataError):
    """A file is missing, truncated or of no known format."""


class RecordError(DataError):
    """One record cannot be read, decoded, transformed or stacked."""


class StateError(BraidaxError):
    """State changed inside a traced function and was not returned."""


class CheckpointError(BraidaxError):
    """A checkpoint cannot be written or restored."""


class WaitTimeout(BraidaxError, TimeoutError):
    """A wait on the host passed its limit."""


class MissingExtra(BraidaxError, ImportError):
    """An optional dependency is not installed."""


def import_extra(module: str, extra: str, *, purpose: str) -> ModuleType:
    """Imports an optional dependency.

    **Arguments:** `module`: the dotted module name. `extra`: the extra of braidax that installs it.
    `purpose`: what needs it, as it stands in the error message.

    **Returns:** the module. **Raises:** `MissingExtra` with the line that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs the module {module!r}, which cannot be imported ({error}); "
            f'install it with: pip install "braidax[{extra}]"'
        ) from error
