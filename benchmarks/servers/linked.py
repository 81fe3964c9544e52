"""Steps of several processes over links of a bandwidth: each has a host of its own, a network namespace."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

from benchmarks.harness import Report, models, say, take_turns
from benchmarks.harness.namespaces import Network, reason_against
from benchmarks.servers.link_worker import NUM_BATCHES, PS, PS_ASYNC, WAIT_SECONDS
from benchmarks.servers.steps import AHEAD, DENSE, LATE, ROWS, SERVERS

_PORT = 47_771  # of hosts that nobody else is on
_GIGABIT = 1_000_000_000
_CLAIMED = 10  # Gbit/s
_AT = f"{_CLAIMED} Gbit/s"
_WORKERS = 2
_WAITING_STEPS = 24  # of which the last ones are waited for, with what they push

Given = tuple[str, Sequence[Any], dict[str, Any]]
"""A model: its name, sizes of which the batch of a process is the last, and options."""


def linked_cases(report: Report, *, quick: bool) -> dict[str, tuple[str, str, int]]:
    """Measures tables by rows, on servers, all variables on servers, and whole gradients, beside one another.

    **Returns:** as `draw` takes it: what is counted, in which case and line, and how many of it a step has.
    """
    if _cannot(report, {"hybrid_dense": ">= 2.5", "hybrid_ps": ">= 1.2", "stall": "<= 0.02"}):
        return {}
    rounds = 2 if quick else 4
    gigabits = (10,) if quick else (10, 1)
    tables: Given = ("lm1b", (20_000, 32, 32) if quick else (793_470, 128, 256), {})
    every = (ROWS, SERVERS, DENSE), (PS, PS_ASYNC)
    case = f"step, {_WORKERS} processes, {_in_words(tables)}"
    counted = {"LM1B, words": (case, _AT, _WORKERS * tables[1][-1] * models.STEPS)}
    _measure(report, case, tables, every, gigabits=gigabits, rounds=rounds)
    report.against("hybrid_dense", case, "time", ours=ROWS, peers=[DENSE], at=[_AT], at_least=2.5)
    wide: Given = ("lm1b", (20_000, 32, 4) if quick else (793_470, 128, 4), {"state": 128 if quick else 2048})
    case = f"step, {_WORKERS} processes, {_in_words(wide)}"
    many = 2 if quick else 13  # of what is quick: it differs by less than one round does from the next
    _measure(report, case, wide, every, gigabits=(10,), rounds=many, longest_seconds=5.0)
    report.against("hybrid_ps", case, "time", ours=ROWS, peers=[PS], at=[_AT], at_least=1.2)
    for model in (
        ("lm1b", (3_000, 64, 2) if quick else (36_549, 512, 2), {"state": 128 if quick else 8192}),
        ("dlrm", (3_000 if quick else 1_000_000, 64 if quick else 1024), {}),
    ):
        case = f"step, {_WORKERS} processes, {_in_words(model)}"
        _measure(report, case, model, every, gigabits=(10,), rounds=rounds)
    for num_workers in (1, 3) if quick else (1, 2, 3, 4):
        small: Given = ("lm1b", (20_000, 32, 32) if quick else (200_000, 64, 64), {})
        case = f"step by workers, {_in_words(small)}"
        groups = ((ROWS, SERVERS), (PS, PS_ASYNC))
        _measure(report, case, small, groups, gigabits=(10,), rounds=rounds, num_workers=num_workers)
    case = f"step of {1e3 * WAIT_SECONDS:.0f} ms, {_WORKERS} processes, {_in_words(tables)}"
    found = _measure(
        report, case, tables, ((AHEAD, LATE),), gigabits=(10,), rounds=rounds, waits=3 if quick else _WAITING_STEPS
    )
    report.at_most("stall", [1 - WAIT_SECONDS / seconds for seconds in found[LATE]], 0.02)
    return counted


def image_cases(report: Report, *, quick: bool) -> dict[str, tuple[str, str, int]]:
    """Measures a network of which nothing is read by rows, with BatchNorm, which parameter servers refuse, and with
    GroupNorm. **Returns:** as `linked_cases`, of the second."""
    if _cannot(report, {"resnet_equal": ">= 0.97"}):
        return {}
    counted: dict[str, tuple[str, str, int]] = {}
    sizes, rounds = ((1, 1, 1, 1), 32, 2) if quick else ((3, 4, 6, 3), 64, 4), 4 if quick else 16
    for norm, groups in (("batch", ((ROWS, DENSE),)), ("group", ((ROWS, DENSE), (PS, PS_ASYNC)))):
        images: Given = ("resnet", sizes, {"norm": norm})
        case = f"step, {_WORKERS} processes, {_in_words(images)}"
        counted["ResNet-50, images"] = (case, _AT, _WORKERS * sizes[-1])
        _measure(report, case, images, groups, gigabits=(10,), rounds=rounds)
        if norm == "batch":
            report.against("resnet_equal", case, "time", ours=ROWS, peers=[DENSE], at=[_AT], at_least=0.97)
    return counted


def _cannot(report: Report, claims: Mapping[str, str]) -> bool:
    """Returns whether there are no links here, and says so of claims."""
    if reason := reason_against():
        report.missing("step over links", DENSE, reason)
        for claim, target in claims.items():
            report.not_measured(claim, target, reason)
    return bool(reason)


def _in_words(model: Given) -> str:
    name, (*sizes, batch), options = model
    told = ", ".join([*map(str, sizes), *(f"{one} {value}" for one, value in options.items())])
    return f"{name} {told}, batches of {batch}"


def _measure(
    report: Report,
    case: str,
    model: Given,
    groups: Sequence[Sequence[str]],
    *,
    gigabits: Sequence[int],
    rounds: int,
    waits: int = 0,
    num_workers: int | None = None,
    longest_seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Measures systems over links.

    **Arguments:** `groups`: of systems that the same processes run. `waits`: how many steps that wait are timed, 0 for
    others. `num_workers`: of this line, where lines of a case differ by that. `longest_seconds`: see `take_turns`.

    **Returns:** seconds by system over the last links.
    """
    found: dict[str, list[float]] = {}
    size = _WORKERS if num_workers is None else num_workers
    with Network(size) as network, ExitStack() as stack:
        network.name_hosts()
        systems: dict[str, _Workers] = {}
        for number, group in enumerate(groups):
            num_steps = waits or NUM_BATCHES
            given = {"model": model, "systems": group, "waits": bool(waits), "servers": size, "num_steps": num_steps}
            workers = stack.enter_context(_Workers(network, given, _PORT + number))
            systems |= dict.fromkeys(group, workers)
        for gigabit in gigabits:
            at = f"{gigabit} Gbit/s" if num_workers is None else f"{size} workers"
            for host in range(size):
                network.limit(host, gigabit * _GIGABIT)
            say(f"{case}: links of {gigabit} Gbit/s")
            turns = {name: partial(one.take, name) for name, one in systems.items()}
            taken = take_turns(turns, rounds=rounds, longest_seconds=longest_seconds)
            for name, seconds in taken.items():
                found[name] = seconds[1:]
                report.add(case, name, "time", "ms", [1e3 * one for one in found[name]], at=at)
            for name, workers in systems.items():
                report.add(case, name, "sent by a host", "MB", [workers.sent[name] / 1e6], at=at)
    return found


