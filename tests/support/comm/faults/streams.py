"""Streams and requests, drawn alike on all ranks, with what comes of them checked."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from braidax.comm import Communicator
from tests.support.comm.faults.operations import Operation
from tests.support.comm.streaming import Drawn, take_part

_LARGEST = 18  # powers of two: 2¹⁸ float64 are 2 MiB


def stream(comm: Communicator, draw: random.Random) -> None:
    take_part(comm, _drawn(comm, draw))


def spilled_stream(comm: Communicator, draw: random.Random) -> None:
    """Its file lies in the folder of the crew, where the test looks for what is left."""
    take_part(comm, _drawn(comm, draw, Path(sys.argv[1]).parent))


def requests(comm: Communicator, draw: random.Random) -> None:
    """All serve, and each asks the next one."""
    comm.barrier()
    values = [np.arange(int(2 ** draw.uniform(0, _LARGEST)), dtype=np.float64) for _ in range(4)]
    after = (comm.rank + 1) % comm.size

    def answer(source: int, value: Any) -> Any:
        return value + comm.rank

    with comm.serve(answer) as server:
        for value in values:
            np.testing.assert_array_equal(comm.ask(after, value), value + after)
        for rank in range(comm.size):
            if rank != comm.rank:
                comm.end_asking(rank)
        server.wait()


def requests_of_one(comm: Communicator, draw: random.Random) -> None:
    """One rank serves, all others ask; who is through with that must not ask what it serves next."""
    comm.barrier()
    root, count = draw.randrange(comm.size), draw.choice([1, 1000, 100_000])
    table = np.zeros(count)

    def add(source: int, value: Any) -> Any:
        table[:] += value
        return table

    if comm.rank == root:
        with comm.serve(add) as server:
            server.wait()
        np.testing.assert_array_equal(table, np.full(count, 6.0 * (comm.size - 1)))
        return
    for number in (1, 2, 3):
        assert (comm.ask(root, np.full(count, float(number))) >= number).all()
    comm.end_asking(root)


STREAMS: list[Operation] = [stream, spilled_stream, requests, requests_of_one]


def _drawn(comm: Communicator, draw: random.Random, spill: Path | None = None) -> Drawn:
    chunk_bytes = draw.choice([1 << 10, 1 << 14, 1 << 18])
    num_chunks = draw.choice([4, 9])
    window_bytes = chunk_bytes * num_chunks * comm.size
    largest = window_bytes // 16 * 15 // comm.size - 2 * chunk_bytes
    return Drawn(str(draw.random()), draw.choice([3, 20, 60]), largest, chunk_bytes, window_bytes, spill)
