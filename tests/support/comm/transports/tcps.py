"""The transport `tcp` as it is moved by C, with lanes and without, by Python, and by both in one world."""

import sys
from unittest import mock

from braidax.comm.transports.tcp import TcpTransport
from braidax.comm.transports.transport import Transport

BINDING = "braidax.comm.transports.tcp_binding"
IN_C, OVER_SOCKETS, IN_PYTHON, OF_BOTH = "tcp", "tcp over sockets", "tcp in Python", "tcp of both"
TCPS = (IN_C, OVER_SOCKETS, IN_PYTHON, OF_BOTH)


def transport_of(name: str, rank: int) -> str | Transport:
    """Returns what a rank gives to `connect`. **Arguments:** `name`: of a transport, or one of `TCPS`."""
    if name == IN_PYTHON or (name == OF_BOTH and rank % 2):
        return made_in_python()
    if name == OVER_SOCKETS:
        return TcpTransport(interfaces=("127.0.0.1",))
    return IN_C if name == OF_BOTH else name


def made_in_python() -> TcpTransport:
    """Returns a transport as it is where there is no compiler."""
    with mock.patch.dict(sys.modules, {BINDING: None}):
        transport = TcpTransport()
    assert transport.moved_by == "Python"
    return transport
