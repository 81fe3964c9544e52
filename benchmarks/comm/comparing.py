"""Which systems are compared: shared memory with shared memory, TCP with TCP, and what each does when nothing is said.

All ranks are on one host.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.comm.objects import DASK, RAY_FAR, RAY_NEAR
from benchmarks.comm.worlds import DEFAULT, GLOO, MPI, MPI_TCP, NEEDS, NO_LAUNCHER, TCP, UCX, UCX_TCP, launcher
from benchmarks.harness import Report, installed

MIB = 1 << 20
OBJECT_NEEDS = {**dict.fromkeys((*RAY_FAR, *RAY_NEAR), "ray"), DASK: "distributed"}
_Running = TypeVar("_Running")


@dataclass(frozen=True)
class Way:
    """How bytes travel, and who is compared there.

    **Fields:** `name`; `ours`; `peers`, which take the same way. `small`, `large`: of messages below 1 MiB, and of
    larger ones, how many times as fast as the best peer ours is to be.
    """

    name: str
    ours: str
    peers: Sequence[str]
    small: float = 1
    large: float = 1


WAYS = (
    Way("tcp", TCP, (GLOO, MPI_TCP), large=0.9),
    Way("ucx_tcp", UCX_TCP, (GLOO, MPI_TCP)),
    Way("shared", UCX, (MPI,), small=0.5, large=0.9),
    Way("default", DEFAULT, (MPI, GLOO)),
)
"""Of messages and collectives."""

OBJECT_WAYS = (
    Way("tcp", TCP, (*RAY_FAR, DASK)),
    Way("shared", UCX, RAY_NEAR),
    Way("default", DEFAULT, (*RAY_NEAR, DASK)),
)
"""Of objects between workers. Ray's nodes and Dask's workers use TCP; inside a node Ray's store is shared memory."""


def present(report: Report, case: str, running: Mapping[str, _Running]) -> dict[str, _Running]:
    """Returns the systems whose packages are there, and `mpirun` for those that it starts; others are said."""
    found = installed(report, case, running, {**NEEDS, **OBJECT_NEEDS})
    for name in (MPI, MPI_TCP):
        if name in found and launcher() is None:
            report.missing(case, name, NO_LAUNCHER)
            del found[name]
    return found


def claim_messages(report: Report, case: str, claim: str, metric: str, sizes: Sequence[int]) -> None:
    """Claims for each way how messages below 1 MiB compare, and larger ones."""
    parts: tuple[tuple[str, Callable[[Way], float], list[str]], ...] = (
        ("small", lambda way: way.small, [named(size) for size in sizes if size < MIB]),
        ("large", lambda way: way.large, [named(size) for size in sizes if size >= MIB]),
    )
    for way in WAYS:
        for part, target, lines in parts:
            if lines:
                name = f"{claim}_{way.name}_{part}"
                report.against(name, case, metric, ours=way.ours, peers=way.peers, at=lines, at_least=target(way))


def claim_collectives(report: Report, loops: Sequence[str], num_ranks: Sequence[int], metric: str, few: bool) -> None:
    """Claims that collectives of ours that fill an array are about as fast as the peers', over TCP and shared memory.

    **Arguments:** `few`: whether few sizes are measured: then the larger ones are those that are.
    """
    cases = [f"{loop}, {size} ranks" for loop in loops for size in num_ranks]
    compared = [(case, *way) for case in cases for way in ((TCP, (GLOO,)), (UCX, (MPI,)))]
    sizes = ["1 MiB"] if few else ["8 KiB", "1 MiB", "64 MiB"]
    report.against_everywhere("collectives", compared, metric, at=sizes, at_least=0.9)
    report.against_everywhere("collectives_small", compared, metric, at=["8 B"], at_least=0.4)


def claim_ways(report: Report, case: str, claim: str, metric: str, ways: Sequence[Way]) -> None:
    """Claims for each way that ours is as fast as the best peer, at all sizes."""
    for way in ways:
        report.against(f"{claim}_{way.name}", case, metric, ours=way.ours, peers=way.peers)


def named(num_bytes: int) -> str:
    """Returns `16 MiB` for 16,777,216."""
    power = min(3, int(math.log2(num_bytes)) // 10)
    return f"{num_bytes >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"
