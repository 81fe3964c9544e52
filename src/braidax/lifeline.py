"""A process that ends with the one that started it, however that one ends."""

import fcntl
import os
import platform
import signal
import threading

from braidax.errors import GangError

LIFELINE = "BRAIDAX_LIFELINE"
"""The environment variable in which a parent that wants it leaves the descriptor for `end_with`."""


def check_is_told_of_ends(purpose: str) -> None:
    """Checks that the system tells a program at once when a process that it has started ends, as Linux does.

    **Arguments:** `purpose`: what needs it, as it stands in the message. **Raises:** `GangError` on other systems.
    """
    if not hasattr(os, "pidfd_open"):
        raise GangError(
            f"{purpose} runs on Linux only, this is {platform.system()}; run the program in one process, or take a "
            "gang on Ray or Dask"
        )


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
