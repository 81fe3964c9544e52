"""How those who train come to the servers of their tables, and these to them."""

import contextlib
import os
from collections.abc import Generator
from typing import Any, Literal, NamedTuple

import jax

from braidax.errors import ArgumentError
from braidax.gang import Gang
from braidax.program.coordination import coordination

from .launched import call_servers, launched_servers, note_world, why_not_replaced
from .meeting import Meeting, find_meeting
from .owning import Owner, owning
from .world import World

_TIMEOUT_SECONDS = 120.0


class Joined(NamedTuple):
    """A world of servers and those who train.

    **Fields:** `world`. `meeting`: by which it was joined. `worker`: which of those who train this is. `bringers`:
    among how many workers, the first ones, whole tables are divided when these are read and written. `owner`: of the
    gang whose ranks serve, where this process has it. `kept`: is closed when the world is. `why_not`: as of
    `Replacing`.
    """

    world: World
    meeting: Meeting
    worker: int
    bringers: int
    owner: Owner | None = None
    kept: contextlib.ExitStack | None = None
    why_not: str = ""


def join_with_processes(gang: Gang | None, *, copies: int = 1, timeout_seconds: float = _TIMEOUT_SECONDS) -> Joined:
    """Joins servers as the processes of one JAX do, all of which call it.

    **Arguments:** `gang`: which runs; its ranks serve, and do nothing else meanwhile. None in all processes but the
    first, and in that one for the servers of `braidax launch`. `copies`: on how many servers lies whatever is on one.
    `timeout_seconds`: the limit of each wait.

    **Raises:** as `Gang.submit`, and as `comm.connect`. `ArgumentError` where the processes are not those of the job.
    """
    size, worker = jax.process_count(), jax.process_index()
    service = coordination() if size > 1 else None
    others = None if service is None else service.numbered("tables")
    if worker > 0:
        assert others is not None, "there are several processes"
        meeting = find_meeting(others, timeout_seconds=timeout_seconds)
        return Joined(World(meeting, worker), meeting, worker, size)
    if gang is None and launched_servers():
        _check_one_jax(size)
        meeting = call_servers(num_workers=size, timeout_seconds=timeout_seconds, copies=copies)
        if others is not None:
            others.set("meeting", meeting.to_json())
        return _joined_launched(meeting, worker, size)
    check_gang(gang)
    assert gang is not None, "it was checked"
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(owning(gang, num_workers=size, timeout_seconds=timeout_seconds, others=others))
        world = World(owner.meeting, worker)
        return Joined(world, owner.meeting, worker, size, owner, stack.pop_all())


def _joined_launched(meeting: Meeting, worker: int, bringers: int) -> Joined:
    """Joins servers of `braidax launch`, once all others do."""
    world = World(meeting, worker)
    note_world(world)
    return Joined(world, meeting, worker, bringers, why_not=why_not_replaced())


def _check_one_jax(num_processes: int) -> None:
    """Raises `ArgumentError` where the processes that `braidax launch` has started each have a JAX of their own."""
    launched = int(os.environ["BRAIDAX_SIZE"])
    if num_processes != launched:
        raise ArgumentError(
            f"jax.process_count() is {num_processes}, and braidax launch has started {launched} processes: expected "
            f'one JAX of all for Hybrid(tables="servers"); leave --initialize nothing out, or use ParameterServers'
        )


def num_servers_of(servers: Any) -> int:
    """Returns how many servers a worker is given. **Raises:** `ArgumentError` as `join_alone`."""
    if servers is None and (launched := launched_servers()):
        return launched
    if isinstance(servers, Meeting):
        return servers.num_servers
    check_gang(servers)
    assert servers is not None, "it was checked"
    return servers.size


def join_alone(servers: Gang | Meeting | Any, *, copies: int = 1) -> Joined:
    """Joins servers as a worker does whose JAX is its own.

    **Arguments:** `servers`: a gang, of a run with one worker, or a meeting that says which worker this is; None: those
    of `braidax launch`, each of whose processes is a worker. `copies`: as of `join_with_processes`.

    **Raises:** as `join_with_processes`.
    """
    if jax.process_count() > 1:
        raise ArgumentError(
            f"jax.process_count() is {jax.process_count()}, and workers of ParameterServers each have a JAX of their "
            f"own: leave jax.distributed.initialize out, which braidax launch does with --initialize nothing, or train "
            f'all processes together by Hybrid(tables="servers")'
        )
    if servers is None and launched_servers():
        worker, size = int(os.environ["BRAIDAX_RANK"]), int(os.environ["BRAIDAX_SIZE"])
        meeting = call_servers(num_workers=size, timeout_seconds=_TIMEOUT_SECONDS, copies=copies)
        return _joined_launched(meeting, worker, 1)
    if not isinstance(servers, Meeting):
        return join_with_processes(servers)
    if servers.worker is None:
        raise ArgumentError(
            f"servers is a meeting of {servers.num_workers} workers that does not say which this is: expected "
            f"servers=meeting.of_worker(number)"
        )
    return Joined(World(servers, servers.worker), servers, servers.worker, 1)


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

    **Returns:** a context, which is left when all have come, or later: until then it starts other servers in place of
    lost ones, where the strategy has copies. **Raises:** `ArgumentError`; as `Gang.submit`.
    """
    check_gang(gang)
    if workers < 1:
        raise ArgumentError(f"workers={workers}: expected how many train, 1 or more")
    with owning(gang, num_workers=workers, timeout_seconds=timeout_seconds, reach=reach) as owner:
        yield owner.meeting


def check_gang(gang: Any) -> None:
    """Raises `ArgumentError` for what is no gang that runs."""
    if not isinstance(gang, Gang):
        raise ArgumentError(
            f"servers is {gang!r}, expected a gang whose ranks will have the tables: "
            f"with bx.gang.LocalGang(2) as gang: bx.parallelize(…, servers=gang)"
        )
