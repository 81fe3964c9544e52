"""How far a step runs ahead of the devices, where running too far ahead ends the process."""

import time
from collections import deque
from typing import Any, cast

import jax
from jax.sharding import Mesh

from braidax.spans import OPERATIONS, note_since

MAX_IN_FLIGHT = 4
"""So many calls of a step may be dispatched and not done on CPU devices.

XLA's CPU client takes 32 programs for a device. Threads that wait to dispatch another are those that would compute, and
with several devices all of them come to wait in a collective, until XLA ends the process (40 s). An update is two
programs; the other half is left to programs of the user's.
"""

_DISPATCH_SECONDS = 1e-3  # no call of a program takes longer, but for one that returns when it is computed


class InFlight:
    """Waits, on CPU devices, for the call before the last `MAX_IN_FLIGHT`; on others never.

    A program that calls the host back is computed on CPU devices while it is called. Of such a call the trace that is
    active has a span, without which its time would seem to be that of dispatch.

    **Arguments:** `mesh`: where the calls run.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._bounded = any(device.platform == "cpu" for device in mesh.devices.flat)
        self._coming: deque[jax.Array] = deque()
        self._begun = 0.0

    def make_room(self) -> None:
        """Returns when one more call may be dispatched."""
        while len(self._coming) >= MAX_IN_FLIGHT:
            first = self._coming.popleft()
            if not first.is_deleted():
                first.block_until_ready()
        self._begun = time.perf_counter()

    def add(self, output: jax.Array) -> None:
        """Takes a small output of a call that has been dispatched; it is kept until the call is done."""
        if self._bounded:
            self._coming.append(output)
            begun = self._begun + _DISPATCH_SECONDS
            if begun < time.perf_counter() and cast("Any", output).is_ready():
                note_since(*OPERATIONS, begun)
