"""Drawn trials of servers and trainers: one dies, freezes or is cut off, and all others go on, with right data."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from braidax.comm.watch import SECOND_WORD_SECONDS
from tests.support.comm.faults.crew import Crew, Harbor
from tests.support.comm.relay import How, Relay
from tests.support.comm.transports.tcps import IN_C, IN_PYTHON, OF_BOTH

Fault = Literal["kill", "stop", "cut off", "cut between two"]
FAULTS: list[Fault] = ["kill", "stop", "cut off", "cut between two"]
MAX_SIZE = 6
PEER_TIMEOUT_SECONDS = 2.0
SLACK_SECONDS = 6.0
_SILENCE_SECONDS = 1.2 * PEER_TIMEOUT_SECONDS + SECOND_WORD_SECONDS
_PROGRAM = "tests.support.comm.losing.rank"
_JOIN_SECONDS = 30.0
_GO_ON_SECONDS = 0.1


@dataclass(frozen=True)
class Trial:
    """**Fields:** `victim`: of the fault. `other`: the end of the connection that is cut, where it is one."""

    fault: Fault
    seed: int
    transport: str
    num_servers: int
    num_trainers: int
    num_teams: int
    victim: int
    other: int
    how: How
    moment_seconds: float
    spin_seconds: float

    @property
    def size(self) -> int:
        return self.num_servers + self.num_trainers

    @property
    def lost(self) -> int:
        """Who must be lost."""
        return max(self.victim, self.other) if self.fault == "cut between two" else self.victim


def drawn(fault: Fault, seed: int, transport: str) -> Trial:
    """Returns the trial of a seed."""
    draw = random.Random(f"{fault} {seed}")
    num_servers = draw.randint(1, 2)
    num_trainers = draw.randint(2, MAX_SIZE - num_servers)
    size = num_servers + num_trainers
    victim = draw.randrange(size)
    return Trial(
        fault=fault,
        seed=seed,
        transport=transport,
        num_servers=num_servers,
        num_trainers=num_trainers,
        num_teams=draw.choice([1, 2]),
        victim=victim,
        other=draw.choice([rank for rank in range(size) if rank != victim]),
        how=draw.choice(["hold", "lose", "break"]),
        moment_seconds=draw.uniform(0, 0.4),
        spin_seconds=draw.choice([0.0, 50e-6]),
    )


def attempt(crew: Crew, relay: Relay, trial: Trial) -> None:
    """Runs a trial; fails when what follows is not what must."""
    is_cut = trial.fault.startswith("cut")
    members, ranks = crew.members, range(trial.size)
    crew.join(
        trial.size,
        seed=trial.seed,
        transport=trial.transport,
        num_servers=trial.num_servers,
        num_teams=trial.num_teams,
        spin_seconds=trial.spin_seconds,
        timeout_seconds=_JOIN_SECONDS,
        peer_timeout_seconds=PEER_TIMEOUT_SECONDS,
        relay=relay.port if is_cut else None,
    )
    for rank in ranks:
        members[rank].hear("joined", seconds=_JOIN_SECONDS)
    time.sleep(trial.moment_seconds)
    at = time.monotonic()
    survivors = [rank for rank in ranks if rank != trial.lost]
    if trial.fault == "kill":
        members[trial.victim].kill()
    elif trial.fault == "stop":
        os.kill(members[trial.victim].pid, signal.SIGSTOP)
    else:
        ends = [trial.other] if trial.fault == "cut between two" else survivors
        relay.cut([(trial.victim, end) for end in ends], trial.how)
    limit = SLACK_SECONDS + time.monotonic() - at + (0 if trial.fault == "kill" else _SILENCE_SECONDS)
    for rank in survivors:
        told = members[rank].hear("lost", seconds=limit + 5)
        assert told["lost"] == [trial.lost], (trial, rank, told)
        assert told["at"] - at < limit, (trial, rank, told)
    time.sleep(_GO_ON_SECONDS)
    for rank in survivors:
        members[rank].tell("stop")
    for rank in survivors:
        check_went_on(trial, rank, members[rank].hear("ended", seconds=_JOIN_SECONDS))
    if trial.fault == "kill":
        crew.replace(trial.victim)
    else:
        members[trial.lost].process.send_signal(signal.SIGCONT)
        members[trial.lost].tell("stop")
        check_victim(trial, members[trial.lost].hear("ended", seconds=_JOIN_SECONDS, skipped="lost"))
    relay.clear()


def check_went_on(trial: Trial, rank: int, told: dict[str, Any]) -> None:
    """Fails unless a survivor heard of the lost rank alone, did all it could do without that, and left nothing."""
    about = f"{trial}, rank {rank}: {told}"
    assert told["error"] is None, about
    assert told["lost"] == [trial.lost], about
    for error in told["errors"]:
        assert (error["peer"], error["host"]) == (trial.lost, f"host-{trial.lost}"), about
        assert "what others do without it goes on" in error["text"], about
    done = told["done"]
    if rank >= trial.num_servers:
        for server in range(trial.num_servers):
            assert (done.get(f"ask {server}", 0) > 0) == (server != trial.lost), about
    if len(told["ranks"]) > 1:
        assert (done.get("reduce", 0) > 0) == (trial.lost not in told["ranks"]), about
    check_left_over(told, about)


def check_victim(trial: Trial, told: dict[str, Any]) -> None:
    """Fails unless the lost rank learns that it is lost, or, cut off from all, that all others are."""
    about = f"{trial}, the lost one: {told}"
    if told["error"] is None:
        assert trial.fault == "cut off" or trial.size == 2, about
        assert trial.lost not in told["lost"], about
    else:
        assert told["error"] == "PeerLost", about
    check_left_over(told, about)


def check_left_over(told: dict[str, Any], about: str) -> None:
    assert told["close_seconds"] < 4, about
    assert (told["threads"], told["descriptors"]) == ([], []), about


def run_trials(fault: Fault, seeds: range, folder: Path, *, num_crews: int, transport: str) -> int:
    """Runs trials of a fault, some at a time. **Returns:** how many."""

    def work(index: int) -> int:
        mine = folder / str(index)
        mine.mkdir()
        count = 0
        with Relay() as relay, Crew(mine, size=MAX_SIZE, spares=1, program=_PROGRAM) as crew:
            for seed in seeds[index::num_crews]:
                attempt(crew, relay, drawn(fault, seed, transport))
                count += 1
        return count

    with ThreadPoolExecutor(num_crews) as executor:
        return sum(executor.map(work, range(num_crews)))


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbor]:
    made = Harbor(lambda: tmp_path_factory.mktemp("crew"), size=MAX_SIZE, program=_PROGRAM)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("fault", "transport"), [("kill", OF_BOTH), ("kill", "ucx"), ("stop", IN_C), ("cut off", IN_C), (FAULTS[3], IN_C)]
)
def test_all_others_go_on(fault: Fault, transport: str, harbor: Harbor) -> None:
    with harbor.crew() as crew, Relay() as relay:
        for seed in (0, 1) if fault == "kill" else (0,):  # of others all must wait until they have been silent
            attempt(crew, relay, drawn(fault, seed, transport))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", [IN_C, IN_PYTHON, "ucx"])
@pytest.mark.parametrize("fault", FAULTS)
def test_so_it_is_in_many_trials(fault: Fault, transport: str, tmp_path: Path) -> None:
    assert run_trials(fault, range(1000, 1060), tmp_path, num_crews=1, transport=transport) == 60
