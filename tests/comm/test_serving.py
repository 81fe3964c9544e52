"""Those who ask and those who serve: limits, late answers, handlers that raise, and peers that misbehave."""

import random
import resource
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.comm.group_messages import ANSWER, ASK, BODY, tag_of
from braidax.comm.messages import FIRST_BYTES, LENGTHS, Unpacking, pack
from braidax.comm.serving.conversation import Talk, pieces_of
from braidax.comm.serving.server import Requests
from braidax.comm.small import WHOLE_BYTES, decoded, encoded
from braidax.comm.transports.transport import Operation
from braidax.errors import Aborted, ArgumentError, CallFailed, CommError, WaitTimeout
from tests.support.comm.ranks import in_turns, outcomes, results
from tests.support.comm.transports.tcps import IN_PYTHON

TRANSPORTS = ["in-process", "tcp", "ucx"]
MIB = 1 << 20


def echo(source: int, value: Any) -> Any:
    return value


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 4000, 1_000_000])
def test_a_late_answer_is_dropped_and_the_generation_lives(transport: str, count: int) -> None:
    """It is never taken for another's, small or large."""
    late = threading.Event()

    def answer(source: int, value: np.ndarray) -> np.ndarray:
        if value[0] == 0:
            assert late.wait(20)
        return np.full(count, value[0])

    def run(comm: Communicator) -> str:
        if comm.rank == 0:
            with comm.serve(answer) as server:
                server.wait()
            return "served"
        with pytest.raises(WaitTimeout, match=r"rank 0 \(host .*\) did not answer within 0.1 s; expected it to serve"):
            comm.ask(0, np.zeros(count, np.int64), timeout_seconds=0.1)
        late.set()
        for number in (1, 2, 3):
            assert (comm.ask(0, np.full(count, number)) == np.full(count, number)).all()
        comm.end_asking(0)
        return "asked"

    assert results(2, run, transport=transport) == ["served", "asked"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_value_becomes_after_the_limit_is_not_sent(transport: str) -> None:
    """Who has given up may change the value: a server that comes later gets what was given, or nothing."""
    given_up, seen = threading.Event(), list[bool]()

    def answer(source: int, value: np.ndarray) -> np.ndarray:
        seen.append(bool((value == 7).all()))
        return value[:1]

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            assert given_up.wait(20)
            with comm.serve(answer) as server:
                server.wait()
            return
        for count in (100, 900, 400_000):
            value = np.full(count, 7.0)
            with pytest.raises(WaitTimeout):
                comm.ask(0, value, timeout_seconds=0.1)
            value[:] = 0
        given_up.set()
        assert comm.ask(0, np.full(500_000, 7.0))[0] == 7
        comm.end_asking(0)

    results(2, run, transport=transport)
    assert seen == [True, True, True]  # two small ones whose asker has gone, and the last


@pytest.mark.parametrize(("transport", "seed"), in_turns(TRANSPORTS, range(3), every=3))
def test_whatever_limits_pass_values_stay_whole(transport: str, seed: int) -> None:
    """Limits that end anywhere in a request: those that are answered are answered right, and the server lives."""

    def answer(source: int, value: np.ndarray) -> np.ndarray:
        assert (value == value[0]).all()
        if value[0] % 5 == 0:
            time.sleep(0.003)
        return np.full(int(value[0]) * 997 % 300_000 + 1, value[0])

    def run(comm: Communicator) -> int:
        if comm.rank == 0:
            with comm.serve(answer) as server:
                server.wait()
            return 0
        draw, answered = random.Random(f"{seed} {comm.rank}"), 0
        for index in range(1, 60):
            value = np.full(draw.choice([1, 700, 5000, 200_000, 600_000]), index)
            try:
                found = comm.ask(0, value, timeout_seconds=draw.choice([0.0001, 0.002, 0.01, 30]))
            except WaitTimeout:
                value[0] = -1
                continue
            assert (found == index).all()
            assert len(found) == index * 997 % 300_000 + 1
            answered += 1
        assert comm.ask(0, np.array([3]))[0] == 3
        comm.end_asking(0)
        return answered

    _, *answered = results(3, run, transport=transport)
    assert all(answered)


def test_a_rank_that_serves_nothing_is_named_and_asked_no_more_for_ever() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            for _ in range(64):
                with pytest.raises(WaitTimeout, match=r"did not answer within 0.001 s; expected it to serve"):
                    comm.ask(0, b"x", timeout_seconds=0.001)
            with pytest.raises(WaitTimeout, match="has left 64 requests of this rank without an answer"):
                comm.ask(0, b"x", timeout_seconds=10)
        comm.barrier()
        if comm.rank == 1:  # what it did not answer it does now, late, and all goes on
            deadline = time.monotonic() + 20
            while True:
                try:
                    assert bytes(comm.ask(0, b"y")) == b"y"
                    break
                except WaitTimeout:
                    assert time.monotonic() < deadline
            comm.end_asking(0)
        else:
            with comm.serve(echo) as server:
                server.wait()

    results(2, run)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_requests_of_one_rank_are_answered_in_their_order(transport: str) -> None:
    seen: dict[int, list[int]] = {1: [], 2: []}

    def answer(source: int, value: np.ndarray) -> np.ndarray:
        seen[source].append(int(value[0]))
        return value

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            with comm.serve(answer) as server:
                server.wait()
                server.wait()
            return
        for index in range(100):
            comm.ask(0, np.full(2000 if index % 7 == 0 else 1, index))
            if index == 50:
                comm.end_asking(0)  # more may come: the second `wait` is for those
        comm.end_asking(0)

    results(3, run, transport=transport)
    assert seen == {1: list(range(100)), 2: list(range(100))}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_values_come_back_whatever_their_size(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one message, in one that brings what does not fit there, and in pieces that are asked for."""
    sizes = [1, FIRST_BYTES - 200, FIRST_BYTES, WHOLE_BYTES - 1, WHOLE_BYTES, WHOLE_BYTES + 1, 3 * WHOLE_BYTES]
    asked, send_rest = list[int](), Talk.send_rest

    def counted(talk: Talk, parcel: Any) -> Any:
        asked.append(sum(map(len, parcel.rest)))
        return send_rest(talk, parcel)

    monkeypatch.setattr(Talk, "send_rest", counted)

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            with comm.serve(echo) as server:
                server.wait()
            return
        found = [comm.ask(0, np.random.default_rng(size).integers(0, 255, size, np.uint8)) for size in sizes]
        for size, value in zip(sizes, found, strict=True):
            np.testing.assert_array_equal(value, np.random.default_rng(size).integers(0, 255, size, np.uint8))
        parts = [bytes([index]) * 3001 for index in range(20)]
        listed = comm.ask(0, parts)
        assert [bytes(part) for part in listed] == parts
        assert [np.frombuffer(part, np.uint8).ctypes.data % 64 for part in listed] == [0] * 20
        comm.end_asking(0)

    results(2, run, transport=transport)
    assert sorted(asked) == [WHOLE_BYTES + 1] * 2 + [3 * WHOLE_BYTES] * 2


@pytest.mark.parametrize("lengths", [[3000], [0, 5, MIB - 5], [MIB - 1, 9], [3, 6 * MIB, 7 * MIB, 1]])
def test_pieces_are_a_copy_in_no_more_memory_than_they_need(lengths: Sequence[int]) -> None:
    parts = [memoryview(np.random.default_rng(length).bytes(length)) for length in lengths]
    flights, found, places = deque[tuple[Operation, memoryview]](), bytearray(), set[int]()
    for piece in pieces_of(parts, flights):
        assert len(piece) in (MIB, sum(lengths) - len(found))
        found += piece
        places.add(id(piece.obj))
        flights.append((Operation(0), piece))  # four of which are under way, the oldest of them has been sent
        assert len(flights) <= 4
        if sum(lengths) <= MIB:
            assert memoryview(piece.obj).nbytes == sum(lengths)
    assert found == b"".join(parts)
    assert len(places) == min(4, -(-sum(lengths) // MIB))


def test_all_that_ask_have_their_turn() -> None:
    def run(comm: Communicator) -> None:
        requests = Requests(comm._group)
        if comm.rank == 0:
            requests._receives = {rank: Operation(rank) for rank in (1, 2, 3)}
            assert requests.next() is None
            for operation in requests._receives.values():
                operation.finish()
            assert [requests.next() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]

    results(4, run)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handler_that_raises_is_told_to_the_asker_alone(transport: str) -> None:
    def answer(source: int, value: Any) -> Any:
        if len(value) == 1:
            raise SystemExit("é" * 20_000)  # longer than one message
        return {} if len(value) == 2 else value

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            with comm.serve(answer) as server:
                server.wait()
            return
        with pytest.raises(CallFailed, match=r"rank 0 \(host .*\) could not answer: SystemExit: éé") as caught:
            comm.ask(0, b"x")
        assert (caught.value.rank, str(caught.value).count("é")) == (0, 20_000)
        assert caught.value.traceback.endswith(f"SystemExit: {'é' * 20_000}\n")
        with pytest.raises(CallFailed, match=r"ArgumentError: value= is a dict: expected a NumPy array"):
            comm.ask(0, b"xy")
        assert bytes(comm.ask(0, b"xyz")) == b"xyz"
        comm.end_asking(0)

    results(2, run, transport=transport)


def test_arguments_that_cannot_be() -> None:
    def run(comm: Communicator) -> None:
        for rank, words in ((comm.rank, "expected another rank than this one"), (2, "expected a rank from 0 to 1")):
            with pytest.raises(ArgumentError, match=words):
                comm.ask(rank, b"")
        with pytest.raises(ArgumentError, match="timeout_seconds=0: expected seconds > 0"):
            comm.ask(1 - comm.rank, b"", timeout_seconds=0)
        with pytest.raises(ArgumentError, match="value= is a dict"):
            comm.ask(1 - comm.rank, {})
        with comm.serve(echo), pytest.raises(CommError, match="serves already; expected one"), comm.serve(echo):
            pass
        comm.barrier()

    results(2, run)


def test_a_server_waits_for_all_who_may_ask() -> None:
    gone = threading.Event()

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            with comm.serve(echo) as server:
                with pytest.raises(WaitTimeout, match=r"rank 0 .* served rank 1 .*, rank 2 .* up to the limit"):
                    server.wait(0.2)
                gone.set()
                server.wait()  # one says so, the other one closes
            comm.recv(1)
            return
        assert gone.wait(20)
        assert bytes(comm.ask(0, b"a")) == b"a"
        if comm.rank == 1:
            comm.end_asking(0)
            comm.send(b"", 0)
        else:
            comm.close()

    found = outcomes(3, run)
    assert found[:2] == [None, None] or all(not isinstance(each, AssertionError) for each in found)
    assert not isinstance(found[0], WaitTimeout | AssertionError), found[0]


def test_a_handler_that_does_not_return_is_named_at_the_end() -> None:
    asked, ends = threading.Event(), threading.Event()

    def forever(source: int, value: Any) -> Any:
        asked.set()
        assert ends.wait(30)
        return b""

    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.ask(0, b"x")
        else:
            words = r"handler=<function .*forever.*> has not returned within 0.3 s"
            with pytest.raises(WaitTimeout, match=words), comm.serve(forever):
                assert asked.wait(20)
                comm.timeout_seconds = 0.3
            ends.set()
            comm.timeout_seconds = 30
            comm.recv(1)
            return
        comm.send(b"", 0)

    results(2, run)


def test_what_serves_ends_with_the_generation() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("enough")
        with comm.serve(echo) as server:
            server.wait()

    for found in outcomes(2, run):
        assert isinstance(found, Aborted)
    assert [thread for thread in threading.enumerate() if thread.name == "braidax-serve"] == []


def test_no_memory_is_taken_on_the_word_of_a_message() -> None:
    """Who announces what never comes holds the server up to its limit, and takes none of its memory."""

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.barrier()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with comm.serve(echo) as server:
                server.wait(20)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
            comm.timeout_seconds = 30
            return
        comm.timeout_seconds = 30
        if comm.rank == 1:
            lengths = LENGTHS.pack(10, 1 << 50, 0) + b"x" * 10
            comm._progress.send(0, tag_of(0, ASK, 0), (memoryview(struct.pack("<QQ", 0, 5) + lengths),))
            comm.barrier()
        else:
            comm.barrier()
            assert bytes(comm.ask(0, b"after", timeout_seconds=20)) == b"after"
        comm.end_asking(0)

    results(3, run, timeout_seconds=2.0)


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        (77, b"", "a word of kind 77"),
        (0, b"short", "a message is no value: one of 5 bytes"),
        (None, b"abc", "a word of 3 bytes"),
        (0, LENGTHS.pack(10, 9000, 0) + b"x" * 10 + bytes(8999), "a message is no value: 9033 bytes that announce 34"),
        (0, LENGTHS.pack(10, 9000, 0) + b"x" * 10 + bytes(9000), "a message is no value: a head of 10 bytes that says"),
        (0, LENGTHS.pack(1 << 63, 1 << 63, 0) + bytes(9000), "a message is no value: 9024 bytes that announce 24"),
    ],
)
def test_hostile_requests_end_the_generation(kind: int | None, data: bytes, words: str) -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            message = data if kind is None else struct.pack("<QQ", kind, 5) + data
            comm._progress.send(0, tag_of(0, ASK, 0), (memoryview(message),))
            comm.recv(0)
        with comm.serve(echo) as server:
            server.wait()

    for found in outcomes(2, run):
        assert isinstance(found, Aborted | CommError)
        assert words in str(found)


def test_nothing_is_left_of_requests_in_the_transport() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            for _ in range(2):
                with comm.serve(echo) as server:
                    server.wait()
        else:
            for _ in range(2):
                for count in (1, 5000, 300_000):
                    comm.ask(0, np.zeros(count))
                comm.end_asking(0)
        comm.barrier()
        transport: Any = comm._progress._transport
        tags = [tag for link in transport._worker._links.values() for tag in (*link.posted, *link.kept)]
        assert [tag for tag in tags if tag >> 30 & 7 in (BODY, ANSWER)] == []
        assert sum(tag >> 30 & 7 == ASK for tag in tags) <= comm.size - 1  # the next requests, if there are any

    results(3, run, transport=IN_PYTHON)


@pytest.mark.parametrize(
    "value",
    [
        np.float32([1, 2]),
        np.zeros((2, 3), "M8[s]"),
        np.array(5),
        b"bytes",
        b"",
        np.zeros((0, 3)),
        np.array(["ab", "c"]),
    ],
)
def test_small_values_are_what_others_are(value: Any) -> None:
    """The short way makes the same bytes, and the same values of them."""
    parts = encoded(value)
    assert parts is not None
    first = bytearray(b"".join(parts))
    assert first == b"".join(pack(value).first)
    expected = Unpacking(np.frombuffer(first, np.uint8)).value()
    for begin in (0, 16):
        found = decoded(bytearray(begin) + first, begin)
        if found is None:
            assert isinstance(value, np.ndarray)
            assert value.dtype.itemsize == 0
            continue
        assert type(found[0]) is type(expected)
        if isinstance(expected, np.ndarray):
            assert (found[0].dtype, found[0].shape) == (expected.dtype, expected.shape)
        assert (found[0] == expected).all() if isinstance(expected, np.ndarray) else found[0] == expected
        if isinstance(expected, np.ndarray):
            assert found[0].flags.aligned
            assert found[0].flags.writeable
    for wrong in (first[:-1], first + b"x", bytearray(b"x" * 100), bytearray(), bytearray(bytes(100)), first[:20]):
        assert decoded(wrong) is None


@pytest.mark.parametrize(
    "about",
    [
        b'["array", "<f4", [3], [8]]',  # more than there is
        b'["array", "<f4", [1], [8]]',
        b'["array", "<f4", [-2], [8]]',
        b'["array", "|O", [1], [8]]',
        b'["array", "<f4", [2], [4, 4]]',
        b'["array", "<f4", [2], []]',
        b'["buffer", null, [], [7]]',
        b'["other", "<f4", [2], [8]]',
        b'{"a": 1}',
        b"[",
    ],
)
def test_what_is_no_small_value_takes_the_long_way(about: bytes) -> None:
    for padding in (b" " * (-(24 + len(about)) % 16), b""):
        words = about + padding
        assert decoded(bytearray(LENGTHS.pack(len(words), 8, 0) + words + bytes(8))) is None


def test_other_values_take_the_long_way() -> None:
    for value in (np.zeros(FIRST_BYTES), bytes(FIRST_BYTES), [b"a"], memoryview(b"a"), np.array([None]), "text"):
        assert encoded(value) is None
