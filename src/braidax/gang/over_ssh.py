"""Launching on many hosts: a connection of ssh to each, and behind it a process that starts the ranks of the host."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import TextIOBase
from pathlib import Path

from braidax.comm import TcpStoreServer
from braidax.comm.environment import without_place
from braidax.comm.stores.tcp_frames import url
from braidax.errors import ArgumentError, GangError
from braidax.gang.hosts import Host
from braidax.gang.launch import (
    GRACE_SECONDS,
    Failed,
    Job,
    check_grace,
    first_failed,
    repeated,
    started,
    tell_of_killed,
    tell_of_stop,
)
from braidax.gang.processes import MAX_STDIN_BYTES, Command, Ending, Processes, Stream, print_lines
from braidax.gang.program import Program, Seat
from braidax.gang.remote import FORCE_SECONDS, STOP, order, read_report
from braidax.gang.routes import address_towards

FORWARDED = ("BRAIDAX_", "JAX_", "XLA_", "NCCL_", "UCX_", "TF_", "PYTHON")
"""What the names of variables begin with that hosts get from the launching machine."""

_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
)
_ASK_SECONDS = 30.0  # for ssh to read its configuration
_LEAVE_SECONDS = 2 * FORCE_SECONDS  # for a host to end its ranks


@dataclass(frozen=True)
class Remote:
    """How to reach hosts.

    **Arguments:** `ssh`: the command with its options, as a shell takes it; the host comes behind it. `address`: of
    this machine, as the hosts reach it; None asks the system for the route to each. `python`: the interpreter on the
    hosts, where braidax is installed.
    """

    ssh: str = "ssh"
    address: str | None = None
    python: str = field(default_factory=lambda: sys.executable)


def launch_over_ssh(
    program: Program,
    hosts: Sequence[Host],
    *,
    remote: Remote,
    restarts: int = 0,
    transport: str = "tcp",
    grace_seconds: float = GRACE_SECONDS,
    log: TextIOBase | None = None,
) -> int:
    """Runs a program on hosts: a process for each device that is named, or one on a host where none is.

    It runs in the folder of the same name there. Of the variables of this process the hosts get those whose names begin
    with one of `FORWARDED`, and none on a command line.

    **Arguments:** `restarts`, `transport`, `grace_seconds`, `log`: as `launch_here` takes them.

    **Returns:** the exit code of the rank that failed first in the last epoch, 255 for a host that cannot be reached.
    **Raises:** `ArgumentError`, `GangError` when it cannot be started.
    """
    check_grace(grace_seconds)
    addresses = [remote.address or address_towards(_hostname(remote.ssh, host.name)) for host in hosts]
    listened = addresses[0] if remote.address is None and len(set(addresses)) == 1 else ""
    seats, job = _seats(hosts), Job.new(transport)

    with TcpStoreServer(host=listened, secret=job.secret) as server:
        port = int(server.address.rpartition(":")[2])

        def run(epoch: int) -> Failed | None:
            told = [job.environment(url(address, port), epoch) for address in addresses]
            here = job.environment(url(listened or "127.0.0.1", port), epoch)
            commands = [
                _command(remote, host, _ordered(program, host, host_seats, variables, grace_seconds))
                for host, host_seats, variables in zip(hosts, seats, told, strict=True)
            ]
            epoch_run = _Epoch(hosts, seats, log)

            def stop(processes: Processes) -> None:
                tell_of_stop(grace_seconds, log)
                processes.tell(STOP)
                processes.wait_for_all(grace_seconds + _LEAVE_SECONDS)
                tell_of_killed(epoch_run.killed, log)

            with started(commands, epoch_run.write, stop=stop, leave_seconds=_LEAVE_SECONDS) as processes:
                return epoch_run.wait(processes, here)

        return repeated(run, restarts, log)


class _Epoch:
    """What the hosts tell while an epoch runs."""

    def __init__(self, hosts: Sequence[Host], seats: Sequence[Sequence[Seat]], log: TextIOBase | None) -> None:
        self._hosts = hosts
        self._seats = seats
        self._reports: list[tuple[int, Ending]] = []
        self._plain = print_lines([""] * len(hosts), log)
        self._named = print_lines([f"[{host.name}] " for host in hosts], log)
        self._processes: Processes | None = None

    def write(self, number: int, stream: Stream, line: str) -> None:
        """Passes on the lines of ranks and of ssh itself, and keeps the reports."""
        report = read_report(line) if stream == "stdout" else None
        if report is not None:
            self._reports.append((number, report))
            if self._processes is not None:
                self._processes.wake()
        else:
            (self._plain if line.startswith("[") else self._named)(number, stream, line)

    def wait(self, processes: Processes, told: dict[str, str]) -> Failed | None:
        """Waits until a rank failed or all hosts are done.

        **Arguments:** `told`: the variables of the epoch, for this machine.
        """
        self._processes = processes
        num_alive = len(self._hosts)
        while not self._reports and num_alive:
            for ending in processes.wait(timeout_seconds=None):
                if ending.status != 0 and not self._reports:
                    host = self._hosts[ending.number].name
                    return Failed(f"host {host}", f"{ending.how} as ssh says", ending.log, ending.exit_code)
                num_alive -= 1
        if not self._reports:
            return None
        first = first_failed(
            lambda: [(self._rank(number, report), report.status) for number, report in list(self._reports)],
            lambda seconds: processes.wait(timeout_seconds=seconds),
            told,
        )
        number, report = next(each for each in self._reports if self._rank(*each) == first)
        where = f"rank {first} (host {self._hosts[number].name}, pid {report.pid})"
        return Failed(where, report.how, report.log, report.exit_code)

    @property
    def killed(self) -> list[int]:
        """The ranks that were killed as far as is known."""
        return [self._rank(*each) for each in self._reports if each[1].status == -signal.SIGKILL]

    def _rank(self, number: int, report: Ending) -> int:
        return self._seats[number][report.number].rank


def _seats(hosts: Sequence[Host]) -> list[list[Seat]]:
    size = sum(host.num_processes for host in hosts)
    found: list[list[Seat]] = []
    rank = 0
    for host in hosts:
        devices = [str(device) for device in host.devices] or [None]
        found.append(
            [Seat(rank + place, size, place, host.num_processes, device) for place, device in enumerate(devices)]
        )
        rank += host.num_processes
    return found


def _ordered(program: Program, host: Host, seats: Sequence[Seat], told: dict[str, str], grace_seconds: float) -> bytes:
    """Returns what a host is told to start."""
    forwarded = {name: text for name, text in without_place(os.environ).items() if name.startswith(FORWARDED)}
    ordered = order(
        [
            (
                program.command,
                {"PYTHONUNBUFFERED": "1", **forwarded, **told, **seat.environment},
                f"[{seat.rank} {host.name}] ",
            )
            for seat in seats
        ],
        str(Path.cwd()),
        grace_seconds,
    )
    if len(ordered) > MAX_STDIN_BYTES:
        raise ArgumentError(
            f"what host {host.name} is told has {len(ordered):,} bytes, more than {MAX_STDIN_BYTES:,}; set fewer or "
            f"shorter environment variables that begin with {', '.join(FORWARDED)}"
        )
    return ordered


def _command(remote: Remote, host: Host, ordered: bytes) -> Command:
    there = f"exec {shlex.quote(remote.python)} -P -m braidax.gang.remote"
    return Command((*_ssh(remote.ssh), *_OPTIONS, host.name, there), os.environ, stdin=ordered)


def _ssh(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ArgumentError(f"ssh={command!r}: {error}; expected a command such as 'ssh -p 2222'") from error
    if not words:
        raise ArgumentError("ssh='': expected a command such as 'ssh -p 2222'")
    return words


def _hostname(ssh: str, host: str) -> str:
    """Returns the name that ssh connects to: its configuration may have another one for a host."""
    try:
        asked = subprocess.run(
            [*_ssh(ssh), "-G", host], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GangError(
            f"ssh={ssh!r} cannot be run ({error}); install OpenSSH's client, or name another command"
        ) from error
    for line in asked.stdout.splitlines() if asked.returncode == 0 else []:
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value
    return host.rpartition("@")[2]
