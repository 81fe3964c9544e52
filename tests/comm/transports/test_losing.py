"""`Transport.lose`: one peer is given up, and nobody else is harmed."""

import functools
import time
from collections.abc import Callable

import pytest

from braidax.comm.transports.transport import Operation
from braidax.errors import Aborted, CommError, PeerLost
from tests.support.comm.transports.checks import pattern
from tests.support.comm.transports.tcps import TCPS
from tests.support.comm.transports.threads import make
from tests.support.comm.transports.worlds import FixedTransport, Rank, run_threads

NAMES = ("in-process", *TCPS, "ucx")
MIB = 1 << 20
LOST = 2  # of three


def error_of(rank: Rank) -> CommError:
    return PeerLost(f"rank {LOST} is lost: rank {rank.rank} says so", LOST, f"host-{LOST}")


def check_living(rank: Rank) -> None:
    """Rank 0 and 1 exchange what they like, of all sizes."""
    other = 1 - rank.rank
    for tag, length in enumerate((0, 8, 60_000, 3 * MIB, 20 * MIB)):
        place = bytearray(length)
        received = rank.receive(other, tag, place)
        rank.wait(rank.send(other, tag, pattern(rank.rank, length)), received)
        assert received.num_bytes == length
        assert place == pattern(other, length)


def lost_by_two(does: Callable[[Rank], None], waits: Callable[[Rank], list[Operation]]) -> Callable[[Rank], None]:
    """Returns a check of three ranks: two of them give the third one up, which does something before."""

    def check(rank: Rank) -> None:
        rank.barrier()
        if rank.rank == LOST:
            does(rank)
            rank.meet()
            rank.meet()  # it is there, and does nothing
            rank.meet()
            rank.close(timeout_seconds=0.0)
            return
        before = waits(rank)
        rank.meet()
        rank.idle(0.1)
        rank.transport.lose(LOST, error_of(rank))
        rank.transport.lose(LOST, Aborted("a second call does nothing"))
        rank.meet()
        check_ended(rank, before)
        for length in (0, 8, 5000, 3 * MIB):
            check_ended(rank, [rank.receive(LOST, 3, bytearray(length)), rank.send(LOST, 3, pattern(1, length))])
        check_living(rank)
        rank.meet()
        check_living(rank)
        rank.close()

    return check


def check_ended(rank: Rank, operations: list[Operation]) -> None:
    for operation in operations:
        with pytest.raises(PeerLost, match=f"rank {LOST} is lost: rank {rank.rank} says so"):
            rank.wait(operation, seconds=5)


def nothing(rank: Rank) -> None: ...


def receives_and_sends(rank: Rank) -> list[Operation]:
    sizes = (0, 8, 5000, 3 * MIB)
    receives = [rank.receive(LOST, tag, bytearray(length)) for tag, length in enumerate(sizes)]
    return [*receives, rank.send(LOST, 1, pattern(1, 30 * MIB)), rank.receive(LOST, 1, bytearray(8))]


@pytest.mark.parametrize("name", NAMES)
def test_what_waits_for_it_ends_and_others_go_on(name: str) -> None:
    run_threads(functools.partial(make, name), 3, lost_by_two(nothing, receives_and_sends))


def sends_what_nobody_asks_for(rank: Rank) -> None:
    for peer in (0, 1):
        for length in (8, 5000, 60_000, 3 * MIB):
            rank.send(peer, 3, pattern(7, length))
    rank.idle(0.05)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_sent_before_is_not_taken(name: str) -> None:
    run_threads(functools.partial(make, name), 3, lost_by_two(sends_what_nobody_asks_for, lambda rank: []))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ucx"])  # shared memory tells nobody
def test_the_lost_one_hears_of_it(name: str) -> None:
    def check(rank: Rank) -> None:
        rank.barrier()
        operations = [rank.receive(1 - rank.rank, 1, bytearray(8)), rank.send(1 - rank.rank, 2, pattern(1, 30 * MIB))]
        if rank.rank == 0:
            rank.transport.lose(1, error_of(rank))
        for operation in operations:
            with pytest.raises(PeerLost):
                rank.wait(operation, seconds=5)
        rank.meet()
        rank.close()

    run_threads(functools.partial(make, name), 2, check)


@pytest.mark.parametrize("name", NAMES)
def test_in_the_middle_of_a_message_nothing_is_taken_for_whole(name: str) -> None:
    """What is half here when its sender is given up is an error, and its place is not written any more."""

    def check(rank: Rank) -> None:
        rank.barrier()
        length = 48 * MIB
        if rank.rank == LOST:
            for peer in (0, 1):
                rank.send(peer, 1, pattern(5, length))
            rank.transport.poll(0.0)
            rank.meet()
            rank.meet()
            rank.close(timeout_seconds=0.0)
            return
        rank.meet()
        place = bytearray(length)
        operation = rank.receive(LOST, 1, place)
        rank.transport.poll(0.0)
        rank.transport.lose(LOST, error_of(rank))
        if operation.error is None and operation.done:
            assert place == pattern(5, length)  # it had come as a whole
        else:
            check_ended(rank, [operation])
            before = bytes(place)
            rank.idle(0.1)
            assert place == before
        check_living(rank)
        rank.meet()
        rank.close()

    run_threads(functools.partial(make, name), 3, check)


def test_a_transport_that_cannot_says_so() -> None:
    fixed = FixedTransport()
    assert not fixed.can_lose
    with pytest.raises(CommError, match="the transport 'fixed' cannot lose rank 1 alone; expected one with can_lose"):
        fixed.lose(1, Aborted(""))


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_no_time(name: str) -> None:
    def check(rank: Rank) -> None:
        rank.barrier()
        if rank.rank != LOST:
            receives_and_sends(rank)
            began = time.monotonic()
            rank.transport.lose(LOST, error_of(rank))
            assert time.monotonic() - began < 1
        rank.meet()
        rank.close(timeout_seconds=0.0)

    run_threads(functools.partial(make, name), 3, check)
