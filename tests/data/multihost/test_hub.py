"""A hub and the processes around it: what becomes of a round is the same for all, whoever fails or is late."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from braidax.data.multihost import hub as star_module
from braidax.data.multihost.hub import Door, Hub, Verdict
from braidax.errors import WaitTimeout

SECONDS = 20.0
FINE = Verdict("fine")


@contextlib.contextmanager
def hubs(num: int) -> Generator[list[Hub]]:
    """The hubs of processes 0 to `num` - 1."""
    pairs = [socket.socketpair() for _ in range(num - 1)]
    first = Hub({process: pair[0] for process, pair in enumerate(pairs, start=1)}, is_first=True)
    made = [first, *(Hub({0: pair[1]}, is_first=False) for pair in pairs)]
    try:
        yield made
    finally:
        for hub in made:
            hub.close()


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """Returns what calls return that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(timeout=2 * SECONDS) for future in [threads.submit(call) for call in calls]]


def agreed(hub: Hub, number: int, seconds: float = SECONDS, *, ready: int = -1) -> Verdict | None:
    deadline = time.monotonic() + seconds
    return hub.agree(number, ready=lambda: max(number, ready), deadline=lambda: deadline, stop=threading.Event())


def test_all_that_are_ready_are_fine() -> None:
    with hubs(4) as made:
        for number in range(3):
            assert at_once([lambda hub=hub, number=number: agreed(hub, number) for hub in made]) == [FINE] * 4


def test_nobody_goes_on_before_the_last_has_come() -> None:
    with hubs(3) as made, ThreadPoolExecutor(3) as threads:
        early: list[Future[Verdict | None]] = [threads.submit(agreed, hub, 0) for hub in made[:2]]
        with pytest.raises(TimeoutError):
            early[0].result(timeout=0.2)
        assert not early[1].done()
        assert agreed(made[2], 0) == FINE
        assert [future.result(timeout=SECONDS) for future in early] == [FINE] * 2


def test_one_message_does_for_all_that_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    with hubs(3) as made:
        sent = {process: recorded(hub, monkeypatch) for process, hub in enumerate(made)}
        ready = [5, 3, 7]
        found = at_once([lambda p=p: [agreed(made[p], n, ready=ready[p]) for n in range(4)] for p in range(3)])
        assert found == [[FINE] * 4] * 3
        assert [{number for number, _ in sent[process]} for process in range(3)] == [{3}, {3}, {7}]
        assert [len(sent[process]) for process in range(3)] == [1, 1, 1]
        assert at_once([lambda hub=hub: agreed(hub, 4) for hub in made]) == [FINE] * 3
        assert [len(sent[process]) for process in range(3)] == [2, 2, 1]  # the last one has said so before


def recorded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Verdict]]:
    """Returns what a hub tells from now on."""
    told, tell = list[tuple[int, Verdict]](), hub._tell

    def recording(number: int, verdict: Verdict) -> None:
        told.append((number, verdict))
        tell(number, verdict)

    monkeypatch.setattr(hub, "_tell", recording)
    return told


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_behind_what_was_ready_is_of_its_own_round(failing: int) -> None:
    with hubs(3) as made:

        def rounds(process: int) -> list[Verdict | None]:
            found = [agreed(made[process], number, ready=1 if process == failing else 5) for number in (0, 1)]
            if process == failing:
                made[process].fail(2, process, "gone")
                return found
            return [*found, agreed(made[process], 2, ready=5)]

        expected = [[FINE, FINE, Verdict("failed", (failing,), "gone")]] * 3
        expected[failing] = [FINE, FINE]
        assert at_once([lambda process=process: rounds(process) for process in range(3)]) == expected


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_is_told_to_all_and_rounds_go_on(failing: int) -> None:
    with hubs(3) as made:

        def two_rounds(process: int) -> list[Verdict | None]:
            if process == failing:
                made[process].fail(0, process, "OSError: gone")
                return [agreed(made[process], 1)]
            return [agreed(made[process], number) for number in (0, 1)]

        expected = [[Verdict("failed", (failing,), "OSError: gone"), FINE]] * 3
        expected[failing] = [FINE]
        assert at_once([lambda process=process: two_rounds(process) for process in range(3)]) == expected


def test_who_does_not_come_is_named_on_all_that_did() -> None:
    with hubs(4) as made:
        found = at_once([lambda hub=hub: agreed(hub, 0, 0.3) for hub in (made[0], made[1], made[3])])
        assert found == [Verdict("late", (2,))] * 3


def test_who_gives_up_sooner_ends_the_round_for_all() -> None:
    with hubs(4) as made:
        found = at_once(
            [lambda: agreed(made[0], 0), lambda: agreed(made[1], 0, 0.2), lambda: agreed(made[2], 0)]
        )  # process 3 does not come, and only process 1 has a short limit
        assert found == [Verdict("late", (3,))] * 3


def test_the_first_is_named_where_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(star_module, "_GRACE_SECONDS", 0.2)
    with hubs(3) as made:
        assert at_once([lambda hub=hub: agreed(hub, 0, 0.2) for hub in made[1:]]) == [Verdict("late", (0,))] * 2


