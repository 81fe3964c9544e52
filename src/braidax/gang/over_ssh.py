"""Launching on many hosts: a connection of ssh to each, and behind it a process that starts the ranks of the host."""

import itertools
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
    has_copies,
    repeated,
    started,
    tell_of_copies,
    tell_of_idle,
    tell_of_killed,
    tell_of_stop,
)
from braidax.gang.processes import MAX_STDIN_BYTES, Command, Ending, Processes, Stream, print_lines
from braidax.gang.program import SERVERS, Program, Seat, ServerSeat
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
    """Runs a program on hosts: a process for each device that is named, or one on a host where none is; and servers of
    its tables, where hosts say so.

    It runs in the folder of the same name there. Of the variables of this process the hosts get those whose names begin
    with one of `FORWARDED`, and none on a command line.

    **Arguments:** `restarts`, `transport`, `grace_seconds`, `log`: as `launch_here` takes them.

    **Returns:** the exit code of the rank that failed first in the last generation, 255 for a host that cannot be
    reached.
    **Raises:** `ArgumentError`, `GangError` when it cannot be started.
    """
    check_grace(grace_seconds)
    parties, job = _parties(hosts), Job.new(transport)
    routes = {host: remote.address or address_towards(_hostname(remote.ssh, host.name)) for host in hosts}
    addresses = [routes[party.host] for party in parties]
    listened = addresses[0] if remote.address is None and len(set(addresses)) == 1 else ""
    num_servers = sum(host.num_servers for host in hosts)
    besides = {SERVERS: str(num_servers)} if num_servers else {}

    with TcpStoreServer(host=listened, secret=job.secret) as server:
        port = int(server.address.rpartition(":")[2])

        def run(generation: int) -> Failed | None:
            told = [job.environment(url(address, port), generation) | besides for address in addresses]
            here = job.environment(url(listened or "127.0.0.1", port), generation) | besides
            commands = [
                _command(remote, party.host, _ordered(program, party, variables, grace_seconds))
                for party, variables in zip(parties, told, strict=True)
            ]
            generation_run = _Generation(parties, here, log)

            def stop(processes: Processes) -> None:
                tell_of_stop(grace_seconds, log)
                processes.tell(STOP)
                processes.wait_for_all(grace_seconds + _LEAVE_SECONDS)
                tell_of_killed(generation_run.killed, log)

            with started(commands, generation_run.write, stop=stop, leave_seconds=_LEAVE_SECONDS) as processes:
                return generation_run.wait(processes)

        return repeated(run, restarts, log)


@dataclass(frozen=True)
class _Party:
    """What one connection is for: the ranks of a host, or its servers, which end when all ranks have.

    **Fields:** `host`. `seats`: of them. `numbers`: by which they are told apart, those of all ranks first.
    """

    host: Host
    seats: Sequence[Seat | ServerSeat]
    numbers: Sequence[int]

    @property
    def has_ranks(self) -> bool:
        """Whether it is the ranks of a host."""
        return isinstance(self.seats[0], Seat)

    def name(self, place: int) -> str:
        """Returns what one is called in messages."""
        seat = self.seats[place]
        return f"rank {seat.rank}" if isinstance(seat, Seat) else f"server {seat.number}"

    def prefix(self, place: int) -> str:
        """Returns what its lines begin with."""
        seat = self.seats[place]
        return f"[{seat.rank if isinstance(seat, Seat) else self.name(place)} {self.host.name}] "


