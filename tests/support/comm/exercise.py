"""What every communicator must do, whatever carries it: run by all ranks, each asserting what it gets.

`python -m tests.support.comm.exercise TRANSPORT FOLDER` is one rank of an MPI launcher, with a file store in FOLDER.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from braidax.comm import Communicator, FileStore, connect
from braidax.comm.environment import rank_from_environment
from braidax.errors import CallFailed
from tests.support.comm.streaming import Drawn, take_part

COUNTS = (0, 1, 7, 1000, 3000, 100_000)  # of float64: nothing, inline, a body of its own, pipelines and rings


def exercise(comm: Communicator, counts: Sequence[int] = COUNTS) -> str:
    """Asserts what all operations return, for arrays of so many elements, and returns a word."""
    _point_to_point(comm)
    for count in counts:
        _values(comm, count)
        _reductions(comm, count)
    _kinds(comm)
    _groups(comm)
    _started(comm)
    _streams(comm)
    _requests(comm)
    comm.barrier()
    return "exercised"


def _mine(rank: int, count: int) -> NDArray[np.float64]:
    return np.arange(count, dtype=np.float64) * (rank + 1)


def _same(found: Any, expected: NDArray[Any]) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def _point_to_point(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in COUNTS:
        sending = comm.start.send(_mine(comm.rank, count), after, tag=count)
        _same(comm.recv(before, tag=count), _mine(before, count))
        sending.wait()
    # Under each tag in order, whichever is asked for first.
    sendings = [comm.start.send(np.array([tag, turn]), after, tag=tag) for turn in range(3) for tag in (1, 2)]
    for tag in (2, 1):
        for turn in range(3):
            _same(comm.recv(before, tag=tag), np.array([tag, turn]))
    for sending in sendings:
        sending.wait()
    if comm.size > 1 and comm.rank < 2:
        place = np.zeros(10, np.int32)
        if comm.rank == 0:
            comm.send_buffer(np.arange(7, dtype=np.int32), 1, tag=5)
            assert comm.recv_buffer(place, 1) == 40
        else:
            assert comm.recv_buffer(place, 0, tag=5) == 28
            comm.send_buffer(place, 0)
        assert place.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 0]


def _values(comm: Communicator, count: int) -> None:
    ranks = range(comm.size)
    for root in {0, comm.size - 1}:
        _same(comm.broadcast(_mine(root, count) if comm.rank == root else b"", root=root), _mine(root, count))
        gathered = comm.gather(_mine(comm.rank, count + comm.rank), root=root)
        assert len(gathered) == (comm.size if comm.rank == root else 0)
        for rank, found in enumerate(gathered):
            _same(found, _mine(rank, count + rank))
    for rank, found in enumerate(comm.all_gather(_mine(comm.rank, count * (comm.rank % 2)))):
        _same(found, _mine(rank, count * (rank % 2)))
    received = comm.all_to_all([_mine(comm.rank, count + rank) for rank in ranks])
    for rank, found in enumerate(received):
        _same(found, _mine(rank, count + comm.rank))


def _reductions(comm: Communicator, count: int) -> None:
    factor = comm.size * (comm.size + 1) / 2
    mine = _mine(comm.rank, count)
    before = mine.copy()
    _same(comm.all_reduce(mine), np.arange(count) * factor)
    _same(comm.all_reduce(mine.reshape(count, 1), np.maximum), _mine(comm.size - 1, count).reshape(count, 1))
    reduced = comm.reduce(mine, root=comm.size - 1)
    _same(reduced, np.arange(count) * factor if comm.rank == comm.size - 1 else np.empty(0))
    blocks = np.stack([mine + rank for rank in range(comm.size)])
    _same(comm.reduce_scatter(blocks)[0], np.arange(count) * factor + comm.size * comm.rank)
    _same(mine, before)
    for _ in range(2):  # the second time in fewer steps
        _into(comm, count, factor)
    # Floating-point sums are the same bits on all ranks, whatever they are.
    random = np.random.default_rng(comm.rank).normal(size=count).astype(np.float32)
    assert len({found.tobytes() for found in comm.all_gather(comm.all_reduce(random))}) == 1


def _into(comm: Communicator, count: int, factor: float) -> None:
    """Collectives that fill an array, which may be the operand where every rank gets the whole of it."""
    mine = _mine(comm.rank, count)
    blocks = np.stack([mine + rank for rank in range(comm.size)])
    for out in (np.full(count, np.nan), mine):
        assert comm.all_reduce(mine, out=out) is out
        _same(out, np.arange(count) * factor)
    part = np.full((1, count), np.nan)
    assert comm.reduce_scatter(blocks, out=part) is part
    _same(part[0], np.arange(count) * factor + comm.size * comm.rank)
    mine, out = _mine(comm.rank, count), np.full((comm.size, count), np.nan)
    assert comm.all_to_all_into(blocks, out) is out
    _same(out, np.stack([_mine(rank, count) + comm.rank for rank in range(comm.size)]))
    out[:] = np.nan
    for root in {0, comm.size - 1}:
        told = _mine(root, count) if comm.rank == root else np.full(count, np.nan)
        assert comm.broadcast_into(told, root=root) is told
        _same(told, _mine(root, count))
    assert comm.all_gather_into(mine, out) is out
    _same(out, np.stack([_mine(rank, count) for rank in range(comm.size)]))


def _kinds(comm: Communicator) -> None:
    root = comm.size // 2
    values: list[Any] = [
        np.array(1.5, np.float32),
        np.float64(2.5),
        np.arange(6).reshape(2, 3)[:, ::2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array(["a", "bc"]),
        np.array([(1, 2.5)], [("a", "<i4"), ("b", "<f8", (2,))]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.zeros((3, 0, 2), np.int8),
    ]
    for value in values:
        found = comm.broadcast(value, root=root)
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert found.tobytes() == comm.broadcast(value, root=root).tobytes()
    assert bytes(comm.broadcast(b"some bytes", root=root)) == b"some bytes"
    parts = [b"ab", np.arange(3, dtype=np.uint8).data, b"", bytearray(20_000)]
    assert [bytes(part) for part in comm.broadcast(parts, root=root)] == [bytes(part) for part in parts]
    many = [b"x" * (index % 5) for index in range(5000)]  # a head that fits in no first message
    assert [bytes(part) for part in comm.broadcast(many, root=root)] == many
    for found in comm.all_gather(many):
        assert [bytes(part) for part in found] == many


def _groups(comm: Communicator) -> None:
    color = comm.rank % 2
    group = comm.split(color, key=-comm.rank)
    members = sorted((rank for rank in range(comm.size) if rank % 2 == color), reverse=True)
    assert (group.size, members[group.rank]) == (len(members), comm.rank)
    assert [int(found[0]) for found in group.all_gather(np.array([comm.rank]))] == members
    alone = group.split(group.rank)
    assert alone.size == 1
    _same(alone.all_reduce(np.ones(3)), np.ones(3))
    # What a group does meets nothing of another group, or of the whole.
    asked = comm.start.all_reduce(np.ones(2))
    _same(group.all_reduce(np.full(2, 2.0)), np.full(2, 2.0 * group.size))
    _same(asked.wait(), np.full(2, float(comm.size)))


def _started(comm: Communicator) -> None:
    requests = [comm.start.all_reduce(_mine(comm.rank, count)) for count in COUNTS]
    gathering = comm.start.all_gather(np.array([comm.rank]))
    blocks = comm.start.reduce_scatter(np.ones((comm.size, 4)))
    whole, swapped = np.empty((comm.size, 9)), np.empty((comm.size, 7))
    filling = comm.start.all_gather_into(_mine(comm.rank, 9), whole)
    swapping = comm.start.all_to_all_into(np.full((comm.size, 7), float(comm.rank)), swapped)
    exchange = comm.start.all_to_all([np.array([comm.rank, rank]) for rank in range(comm.size)])
    told = comm.start.broadcast(np.arange(50_000) if comm.rank == 0 else b"")
    filled = np.arange(90_000.0) if comm.rank == 0 else np.empty(90_000)
    telling = comm.start.broadcast_into(filled)
    coming = comm.start.barrier()
    _same(filling.wait(), np.stack([_mine(rank, 9) for rank in range(comm.size)]))
    assert swapping.wait() is swapped
    _same(swapped[:, 3], np.arange(comm.size, dtype=np.float64))
    assert [found.tolist() for found in exchange.wait()] == [[rank, comm.rank] for rank in range(comm.size)]
    for count, request in reversed(list(zip(COUNTS, requests, strict=True))):
        _same(request.wait(), np.arange(count) * (comm.size * (comm.size + 1) / 2))
        assert request.done
        _same(request.wait(), request.wait())
    assert [int(found[0]) for found in gathering.wait()] == list(range(comm.size))
    _same(blocks.wait(), np.full((1, 4), float(comm.size)))
    _same(told.wait(), np.arange(50_000))
    assert telling.wait() is filled
    _same(filled, np.arange(90_000.0))
    coming.wait()


def _streams(comm: Communicator) -> None:
    for turn, chunk_bytes in enumerate((1 << 10, 1 << 12, 1 << 16)):
        window_bytes = chunk_bytes * comm.size * 8
        largest = window_bytes // 16 * 15 // comm.size // 2
        drawn = Drawn(f"exercise {turn}", 20, largest, chunk_bytes, window_bytes)
        take_part(comm, drawn)
        take_part(comm, replace(drawn, spill=Path(tempfile.gettempdir())))
    group = comm.split(comm.rank % 2)
    take_part(group, Drawn(f"group {comm.rank % 2}", 20, 1 << 13, 1 << 11, (1 << 15) * group.size))
    assert list(comm.exchange([])) == []


def _requests(comm: Communicator) -> None:
    """All serve, and all ask all others, several at a time."""

    def answer(source: int, value: Any) -> Any:
        if isinstance(value, memoryview):
            raise KeyError(bytes(value).decode())
        return value if isinstance(value, list) else value * (comm.rank + 1)

    def ask(rank: int) -> None:
        is_next = rank == (comm.rank + 1) % comm.size
        for count in (0, 1, 700, 3000, *((200_000, 700_000) if is_next else ())):
            _same(comm.ask(rank, _mine(comm.rank, count)), _mine(comm.rank, count) * (rank + 1))
        parts = [b"ab", b"", bytes(range(200)) * (10_000 if is_next else 10)]
        assert [bytes(part) for part in comm.ask(rank, parts)] == parts
        with pytest.raises(CallFailed, match="KeyError: 'no such'") as caught:
            comm.ask(rank, b"no such")
        assert (caught.value.rank, caught.value.host) == (rank, comm.hosts[rank])
        assert "raise KeyError" in caught.value.traceback

    with comm.serve(answer) as server:
        with ThreadPoolExecutor(3) as executor:
            list(executor.map(ask, [rank for rank in range(comm.size) if rank != comm.rank]))
        for rank in range(comm.size):
            if rank != comm.rank:
                comm.end_asking(rank)
        server.wait()


if __name__ == "__main__":
    place = rank_from_environment(os.environ)
    assert place is not None
    with (
        FileStore(sys.argv[2]) as store,
        connect(store, rank=place.rank, size=place.size, transport=sys.argv[1]) as comm,
    ):
        sys.stdout.write(f"{comm.rank} {exercise(comm)}\n")
        comm.barrier()
