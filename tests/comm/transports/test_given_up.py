"""UCX: a large message lies in its sender's memory, and is none any more once the sender has given it up."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.comm.ranks import by_day
from tests.support.comm.transports.ucx_ranks import WAYS, Rank, Ranks

SIZES = (13_864, 1 << 20, 40 << 20)


def meet(rank: Rank) -> None:
    """Exchanges large messages, so that all ways are there."""
    place = bytearray(1 << 20)
    rank.wait(rank.receive(1 - rank.rank, 99, place), rank.send(1 - rank.rank, 99, bytes(1 << 20)))


def give_up(rank: Rank) -> list[bool]:
    """Sends, gives up before anybody has received it, and puts other values in its place."""
    meet(rank)
    places = [np.ones(size, np.uint8) for size in SIZES]
    sent = [rank.send(1, tag, place.data) for tag, place in enumerate(places)]
    rank.wait(*sent, seconds=0.05)
    ended = [operation.done for operation in sent]
    rank.transport.close(timeout_seconds=0)
    for place in places:
        place[:] = 2
    rank.pipe.send(("given up", None))
    rank.ask()
    return ended


def receive_late(rank: Rank) -> list[tuple[str, set[int]]]:
    meet(rank)
    rank.ask()
    found: list[tuple[str, set[int]]] = []
    for tag, size in enumerate(SIZES):
        place = bytearray(size)
        received = rank.receive(0, tag, place)
        rank.wait(received, seconds=0.5)
        assert received.done
        found.append((str(received.error), set(place[:4096]) | set(place[-1:])))
    return found


@pytest.mark.parametrize("way", by_day(WAYS, "default", "tcp"))
def test_what_its_sender_gave_up_is_no_message(way: str, together: Callable[..., Ranks]) -> None:
    ranks = together(give_up, receive_late, environment=WAYS[way])
    ranks.hear(0)
    ranks.tell(1)
    found = ranks.hear(1)
    ranks.tell(0)
    had_ended = ranks.hear(0)
    assert had_ended == [way != "default", False, False]
    for (how, values), was_sent in zip(found, had_ended, strict=True):
        if how == "None":
            assert was_sent
            assert values == {1}
        else:
            assert how.startswith("rank 0 (host host-0) is lost: UCX says ")
