"""Ownership: which process writes which part of which leaf, found from the shardings alone.

Every element is written once. What one process holds alone it writes; what several hold is cut into equal parts, one
for each of them; what is too small for that goes to the one that has least to write. All processes come to the same
result without a word, because all see the same shardings.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from braidax.checkpoint.snapshot.boxes import Box, box_of, joined, overlap, split, volume, whole

SMALL_BYTES = 1 << 16
"""What is smaller than this is not cut."""


class Placed(NamedTuple):
    """An array: its shape, the bytes of an element, its sharding; None where each process has it for itself.

    `padded`: the shape that it has on its devices, where that is longer; what is behind nobody writes.
    """

    shape: tuple[int, ...]
    itemsize: int
    sharding: Any
    padded: tuple[int, ...] | None = None


Shares = dict[int, list[Box]]
"""What each process writes of a leaf."""


@functools.lru_cache(maxsize=16)
def ownership(leaves: tuple[Placed, ...]) -> tuple[Shares, ...]:
    """Returns who writes what.

    What each process has for itself, process 0 writes. What is on devices of one process only does not count when work
    is balanced: where it is no array of a common mesh, each process sees it as its own.

    **Arguments:** `leaves`: the arrays of a tree, in its order.

    **Returns:** for each leaf the boxes by process.
    """
    found: list[Shares] = [{} for _ in leaves]
    loads: Counter[int] = Counter()
    shared: list[tuple[int, Box, tuple[int, ...]]] = []
    for number, leaf in enumerate(leaves):
        if leaf.sharding is None:
            found[number] = {0: [whole(leaf.shape)]}
            continue
        held = holders(leaf.sharding, leaf.shape, leaf.padded)
        is_common = len({process for processes in held for process in processes}) > 1
        for processes, boxes in held.items():
            if len(processes) > 1:
                shared += [(number, box, processes) for box in boxes]
                continue
            process = min(processes)
            found[number][process] = boxes
            loads[process] += is_common * leaf.itemsize * sum(map(volume, boxes))
    shared.sort(key=lambda item: -leaves[item[0]].itemsize * volume(item[1]))
    for number, box, processes in shared:
        itemsize = leaves[number].itemsize
        parts = split(box, len(processes)) if itemsize * volume(box) >= SMALL_BYTES else [box]
        parts.sort(key=volume, reverse=True)
        idle_first = sorted(processes, key=lambda process: (loads[process], process))
        for process, part in zip(idle_first, parts, strict=False):
            found[number].setdefault(process, []).append(part)
            loads[process] += itemsize * volume(part)
    return tuple(found)


def process_of(device: Any) -> int:
    """Returns the process that a device belongs to."""
    return device.process_index


def holders(
    sharding: Any, shape: Sequence[int], padded: Sequence[int] | None = None
) -> dict[tuple[int, ...], list[Box]]:
    """Returns the boxes of an array by the processes that hold them. **Arguments:** as of `Placed`."""
    held: dict[Box, set[int]] = {}
    stored = tuple(shape if padded is None else padded)
    for device, index in sharding.devices_indices_map(stored).items():
        box = box_of(index, stored)
        part = box if padded is None else overlap(box, whole(shape))
        if part is not None:
            held.setdefault(part, set()).add(process_of(device))
    grouped: dict[tuple[int, ...], list[Box]] = {}
    for box, processes in held.items():
        grouped.setdefault(tuple(sorted(processes)), []).append(box)
    return {processes: joined(boxes) for processes, boxes in sorted(grouped.items())}
