"""A bell: what one thread rings so that another, asleep on its descriptor, wakes."""

import contextlib
import os
import select
from typing import final

_MOST_BYTES = 1 << 16  # what a pipe holds


@final
class Bell:
    """A descriptor that is readable from `ring` on until `hush`. Any thread may ring; the owner closes."""

    def __init__(self) -> None:
        self._heard, self._rung = os.pipe()
        os.set_blocking(self._heard, False)
        os.set_blocking(self._rung, False)
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)

    def ring(self) -> None:
        """Makes the descriptor readable."""
        with contextlib.suppress(OSError):  # it is rung often enough, or closed: nobody listens any more
            os.write(self._rung, b"!")

    def hush(self) -> None:
        """Makes the descriptor unreadable until the next ring."""
        with contextlib.suppress(OSError):
            os.read(self._heard, _MOST_BYTES)

    def wait(self, seconds: float) -> None:
        """Sleeps until the bell rings, for up to `seconds`."""
        self._poll.poll(seconds * 1000)

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._heard

    def close(self) -> None:
        """Gives up the descriptors; a second call does nothing. Ringing does nothing then."""
        for name in ("_heard", "_rung"):
            descriptor: int = getattr(self, name)
            setattr(self, name, -1)  # first: the number may soon be another file's
            if descriptor >= 0:
                os.close(descriptor)
