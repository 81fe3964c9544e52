"""Streams between ranks beside plain sockets, their memory, and requests beside messages there and back."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.comm.comparing import MIB, named
from benchmarks.comm.worlds import DEFAULT, TCP, UCX, World, Worlds
from benchmarks.harness import Report, say, take_turns

SOCKET, SOCKET_TCP = "a plain socket", "a plain socket, tcp"
WINDOW_BYTES = 64 * MIB
SIZES = (1 << 10, 1 << 16, MIB, 16 * MIB)
_OURS = (DEFAULT, TCP, UCX)
_FAMILIES = {SOCKET: (DEFAULT, "unix"), SOCKET_TCP: (TCP, "tcp")}
_LEAST_GB = 1.0
_OF_A_SOCKET = 0.8
_OF_THE_WINDOW = 1.1
_OF_PING_PONG = 1.5
_RATE = "an item"


def streams(report: Report, worlds: Worlds, *, total_bytes: int, rounds: int) -> None:
    """Lists of one buffer from even ranks to odd ones, all pairs at once."""
    case = f"streams, {worlds.size} ranks"
    found = worlds.of(_OURS)
    for num_bytes in SIZES:
        window_bytes = max(WINDOW_BYTES, 2 * worlds.size * num_bytes)
        count = max(4, (total_bytes if num_bytes > 1 << 10 else total_bytes // 16) // num_bytes)
        running: dict[str, Callable[[], float]] = {
            name: partial(_slowest, world, "stream", num_bytes, count, window_bytes) for name, world in found.items()
        }
        for name, (world, family) in _FAMILIES.items():
            running[name] = partial(_slowest, found[world], "plain", num_bytes, count, family)
        for name, seconds in take_turns(running, rounds=rounds).items():
            report.add(case, name, _RATE, "us", [1e6 * each for each in seconds], at=named(num_bytes))
            say(f"  {case}, {named(num_bytes)}: {name} {num_bytes / statistics.median(seconds) / 1e9:.2f} GB/s a pair")
    if worlds.size == 2:
        lines = [named(size) for size in SIZES if size >= MIB]
        for claim, ours, peer in (("exchange", DEFAULT, SOCKET), ("exchange_tcp", TCP, SOCKET_TCP)):
            report.against(claim, case, _RATE, ours=ours, peers=[peer], at=lines, at_least=_OF_A_SOCKET)
    for name in (DEFAULT, TCP, UCX):
        rows = [row for row in report.rows if (row.case, row.system, row.at) == (case, name, named(MIB))]
        rates = [MIB / value / 1e3 for value in rows[0].values]
        report.at_least(f"exchange_rate_{worlds.size}_ranks_{name.split()[-1]}", rates, _LEAST_GB)


def memory(report: Report, worlds: Worlds, *, total_bytes: int) -> None:
    """By how much a rank grows while all send to all, beyond which a window is exceeded."""
    case, most = f"memory of streams, {worlds.size} ranks", 0.0
    for name, world in worlds.of((DEFAULT, UCX)).items():
        for window_bytes in (16 * MIB, WINDOW_BYTES):
            count = total_bytes // MIB
            world.ask("growth", MIB // 4, 8, window_bytes)  # what grows once
            grown = max(world.ask("growth", MIB // 4, 4 * count, window_bytes))
            report.add(case, name, "of the window", "%", [100 * grown / window_bytes], at=named(window_bytes))
            say(f"  {case}, {name}, {named(window_bytes)}: {grown / window_bytes:.2f} of it")
            most = max(most, grown / window_bytes)
    report.at_most(f"exchange_memory_{worlds.size}_ranks", most, _OF_THE_WINDOW)


def asking(report: Report, worlds: Worlds, *, count: int, rounds: int) -> None:
    """Requests of all other ranks to one that gives back what it is asked with."""
    case = f"requests, {worlds.size - 1} who ask"
    ratios: dict[str, float] = {}
    for num_bytes in (8, 1 << 10, 1 << 16, MIB):
        times = count if num_bytes <= 1 << 10 else count // 20
        for name, world in worlds.of((DEFAULT, UCX)).items():
            running: Mapping[str, Callable[[], float]] = {
                "there and back": partial(_there_and_back, world, num_bytes, times),
                name: partial(_slowest, world, "ask", num_bytes, times),
            }
            found = take_turns(running, rounds=rounds)
            for system, seconds in found.items():
                label = name if system == name else f"{name}, {system}"
                report.add(case, label, "a request", "us", [1e6 * each for each in seconds], at=named(num_bytes))
            asked, there = (statistics.median(found[key]) for key in (name, "there and back"))
            say(f"  {case}, {name}, {named(num_bytes)}: {1e6 * asked:.1f} us, there and back {1e6 * there:.1f}")
            if num_bytes <= 1 << 10:
                ratios[name] = max(ratios.get(name, 0.0), asked / there)
    if worlds.size == 2:
        for name, ratio in ratios.items():
            report.at_most(f"ask_{name.split()[-1]}", ratio, _OF_PING_PONG)


def _slowest(world: World, loop: str, *arguments: object) -> float:
    return max(world.ask(loop, *arguments))


def _there_and_back(world: World, num_bytes: int, count: int) -> float:
    return 2 * max(world.ask("ping_pong", num_bytes, count))
