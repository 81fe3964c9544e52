"""The servers that `braidax launch --servers` has started: how a step calls them, and how they wait for that."""

import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from braidax.errors import ArgumentError, WaitTimeout
from braidax.gang.program import CALLED, COPIES, REPLACES, SERVERS
from braidax.gang.runner import scoped_store

from .meeting import Meeting
from .replacing import called, come, open_keys, value_of, wanted_ranks
from .world import World

_WAIT_SECONDS = 60.0  # of a server, for a step; it begins again until its job ends it
_LOOK_SECONDS = 0.2  # between looks of one that was started in place of another
_NO_OWNER = (
    "braidax launch starts no other server on --hosts; give the step one that is spare (spares=1), or all processes to "
    "one host"
)


def launched_servers(environ: Mapping[str, str] = os.environ) -> int:
    """Returns how many servers the job of this process has, 0 for none."""
    return int(environ.get(SERVERS, "0"))


def why_not_replaced(environ: Mapping[str, str] = os.environ) -> str:
    """Returns why nobody starts other servers of this job in place of lost ones; empty where that is done."""
    return "" if REPLACES in environ else _NO_OWNER


@dataclass
class _Calls:
    """What this process has asked of the servers of its job. **Fields:** `number`: of meetings so far. `world`: the
    last one."""

    number: int = 0
    world: weakref.ref[World] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_CALLS = _Calls()  # of the process, as its environment is


def call_servers(*, num_workers: int, timeout_seconds: float, copies: int) -> Meeting:
    """Tells the servers of this job where they meet workers next; all workers may, and say the same.

    **Arguments:** `num_workers`: who come. `copies`: on how many servers lies whatever is on one.

    **Raises:** `ArgumentError` where a step of this process has the servers still.
    """
    with _CALLS.lock:
        world = None if _CALLS.world is None else _CALLS.world()
        if world is not None and world.failure is None:
            raise ArgumentError(
                f"servers is None, and the {launched_servers()} servers of braidax launch serve another step of this "
                f"process: expected one at a time; close it first (with step: …), or give servers=, a gang of its own"
            )
        number = _CALLS.number
        _CALLS.number += 1
    found = _meeting(os.environ, number, num_workers, timeout_seconds)
    with scoped_store(os.environ) as store:
        store.set(COPIES, str(copies).encode())
        call = {"num_workers": num_workers, "timeout_seconds": timeout_seconds}
        store.set(f"{CALLED}/{number}", json.dumps(call).encode())
    return found


def note_world(world: World) -> None:
    """Keeps in mind that the servers of this job serve a step of this process until the world is closed."""
    with _CALLS.lock:
        _CALLS.world = weakref.ref(world)


def await_call(number: int, environ: Mapping[str, str] = os.environ) -> Meeting:
    """Returns where a server meets workers, when a step calls it. **Arguments:** `number`: of meetings before."""
    while True:
        try:
            with scoped_store(environ) as store:
                call = json.loads(store.get(f"{CALLED}/{number}", timeout_seconds=_WAIT_SECONDS))
        except WaitTimeout:
            continue
        return _meeting(environ, number, **call)


def note_joins(number: int, rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Notes that a server joins those who meet. **Arguments:** `number`: of meetings before. `rank`: its own."""
    with scoped_store(environ) as store:
        store.set(f"{CALLED}/{number}/joined/{rank}", b"")


def await_place(rank: int, environ: Mapping[str, str] = os.environ) -> tuple[int, Meeting, int]:
    """Returns where a server meets others that was started in place of one that is lost: once more, where who trains
    wants that, or for the next step.

    **Arguments:** `rank`: its own. **Returns:** the number of meetings before, where, and under which generation.
    """
    with scoped_store(environ) as store:
        steps = 0
        while value_of(store, f"{CALLED}/{steps}") is not None:
            steps += 1
        if steps == 0 or value_of(store, f"{CALLED}/{steps - 1}/joined/{rank}") is None:
            number = max(0, steps - 1)
            return number, await_call(number, environ), 0
        meeting, wanted, has_come = await_call(steps - 1, environ), 0, False
        with open_keys(meeting) as keys:
            while value_of(store, f"{CALLED}/{steps}") is None:
                while not has_come and (ranks := wanted_ranks(keys, wanted)) is not None:
                    if rank in ranks and called(keys, wanted) is None:
                        come(keys, wanted, rank)
                        has_come = True
                    else:
                        wanted += 1
                if has_come and (generation := called(keys, wanted)) is not None:
                    return steps - 1, meeting, generation
                time.sleep(_LOOK_SECONDS)
        return steps, await_call(steps, environ), 0


def _meeting(environ: Mapping[str, str], number: int, num_workers: int, timeout_seconds: float) -> Meeting:
    """Returns a meeting of a job, which no other generation of it has."""
    address = urlsplit(environ["BRAIDAX_STORE"]).netloc
    job = f"{environ['BRAIDAX_JOB']} {environ['BRAIDAX_GENERATION']} tables {number}"
    secret, transport = bytes.fromhex(environ["BRAIDAX_SECRET"]), environ["BRAIDAX_TRANSPORT"]
    num_servers = launched_servers(environ)
    return Meeting(address, secret, job, transport, timeout_seconds, num_servers, num_workers)
