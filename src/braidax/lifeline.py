"""A process that ends with the one that started it, however that one ends."""

import fcntl
import os
import signal
import threading

LIFELINE = "BRAIDAX_LIFELINE"
"""The environment variable in which a parent that wants it leaves the descriptor for `end_with`."""


def end_with(descriptor: int) -> None:
    """Ends this process when its parent is gone, also in the middle of native code; of a process group, all of it.

    **Arguments:** `descriptor`: the reading end of a pipe, into which nothing is written and whose other end the parent
    alone holds for as long as it lives. A process that leads its group takes the group along.
    """
    owner = -os.getpid() if _leads_group() else os.getpid()
    # Linux ends even a process that is stopped or never lets go of the GIL; elsewhere the thread has to.
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, owner)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_wait_for_end, args=(descriptor,), name="braidax-parent", daemon=True).start()


def _leads_group() -> bool:
    return os.getpgrp() == os.getpid()


def _wait_for_end(descriptor: int) -> None:
    os.read(descriptor, 1)
    if _leads_group():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
