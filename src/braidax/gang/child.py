"""A rank of a `LocalGang`: it joins, and calls what comes over a socket, until its parent closes that or is gone."""

import faulthandler
import os
import pickle
import socket
import time
from dataclasses import dataclass, field

from braidax.comm import TcpStore, Tuning
from braidax.gang.member import Member
from braidax.lifeline import LIFELINE, end_with

LENGTH_BYTES = 8
"""Before each message: its length, little-endian."""


@dataclass(frozen=True)
class Birth:
    """What a rank is told first. It travels over the socket: nobody else on the machine sees the secret.

    **Fields:** `rank`, `size`, `job`, `epoch`, `transport`: of the gang. `store`: host, port and secret of its store.
    `limits`: until when all must have met, by `time.monotonic`, which all processes of a machine share, and the seconds
    that each later wait may take. `tuning`: as `connect` takes it.
    """

    rank: int
    size: int
    job: str
    epoch: int
    transport: str
    store: tuple[str, int, bytes] = field(repr=False)
    limits: tuple[float, float]
    tuning: Tuning


def main(control: int) -> None:
    """Serves a gang until the other end of the socket closes.

    **Arguments:** `control`: the descriptor of the socket.
    """
    os.set_inheritable(control, False)
    end_with(int(os.environ.pop(LIFELINE)))
    faulthandler.enable()  # a crash in native code shows where
    with socket.socket(fileno=control) as connection:
        birth: Birth = pickle.loads(_receive(connection))
        host, port, secret = birth.store
        deadline, timeout_seconds = birth.limits
        member = Member(
            TcpStore(host, port, secret=secret, timeout_seconds=timeout_seconds),
            rank=birth.rank,
            size=birth.size,
            job=birth.job,
            epoch=birth.epoch,
            transport=birth.transport,
            timeout_seconds=timeout_seconds,
            tuning=birth.tuning,
        )
        try:
            _send(connection, member.join(timeout_seconds=max(1e-3, deadline - time.monotonic())))
            while True:
                _send(connection, member.call(_receive(connection)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        finally:
            member.leave()


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little"))
    connection.sendall(data)


def _receive(connection: socket.socket) -> bytearray:
    length = int.from_bytes(_bytes(connection, LENGTH_BYTES), "little")
    return _bytes(connection, length)


def _bytes(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the gang closed its end")
        view = view[count:]
    return data
