"""Launching: a program in many processes that live and die together, here on one machine."""

import contextlib
import math
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from io import TextIOBase
from pathlib import Path

from braidax.comm import Store, TcpStoreServer
from braidax.comm.environment import without_place
from braidax.errors import ArgumentError, GangError, WaitTimeout
from braidax.gang.processes import Command, Ending, Processes, Writer, print_lines
from braidax.gang.program import CALLED, COPIES, IN_PLACE, REPLACES, SERVERS, Program, Seat, ServerSeat, shares_of_gpus
from braidax.gang.runner import CONSEQUENCE, FIRST_FAILED, scoped_store
from braidax.lifeline import check_is_told_of_ends

GRACE_SECONDS = 30.0
"""That ranks may take to save and end when all are told to stop: what platforms leave between SIGTERM and SIGKILL."""

_LOOK_SECONDS = 2.0  # that the rank that failed may take to end, when another one ended because of it
_PAUSE_SECONDS = 0.1
_SIGNALED = 128  # above which an exit code is a signal's


@dataclass(frozen=True)
class Failed:
    """The rank, or the host, that failed first.

    **Fields:** `where`, `how`: in words. `log`: its last lines. `exit_code`: as a shell tells it.
    """

    where: str
    how: str
    log: tuple[str, ...]
    exit_code: int

    def __str__(self) -> str:
        told = f"{self.where} failed first: it {self.how}"
        return "\n".join([f"{told}; the last lines that it wrote:", *self.log] if self.log else [told])


@dataclass(frozen=True)
class Job:
    """What all ranks of all generations are told.

    **Fields:** `secret`: of the store. `transport`: of `braidax.comm.from_environment`. `name`: a name of its own.
    """

    secret: bytes = field(repr=False)
    transport: str
    name: str

    @staticmethod
    def new(transport: str) -> "Job":
        """Returns a job with a name and a secret that no other one has."""
        return Job(secrets.token_bytes(32), transport, f"launch-{secrets.token_hex(8)}")

    def environment(self, store: str, generation: int) -> dict[str, str]:
        """Returns the variables that say so, for ranks that reach the store at a URL."""
        return {
            "BRAIDAX_STORE": store,
            "BRAIDAX_SECRET": self.secret.hex(),
            "BRAIDAX_JOB": self.name,
            "BRAIDAX_GENERATION": str(generation),
            "BRAIDAX_TRANSPORT": self.transport,
        }


def launch_here(
    program: Program,
    num_processes: int,
    *,
    servers: int = 0,
    restarts: int = 0,
    transport: str = "tcp",
    grace_seconds: float = GRACE_SECONDS,
    log: TextIOBase | None = None,
) -> int:
    """Runs a program in processes of this machine.

    Where one fails, the others get SIGTERM, and five seconds later SIGKILL. Whatever is raised in here from outside,
    such as `KeyboardInterrupt` or what the handler of a signal raises, goes on when all have been stopped: by SIGTERM,
    and by SIGKILL after `grace_seconds`, or at once when something is raised again.

    **Arguments:** `servers`: how many processes besides have tables or variables for the program's steps
    (`Hybrid(tables="servers")`, `ParameterServers`). They end when the program has; one that ends before fails as a
    rank does, unless there are copies of what it had: where a signal has ended it, another one is started. `restarts`:
    how often all are started again, as the next generation, after one has failed. `transport`: of
    `braidax.comm.from_environment`. `grace_seconds`: that they may take for a last checkpoint when they are to stop.
    `log`: where lines go; None is `sys.stdout` and `sys.stderr`.

    **Returns:** the exit code of the process that failed first, of the last generation, as a shell tells it, or 0.
    **Raises:** `ArgumentError`, `GangError` when it cannot be started.
    """
    if num_processes < 1:
        raise ArgumentError(f"{num_processes=}: expected at least 1")
    if servers < 0:
        raise ArgumentError(f"{servers=}: expected how many processes have tables, 0 for none")
    check_grace(grace_seconds)
    outside = {"PYTHONUNBUFFERED": "1", **without_place(os.environ)}
    shares = shares_of_gpus(outside, find_gpus(), num_processes, program.devices_per_process)
    seats = [Seat(rank, num_processes, rank, num_processes, share) for rank, share in enumerate(shares)]
    places = [ServerSeat(number, servers) for number in range(servers)]
    names = [*(f"rank {seat.rank}" for seat in seats), *(f"server {place.number}" for place in places)]
    prefixes = [*(f"[{seat.rank}] " for seat in seats), *(f"[server {place.number}] " for place in places)]
    job = Job.new(transport)

    def stop(processes: Processes) -> None:
        tell_of_stop(grace_seconds, log)
        processes.end(grace_seconds=grace_seconds)
        endings = processes.wait(timeout_seconds=0)
        killed = [ending.number for ending in endings if ending.status == -signal.SIGKILL]
        tell_of_killed([number for number in killed if number < num_processes], log)

    def run(generation: int) -> Failed | None:
        told = job.environment(server.address, generation) | ({SERVERS: str(servers), REPLACES: "1"} if servers else {})
        started_as = [(program.command, seat.environment) for seat in seats]
        started_as += [(place.command, place.environment) for place in places]
        commands = [
            Command((sys.executable, *command), {**outside, **told, **environment}, str(Path.cwd()))
            for command, environment in started_as
        ]
        shown = [*prefixes]
        with started(commands, print_lines(shown, log), stop=stop) as processes:
            return _Generation(processes, commands, names, shown, told, log).wait()

    with TcpStoreServer(secret=job.secret) as server:
        return repeated(run, restarts, log)


