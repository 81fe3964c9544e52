"""Whether what processes save together is one tree, and all of it."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from braidax.checkpoint.snapshot.boxes import Box, overlap, volume
from braidax.checkpoint.snapshot.hold import Snapshot
from braidax.errors import CheckpointError

_REMEDY = "Earlier checkpoints are untouched"


class Said(NamedTuple):
    """What a process says of its tree.

    **Fields:** `digest`: of what all have alike; empty of a process that has only parts of host arrays. `shards`: these
    parts: path, dtype, shape of the whole array, and the box.
    """

    digest: str
    shards: list[tuple[str, str, tuple[int, ...], Box]]

    @staticmethod
    def of(snapshot: Snapshot, process: int) -> "Said":
        """Returns what a process says of what it saves."""
        shards = [(leaf.path, leaf.dtype, leaf.shape, box) for leaf, box in snapshot.shards]
        return Said("" if process and len(shards) == len(snapshot.entries) else snapshot.digest, shards)

    @staticmethod
    def from_json(content: Sequence[Any]) -> "Said":
        """Reads what JSON made of it."""
        digest, shards = content
        return Said(
            digest, [(path, dtype, tuple(shape), tuple((a, b) for a, b in box)) for path, dtype, shape, box in shards]
        )


def check_same(where: str, said: Mapping[int, Said]) -> None:
    """Raises `CheckpointError` where processes save different trees, or not all of a host array, or some of it twice.

    **Arguments:** `where`: the checkpoint. `said`: by process.
    """
    for process, each in said.items():
        if each.digest and each.digest != said[0].digest:
            raise CheckpointError(
                f"{where}: process {process} saves another tree than process 0: expected the same paths, shapes, "
                f"dtypes and shardings on all; give every process the same tree. {_REMEDY}"
            )
    arrays = {path: (dtype, shape) for path, dtype, shape, _ in said[0].shards}
    boxes: dict[str, list[tuple[int, Box]]] = {path: [] for path in arrays}
    for process, each in said.items():
        for path, dtype, shape, box in each.shards:
            if arrays.get(path) != (dtype, shape):
                there = f"{arrays[path][0]}{list(arrays[path][1])}" if path in arrays else "none of that path"
                raise CheckpointError(
                    f"{where}: process {process} saves a part of leaf {path!r}, {dtype}{list(shape)}, and process 0 "
                    f"has {there}: expected a HostShard of the same array there, without rows if it has none. {_REMEDY}"
                )
            boxes[path].append((process, box))
    for path, parts in boxes.items():
        _check_whole(where, path, arrays[path][1], [part for part in parts if volume(part[1])])


def _check_whole(where: str, path: str, shape: tuple[int, ...], parts: Sequence[tuple[int, Box]]) -> None:
    for (process, box), (other, its) in itertools.combinations(parts, 2):
        if (both := overlap(box, its)) is not None:
            raise CheckpointError(
                f"{where}: processes {process} and {other} both have {_told(both)} of leaf {path!r}: expected "
                f"HostShards that have nothing in common; correct their start. {_REMEDY}"
            )
    found, expected = sum(volume(box) for _, box in parts), math.prod(shape)
    if found != expected:
        raise CheckpointError(
            f"{where}: the processes have {found} elements of leaf {path!r} of shape {list(shape)}, expected "
            f"{expected}: give all parts of it, or the true shape. {_REMEDY}"
        )


def _told(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
