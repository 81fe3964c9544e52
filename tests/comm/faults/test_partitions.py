"""Ranks on hosts of their own: cables that are pulled, links that are narrow, addresses that nobody reaches."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.namespaces import Network, reason_against
from tests.support.comm.faults.crew import START_SECONDS, Member
from tests.support.comm.faults.trials import PEER_TIMEOUT_SECONDS, SLACK_SECONDS, check_after

LIMIT_SECONDS = 30.0


@pytest.fixture(autouse=True)
def possible() -> None:
    if reason := reason_against():
        pytest.skip(reason)


@contextlib.contextmanager
def ranks_on_hosts(num_hosts: int, folder: Path) -> Iterator[tuple[Network, list[Member]]]:
    """Starts a rank on each of some hosts; in the end they must leave by themselves."""
    with Network(num_hosts) as network, contextlib.ExitStack() as stack:
        members: list[Member] = []
        for host in range(num_hosts):
            members.append(Member(folder / "store", folder / f"{host}.log", prefix=network.prefix(host)))
            stack.callback(members[-1].kill)
        for member in members:
            member.hear("there", seconds=START_SECONDS)
        yield network, members
        for member in members:
            member.leave()


def join(members: list[Member], stances: list[str], *, generation: int = 0, **given: Any) -> None:
    for rank in range(len(stances)):
        usual: dict[str, Any] = {
            "rank": rank,
            "size": len(stances),
            "generation": generation,
            "job": "partitions",
            "seed": generation,
            "transport": "tcp",
            "hosts": [None] * len(stances),
            "victim": 1,
            "stances": stances,
            "num_operations": 4,
            "spin_seconds": 50e-6,
            "timeout_seconds": LIMIT_SECONDS,
            "peer_timeout_seconds": PEER_TIMEOUT_SECONDS,
            "relay": None,
        }
        members[rank].tell(usual | given)


@pytest.mark.parametrize(
    "stances",
    [
        pytest.param(["recv", "idle"], marks=pytest.mark.slow),
        ["all_reduce", "idle", "all_reduce"],
        pytest.param(["operations"] * 3, marks=pytest.mark.slow),
    ],
    ids=["two", "three", "busy"],
)
def test_hosts_that_are_cut_off(stances: list[str], tmp_path: Path) -> None:
    """The host of rank 1 is cut off; the others name it, it names one of them; mended, they go on."""
    busy, size = stances[0] == "operations", len(stances)
    with ranks_on_hosts(size, tmp_path) as (network, members):
        join(members, stances, num_operations=None if busy else 4)
        for event in ("joined",) if busy else ("joined", "ready"):
            for member in members:
                member.hear(event, seconds=LIMIT_SECONDS)
        network.cut(1)
        at = time.monotonic()
        for rank in sorted(range(size), key=lambda rank: stances[rank] == "idle"):
            if stances[rank] == "idle":
                members[rank].tell("call")
            told = members[rank].hear("ended", seconds=LIMIT_SECONDS)
            assert told["error"] == "PeerLost", told
            assert (told["peer"] == 1) == (rank != 1), told
            assert "nothing came from it for 2 s, it is frozen or cut off" in told["text"], told
            assert 0.5 < told["at"] - at < PEER_TIMEOUT_SECONDS + SLACK_SECONDS, told
            check_after(told, "PeerLost", str(told))
        network.mend(1)
        join(members, ["leave"] * size, generation=1)
        for member in members:
            member.hear("joined", seconds=LIMIT_SECONDS)
            assert member.hear("ended", seconds=LIMIT_SECONDS)["error"] is None


def test_a_narrow_link_is_slow_and_right(tmp_path: Path) -> None:
    """64 MiB at 1 Gbit/s: each of two ranks sends as much as it has, which takes 0.54 s."""
    with ranks_on_hosts(2, tmp_path) as (network, members):
        for host in (0, 1):
            network.limit(host, 10**9)
        join(members, ["large all_reduce", "large all_reduce"], num_operations=0)
        for event in ("joined", "ready"):
            for member in members:
                member.hear(event, seconds=LIMIT_SECONDS)
        for member in members:
            seconds = member.hear("took", seconds=LIMIT_SECONDS)["seconds"]
            assert 0.5 < seconds < 10, seconds
            assert member.hear("ended", seconds=LIMIT_SECONDS)["error"] is None


def test_an_address_that_nobody_reaches_is_named(tmp_path: Path) -> None:
    with ranks_on_hosts(2, tmp_path) as (network, members):
        network.swallow(1, 0)
        join(members, ["leave", "leave"], timeout_seconds=2.0)
        told = [member.hear("ended", seconds=LIMIT_SECONDS) for member in members]
    assert [each["error"] for each in told] == ["WaitTimeout", "WaitTimeout"], told
    assert "rank 1 (host" in told[0]["text"]
    assert "did not connect to rank 0 (host" in told[0]["text"]
    assert "BRAIDAX_ADDRESS" in told[0]["text"]
    assert "rank 0 (host" in told[1]["text"]
    assert "cannot be reached: 10.77.0.1:" in told[1]["text"]
    assert "BRAIDAX_ADDRESS there" in told[1]["text"]
