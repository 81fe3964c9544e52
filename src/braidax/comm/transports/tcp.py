"""Messages over TCP sockets: one for each pair of ranks, both ways."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

from braidax.bindings import import_binding
from braidax.comm.transports.quick import know_arrays
from braidax.comm.transports.schedules import BindingSchedules, disagree
from braidax.comm.transports.tcp_link import lost
from braidax.comm.transports.tcp_worker import TcpWorker
from braidax.comm.transports.transport import Buffer, Operation, QuickCalls, Transport, too_long
from braidax.connections.listener import Listener, Tls, linger
from braidax.connections.world import World
from braidax.errors import CommError

if TYPE_CHECKING:
    from braidax.comm.transports.tcp_lanes import Lanes


@final
class TcpTransport(Transport):
    """Moves messages over TCP; needs nothing but Python, and is quickest where braidax was installed with a C compiler.

    Every pair of ranks shares one connection, on which both have proved that they know the world's secret. A message
    that was asked for is read into its place. Of those that were not, up to 4 MiB a peer are kept in memory, when they
    are small or stand in the way of others; the rest waits at the sender, whose `send` ends when it is asked for.

    **Arguments:** `interfaces`: addresses of this host that peers on other hosts may use, such as `("10.0.0.5",)`; by
    default those of all interfaces that are up. `tls`: encrypts the connections, which Python moves then.

    **Fields:** `moved_by`: what moves the messages, `"C"` or `"Python"`; ranks of both kinds talk to one another.
    """

    name = "tcp"
    can_lose = True

    def __init__(self, *, interfaces: Sequence[str] = (), tls: Tls | None = None) -> None:
        self._listener = Listener(interfaces=interfaces, tls=tls)
        self._connections: dict[int, socket.socket] = {}
        self._given_up: dict[int, CommError] = {}
        self._address = self._listener.address
        self._lanes: Lanes | None = None
        binding = None if tls is not None else _binding()
        self.moved_by: Literal["C", "Python"] = "Python" if binding is None else "C"
        if binding is None:
            self._worker: Any = TcpWorker(self._given_up)
        else:
            from braidax.comm.transports import tcp_lanes  # what it needs is not on all systems

            self._address, self._lanes = tcp_lanes.told_lanes(self._address), tcp_lanes.Lanes()
            self._worker = binding.Worker()
            worker = self._worker
            self.quick = QuickCalls(worker.send, worker.receive, worker.send_receive, worker.send_receive_value)
            self.schedules = BindingSchedules(binding, worker)
            know_arrays(binding.know_arrays)
            self.takes_arrays = True
        # A call of our own would be a good part of the time of a small message.
        self.send = self._worker.send
        self.receive = self._worker.receive
        self.poll = self._worker.poll
        self.arm = self._worker.arm
        self.fileno = self._worker.fileno

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, world: World, *, timeout_seconds: float) -> None:
        dialed = set(range(world.rank))
        deadline = time.monotonic() + timeout_seconds
        with self._listener as listener:
            self._connections = listener.connect(
                world, purpose=b"tcp", dialed=dialed, accepted=set(range(world.rank + 1, world.size)), deadline=deadline
            )
        if self._lanes is not None:
            self._lanes.connect(world, self._connections, deadline=deadline)
        for connection in self._connections.values():
            connection.setblocking(False)
        if self._lanes is None:
            self._worker.connect(world, self._connections)
            return
        descriptors = [-1] * world.size
        for rank, connection in self._connections.items():
            descriptors[rank] = connection.fileno()
        is_crowded = world.hosts.count(world.hosts[world.rank]) > (os.cpu_count() or 1)
        told = partial(_fail, world, self._given_up), partial(disagree, world)
        lanes = tuple(map(self._lanes.found.get, range(world.size)))
        self._worker.connect(world.rank, tuple(descriptors), *told, Operation, is_crowded, lanes, self._lanes.bell)
        self._lanes.let_go_of_memory()

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        self._worker.send(peer, tag, buffers, operation)

    def receive(self, peer: int, tag: int, buffer: Buffer, operation: Operation) -> None:
        self._worker.receive(peer, tag, buffer, operation)

    def poll(self, spin_seconds: float) -> None:
        self._worker.poll(spin_seconds)

    def arm(self) -> bool:
        return self._worker.arm()

    def fileno(self) -> int:
        return self._worker.fileno()

    def kept_bytes(self, peer: int) -> int:
        """Returns how much is kept of messages from a peer that nobody has asked for."""
        return self._worker.kept_bytes(peer)

    def lose(self, peer: int, error: CommError) -> None:
        if peer not in self._given_up:
            self._given_up[peer] = error
            self._worker.lose(peer)
            self._connections[peer].close()

    def close(self, *, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        self._listener.close()
        left_open = self._worker.close(timeout_seconds)
        if timeout_seconds > 0:
            linger([self._connections[rank] for rank in left_open], deadline)
        for connection in self._connections.values():
            connection.close()
        if self._lanes is not None:
            self._lanes.close()


def _fail(
    world: World,
    given_up: Mapping[int, CommError],
    operation: Operation,
    peer: int,
    how: str,
    num_bytes: int,
    capacity: int,
) -> None:
    """Ends an operation with an error. **Arguments:** `how`: its peer was lost; empty: a message is too long."""
    if how:
        operation.fail(given_up.get(peer) or lost(world, peer, how))
    else:
        operation.fail(too_long(world, peer, num_bytes, capacity))


def _binding() -> Any:
    """Returns the binding in C, or None where braidax was installed without a compiler."""
    return import_binding("braidax.comm.transports.tcp_binding")
