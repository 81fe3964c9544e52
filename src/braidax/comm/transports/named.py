"""Transports by name: those of braidax, and those that other packages bring."""

from importlib.metadata import entry_points
from typing import Any

from braidax.comm.transports.transport import Transport
from braidax.errors import ArgumentError

ENTRY_POINTS = "braidax.transports"
"""The group of entry points that adds transports: each a callable without arguments that returns a `Transport`."""

_OURS = ("mpi", "tcp", "ucx")


def make_transport(name: str) -> Transport:
    """Makes a transport.

    **Arguments:** `name`: `"tcp"`, which needs nothing; `"ucx"` (extra `ucx`); `"mpi"` (extra `mpi`, under `mpiexec`);
    or what another package calls its own, by an entry point of the group `braidax.transports`.

    **Returns:** a transport that is not connected yet; it is the caller's to close. **Raises:** `ArgumentError` for a
    name that stands for none, `MissingExtra` when what it needs is not installed.
    """
    match name:
        case "tcp":
            from braidax.comm.transports.tcp import TcpTransport

            return TcpTransport()
        case "ucx":
            from braidax.comm.transports.ucx import UcxTransport

            return UcxTransport()
        case "mpi":
            from braidax.comm.transports.mpi import MpiTransport

            return MpiTransport()
        case "in-process":
            raise ArgumentError(
                "name='in-process': the ranks of one process must share a hub, which no name can say; make one Hub() "
                "and give each rank InProcessTransport(hub)"
            )
        case _:
            return _third_party(name)


def check_transport(name: str, option: str = "name") -> None:
    """Raises `ArgumentError`, in which the name is an `option`'s, for one that stands for no transport."""
    theirs = entry_points(group=ENTRY_POINTS).names
    if name not in _OURS and name not in theirs:
        raise ArgumentError(
            f"{option}={name!r}: expected one of {sorted({*_OURS, *theirs})}; other packages add transports by an "
            f"entry point of the group {ENTRY_POINTS!r}: is the package installed?"
        )


def _third_party(name: str) -> Transport:
    check_transport(name)
    entry = entry_points(group=ENTRY_POINTS)[name]
    made: Any = entry.load()()
    if not isinstance(made, Transport):
        raise ArgumentError(
            f"name={name!r}: the entry point {entry.value!r} returned a {type(made).__name__}; expected a Transport: "
            "mend the package that brings it"
        )
    return made
