"""Worlds of `on_loss="peer"`: what ends with a rank that is lost, and all that does not."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator, Hub, InProcessTransport, MemoryStore, connect, rendezvous
from braidax.comm.transports.mpi import MpiTransport
from braidax.errors import Aborted, ArgumentError, CommError, HandshakeError, PeerLost, WaitTimeout
from tests.support.comm.exercise import exercise
from tests.support.comm.losing.worlds import LIMIT_SECONDS, TRANSPORTS, VICTIM, lose, raises_lost, until, world
from tests.support.comm.ranks import outcomes
from tests.support.comm.transports.tcps import IN_C
from tests.support.comm.transports.worlds import FixedTransport

_NEVER = 9  # a tag under which nobody sends
_LARGE = 1 << 20  # numbers: more than the transport takes of what nobody asks for


def in_turn(turn: int) -> list[Any]:
    """Returns two of the transports, and the others in the long run. **Arguments:** `turn`: 0 or 1, which two."""
    return [
        pytest.param(one, marks=() if place % 2 == turn else pytest.mark.slow) for place, one in enumerate(TRANSPORTS)
    ]


def check_two(comm: Communicator, other: int) -> None:
    """Exchanges values of all sizes with another rank."""
    for count in (0, 1, 5000, _LARGE):
        request = comm.start.send(np.arange(count) + comm.rank, other, tag=5)
        np.testing.assert_array_equal(comm.recv(other, tag=5), np.arange(count) + other)
        request.wait()


WAITS: dict[str, Callable[[Communicator], Any]] = {
    "recv": lambda comm: comm.recv(VICTIM, tag=_NEVER),
    "recv_buffer": lambda comm: comm.recv_buffer(bytearray(10), VICTIM, tag=_NEVER),
    "send": lambda comm: comm.send(np.zeros(_LARGE), VICTIM, tag=_NEVER),
    "send_buffer": lambda comm: comm.send_buffer(np.zeros(_LARGE), VICTIM, tag=_NEVER),
    "request": lambda comm: comm.start.recv(VICTIM, tag=_NEVER).wait(),
    "ask": lambda comm: comm.ask(VICTIM, b"x"),
    "ask much": lambda comm: comm.ask(VICTIM, np.zeros(_LARGE)),
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(np.zeros(1000)),
    "request of all_reduce": lambda comm: comm.start.all_reduce(np.zeros(_LARGE)).wait(),
    "all_gather": lambda comm: comm.all_gather(np.zeros(_LARGE)),
    "reduce": lambda comm: [comm.reduce(np.zeros(10), root=0) for _ in range(100)],
    "broadcast": lambda comm: comm.broadcast(b"", root=VICTIM),
    "all_to_all": lambda comm: comm.all_to_all([np.zeros(_LARGE)] * comm.size),
    "exchange": lambda comm: list(comm.exchange([(VICTIM, [b"x"])])),
    "split": lambda comm: comm.split(0),
}


def _drawn_pairs() -> list[Any]:
    """Returns each wait over one of the transports, and over the others in the long run."""
    return [
        pytest.param(wait, transport, marks=() if (index + place) % 4 == 0 else pytest.mark.slow)
        for index, wait in enumerate(WAITS)
        for place, transport in enumerate(TRANSPORTS)
    ]


@pytest.mark.parametrize("transport", in_turn(1))
def test_every_operation(transport: str) -> None:
    def run(comm: Communicator) -> str:
        found = exercise(comm)
        comm.barrier()
        return found

    assert world(3, run, transport) == ["exercised"] * 3


@pytest.mark.parametrize(("wait", "transport"), _drawn_pairs())
def test_whoever_waits_for_a_lost_rank_hears_so_and_all_else_goes_on(wait: str, transport: str) -> None:
    waits = threading.Barrier(4)
    over = threading.Barrier(4)

    def run(comm: Communicator) -> None:
        assert (comm.on_loss, comm.lost) == ("peer", frozenset())
        others = comm.split(int(comm.rank == VICTIM))
        waits.wait(LIMIT_SECONDS)
        if comm.rank == VICTIM:
            until(lambda: comm._progress.failure is not None)
            for call in (lambda: comm.recv(0), comm.barrier, others.barrier):
                with pytest.raises(PeerLost, match=rf"rank {VICTIM} \(host .*\) is lost: its process ended"):
                    call()
            over.wait(LIMIT_SECONDS)
            return
        if comm.rank == 0:
            threading.Timer(0.1, lose, (comm, VICTIM)).start()
        raises_lost(lambda: WAITS[wait](comm))
        for later in ("recv", "send_buffer", "ask", "barrier", "all_gather", "request"):
            raises_lost(lambda later=later: WAITS[later](comm))
        assert comm.lost == {VICTIM}
        assert others.all_reduce(np.array([comm.rank])).tolist() == [4]
        assert others.lost == frozenset()
        if comm.rank in (0, 1):
            check_two(comm, 1 - comm.rank)
        assert [bytes(each) for each in others.all_gather(b"%d" % comm.rank)] == [b"0", b"1", b"3"]
        over.wait(LIMIT_SECONDS)

    world(4, run, transport)


@pytest.mark.parametrize("transport", in_turn(1))
def test_who_waits_in_a_collective_for_a_living_rank_hears_so(transport: str) -> None:
    """Rank 3 never comes either: what rank 0 waits for in the collective is a living one, and it must not."""

    over = threading.Barrier(4)

    def run(comm: Communicator) -> None:
        two = comm.split(comm.rank % 2)
        if comm.rank == 0:
            request = comm.start.barrier()  # the opening of rank 3 is missing
            raises_lost(lambda: comm.all_reduce(np.zeros(100)))
            raises_lost(request.wait)
            assert request.done
        elif comm.rank == 1:
            time.sleep(0.2)
            lose(comm, VICTIM)
        until(lambda: comm._progress.failure or comm.lost)
        if comm.rank % 2:
            assert two.all_reduce(np.array([comm.rank])).tolist() == [4]
            two.barrier()
        over.wait(LIMIT_SECONDS)

    world(4, run, transport)


@pytest.mark.parametrize("transport", in_turn(0))
def test_an_abort_ends_what_others_do_with_that_rank(transport: str) -> None:
    split = threading.Barrier(3)

    def run(comm: Communicator) -> None:
        two = comm.split(int(comm.rank == VICTIM))
        split.wait(LIMIT_SECONDS)
        if comm.rank == VICTIM:
            comm.abort("the disk is full")
            with pytest.raises(Aborted, match="ended the generation: the disk is full"):
                comm.barrier()
            return
        words = rf"rank {VICTIM} \(host .*\) ended its part: the disk is full; what others do without it goes on"
        for name in ("recv", "all_reduce", "ask", "request", "send"):
            with pytest.raises(Aborted, match=words):
                WAITS[name](comm)
        assert comm.lost == {VICTIM}
        two.barrier()
        two.barrier()

    world(3, run, transport)


def test_what_is_raised_in_the_with_block_ends_this_rank_alone() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == VICTIM:
            raise ValueError("no such column")
        with pytest.raises(Aborted, match="ended its part: ValueError: no such column"):
            comm.recv(VICTIM)
        check_two(comm, 1 - comm.rank)

    found = outcomes(3, run, transport=IN_C, on_loss="peer")
    assert found[:2] == [None, None]
    assert isinstance(found[2], ValueError)


@pytest.mark.parametrize("transport", in_turn(1))
def test_ranks_that_disagree_end_the_collectives_of_their_group_alone(transport: str) -> None:
    def run(comm: Communicator) -> None:
        two = comm.split(comm.rank // 2)
        if comm.rank < 2:
            words = r"brings all_reduce\(add\) of float64\[3\]|brings all_reduce\(add\) of float64\[2\]"
            with pytest.raises((CommError, Aborted), match=words):
                two.all_reduce(np.zeros(2 + comm.rank))
            with pytest.raises(
                Aborted, match=r"rank [01] \(host .*\) ended the collectives of a group: all_reduce failed"
            ):
                two.barrier()
            check_two(two, 1 - two.rank)  # messages between two go on
        else:
            for _ in range(10):
                assert two.all_reduce(np.full(1000, comm.rank)).tolist() == [5] * 1000
        assert comm.lost == frozenset()
        assert comm.all_reduce(np.array([comm.rank])).tolist() == [6]
        comm.barrier()

    world(4, run, transport)


@pytest.mark.parametrize("transport", in_turn(0))
def test_a_limit_that_passes_in_a_collective_ends_those_of_its_group_alone(transport: str) -> None:
    over = threading.Event()

    def run(comm: Communicator) -> None:
        two = comm.split(comm.rank // 2)
        if comm.rank == 0:
            two.timeout_seconds = 0.2
            out = np.zeros(_LARGE)
            with pytest.raises(WaitTimeout, match=r"rank 0 .* waited for rank 1 "):
                two.all_reduce(np.ones(_LARGE), out=out)
            over.set()
            assert (out == 0).all()
        if comm.rank == 1:
            assert over.wait(LIMIT_SECONDS)
            with pytest.raises(Aborted, match=r"ended the collectives of a group: all_reduce took longer than 0\.2 s"):
                for _ in range(2):  # what rank 0 sent may be here before its word that it waits no longer
                    assert (two.all_reduce(np.ones(_LARGE)) == 2).all()
        if comm.rank > 1:
            two.barrier()
        assert comm.all_reduce(np.array([comm.rank])).tolist() == [6]
        comm.barrier()

    began = time.monotonic()
    world(4, run, transport)
    assert time.monotonic() - began < 8  # closing does not wait for what nobody takes


@pytest.mark.parametrize("transport", in_turn(1))
def test_a_limit_that_passes_between_two_ends_nothing_and_loses_no_message(transport: str) -> None:
    late = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        place = np.zeros(3)
        if comm.rank == 0:
            comm.timeout_seconds = 0.1
            calls: list[Callable[[], Any]] = [
                lambda: comm.recv(1),
                lambda: comm.recv(1),
                lambda: comm.recv_buffer(place, 1),
                lambda: comm.start.recv(1, tag=3).wait(),
                lambda: comm.ask(1, b"x"),
                lambda: comm.send(np.ones(_LARGE), 1),
                lambda: comm.send_buffer(np.full(_LARGE, 2.0), 1),
            ]
            for call in calls:
                with pytest.raises(WaitTimeout):
                    call()
            comm.timeout_seconds = LIMIT_SECONDS
            late.wait(LIMIT_SECONDS)
            assert [bytes(comm.recv(1)) for _ in range(3)] == [b"0", b"1", b"2"]
            assert (place == 0).all()
            assert [comm.recv_buffer(place, 1) and place[0] for _ in range(2)] == [7, 8]
        else:
            late.wait(LIMIT_SECONDS)
            for number in range(3):
                comm.send(b"%d" % number, 0)
            for number in (7.0, 8.0):
                comm.send_buffer(np.full(3, number), 0)
            assert (comm.recv(0) == 1).all()
            place = np.zeros(_LARGE)
            comm.recv_buffer(place, 0)
            assert (place == 2).all()
        comm.barrier()

    world(2, run, transport)


def test_what_is_sent_may_be_changed_once_the_call_has_raised() -> None:
    late = threading.Event()

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.timeout_seconds = 0.1
            for way, value in ((comm.send, np.ones(_LARGE)), (comm.send_buffer, np.ones(_LARGE))):
                with pytest.raises(WaitTimeout):
                    way(value, 1)
                value[:] = 0
            comm.timeout_seconds = LIMIT_SECONDS
            late.set()
        else:
            assert late.wait(LIMIT_SECONDS)
            assert (comm.recv(0) == 1).all()
            place = np.zeros(_LARGE)
            comm.recv_buffer(place, 0)
            assert (place == 1).all()
        comm.barrier()

    world(2, run, "ucx")
    late.clear()
    world(2, run, IN_C)


def test_a_receive_that_was_given_up_and_is_too_short_now() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.timeout_seconds = 0.1
            with pytest.raises(WaitTimeout):
                comm.recv_buffer(bytearray(10), 1)
            comm.timeout_seconds = LIMIT_SECONDS
            comm.send(b"now", 1)
            with pytest.raises(CommError, match="sent 10 bytes where at most 5 were expected"):
                comm.recv_buffer(bytearray(5), 1)
        else:
            comm.recv(0)
            comm.send_buffer(bytes(10), 0)
        comm.barrier()

    world(2, run)


@pytest.mark.parametrize("transport", in_turn(0))
def test_a_stream_that_is_left_ends_those_of_its_group_alone(transport: str) -> None:
    def run(comm: Communicator) -> None:
        two = comm.split(comm.rank // 2)

        def parts() -> Any:
            for index in range(2000):
                yield index % 2, [np.full(2000, index)]

        if comm.rank < 2:
            with pytest.raises(
                Aborted, match=r"rank 1 \(host .*\) ended the collectives of a group: exchange was left"
            ):
                for _ in two.exchange(parts(), window_bytes=1 << 23):
                    if comm.rank == 1:
                        break
                two.barrier()
            check_two(two, 1 - two.rank)
        else:
            assert len(list(two.exchange(parts()))) == 2000
        comm.barrier()

    world(4, run, transport)


def test_what_on_loss_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="on_loss='none': expected 'generation' or 'peer'"):
        rendezvous._check(0, 1, 1.0, "none")


def test_ranks_must_agree_on_it() -> None:
    store, hub, found = MemoryStore(), Hub(), dict[int, BaseException]()

    def join(rank: int) -> None:
        try:
            connect(
                store,
                rank=rank,
                size=2,
                transport=InProcessTransport(hub),
                on_loss="peer" if rank else "generation",
                timeout_seconds=20,
            ).close()
        except (HandshakeError, Aborted) as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert any(
        "connects with on_loss='peer', rank 0 with 'generation'; give all ranks the same" in str(error)
        or "connects with on_loss='generation', rank 1 with 'peer'; give all ranks the same" in str(error)
        for error in found.values()
    )
    assert len(found) == 2


def test_a_transport_that_cannot_is_refused() -> None:
    assert not MpiTransport.can_lose
    with pytest.raises(ArgumentError, match="on_loss='peer': the transport 'fixed' cannot lose one rank and keep"):
        connect(MemoryStore(), rank=0, size=1, transport=FixedTransport(), on_loss="peer")
