"""Drawn streams: what each rank sends is known to all, so that each can say what must come."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from braidax.comm import Communicator

_SOME_LENGTHS = (0, 1, 63, 64, 65, 1000)


@dataclass(frozen=True)
class Drawn:
    """**Fields:** `num_items`: that each rank sends. `largest`: bytes of an item. `spill`: a folder, or None."""

    key: str
    num_items: int
    largest: int
    chunk_bytes: int
    window_bytes: int
    spill: Path | None = None


def items_of(drawn: Drawn, source: int, size: int) -> list[tuple[int, list[int]]]:
    """Returns the ranks to which a rank sends, and the lengths of the buffers."""
    draw = random.Random(f"{drawn.key} {source}")
    items: list[tuple[int, list[int]]] = []
    for _ in range(drawn.num_items):
        lengths = [draw.choice(_SOME_LENGTHS) for _ in range(draw.randrange(4))]
        if draw.random() < 0.4:
            lengths.append(draw.randrange(max(1, drawn.largest - sum(lengths) - 64 * (len(lengths) + 4))))
        if sum(lengths) + 64 * (len(lengths) + 4) > drawn.largest:
            lengths = []
        items.append((draw.randrange(size), lengths))
    return items


def payload(source: int, index: int, length: int) -> np.ndarray:
    """Returns the bytes of a buffer."""
    return (np.arange(length, dtype=np.uint32) * (source + 3) + index * 7).astype(np.uint8)


def take_part(comm: Communicator, drawn: Drawn) -> None:
    """Sends what this rank sends, and fails unless what comes is what must, each source's in its order."""

    def parts() -> Iterator[tuple[int, list[np.ndarray]]]:
        for index, (dest, lengths) in enumerate(items_of(drawn, comm.rank, comm.size)):
            yield dest, [payload(comm.rank, index, length) for length in lengths]

    expected = {
        source: iter(
            [
                (index, lengths)
                for index, (dest, lengths) in enumerate(items_of(drawn, source, comm.size))
                if dest == comm.rank
            ]
        )
        for source in range(comm.size)
    }
    stream = comm.exchange(parts(), chunk_bytes=drawn.chunk_bytes, window_bytes=drawn.window_bytes, spill=drawn.spill)
    for source, buffers in stream:
        index, lengths = next(expected[source])
        assert [len(buffer) for buffer in buffers] == lengths
        for buffer, length in zip(buffers, lengths, strict=True):
            found = np.frombuffer(buffer, np.uint8)
            assert not length or found.ctypes.data % 64 == 0
            assert np.array_equal(found, payload(source, index, length)), (source, index, length)
            del found
    assert [list(left) for left in expected.values()] == [[]] * comm.size
