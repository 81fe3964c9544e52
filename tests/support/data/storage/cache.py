"""A cache of pages that is small, and a process that fills it."""

import random
from pathlib import Path

from braidax.data.storage.cache import PageCache
from braidax.data.storage.options import PAGE_BYTES

DATA = random.Random(0).randbytes(40 * PAGE_BYTES + 100)
SEGMENT = 16 * PAGE_BYTES


def cache(folder: Path, *, cache_bytes: int = 1 << 30, keys: tuple[str, ...] = ("a",), data: bytes = DATA) -> PageCache:
    """Returns a cache of objects that all have the same bytes."""
    return PageCache(folder, cache_bytes, keys, [len(data)] * len(keys), segment_bytes=SEGMENT)


def write_and_read(folder: Path, seed: int, num: int, room: int) -> None:
    """Writes random stretches of eight objects, and checks what it finds of them."""
    names = tuple(f"object {number}" for number in range(8))
    made, rng = cache(folder, cache_bytes=room, keys=names), random.Random(seed)
    for _ in range(num):
        file, page, start = rng.randrange(8), rng.randrange(41), rng.randrange(len(DATA) - 1)
        stop = (page + rng.randrange(1, 20)) * PAGE_BYTES
        made.store(file, page * PAGE_BYTES, memoryview(DATA)[page * PAGE_BYTES : stop])
        [found] = made.read([(file, start, min(len(DATA), start + 9000))])
        assert found in (None, DATA[start : start + 9000])
