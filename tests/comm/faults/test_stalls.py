"""What trials forgive: time in which nothing at all ran here."""

import ctypes
import time

from tests.support.comm.faults.stalls import Stalls


def test_a_machine_that_stands_still_is_no_fault_of_a_rank() -> None:
    stalls = Stalls()
    try:
        before, began = stalls.clock(), time.monotonic()
        ctypes.PyDLL(None).usleep(600_000)  # no thread of this process runs meanwhile: it keeps the interpreter's lock
        assert stalls.seconds > 0.5
        assert stalls.clock() - before < time.monotonic() - began - 0.5
        counted = stalls.seconds
        for _ in range(5):
            time.sleep(0.1)  # others run
        assert stalls.seconds - counted < time.monotonic() - began - 1.0
    finally:
        stalls.close()
        stalls.close()