@final
class _Workers:
    """Processes, one a host. **Fields:** `sent`: bytes a step that the host which sent most has, by system."""

    def __init__(self, network: Network, given: dict[str, Any], port: int) -> None:
        self._network, self.sent, self._num_steps = network, dict[str, float](), given["num_steps"]
        self._num_meetings = sum(name in (PS, PS_ASYNC) for name in given["systems"])
        size = len(network.hosts)
        given = {**given, "coordinator": f"{network.addresses[0]}:{port}", "size": size}
        self._processes = [
            subprocess.Popen(
                [
                    *network.prefix(rank),
                    sys.executable,
                    "-m",
                    "benchmarks.servers.link_worker",
                    json.dumps({**given, "rank": rank}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PJRT_NPROC": "8"},
            )
            for rank in range(size)
        ]

    def take(self, system: str) -> float:
        """Returns seconds a step of a system."""
        before = self._counted()
        for process in self._processes:
            _tell(process, system)
        found = [float(self._read(process)) for process in self._processes]
        sent = [now - then for now, then in zip(self._counted(), before, strict=True)]
        self.sent[system] = max(sent) / self._num_steps
        return max(found)

    def _counted(self) -> list[int]:
        return [self._network.sent(host) for host in range(len(self._processes))]

    def _read(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None, "it is a pipe"
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a process that trains over links ended with {process.wait()}")
        return line

    def __enter__(self) -> "_Workers":
        first, *others = self._processes
        for _ in range(self._num_meetings):
            meeting = self._read(first)
            for process in others:
                _tell(process, meeting)
        for process in self._processes:
            assert self._read(process) == "ready", "it says so when its steps are compiled"
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):  # who has the service that the others ask goes last
            process.kill()
            process.wait()


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
