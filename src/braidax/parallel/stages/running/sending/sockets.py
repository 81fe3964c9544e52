"""Arrays from process to process over sockets, beside what the devices compute."""

import itertools
import socket
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import final

import jax
from jax.experimental import transfer

from braidax.connections.hosts import LOOPBACK, host_addresses, host_id

from .agreement import WAIT_SECONDS, Agreement

_PER_CHANNEL, _PER_PROCESS = 1 << 32, 1 << 44
_ANSWER_SECONDS, _PAUSE_SECONDS = 5.0, 0.1


@final
class Sockets:
    """Connections of this process with others.

    Nothing waits: an array that is sent may still be computed, one that is received may still be under way. Two
    processes have to send and receive in one order on each channel.

    **Arguments:** `agreement`: of the processes that take part. `wait_seconds`: for each array.

    **Raises:** `WaitTimeout` naming a process that does not come.
    """

    def __init__(self, agreement: Agreement, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._process, self._wait = jax.process_index(), timedelta(seconds=wait_seconds)
        self._sent, self._received = Counter[int](), Counter[tuple[int, int]]()
        self._channels = itertools.count(1)
        hosts = agreement.exchanged(host_id())
        here = LOOPBACK if len({*hosts.values()}) == 1 else host_addresses()[0]
        place = f"[{here}]:0" if ":" in here else f"{here}:0"
        backend = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(backend, place, [place])
        addresses = agreement.exchanged(self._server.address())
        others = {one: address for one, address in addresses.items() if one != self._process}
        self._addresses = others
        self._connections = {one: self._server.connect(address) for one, address in others.items()}

    def ended(self, wait_seconds: float) -> list[int]:
        """Returns which other processes are gone; one that is about to go may be asked for a while."""
        deadline = time.monotonic() + wait_seconds
        while True:
            found = [process for process, address in self._addresses.items() if not _answers(address)]
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(_PAUSE_SECONDS)

    def channel(self) -> int:
        """Returns a new one, alike on all processes, which ask for them in one order; 0 is for all else."""
        return next(self._channels)

    def send(self, process: int, arrays: Sequence[jax.Array], channel: int = 0) -> None:
        """Sends arrays, which nobody may give up before they are received.

        **Arguments:** `arrays`: each on one device of this process.
        """
        place = process * _PER_PROCESS + channel * _PER_CHANNEL
        self._sent[place] += 1
        self._server.await_pull(place + self._sent[place], [*arrays])

    def receive(self, process: int, specs: Sequence[jax.ShapeDtypeStruct], channel: int = 0) -> list[jax.Array]:
        """Returns what a process sends. **Arguments:** `specs`: with the sharding of one device of this process."""
        place = process, self._process * _PER_PROCESS + channel * _PER_CHANNEL
        self._received[place] += 1
        number = place[1] + self._received[place]
        found: list[jax.Array] = self._connections[process].pull(number, [*specs], datetime.now() + self._wait)
        return found


def _answers(address: str) -> bool:
    host, _, number = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(number)), timeout=_ANSWER_SECONDS):
            return True
    except OSError:
        return False
