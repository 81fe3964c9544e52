"""How a caller that moves messages sleeps: until the transport has news, or somebody rings."""

import contextlib
import selectors
from typing import final

from braidax.comm.transports.bell import Bell


@final
class Nap:
    """One caller at a time sleeps; any thread may ring.

    **Arguments:** `descriptor`: of the transport; owned by that.
    """

    def __init__(self, descriptor: int) -> None:
        self._bell = Bell()
        self._descriptor = descriptor
        self._selector = selectors.DefaultSelector()
        for readable in (descriptor, self._bell.fileno()):
            self._selector.register(readable, selectors.EVENT_READ)

    def sleep(self, seconds: float) -> None:
        """Sleeps, for up to so long."""
        for key, _ in self._selector.select(seconds):
            if key.fd != self._descriptor:
                self._bell.hush()

    def ring(self) -> None:
        """Wakes who sleeps, or who is about to."""
        self._bell.ring()

    def forget(self) -> None:
        """Listens no more to the transport, which is about to close."""
        with contextlib.suppress(KeyError):  # an interrupted close has done so
            self._selector.unregister(self._descriptor)

    def close(self) -> None:
        """Gives up the descriptors; nobody sleeps any more."""
        self._selector.close()
        self._bell.close()
