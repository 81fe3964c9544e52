"""Ranks that have nothing to do cost next to nothing, whatever moves their messages."""

import resource
import time

import pytest

from braidax.comm import Communicator
from tests.support.comm.ranks import by_day, results
from tests.support.comm.transports.tcps import IN_C, IN_PYTHON

IDLE_SECONDS = 0.4
MOST = 0.2  # of a core, by all ranks, which share a process; one that spins takes 1
UCX, UCX_TCP = "ucx", "ucx over TCP"


def used_seconds() -> float:
    """Returns the seconds that all threads of this process have had a core, the kernel's part included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def idle_share() -> float:
    """Returns the share of a core that the process takes while this thread does nothing."""
    used, begin = used_seconds(), time.monotonic()
    time.sleep(IDLE_SECONDS)
    return (used_seconds() - used) / (time.monotonic() - begin)


def be_idle(comm: Communicator) -> dict[str, float]:
    """Rank 1 measures while rank 0 does nothing, waits for a message, and serves nobody."""
    shares = dict[str, float]()
    comm.barrier()
    if comm.rank:
        shares["nothing"] = idle_share()
    comm.barrier()
    if comm.rank:
        shares["recv"] = idle_share()
        comm.send(b"good day", 0)
        assert comm.ask(0, b"who is it?") == b"who is it?"
        shares["serve"] = idle_share()
        comm.end_asking(0)
    else:
        assert comm.recv(1) == b"good day"
        with comm.serve(lambda rank, value: value) as server:
            server.wait()
    return shares


@pytest.mark.parametrize("transport", by_day((IN_C, IN_PYTHON, UCX, UCX_TCP), UCX_TCP))
def test_ranks_with_nothing_to_do_sleep(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if transport == UCX_TCP:
        monkeypatch.setenv("UCX_TLS", "tcp")
    shares = results(2, be_idle, transport=UCX if transport == UCX_TCP else transport)[1]
    assert list(shares) == ["nothing", "recv", "serve"]
    assert all(share < MOST for share in shares.values()), shares
