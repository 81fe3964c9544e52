"""How those who train come to the servers of their tables, and these to them."""

import contextlib
from collections.abc import Generator
from typing import Any, Literal, NamedTuple

import jax

from braidax.comm import Communicator
from braidax.errors import ArgumentError, CommError, PeerLost, WaitTimeout
from braidax.gang import Gang
from braidax.program.coordination import coordination

from .meeting import Meeting, begin_meeting, find_meeting
from .on_servers.holder import serve

_TIMEOUT_SECONDS = 120.0


class Joined(NamedTuple):
    """A world of servers and those who train.

    **Fields:** `world`: servers first. `meeting`: by which it was joined. `worker`: which of those who train this is.
    `gang`: whose ranks serve, where this process has it. `bringers`: among how many workers, the first ones, whole
    tables are divided when these are read and written.
    """

    world: Communicator
    meeting: Meeting
    worker: int
    gang: Gang | None
    bringers: int


def join_with_processes(gang: Gang | None, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> Joined:
    """Joins servers as the processes of one JAX do, all of which call it.

    **Arguments:** `gang`: which runs; its ranks serve, and do nothing else meanwhile. None in all processes but the
    first. `timeout_seconds`: the limit of each wait.

    **Raises:** as `Gang.submit`, and as `comm.connect`.
    """
    size, worker = jax.process_count(), jax.process_index()
    service = coordination() if size > 1 else None
    others = None if service is None else service.numbered("tables")
    if worker > 0:
        assert others is not None, "there are several processes"
        meeting = find_meeting(others, timeout_seconds=timeout_seconds)
        return Joined(meeting.join(meeting.num_servers + worker), meeting, worker, None, size)
    check_gang(gang)
    assert gang is not None, "it was checked"
    with begin_meeting(
        gang.hosts, num_workers=size, transport=gang.transport, timeout_seconds=timeout_seconds, others=others
    ) as meeting:
        serving = gang.submit(serve, meeting)
        try:
            world = meeting.join(gang.size)
        except (CommError, WaitTimeout):
            if serving.done:
                serving.result()  # which says why they have not come
            raise
    return Joined(world, meeting, worker, gang, size)


def num_servers_of(servers: Any) -> int:
    """Returns how many servers a worker is given. **Raises:** `ArgumentError` as `join_alone`."""
    if isinstance(servers, Meeting):
        return servers.num_servers
    check_gang(servers)
    return servers.size


def join_alone(servers: Gang | Meeting | Any) -> Joined:
    """Joins servers as a worker does whose JAX is its own. **Arguments:** `servers`: a gang, of a run with one worker,
    or a meeting that says which worker this is. **Raises:** as `join_with_processes`."""
    if jax.process_count() > 1:
        raise ArgumentError(
            f"jax.process_count() is {jax.process_count()}, and workers of ParameterServers each have a JAX of their "
            f'own: leave jax.distributed.initialize out, or train all processes together by Hybrid(tables="servers")'
        )
    if not isinstance(servers, Meeting):
        return join_with_processes(servers)
    if servers.worker is None:
        raise ArgumentError(
            f"servers is a meeting of {servers.num_workers} workers that does not say which this is: expected "
            f"servers=meeting.of_worker(number)"
        )
    return Joined(servers.join(servers.num_servers + servers.worker), servers, servers.worker, None, 1)


@contextlib.contextmanager
def open_meeting(
    gang: Gang,
    *,
    workers: int,
    reach: Literal["here", "all"] = "here",
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> Generator[Meeting, None, None]:
    """Lets the ranks of a gang serve workers that each have a JAX of their own, for one run.

    **Arguments:** `gang`: which runs; its ranks do nothing else meanwhile. `workers`: how many come. Each calls
    `parallelize(…, servers=meeting.of_worker(number))`. `reach`: "here", workers are on this host, or where the servers
    are; "all": on any. `timeout_seconds`: the limit of each wait, also for all to come.

    **Returns:** a context, which is left when all have come, or later. **Raises:** `ArgumentError`; as `Gang.submit`.
    """
    check_gang(gang)
    if workers < 1:
        raise ArgumentError(f"workers={workers}: expected how many train, 1 or more")
    with begin_meeting(
        gang.hosts, num_workers=workers, transport=gang.transport, timeout_seconds=timeout_seconds, reach=reach
    ) as meeting:
        serving = gang.submit(serve, meeting)
        try:
            yield meeting
        except (CommError, WaitTimeout) as error:
            if serving.done and not isinstance(error, PeerLost):
                serving.result()  # which says why they have not come
            raise


def check_gang(gang: Any) -> None:
    """Raises `ArgumentError` for what is no gang that runs."""
    if not isinstance(gang, Gang):
        raise ArgumentError(
            f"servers is {gang!r}, expected a gang whose ranks will have the tables: "
            f"with bx.gang.LocalGang(2) as gang: bx.parallelize(…, servers=gang)"
        )
