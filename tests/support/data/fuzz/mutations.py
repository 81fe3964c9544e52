"""Ways to damage a file: bytes are changed, cut off, added, or put where they do not belong."""

from collections.abc import Callable

import numpy as np

_EDGE_BYTES = 256  # of both ends of a file, where most of its structure is
_NUMBERS = (0, 1, -1, 127, -128, 1 << 15, -(1 << 15), (1 << 31) - 1, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63))

Random = np.random.Generator


def mutated(data: bytes, random: Random) -> tuple[bytes, str]:
    """Returns damaged bytes that differ from `data`, which is not empty, and what was done to them."""
    kind = _KINDS[int(random.integers(len(_KINDS)))]
    found = kind(data, random)
    while found == data:
        found = _flip(data, random)
    return found, kind.__name__.strip("_")


def _flip(data: bytes, random: Random) -> bytes:
    """Changes one bit, or a few bytes."""
    found = bytearray(data)
    for _ in range(int(random.choice([1, 1, 1, 2, 5]))):
        place = _place(data, random)
        found[place] ^= 1 << int(random.integers(8)) if random.integers(2) else int(random.integers(1, 256))
    return bytes(found)


def _number(data: bytes, random: Random) -> bytes:
    """Puts a number at the edge of what fits where another may have been."""
    width = int(random.choice([1, 2, 4, 8]))
    value = int(random.choice(np.array(_NUMBERS, object))) & ((1 << 8 * width) - 1)
    place = _place(data, random)
    place -= place % width if random.integers(2) else 0
    return (data[:place] + value.to_bytes(width, "little") + data[place + width :])[: len(data)]


def _cut(data: bytes, random: Random) -> bytes:
    return data[: int(random.integers(len(data)))]


def _extend(data: bytes, random: Random) -> bytes:
    tails = (random.bytes(int(random.integers(1, 64))), bytes(int(random.integers(1, 4096))), data, data[-32:])
    return data + tails[int(random.integers(len(tails)))]


def _splice(data: bytes, random: Random) -> bytes:
    """Copies a stretch over another, moves it there, or leaves it out."""
    length = int(min(len(data), 2 ** random.uniform(0, 10)))
    taken = int(random.integers(len(data) - length + 1))
    place = _place(data, random)
    over = int(random.choice([0, length]))
    piece = data[taken : taken + length] if random.integers(4) else b""
    return data[:place] + piece + data[place + (over if piece else length) :]


def _place(data: bytes, random: Random) -> int:
    edge = min(_EDGE_BYTES, len(data))
    kind = int(random.integers(4))
    if kind == 0:
        return int(random.integers(edge))
    return int(random.integers(len(data) - edge, len(data))) if kind == 1 else int(random.integers(len(data)))


_KINDS: tuple[Callable[[bytes, Random], bytes], ...] = (_flip, _flip, _number, _cut, _extend, _splice)
