"""Matching: oldest with oldest, whichever comes first."""

import random

from braidax.comm.transports.matching import Matching


def test_each_finds_the_oldest_other_of_its_key() -> None:
    matching: Matching[str, str] = Matching()
    assert matching.post(0, 1, "first") is None
    assert matching.post(0, 1, "second") is None
    assert matching.arrive(1, 1, "of another peer") is None
    assert matching.arrive(0, 2, "of another tag") is None
    assert matching.arrive(0, 1, "a") == "first"
    assert matching.arrive(0, 1, "b") == "second"
    assert matching.arrive(0, 1, "c") is None
    assert matching.arrive(0, 1, "d") is None
    assert matching.post(0, 1, "third") == "c"
    assert matching.take(0, 1) == "d"
    assert matching.take(0, 1) is None
    assert matching.post(1, 1, "x") == "of another peer"


def test_random_orders_pair_like_with_like() -> None:
    drawn = random.Random(5)
    matching: Matching[tuple[int, int, int], tuple[int, int, int]] = Matching()
    counts = {(kind, peer, tag): 0 for kind in ("post", "arrive") for peer in range(3) for tag in range(3)}
    for _ in range(2000):
        kind, peer, tag = drawn.choice(list(counts))
        number = counts[kind, peer, tag]
        counts[kind, peer, tag] += 1
        found = getattr(matching, kind)(peer, tag, (peer, tag, number))
        other = counts["arrive" if kind == "post" else "post", peer, tag]
        assert found == ((peer, tag, number) if other > number else None)


def test_receives_from_a_lost_peer_are_given_up_and_its_messages_stay() -> None:
    matching: Matching[str, str] = Matching()
    matching.post(0, 1, "a")
    matching.post(0, 1, "b")
    matching.post(0, 2, "c")
    matching.post(1, 1, "of another peer")
    matching.arrive(0, 3, "message")
    assert sorted(matching.give_up(0)) == ["a", "b", "c"]
    assert matching.give_up(0) == []
    assert matching.take(0, 3) == "message"
    assert matching.arrive(1, 1, "x") == "of another peer"
    matching.post(1, 1, "y")
    matching.arrive(2, 1, "z")
    matching.clear()
    assert matching.take(2, 1) is None
    assert matching.give_up(1) == []
