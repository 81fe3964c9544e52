"""Worlds that say which of their ranks is lost."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from braidax.comm import Communicator
from braidax.comm.watch import Notice
from braidax.errors import PeerLost
from tests.support.comm.ranks import results
from tests.support.comm.transports.tcps import IN_C, IN_PYTHON

TRANSPORTS = ["in-process", IN_C, IN_PYTHON, "ucx"]
LIMIT_SECONDS = 30.0
AT_ONCE_SECONDS = 8.0
VICTIM = 2


def world(size: int, call: Callable[[Communicator], Any], transport: str = IN_C, **options: Any) -> list[Any]:
    """Runs a function on every rank of such a world. **Returns:** what each returned."""
    return results(size, call, transport=transport, on_loss="peer", **options)


def lose(comm: Communicator, rank: int) -> None:
    """Lets this rank say that another one is lost, as if it had seen that."""
    comm._progress.fail(Notice("lost", rank, "its process ended"))


def raises_lost(call: Callable[[], Any], rank: int = VICTIM) -> None:
    """Fails unless a call raises at once that a rank is lost."""
    began = time.monotonic()
    with pytest.raises(
        PeerLost, match=rf"rank {rank} \(host .*\) is lost: its process ended; what others do"
    ) as caught:
        call()
    assert (caught.value.rank, time.monotonic() - began < AT_ONCE_SECONDS) == (rank, True)


def until(holds: Callable[[], Any]) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)