def test_a_round_that_was_given_up_does_not_disturb_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(star_module, "_GRACE_SECONDS", SECONDS)
    with hubs(2) as made, ThreadPoolExecutor(1) as threads:
        other: Future[Verdict | None] = threads.submit(agreed, made[1], 0, 0.0)  # gives up at once
        with pytest.raises(TimeoutError):
            other.result(timeout=0.2)
        assert agreed(made[0], 0) == FINE
        assert other.result(timeout=SECONDS) == FINE
        assert at_once([lambda hub=hub: agreed(hub, 1) for hub in made]) == [FINE] * 2


@pytest.mark.parametrize("leaving", [0, 1])
def test_who_leaves_or_dies_is_known_at_once(leaving: int) -> None:
    with hubs(3) as made:
        made[leaving].close()
        staying = [hub for process, hub in enumerate(made) if process != leaving]
        begun = time.monotonic()
        assert at_once([lambda hub=hub: agreed(hub, 0) for hub in staying]) == [Verdict("left", (leaving,))] * 2
        assert time.monotonic() - begun < SECONDS / 2


def test_what_was_said_before_leaving_arrives() -> None:
    with hubs(3) as made, ThreadPoolExecutor(2) as threads:
        others = [threads.submit(agreed, hub, 0) for hub in made[1:]]
        assert agreed(made[0], 0) == FINE
        made[0].close()
        assert [future.result(timeout=SECONDS) for future in others] == [FINE] * 2


def test_why_the_first_left_is_heard_by_who_comes_later() -> None:
    with hubs(2) as made:
        made[0].fail(0, 0, "gone")
        made[0].close()
        assert agreed(made[1], 0) == Verdict("failed", (0,), "gone")
        assert agreed(made[1], 1) == Verdict("left", (0,))


@pytest.mark.parametrize("process", [0, 1])
def test_a_limit_may_be_set_while_waiting(monkeypatch: pytest.MonkeyPatch, process: int) -> None:
    monkeypatch.setattr(star_module, "_GRACE_SECONDS", 0.1)
    limits = [math.inf]
    with hubs(2) as made, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            made[process].agree, 0, ready=lambda: 0, deadline=lambda: limits[0], stop=threading.Event()
        )
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        limits[0] = 0.0
        assert waiting.result(timeout=SECONDS / 2) == Verdict("late", (1 - process,))


@pytest.mark.parametrize("process", [0, 1])
def test_a_wait_can_be_stopped(process: int) -> None:
    with hubs(2) as made, ThreadPoolExecutor(1) as threads:
        stop = threading.Event()
        waiting = threads.submit(made[process].agree, 0, ready=lambda: 0, deadline=lambda: math.inf, stop=stop)
        stop.set()
        assert waiting.result(timeout=SECONDS / 2) is None


def test_nobody_waits_for_a_process_that_failed_and_does_not_listen() -> None:
    with hubs(3) as made:
        for number in range(100):
            made[1].fail(number, 1, "x" * 5000)
            found = at_once([lambda hub=hub, number=number: agreed(hub, number) for hub in (made[0], made[2])])
            assert found == [Verdict("failed", (1,), "x" * 3999 + "…")] * 2


def test_nobody_waits_for_a_process_that_does_not_listen() -> None:
    with hubs(2) as made:
        for number in range(100):
            made[0].fail(number, 0, "x" * 4000)
        assert agreed(made[0], 100) == Verdict("left", (1,))


@pytest.mark.parametrize(
    "said", [b"\xff" * 16, b"\x00\x00", b"\x00\x02" + bytes(7) + b"\x08" + bytes(7) + b"\x01" + bytes(8) + b"{"]
)
def test_who_says_what_is_no_verdict_is_given_up(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Hub({1: ours}, is_first=True)) as hub:
        theirs.sendall(said)
        assert agreed(hub, 0) == Verdict("left", (1,))


def test_processes_find_each_other_by_what_they_are_told() -> None:
    processes = [1, 4, 6]
    doors = [Door(processes, process) for process in processes]
    words = {process: door.words for process, door in zip(processes, doors, strict=True)}

    def enter(number: int) -> Verdict | None:
        with doors[number] as door:
            hub = door.connect(words, deadline=time.monotonic() + SECONDS)
        with contextlib.closing(hub):
            if processes[number] == 6:
                hub.fail(0, 6, "gone")
                return None
            return agreed(hub, 0)

    failed = Verdict("failed", (6,), "gone")
    assert at_once([lambda number=number: enter(number) for number in range(3)]) == [failed, failed, None]


def test_who_does_not_connect_is_named() -> None:
    late = pytest.raises(WaitTimeout, match=r"rank 1 .* did not connect to rank 0 .* in time")
    with Door([0, 1], 0) as first, Door([0, 1], 1) as second, late:
        first.connect({0: first.words, 1: second.words}, deadline=time.monotonic() + 0.3)
