"""Calls of a transport that begin a small message and move it along at once: one call in place of two to four."""

from collections.abc import Callable
from typing import Any

import numpy as np

from braidax.comm.small import HEADER, decoded, encoded
from braidax.comm.transports.transport import Operation, QuickCalls, SmallValues, Transport


def know_arrays(know: Callable[[Any, int, Any], bool]) -> None:
    """Shows a binding in C how arrays lie in memory, so that it finds their bytes. **Arguments:** `know`: of it."""
    array = np.zeros((3, 2), np.float32)
    know(array, array.__array_interface__["data"][0], array.dtype)


def quick_calls_of(transport: Transport) -> QuickCalls:
    """Returns those of a transport: in C where it has them, otherwise made of its other calls."""
    if transport.quick is not None:
        return transport.quick

    def poll(operation: Operation, spin_seconds: float) -> None:
        if spin_seconds >= 0 and not operation.done:
            transport.poll(spin_seconds)

    def send(peer: int, tag: int, buffers: Any, operation: Operation, spin_seconds: float) -> None:
        transport.send(peer, tag, buffers, operation)
        poll(operation, spin_seconds)

    def receive(peer: int, tag: int, buffer: Any, operation: Operation, spin_seconds: float) -> None:
        transport.receive(peer, tag, buffer, operation)
        poll(operation, spin_seconds)

    def send_receive(
        peer: int, tag: int, buffers: tuple[Any, ...], receive_tag: int, place: Any, spin_seconds: float
    ) -> bytearray | Operation:
        copy, operation = memoryview(b"".join(buffers)), Operation(peer)
        transport.send(peer, tag, (copy,), Operation(peer))
        receive(peer, receive_tag, memoryview(place), operation, spin_seconds)
        return bytearray(place[: operation.num_bytes]) if operation.done and operation.error is None else operation

    def send_receive_value(
        peer: int,
        tag: int,
        kind: int,
        number: int,
        value: Any,
        receive_tag: int,
        place: Any,
        small: SmallValues,
        spin_seconds: float,
    ) -> tuple[int, int, Any] | bytearray | Operation | None:
        first = encoded(value)
        if first is None:
            return None
        heard = send_receive(peer, tag, (HEADER.pack(kind, number), *first), receive_tag, place, spin_seconds)
        if isinstance(heard, Operation) or len(heard) <= HEADER.size:
            return heard
        found = decoded(heard, HEADER.size)
        return heard if found is None else (*HEADER.unpack_from(heard), found[0])

    return QuickCalls(send, receive, send_receive, send_receive_value)