class _Generation:
    """The processes of a generation while they run: ranks first, then servers, and then others in place of these.

    **Arguments:** `commands`, `names`: of all that were started. `prefixes`: of their lines, to which those of others
    are added. `told`: the variables of the generation.
    """

    def __init__(
        self,
        processes: Processes,
        commands: Sequence[Command],
        names: Sequence[str],
        prefixes: list[str],
        told: dict[str, str],
        log: TextIOBase | None,
    ) -> None:
        self._processes, self._commands, self._names, self._prefixes = processes, [*commands], [*names], prefixes
        self._told, self._log = told, log
        self._num_servers = int(told.get(SERVERS, "0"))
        self._num_ranks = len(names) - self._num_servers
        self._endings: dict[int, Ending] = {}
        self._spared: set[int] = set()  # servers that the program goes on without

    def wait(self) -> Failed | None:
        """Returns when all ranks have ended, or a process has failed: that is which."""
        while sum(number < self._num_ranks for number in self._endings) < self._num_ranks and not self._failed():
            self._look(None)
        if not self._failed():
            if self._num_servers:
                tell_of_idle(self._told, self._log)
            return None
        ending = self._endings[first_failed(self._failed, self._look, self._told)]
        name = f"{self._names[ending.number]} (pid {ending.pid})"
        return Failed(name, ending.how, ending.log, ending.exit_code or 1)

    def _look(self, seconds: float | None) -> None:
        for ending in self._processes.wait(timeout_seconds=seconds):
            self._endings[ending.number] = ending
            if ending.number >= self._num_ranks and has_copies(self._told):
                self._spared.add(ending.number)
                name = f"{self._names[ending.number]} (pid {ending.pid})"
                tell_of_copies(name, ending.how, "starts another one" if ending.status < 0 else "", self._log)
                if ending.status < 0:  # who ends by itself might do so again and again
                    self._start_in_place_of(ending.number)

    def _start_in_place_of(self, number: int) -> None:
        """Starts another server. What keeps the system from that it is told, and the program goes on."""
        former = self._commands[number]
        command = replace(former, environment={**former.environment, IN_PLACE: "1"})
        self._names.append(self._names[number])
        self._commands.append(command)
        self._prefixes.append(self._prefixes[number])
        try:
            self._processes.add([command])
        except OSError as error:
            _tell(f"the system started no other {self._names.pop()} ({error})", self._log)
            del self._commands[-1], self._prefixes[-1]

    def _failed(self) -> list[tuple[int, int]]:
        """Returns number and status of those that have failed; a server that has ended before all ranks has."""
        return [
            (ending.number, ending.status)
            for ending in self._endings.values()
            if (ending.status or ending.number >= self._num_ranks) and ending.number not in self._spared
        ]


def repeated(run: Callable[[int], Failed | None], restarts: int, log: TextIOBase | None) -> int:
    """Runs generations until one does not fail or there are enough, tells of each failure, and returns the exit code.

    **Arguments:** `run`: runs the generation of this number. `restarts`: how many may follow the first.
    """
    if restarts < 0:
        raise ArgumentError(f"{restarts=}: expected 0 or more")
    generation = 0
    while (failed := run(generation)) is not None:
        sys.stdout.flush()
        (log or sys.stderr).write(f"braidax launch: {failed}\n")
        if generation == restarts:
            if failed.exit_code > _SIGNALED:
                _tell("run the same command again to go on from the last checkpoint, or give --restarts", log)
            return failed.exit_code
        generation += 1
        _tell(f"starts all again (restart {generation} of {restarts})", log)
    return 0


