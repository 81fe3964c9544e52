"""Whatever ranks wait for when one of them dies, freezes, is cut off, aborts or leaves: they learn it, and why."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.comm.faults.crew import Crew, Harbor
from tests.support.comm.faults.trials import (
    ALONE,
    SLACK_SECONDS,
    TOGETHER,
    Fault,
    Trial,
    attempt,
    check_after,
    check_goes_on,
)
from tests.support.comm.relay import Relay

LIMIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbor]:
    made = Harbor(lambda: tmp_path_factory.mktemp("crew"), size=5)
    yield made
    made.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as made:
        yield made


def begin(crew: Crew, stances: list[str], *, relay: Relay | None = None, **given: Any) -> None:
    """Lets as many ranks as there are stances take them up."""
    size = len(stances)
    hosts = [f"host-{rank}" for rank in range(size)]
    usual = {
        "victim": 0,
        "seed": 1,
        "transport": "tcp",
        "num_operations": 2,
        "spin_seconds": 50e-6,
        "timeout_seconds": LIMIT_SECONDS,
        "peer_timeout_seconds": 2.0,
        "relay": None if relay is None else relay.port,
    }
    crew.join(size, hosts=hosts, stances=stances, **{**usual, **given})
    for event in ("joined", "ready"):
        for rank, stance in enumerate(stances):
            if stance != "leave" or event == "joined":
                crew.members[rank].hear(event, seconds=LIMIT_SECONDS)


@pytest.mark.parametrize(
    ("fault", "seeds"),
    [
        ("kill", (0, 1, 2, 3)),
        # By day in test_faults.py, and a cut in test_partitions.py, too.
        *(pytest.param(fault, (0, 1, 2, 3), marks=pytest.mark.slow) for fault in ("stop", "cut")),
    ],
)
def test_all_that_ranks_can_wait_for(fault: Fault, seeds: tuple[int, ...], harbor: Harbor, relay: Relay) -> None:
    """Who dies is heard of at once; silence takes seconds: only some of what ranks can wait for is tried then."""
    used = relay if fault == "cut" else None
    with harbor.crew() as crew:
        for seed in seeds:
            together = TOGETHER[seed]
            one, other = [*ALONE, "idle", "recv"][2 * seed : 2 * seed + 2]
            stances = [one, together, "idle", other, together]
            trial = Trial(
                fault=fault,
                seed=seed,
                transport="tcp",
                size=5,
                hosts=["a", "a", "b", "b", "c"],
                victim=2,
                other=2,
                how="lose",
                stances=stances,
                num_operations=3,
                moment_seconds=0.05,
                spin_seconds=50e-6,
                delay_seconds=0.0,
            )
            attempt(crew, used, trial)
        check_goes_on(crew, used, size=5)


@pytest.mark.parametrize("how", ["abort", "abort and exit"])
def test_an_abort_reaches_all_with_its_reason(how: str, harbor: Harbor) -> None:
    with harbor.crew() as crew:
        for stances in (["recv", how, "barrier", "idle"], ["wait", how, "all_reduce", "recv of another"]):
            begin(crew, stances, victim=1)
            crew.members[1].tell("go")
            at = time.monotonic()
            for rank in (0, 2, 3):
                if stances[rank] == "idle":
                    crew.members[rank].tell("call")
                told = crew.members[rank].hear("ended", seconds=LIMIT_SECONDS)
                assert told["error"] == "Aborted"
                assert told["text"] == "rank 1 (host host-1) ended the generation: the disk is full"
                assert told["at"] - at < SLACK_SECONDS
                check_after(told, "Aborted", stances[rank])
            if how == "abort":
                check_after(crew.members[1].hear("ended", seconds=LIMIT_SECONDS), "Aborted", how)
            else:
                assert crew.members[1].process.wait(10) == 3
                crew.members[1].kill()
                crew.replace(1)
        check_goes_on(crew, None, size=4)


@pytest.mark.parametrize("stance", ["recv", "recv_buffer", "wait", "barrier", "send", "all_reduce"])
def test_waiting_for_a_rank_that_closed(stance: str, harbor: Harbor) -> None:
    with harbor.crew() as crew:
        begin(crew, [stance, "close"], victim=1)
        crew.members[1].tell("go")
        at = time.monotonic()
        told = crew.members[0].hear("ended", seconds=LIMIT_SECONDS)
        assert (told["error"], told["peer"], told["host"]) == ("PeerLost", 1, "host-1")
        assert told["text"].startswith("rank 1 (host host-1) is lost: it closed its communicator")
        assert told["at"] - at < SLACK_SECONDS
        assert (told["threads"], told["descriptors"]) == ([], [])
        told = crew.members[1].hear("ended", seconds=LIMIT_SECONDS)
        assert (
            told["text"] == "rank 1 (host host-1): this communicator is closed; connect again, as the next generation"
        )


def test_a_rank_that_ends_without_closing_is_lost(harbor: Harbor) -> None:
    with harbor.crew() as crew:
        begin(crew, ["recv", "forget", "idle"], victim=1)
        crew.members[1].tell("go")
        for rank in (0, 2):
            if rank == 2:
                crew.members[rank].tell("call")
            told = crew.members[rank].hear("ended", seconds=LIMIT_SECONDS)
            assert (told["error"], told["peer"]) == ("PeerLost", 1)
            assert "rank 1 (host host-1) is lost: its process ended" in told["text"]
        crew.members[1].leave()
        crew.replace(1)


def test_peers_that_stopped_calling_are_named(harbor: Harbor) -> None:
    with harbor.crew() as crew:
        begin(crew, ["recv", "idle", "idle"], victim=2, timeout_seconds=1.5)
        told = crew.members[0].hear("ended", seconds=LIMIT_SECONDS)
        assert told["error"] == "WaitTimeout"
        assert told["text"].startswith("rank 0 (host host-0) waited for rank 2 (host host-2) up to the limit; expected")
        check_after(told, "Aborted", "rank 0")
        for rank in (1, 2):
            crew.members[rank].tell("call")
            told = crew.members[rank].hear("ended", seconds=LIMIT_SECONDS)
            assert told["error"] == "Aborted"
            assert told["text"].startswith(
                "rank 0 (host host-0) ended the generation: recv took longer than 1.5 s: "
                "rank 0 (host host-0) waited for rank 2 (host host-2) up to the limit; expected it to take part"
            )
            check_after(told, "Aborted", f"rank {rank}")


def test_a_link_that_is_cut_between_ranks_far_apart_ends_at_the_limit(harbor: Harbor, relay: Relay) -> None:
    """The ring does not go over that link: who waits across it hears so from the limit, and tells all others."""
    with harbor.crew() as crew:
        begin(crew, ["recv", "idle", "idle", "idle"], victim=2, relay=relay, timeout_seconds=3.0)
        relay.cut([(0, 2)], "lose")
        at = time.monotonic()
        told = crew.members[0].hear("ended", seconds=LIMIT_SECONDS)
        assert told["error"] == "WaitTimeout"
        assert told["text"].startswith("rank 0 (host host-0) waited for rank 2 (host host-2) up to the limit")
        assert told["at"] - at < 3 + SLACK_SECONDS
        for rank in (1, 2, 3):
            crew.members[rank].tell("call")
            told = crew.members[rank].hear("ended", seconds=LIMIT_SECONDS)
            assert told["error"] == "Aborted"
            assert "rank 0 (host host-0) waited for rank 2 (host host-2)" in told["text"]
            check_after(told, "Aborted", f"rank {rank}")


def test_a_stall_shorter_than_the_limit_is_lived_through(harbor: Harbor, relay: Relay) -> None:
    with harbor.crew() as crew:
        relay.delay(0.02)
        begin(crew, ["leave"] * 3, relay=relay, num_operations=10, peer_timeout_seconds=10.0)
        relay.hold([(0, 1), (1, 2)], seconds=1.5)
        at = time.monotonic()
        told = [member.hear("ended", seconds=LIMIT_SECONDS) for member in crew.members[:3]]
        assert [each["error"] for each in told] == [None] * 3, told
        assert time.monotonic() - at > 1.4


def test_a_rank_frozen_for_less_than_the_limit_is_not_lost(harbor: Harbor) -> None:
    with harbor.crew() as crew:
        begin(crew, ["barrier", "late", "barrier"], peer_timeout_seconds=10.0)
        os.kill(crew.members[1].pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(crew.members[1].pid, signal.SIGCONT)
        crew.members[1].tell("call")
        told = [member.hear("ended", seconds=LIMIT_SECONDS) for member in crew.members[:3]]
        assert [each["error"] for each in told] == [None] * 3, told
