"""Every error that braidax raises.

```
BraidaxError
├── ArgumentError (ValueError)      a parameter has a value that cannot work
│   └── SpecError                   a sharding does not fit the mesh or the batch
├── DataError                       data on disk, or from an object, is not usable
│   ├── FormatError                 a file is missing, truncated or of no known format
│   ├── RecordError                 one record is damaged, or cannot be decoded, transformed or stacked
│   └── ReadError                   a disk, a server or a connection failed; the data may be fine
├── StateError                      state changed inside a traced function and was not returned
├── CheckpointError                 a checkpoint cannot be written or restored
├── CommError                       ranks cannot talk, or can no longer talk, to one another
│   ├── HandshakeError              a peer does not fit: its version, world size, transport or secret
│   ├── PeerLost                    another process died, froze, was cut off or left
│   └── Aborted                     a rank ended the generation on purpose
├── CallFailed                      what was called in another process raised there
├── GangError                       a gang of processes cannot be started or used
├── WaitTimeout (TimeoutError)      a wait on the host passed its limit
└── MissingExtra (ImportError)      an optional dependency is not installed
```

A message names the parameter or file, the value, what was expected, and the remedy.

What goes wrong in other processes has two words, whoever tells of it: communicators, gangs, loaders, checkpoints,
pipelines. `PeerLost`: the process is no longer there to be waited for. `CallFailed`: it is, and what it did raised.
`Aborted` is what the ranks that are well raise when one of them has ended the generation of all.
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
    """One record is damaged, or cannot be decoded, transformed or stacked."""


class ReadError(DataError):
    """A disk, a server or a connection failed: what the data are cannot be told; they may be fine."""


class StateError(BraidaxError):
    """State changed inside a traced function and was not returned."""


class CheckpointError(BraidaxError):
    """A checkpoint cannot be written or restored."""


class CommError(BraidaxError):
    """Ranks cannot talk, or can no longer talk, to one another."""


class HandshakeError(CommError):
    """A peer does not fit: its version, world size, transport or secret."""


class PeerLost(CommError):
    """Another process of the job died, froze, was cut off or left.

    **Fields:** `rank`: the number of that process among those that the message is about: the ranks of a communicator
    or a gang, the processes of JAX, the workers of a source. `host`: its name, empty where it is not known.
    """

    def __init__(self, message: str, rank: int, host: str = "") -> None:
        super().__init__(message, rank, host)
        self.rank = rank
        self.host = host

    def __str__(self) -> str:
        return str(self.args[0])


class Aborted(CommError):
    """A rank ended the generation on purpose; the message says which, and why."""


class CallFailed(BraidaxError):
    """What was called in another process raised there; the process goes on.

    **Fields:** `rank`, `host`: of that process, as of `PeerLost`. `traceback`: of what was raised, as Python shows it
    there, which is a note to this error, too; empty where it is not known.
    """

    def __init__(self, message: str, rank: int, host: str = "", traceback: str = "") -> None:
        super().__init__(message, rank, host, traceback)
        self.rank = rank
        self.host = host
        self.traceback = traceback
        if traceback:
            self.add_note(f"The traceback there:\n{traceback}")

    def __str__(self) -> str:
        return str(self.args[0])


class GangError(BraidaxError):
    """A gang of processes cannot be started or used."""


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
