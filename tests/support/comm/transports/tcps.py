"""The transport `tcp` as it is moved by C, by Python, and by both in one world."""

import sys
from unittest import mock

from braidax.comm.transports.tcp import TcpTransport
from braidax.comm.transports.transport import Transport

BINDING = "braidax.comm.transports.tcp_binding"
IN_C, IN_PYTHON, OF_BOTH = "tcp", "tcp in Python", "tcp of both"
TCPS = (IN_C, IN_PYTHON, OF_BOTH)


def transport_of(name: str, rank: int) -> str | Transport:
    """Returns what a rank gives to `connect`. **Arguments:** `name`: of a transport, or one of `TCPS`."""
    if name == IN_PYTHON or (name == OF_BOTH and rank % 2):
        return made_in_python()
    return IN_C if name == OF_BOTH else name


def made_in_python() -> TcpTransport:
    """Returns a transport as it is where there is no compiler."""
    with mock.patch.dict(sys.modules, {BINDING: None}):
        transport = TcpTransport()
    assert transport.moved_by == "Python"
    return transport
