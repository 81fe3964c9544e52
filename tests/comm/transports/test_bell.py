"""The bell: readable from ring to hush, from any thread."""

import threading
import time

from braidax.comm.transports.bell import Bell
from tests.support.readable import is_readable


def test_it_is_readable_from_ring_to_hush() -> None:
    bell = Bell()
    assert not is_readable(bell)
    bell.hush()
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()
    assert is_readable(bell)
    bell.hush()
    bell.hush()
    assert not is_readable(bell)
    bell.close()


def test_a_ring_ends_a_wait() -> None:
    bell = Bell()
    began = time.monotonic()
    bell.wait(0.05)
    assert 0.04 < time.monotonic() - began < 5
    ringing = threading.Timer(0.05, bell.ring)
    ringing.start()
    bell.wait(60)
    assert time.monotonic() - began < 30
    ringing.join()
    bell.close()
