"""Messages between ranks on one host: ours over TCP and UCX, mpi4py, gloo, Ray's object store, Dask.

Latency and bandwidth, all_to_all and all_reduce for 2 and 4 ranks, objects between workers, from start to first
barrier, and what waiting costs. Each system has processes of its own; one measures while the others sleep.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.comm.objects import DASK, RAY_FAR, RAY_NEAR, Transfer, dask_transfers, ray_transfers
from benchmarks.comm.starting import LOCAL, starts
from benchmarks.comm.tables import Comparison, Pair, named
from benchmarks.comm.worlds import DEFAULT, GLOO, MPI, TAKING_TURNS, TCP, UCX, UCX_TCP, World, Worlds
from benchmarks.harness import Report, arguments, run, say, take_turns

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TCP_GLOO, UCX_MPI, UCX_TCP_GLOO = (
    Pair(TCP, (GLOO,), "gloo"),
    Pair(UCX, (MPI,), "mpi4py"),
    Pair(UCX_TCP, (GLOO,), "gloo"),
)
PAIRS = (TCP_GLOO, UCX_MPI, UCX_TCP_GLOO)
# Ray transfers objects between nodes; inside a node it only maps what lies in shared memory. All are on this host.
DEFAULT_RAY, DEFAULT_DASK = Pair(DEFAULT, RAY_FAR, "Ray, 2 nodes"), Pair(DEFAULT, (DASK,), "Dask")
OBJECT_PAIRS = (
    DEFAULT_RAY,
    Pair(TCP, RAY_FAR, "Ray, 2 nodes"),
    Pair(DEFAULT, RAY_NEAR, "Ray"),
    Pair(UCX, RAY_NEAR, "Ray"),
    DEFAULT_DASK,
)
COMPARED_BYTES = 16 * MIB  # of vs_ray and vs_dask


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
)
QUICK = Scale((2,), (8, MIB, 16 * MIB), (8, MIB), (16 * MIB,), rounds=2, start_rounds=1, seconds=0.03, idle_seconds=0.5)


def main() -> int:
    parser = arguments("comm", __doc__ or "", [*CASES, *ALONE])
    options = parser.parse_args()
    scale, report = QUICK if options.quick else FULL, Report(options)
    chosen = options.only or [*CASES, *ALONE]
    for size in scale.sizes:
        with Worlds(size) as worlds:
            for name in chosen:
                if name in CASES:
                    CASES[name](report, scale, worlds)
    for name in chosen:
        if name in ALONE:
            ALONE[name](report, scale)
    return report.finish()


def _messages(report: Report, scale: Scale, worlds: Worlds) -> None:
    """One message there and back again, between each pair of ranks at once."""
    comparison = Comparison(f"messages, {worlds.size} ranks", "one way", PAIRS)
    # Memory is now and then half as fast for a round, for whoever is at it: the claims need more rounds than the rest.
    times = 3 if worlds.size == 2 else 1
    _measure(report, scale, worlds, comparison, "ping_pong", scale.message_bytes, times=times)
    if worlds.size == 2:
        large = [num_bytes for num_bytes in scale.message_bytes if num_bytes >= MIB]
        report.at_least("ucx_bandwidth", min(comparison.ratio(num_bytes, UCX_MPI) for num_bytes in large), 0.9)
        report.at_most("ucx_latency", 1 / comparison.ratio(8, UCX_MPI), 2)
        report.at_least("tcp_bandwidth", min(comparison.ratio(num_bytes, TCP_GLOO) for num_bytes in large), 0.9)


def _all_to_all(report: Report, scale: Scale, worlds: Worlds) -> None:
    """Each rank has something for each other one; `bytes` is all that one has."""
    comparison = Comparison(f"all_to_all, {worlds.size} ranks", "time", PAIRS)
    _measure(report, scale, worlds, comparison, "all_to_all", scale.collective_bytes)


def _all_reduce(report: Report, scale: Scale, worlds: Worlds) -> None:
    """The sum of float32 arrays."""
    comparison = Comparison(f"all_reduce, {worlds.size} ranks", "time", PAIRS)
    _measure(report, scale, worlds, comparison, "all_reduce", scale.collective_bytes)


def _objects(report: Report, scale: Scale, worlds: Worlds) -> None:
    """An array from a worker process to another one."""
    if worlds.size != 2:
        return
    comparison = Comparison("objects, 2 workers", "one way", OBJECT_PAIRS)
    with ray_transfers(store_bytes=3 * GIB // 2) as ray, dask_transfers() as dask:
        ours = {name: _asking(world, "ping_pong") for name, world in worlds.of([TCP, DEFAULT, UCX]).items()}
        for num_bytes in scale.object_bytes:
            running, rounds = {**ours, **ray, **dask}, scale.rounds_of(num_bytes, worlds.size)
            _turns(report, comparison, running, num_bytes, rounds=rounds, seconds=3 * scale.seconds)
    comparison.show()
    report.at_least("vs_ray", comparison.ratio(COMPARED_BYTES, DEFAULT_RAY), 5)
    report.at_least("vs_dask", comparison.ratio(COMPARED_BYTES, DEFAULT_DASK), 5)


def _start(report: Report, scale: Scale) -> None:
    """From nothing to behind the first barrier."""
    with starts() as running:
        figures = take_turns(running, rounds=scale.start_rounds)
    say(f"  start: {', '.join(f'{name} {statistics.median(values):.2f}' for name, values in figures.items())} s")
    for name, seconds in figures.items():
        report.add("start, 4 ranks", name, "to the first barrier", "s", seconds)
    report.at_most("start", statistics.median(figures[LOCAL]), 2)


def _idle(report: Report, scale: Scale, worlds: Worlds) -> None:
    """What ranks use that do nothing, and that wait for a message: the one that uses most."""
    if worlds.size != max(scale.sizes):
        return
    running = worlds.of(list(TAKING_TURNS))
    medians: dict[str, float] = {}
    for loop, case in (("connected", "connected"), ("receiving", "waiting for a message")):
        asked = {name: _idling(world, loop, scale.idle_seconds) for name, world in running.items()}
        for name, shares in take_turns(asked, rounds=min(3, scale.rounds)).items():
            median = report.add(
                f"{case}, {worlds.size} ranks", name, "of a core", "%", [100 * share for share in shares]
            )
            medians[name] = max(median, medians.get(name, 0.0))
    report.at_most("idle", max(medians[name] for name in (TCP, UCX, UCX_TCP)), 2)


CASES: Mapping[str, Callable[[Report, Scale, Worlds], None]] = {
    "messages": _messages,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "objects": _objects,
    "idle": _idle,
}
ALONE: Mapping[str, Callable[[Report, Scale], None]] = {"start": _start}


def _measure(
    report: Report,
    scale: Scale,
    worlds: Worlds,
    comparison: Comparison,
    loop: str,
    sizes: Sequence[int],
    *,
    times: int = 1,
) -> None:
    running = {name: _asking(world, loop) for name, world in worlds.of(list(TAKING_TURNS)).items()}
    for num_bytes in sizes:
        rounds = times * scale.rounds_of(num_bytes, worlds.size)
        _turns(report, comparison, running, num_bytes, rounds=rounds, seconds=scale.seconds)
    comparison.show()


def _turns(
    report: Report,
    comparison: Comparison,
    running: Mapping[str, Transfer],
    num_bytes: int,
    *,
    rounds: int,
    seconds: float,
) -> None:
    began = time.perf_counter()
    steady = {name: _steady(run, num_bytes, seconds) for name, run in running.items()}
    figures = take_turns(steady, rounds=rounds)
    comparison.add(report, num_bytes, figures)
    medians = ", ".join(f"{name} {1e6 * statistics.median(values):,.1f}" for name, values in figures.items())
    say(f"  {comparison.title}, {named(num_bytes)}: {medians} us ({time.perf_counter() - began:.1f} s)")


def _steady(run: Transfer, num_bytes: int, seconds: float) -> Callable[[], float]:
    """Returns what measures for so many seconds, which it finds out how to by a first try."""
    if num_bytes >= 64 * MIB:
        return lambda: run(num_bytes, 1)
    tried = run(num_bytes, 3)
    count = int(min(max(2.0, seconds / max(tried, 1e-6) / 2), 20_000))
    run(num_bytes, max(1, count // 4))
    return lambda: run(num_bytes, count)


def _asking(world: World, loop: str) -> Transfer:
    return lambda num_bytes, count: max(world.ask(loop, num_bytes, count))


def _idling(world: World, loop: str, seconds: float) -> Callable[[], float]:
    return lambda: max(world.ask(loop, seconds))


if __name__ == "__main__":
    run(main)
