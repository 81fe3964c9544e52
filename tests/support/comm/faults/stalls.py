"""How long the machine itself stood still: one that is shared was seen to run nothing for many seconds."""

import threading
import time
from typing import final

_LOOK_SECONDS = 0.05
_STALL_SECONDS = 0.3  # what is shorter, the slack of a trial allows


@final
class Stalls:
    """Counts the time in which a thread that only looks at the clock was given no core."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._looked = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """All of it so far, what has not ended included."""
        with self._lock:
            self._look()
            return self._seconds

    def clock(self) -> float:
        """Returns the time by `time.monotonic`, as if the machine had never stood still."""
        return time.monotonic() - self.seconds

    def close(self) -> None:
        """Ends the thread. A second call does nothing."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            with self._lock:
                self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > _STALL_SECONDS:
            self._seconds += now - self._looked
        self._looked = now
