"""The watch where ranks are lost one by one: who hears of whom, and who is lost where a connection breaks."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from braidax.comm import watch as watch_module
from braidax.comm.watch import Notice, Watch
from braidax.connections.world import World

LIMIT_SECONDS = 30.0


@contextlib.contextmanager
def watches(size: int, *, peer_timeout_seconds: float = 60.0) -> Iterator[list[Watch]]:
    """Connects the watches of a world."""
    made = [Watch(peer_timeout_seconds=peer_timeout_seconds, on_loss="peer") for _ in range(size)]
    addresses = [watch.address for watch in made]
    hosts = tuple("abcdefgh"[:size])
    threads = [
        threading.Thread(
            target=watch.connect,
            args=(World(rank, addresses, hosts, b"0123456789abcdef"),),
            kwargs={"timeout_seconds": 20},
        )
        for rank, watch in enumerate(made)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    try:
        yield made
    finally:
        for watch in made:
            watch.close()


def link(watch: Watch, rank: int) -> socket.socket:
    """Returns the connection to a rank."""
    return next(neighbor.channel.socket for neighbor in watch._neighbors if neighbor.rank == rank)


def breaks(watch: Watch, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a watch see that the connection to a rank is broken."""
    monkeypatch.setattr(watch_module, "SECOND_WORD_SECONDS", 0.5)
    how = "the connection to it broke: a test"
    monkeypatch.setattr(watch, "_silent", lambda neighbor, now: how if neighbor.rank == rank else "")


def look_until(made: dict[int, Watch], holds: Callable[[dict[int, list[Notice]]], bool]) -> dict[int, list[Notice]]:
    """Lets ranks look, until what they have heard is what is waited for."""
    found: dict[int, list[Notice]] = {rank: [] for rank in made}
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds(found):
        assert time.monotonic() < deadline, found
        for rank, watch in made.items():
            found[rank] += watch.look()
        time.sleep(0.002)  # what they wait for needs the core
    return found


def test_all_are_neighbors_and_hear_of_a_death_themselves() -> None:
    with watches(4) as made:
        assert [sorted(neighbor.rank for neighbor in watch._neighbors) for watch in made] == [
            [other for other in range(4) if other != rank] for rank in range(4)
        ]
        for rank in (0, 1, 3):
            link(made[2], rank).close()
        made[2]._neighbors.clear()
        left = {rank: made[rank] for rank in (0, 1, 3)}
        found = look_until(left, lambda found: all(found.values()))
        assert {notice for each in found.values() for notice in each} == {Notice("lost", 2, "its process ended")}
        for watch in left.values():
            assert 2 not in {neighbor.rank for neighbor in watch._neighbors}
            assert watch.look() == []


@pytest.mark.parametrize("cut", [(0, 1), (1, 2), (0, 2)])
def test_where_a_connection_breaks_the_higher_one_is_lost_for_all(
    cut: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends live: were both to be believed, both were lost."""
    with watches(3) as made:
        low, high = cut
        for one, other in (cut, cut[::-1]):
            breaks(made[one], other, monkeypatch)
        found = look_until(dict(enumerate(made)), lambda found: all(found.values()))
        assert {notice for each in found.values() for notice in each} == {
            Notice("lost", high, "the connection to it broke: a test")
        }
        time.sleep(0.6)  # behind which the higher one would have had its say
        assert [watch.look() for watch in made] == [[], [], []]
        assert low not in {rank for watch in made for kind, rank, _ in watch._told if kind == "lost"}


def test_of_two_alone_each_names_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with watches(2) as made:
        for rank in (0, 1):
            breaks(made[rank], 1 - rank, monkeypatch)
        began = time.monotonic()
        assert made[1].look() == []
        assert 0.3 < made[1].pause_seconds <= 0.5
        assert [each.rank for each in made[0].look()] == [1]
        found = look_until({1: made[1]}, lambda found: bool(found[1]))
        assert [notice.rank for notice in found[1]] == [0]
        assert time.monotonic() - began < 2


def test_a_frozen_one_hears_that_it_is_lost_and_says_nothing_of_others() -> None:
    with watches(3, peer_timeout_seconds=0.5) as made:
        awake = {0: made[0], 1: made[1]}
        found = look_until(awake, lambda found: all(found.values()))
        words = "nothing came from it for 0.5 s, it is frozen or cut off"
        assert found == {0: [Notice("lost", 2, words)], 1: [Notice("lost", 2, words)]}
        assert made[2].look() == [Notice("lost", 2, words)]
        time.sleep(1.2)
        assert made[2].look() == []
        assert [watch.look() for watch in awake.values()] == [[], []]


def test_a_frozen_first_rank_is_lost_a_little_later() -> None:
    with watches(3, peer_timeout_seconds=0.5) as made:
        awake = {1: made[1], 2: made[2]}
        began = time.monotonic()
        found = look_until(awake, lambda found: all(found.values()))
        assert {notice.rank for each in found.values() for notice in each} == {0}
        assert time.monotonic() - began > 0.5


def test_a_group_that_failed_is_told_of_apart_from_others() -> None:
    with watches(3) as made:
        for group in (1, 2):
            made[0].tell(Notice("failed", 0, "words", group))
        found = look_until({1: made[1], 2: made[2]}, lambda found: all(len(each) == 2 for each in found.values()))
        assert [notice.group for notice in found[2]] == [1, 2]
        assert made[0].look() == []
