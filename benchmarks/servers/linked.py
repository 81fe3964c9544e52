"""Steps of several processes over links of a bandwidth: each has a host of its own, a network namespace."""

import json
import os
import subprocess
import sys
from functools import partial
from typing import final

from benchmarks.harness import Report, models, say, take_turns
from benchmarks.harness.namespaces import Network, reason_against
from benchmarks.servers.link_worker import NUM_BATCHES
from benchmarks.servers.steps import DENSE, ROWS, SERVERS

_PORT = 47_771  # of hosts that nobody else is on
_GIGABIT = 1_000_000_000
_CLAIMED = 10  # Gbit/s


def linked_case(
    report: Report, sizes: tuple[int, int, int], *, workers: int, gigabits: tuple[int, ...], rounds: int
) -> None:
    """Measures rows on devices, tables on servers, and whole gradients, beside one another.

    **Arguments:** `sizes`: of LM1B: words, width, sequences of a process's batch.
    """
    words, width, batch = sizes
    model = models.lm1b(words, width, batch * workers)
    case = f"step, {workers} processes, {model.name}"
    if reason := reason_against():
        report.missing(case, DENSE, reason)
        report.not_measured("hybrid_dense", ">= 2.5", reason)
        return
    with Network(workers) as network:
        network.name_hosts()
        with _Workers(network, (words, width, batch * workers)) as processes:
            for gigabit in gigabits:
                for host in range(workers):
                    network.limit(host, gigabit * _GIGABIT)
                say(f"links of {gigabit} Gbit/s")
                at = f"{gigabit} Gbit/s"
                systems = {name: partial(processes.take, name) for name in (ROWS, SERVERS, DENSE)}
                for name, seconds in take_turns(systems, rounds=rounds).items():
                    report.add(case, name, "time", "ms", [1e3 * one for one in seconds[1:]], at=at)
                for name in systems:
                    report.add(case, name, "sent by a host", "MB", [processes.sent[name] / 1e6], at=at)
    report.against("hybrid_dense", case, "time", ours=ROWS, peers=[DENSE], at=[f"{_CLAIMED} Gbit/s"], at_least=2.5)


@final
class _Workers:
    """The processes, one a host. **Fields:** `sent`: bytes a step that the host which sent most has, by system."""

    def __init__(self, network: Network, model: tuple[int, int, int]) -> None:
        self._network, self.sent = network, dict[str, float]()
        size = len(network.hosts)
        given = {"coordinator": f"{network.addresses[0]}:{_PORT}", "size": size, "model": model, "servers": size}
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
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(f"{system}\n")
            process.stdin.flush()
        found = [float(self._read(process)) for process in self._processes]
        sent = [now - then for now, then in zip(self._counted(), before, strict=True)]
        self.sent[system] = max(sent) / NUM_BATCHES
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
        for process in self._processes:
            assert self._read(process) == "ready", "it says so when its steps are compiled"
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):  # who has the service that the others ask goes last
            process.kill()
            process.wait()