class _Generation:
    """What the hosts tell while a generation runs. **Arguments:** `told`: the variables of the generation, for this
    machine."""

    def __init__(self, parties: Sequence[_Party], told: dict[str, str], log: TextIOBase | None) -> None:
        self._parties, self._told, self._log = parties, told, log
        self._reports: list[tuple[int, Ending]] = []  # of those that have failed
        self._spared: set[int] = set()  # parties whose servers the program goes on without, as far as they have failed
        self._plain = print_lines([""] * len(parties), log)
        self._named = print_lines([f"[{party.host.name}] " for party in parties], log)
        self._processes: Processes | None = None

    def write(self, number: int, stream: Stream, line: str) -> None:
        """Passes on the lines of ranks and of ssh itself, and keeps the reports."""
        report = read_report(line) if stream == "stdout" else None
        if report is None:
            (self._plain if line.startswith("[") else self._named)(number, stream, line)
            return
        if self._goes_on_without(number):
            self._spared.add(number)
            tell_of_copies(self._called(number, report), report.how, "", self._log)
            return
        self._reports.append((number, report))
        if self._processes is not None:
            self._processes.wake()

    def wait(self, processes: Processes) -> Failed | None:
        """Waits until one has failed or all ranks have ended."""
        self._processes = processes
        num_alive = sum(party.has_ranks for party in self._parties)
        while not self._reports and num_alive:
            for ending in processes.wait(timeout_seconds=None):
                party = self._parties[ending.number]
                if not self._reports and self._is_failure(ending):
                    return Failed(
                        f"host {party.host.name}", f"{ending.how} as ssh says", ending.log, ending.exit_code or 1
                    )
                num_alive -= party.has_ranks
        if not self._reports:
            if len(self._parties) > sum(party.has_ranks for party in self._parties):
                tell_of_idle(self._told, self._log)
            return None
        first = first_failed(
            lambda: [(self._number(number, report), report.status) for number, report in list(self._reports)],
            lambda seconds: processes.wait(timeout_seconds=seconds),
            self._told,
        )
        number, report = next(each for each in self._reports if self._number(*each) == first)
        return Failed(self._called(number, report), report.how, report.log, report.exit_code or 1)

    def _is_failure(self, ending: Ending) -> bool:
        """Whether a connection has ended that should not have: servers end when they are told to, and not before."""
        if self._parties[ending.number].has_ranks:
            return ending.status != 0
        return ending.number not in self._spared and not self._goes_on_without(ending.number)

    def _goes_on_without(self, number: int) -> bool:
        return not self._parties[number].has_ranks and has_copies(self._told)

    @property
    def killed(self) -> list[int]:
        """The ranks that were killed as far as is known."""
        found = [each for each in self._reports if self._parties[each[0]].has_ranks]
        return [self._number(*each) for each in found if each[1].status == -signal.SIGKILL]

    def _number(self, number: int, report: Ending) -> int:
        return self._parties[number].numbers[report.number]

    def _called(self, number: int, report: Ending) -> str:
        party = self._parties[number]
        return f"{party.name(report.number)} (host {party.host.name}, pid {report.pid})"


def _parties(hosts: Sequence[Host]) -> list[_Party]:
    """Returns the ranks of all hosts, and then their servers, with the numbers that they get."""
    size, num_servers = (sum(getattr(host, one) for host in hosts) for one in ("num_processes", "num_servers"))
    ranks, servers = itertools.count(), itertools.count()
    found: list[_Party] = []
    for host in (host for host in hosts if host.num_processes):
        devices = [str(device) for device in host.devices] or [None]
        numbers = [next(ranks) for _ in devices]
        places = enumerate(zip(numbers, devices, strict=True))
        seats = [Seat(rank, size, place, len(devices), device) for place, (rank, device) in places]
        found.append(_Party(host, seats, numbers))
    for host in (host for host in hosts if host.num_servers):
        seats = [ServerSeat(next(servers), num_servers) for _ in range(host.num_servers)]
        found.append(_Party(host, seats, [size + seat.number for seat in seats]))
    return found


def _ordered(program: Program, party: _Party, told: dict[str, str], grace_seconds: float) -> bytes:
    """Returns what a host is told to start."""
    forwarded = {name: text for name, text in without_place(os.environ).items() if name.startswith(FORWARDED)}
    commands = [
        (
            program.command if isinstance(seat, Seat) else seat.command,
            {"PYTHONUNBUFFERED": "1", **forwarded, **told, **seat.environment},
            party.prefix(place),
        )
        for place, seat in enumerate(party.seats)
    ]
    ordered = order(commands, str(Path.cwd()), grace_seconds)
    if len(ordered) > MAX_STDIN_BYTES:
        raise ArgumentError(
            f"what host {party.host.name} is told has {len(ordered):,} bytes, more than {MAX_STDIN_BYTES:,}; set fewer "
            f"or shorter environment variables that begin with {', '.join(FORWARDED)}"
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