def has_copies(told: dict[str, str]) -> bool:
    """Returns whether a step has copies of what each server has. **Arguments:** `told`: the variables of the
    generation."""
    with scoped_store(told) as store:
        return int(_value(store, COPIES) or b"1") > 1


def tell_of_copies(name: str, how: str, then: str, log: TextIOBase | None) -> None:
    """Says that a server has ended, and the program goes on. **Arguments:** `then`: what is done besides."""
    _tell(f"{name} {how}; the program has copies of what it had, and goes on{then and f'; {then}'}", log)


def tell_of_idle(told: dict[str, str], log: TextIOBase | None) -> None:
    """Says so where a program has left its servers idle. **Arguments:** `told`: the variables of the generation."""
    with scoped_store(told) as store:
        if _value(store, f"{CALLED}/0") is None:
            _tell(
                f"the program has ended, and no step of it has met its {told[SERVERS]} servers: give one strategies "
                'with Hybrid(tables="servers") or ParameterServers(), and no servers= of its own, or start no servers',
                log,
            )


def check_grace(grace_seconds: float) -> None:
    """Checks how long ranks may take to end. **Raises:** `ArgumentError`."""
    if not 0 <= grace_seconds < math.inf:
        raise ArgumentError(f"{grace_seconds=}: expected a finite number of seconds >= 0")


def tell_of_stop(grace_seconds: float, log: TextIOBase | None) -> None:
    """Says what happens now that all have been told to stop."""
    _tell(f"stops; the ranks have {grace_seconds:g} s to save and end, Ctrl-C ends them at once", log)


def tell_of_killed(ranks: Sequence[int], log: TextIOBase | None) -> None:
    """Says which ranks had not ended in time, if any."""
    if ranks:
        _tell(f"had to kill ranks that did not end: {', '.join(map(str, sorted(ranks)))}", log)


def _tell(message: str, log: TextIOBase | None) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        sys.stdout.flush()
        (log or sys.stderr).write(f"braidax launch: {message}\n")


@contextlib.contextmanager
def started(
    commands: Sequence[Command], write: Writer, *, stop: Callable[[Processes], object], leave_seconds: float = 0.0
) -> Generator[Processes, None, None]:
    """Starts processes, and ends them all behind the block.

    **Arguments:** `stop`: what comes before that when something is raised in the block: the job has been told to stop.

    **Raises:** `GangError` when they cannot be started, and on other systems than Linux.
    """
    check_is_told_of_ends("braidax launch")
    try:
        processes = Processes(commands, write=write)
    except OSError as error:
        raise GangError(
            f"the system started no {len(commands)} processes ({error}); take fewer, or allow more processes and "
            "descriptors (ulimit -u, ulimit -n)"
        ) from error
    try:
        yield processes
    except BaseException:
        stop(processes)
        raise
    finally:
        processes.end(leave_seconds=leave_seconds)


def first_failed(
    failed: Callable[[], Sequence[tuple[int, int]]], look: Callable[[float], object], told: dict[str, str]
) -> int:
    """Returns the rank that failed by itself, given that some have: those that it took along may have ended before.

    **Arguments:** `failed`: returns rank and status of those that have ended so, in order. `look`: waits up to so many
    seconds for others. `told`: the variables of the generation.
    """
    deadline = time.monotonic() + _LOOK_SECONDS
    with scoped_store(told) as store:
        while True:
            ended = failed()
            first, left = _blamed(ended, store), deadline - time.monotonic()
            if first in [rank for rank, _ in ended]:
                return first
            if left <= 0:
                return ended[0][0]
            look(min(left, _PAUSE_SECONDS))


def _blamed(ended: Sequence[tuple[int, int]], store: Store) -> int:
    """Returns the rank to blame as far as is known, or -1 when all that have ended only say that another one failed."""
    first = _value(store, FIRST_FAILED)
    for rank, status in ended:
        if status < 0:  # a signal is nobody else's fault
            return rank
        if first is not None:
            return int(first)
        if _value(store, f"{CONSEQUENCE}/{rank}") is None:
            return rank
    return -1


def _value(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key, timeout_seconds=0.0)
    except WaitTimeout:
        return None


def find_gpus() -> list[str]:
    """Returns the numbers by which CUDA knows the GPUs of this machine or container."""
    num_gpus = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").iterdir())
    return [str(number) for number in range(num_gpus)]
