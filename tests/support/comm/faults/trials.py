"""Trials: a world, what its ranks do, a victim, a moment and a fault, all drawn from a seed; and what must follow."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.support.comm.faults.crew import Crew
from tests.support.comm.relay import How, Relay

Fault = Literal["kill", "stop", "cut"]
Operations = Literal["all", "streams"]

PEER_TIMEOUT_SECONDS = 2.0
SLACK_SECONDS = 5.0  # for a machine that has more to do than this
AT_ONCE_SECONDS = 1.8  # for calls after the failure, and for closing
MAX_SIZE = 5
_JOIN_SECONDS = 30.0
_MAX_MOMENT_SECONDS = 0.4
_REASONS = {
    "kill": r"its process ended|the connection to it broke|its connection ended",
    "stop": r"nothing came from it for 2 s, it is frozen or cut off",
    "cut": r"its process ended|the connection to it broke|its connection ended|nothing came from it for 2 s",
}


@dataclass(frozen=True)
class Trial:
    """**Fields:** `stances`: of each rank, see `rank`; none while all do drawn operations for ever. `num_operations`:
    before the stances. `moment_seconds`: when the fault comes. `victim`: to whom. `other`: the end of the link that is
    cut; the victim itself when it is cut off from all.
    """

    fault: Fault
    seed: int
    transport: str
    size: int
    hosts: list[str]
    victim: int
    other: int
    how: How
    stances: list[str]
    num_operations: int | None
    moment_seconds: float
    spin_seconds: float
    delay_seconds: float
    operations: Operations = "all"


ALONE = ["recv", "recv of another", "recv_buffer", "send", "wait", "idle"]
TOGETHER = ["barrier", "all_reduce", "all_to_all", "wait of all_reduce"]  # one of them at a time: they must be the same


def drawn(fault: Fault, seed: int, *, transport: str = "tcp", operations: Operations = "all") -> Trial:
    """Returns the trial of a seed."""
    draw = random.Random(f"{fault} {seed}")
    size = draw.randint(2, MAX_SIZE)
    victim = draw.randrange(size)
    together = draw.choice(TOGETHER)
    stances = [draw.choice([*ALONE, together, together]) for _ in range(size)]
    stances[victim] = "idle"
    return Trial(
        fault=fault,
        seed=seed,
        transport=transport,
        size=size,
        hosts=[f"host-{draw.randrange(size)}" for _ in range(size)],
        victim=victim,
        other=draw.choice([victim, (victim + 1) % size]),
        how=draw.choice(["hold", "lose", "break"]),
        stances=stances,
        num_operations=draw.choice([None, None, draw.randrange(10)]) if operations == "all" else None,
        moment_seconds=draw.uniform(0, _MAX_MOMENT_SECONDS),
        spin_seconds=draw.choice([0.0, 50e-6]),
        delay_seconds=draw.choice([0.0, 0.0, 0.005]),
        operations=operations,
    )


def attempt(crew: Crew, relay: Relay | None, trial: Trial) -> dict[str, Any]:
    """Runs a trial, and returns what happened; fails when that is not what must."""
    members, ranks = crew.members, range(trial.size)
    if relay is not None:
        relay.delay(trial.delay_seconds)
    crew.join(
        trial.size,
        seed=trial.seed,
        transport=trial.transport,
        hosts=trial.hosts,
        victim=trial.victim,
        stances=trial.stances,
        num_operations=trial.num_operations,
        spin_seconds=trial.spin_seconds,
        timeout_seconds=_JOIN_SECONDS,
        peer_timeout_seconds=PEER_TIMEOUT_SECONDS,
        relay=None if relay is None else relay.port,
        operations=trial.operations,
    )
    for event in ("joined",) if trial.num_operations is None else ("joined", "ready"):
        for rank in ranks:
            members[rank].hear(event, seconds=_JOIN_SECONDS)
    time.sleep(trial.moment_seconds)
    at, stood_still = time.monotonic(), crew.stalls.seconds
    survivors = inflict(crew, relay, trial)
    late_seconds = time.monotonic() - at  # a relay that is full of messages may take its time to hear of a cut
    limit = late_seconds + SLACK_SECONDS + (0 if trial.fault == "kill" else PEER_TIMEOUT_SECONDS)
    idle = [rank for rank in ranks if trial.num_operations is not None and trial.stances[rank] == "idle"]
    ended: dict[int, dict[str, Any]] = {}
    for rank in [rank for rank in survivors if rank not in idle] + [rank for rank in survivors if rank in idle]:
        if rank in idle:
            members[rank].tell("call")
        ended[rank] = members[rank].hear("ended", seconds=max(limit, at + limit - time.monotonic()) + 5)
    if trial.fault == "kill":
        crew.replace(trial.victim)
    elif trial.fault == "stop":
        members[trial.victim].process.send_signal(signal.SIGCONT)
        if trial.victim in idle:
            members[trial.victim].tell("call")
        thawed = members[trial.victim].hear("ended", seconds=limit)
        check_lost(trial, trial.victim, thawed, [trial.victim], stall_seconds=crew.stalls.seconds - stood_still)
    if relay is not None:
        relay.clear()
    late = {"fault_seconds": round(late_seconds, 3), "stall_seconds": round(crew.stalls.seconds - stood_still, 3)}
    for rank, told in ended.items():
        told["after_seconds"] = round(told["at"] - at, 3)
        check_lost(trial, rank, told, blamed(trial, rank), stall_seconds=late["stall_seconds"])
        most = limit + late["stall_seconds"] + (rank in idle)
        assert 0 <= told["after_seconds"] <= most, (trial, rank, told, late)
    return {**asdict(trial), "generation": crew.generation - 1, **late, "ended": ended}


def inflict(crew: Crew, relay: Relay | None, trial: Trial) -> list[int]:
    """Does it, and returns the ranks that must notice."""
    survivors = [rank for rank in range(trial.size) if rank != trial.victim]
    if trial.fault == "kill":
        crew.members[trial.victim].kill()
    elif trial.fault == "stop":
        os.kill(crew.members[trial.victim].pid, signal.SIGSTOP)
    else:
        assert relay is not None
        ends = survivors if trial.other == trial.victim else [trial.other]
        relay.cut([(trial.victim, rank) for rank in ends], trial.how)
        survivors = list(range(trial.size))
    return survivors


def blamed(trial: Trial, rank: int) -> list[int]:
    """Returns whom a rank may name: of a cut, an end that it cannot reach."""
    if trial.fault != "cut":
        return [trial.victim]
    if trial.other != trial.victim:
        return [trial.victim, trial.other]
    return [trial.victim] if rank != trial.victim else [other for other in range(trial.size) if other != rank]


def check_lost(
    trial: Trial, rank: int, told: dict[str, Any], expected: list[int], *, stall_seconds: float = 0.0
) -> None:
    """Fails unless a rank heard who is lost, and why; could do nothing afterwards; and left nothing.

    **Arguments:** `expected`: whom it may name. `stall_seconds`: by which it may be late.
    """
    about = f"{trial}, rank {rank}: {told}"
    assert told["error"] == "PeerLost", about
    assert told["peer"] in expected, about
    assert told["host"] == trial.hosts[told["peer"]], about
    named = re.escape(f"rank {told['peer']} (host {told['host']})")
    assert re.match(rf"{named} is lost: ({_REASONS[trial.fault]}).*; the generation cannot go on", told["text"]), about
    check_after(told, "PeerLost", about, stall_seconds=stall_seconds)


def check_after(told: dict[str, Any], error: str, about: str, *, stall_seconds: float = 0.0) -> None:
    """Fails unless every call after the failure raised the same at once, and nothing is left after the close."""
    assert told["again"] == [error] * 5, about
    assert told["again_seconds"] < AT_ONCE_SECONDS + stall_seconds, about
    assert told["close_seconds"] < AT_ONCE_SECONDS + stall_seconds, about
    assert (told["threads"], told["descriptors"]) == ([], []), about


def check_goes_on(crew: Crew, relay: Relay | None, *, size: int) -> None:
    """Fails unless the ranks meet once more, compute what is right, and part in peace."""
    crew.join(
        size,
        seed=0,
        transport="tcp",
        hosts=[f"host-{rank}" for rank in range(size)],
        victim=0,
        stances=["leave"] * size,
        num_operations=20,
        spin_seconds=50e-6,
        timeout_seconds=_JOIN_SECONDS,
        peer_timeout_seconds=_JOIN_SECONDS,
        relay=None if relay is None else relay.port,
    )
    for member in crew.members[:size]:
        member.hear("joined", seconds=_JOIN_SECONDS)
    for member in crew.members[:size]:
        told = member.hear("ended", seconds=_JOIN_SECONDS)
        assert (told["error"], told["threads"], told["descriptors"]) == (None, [], []), told


def live_through(crew: Crew, relay: Relay, trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Runs trials of one fault, one after the other, and returns what happened; in the end the ranks meet once more."""
    happened: list[dict[str, Any]] = []
    used: Relay | None = None
    for trial in trials:
        used = relay if trial.fault == "cut" else None
        happened.append(attempt(crew, used, trial))
        found = sorted(path.name for path in crew.folder.iterdir() if path.suffix != ".log")
        assert found == ["store"], found  # no file of a stream
    check_goes_on(crew, used, size=MAX_SIZE)
    return happened


def run_trials(
    fault: Fault,
    seeds: range,
    folder: Path,
    *,
    num_crews: int,
    transport: str = "tcp",
    operations: Operations = "all",
) -> list[dict[str, Any]]:
    """Runs trials of a fault, some at a time, and returns what happened; each is a line of the log.

    The log lies in the folder that the environment variable BRAIDAX_FAULT_LOG names, or in the given one.
    """
    logs = Path(os.environ.get("BRAIDAX_FAULT_LOG", folder))
    logs.mkdir(parents=True, exist_ok=True)

    def work(index: int) -> list[dict[str, Any]]:
        mine = folder / str(index)
        mine.mkdir()
        trials = [drawn(fault, seed, transport=transport, operations=operations) for seed in seeds[index::num_crews]]
        with Relay() as relay, Crew(mine, size=MAX_SIZE, spares=1) as crew:
            happened = live_through(crew, relay, trials)
        with (logs / f"{transport}-{fault}-{operations}.jsonl").open("a") as log:
            log.writelines(json.dumps(each) + "\n" for each in happened)
        return happened

    with ThreadPoolExecutor(num_crews) as executor:
        return [each for done in executor.map(work, range(num_crews)) for each in done]
