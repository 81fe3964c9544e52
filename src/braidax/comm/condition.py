"""A condition variable that Ctrl-C cannot break."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final


@final
class Condition:
    """Lets threads sleep until what they wait for holds.

    An interrupt inside `threading.Condition` leaves its lock taken for ever, or gives back that of another thread: it
    takes and gives back the lock in Python. Here that is left to the `with` statement, which no interrupt divides.

    **Arguments:** `lock`: guards what is waited for; one of its own by default.

    **Fields:** `lock`. `sleepers`: what wakes each thread that waits.
    """

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        self.lock: AbstractContextManager[Any] = threading.Lock() if lock is None else lock
        self.sleepers: dict[int, threading.Lock] = {}

    def __len__(self) -> int:
        """The number of threads that wait."""
        return len(self.sleepers)

    def wait_for(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Returns whether something holds, at once or within a while; called without the lock.

        **Arguments:** `holds`: says so, under the lock; what it raises is raised.
        """
        deadline = time.monotonic() + seconds
        me = threading.get_ident()
        try:
            while True:
                with self.lock:
                    self.sleepers.pop(me, None)
                    if holds():
                        return True
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    called = threading.Lock()
                    called.acquire()
                    self.sleepers[me] = called
                called.acquire(timeout=left)
        except BaseException:
            with self.lock:
                self.sleepers.pop(me, None)
            raise

    def notify_all(self) -> None:
        """Lets all look again; called under the lock."""
        for called in self.sleepers.values():
            if called.locked():
                called.release()
