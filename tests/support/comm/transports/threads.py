"""Transports whose ranks are threads of one process."""

from collections.abc import Sequence

from braidax.comm.transports.in_process import Hub, InProcessTransport
from braidax.comm.transports.named import make_transport
from braidax.comm.transports.transport import Transport
from tests.support.comm.transports.tcps import transport_of


def make(name: str, size: int) -> Sequence[Transport]:
    """Makes the transports of a world whose ranks are threads of this process."""
    if name == "in-process":
        hub = Hub()
        return [InProcessTransport(hub) for _ in range(size)]
    opened = [transport_of(name, rank) for rank in range(size)]
    return [make_transport(each) if isinstance(each, str) else each for each in opened]
