"""Who keeps whose part of a checkpoint, and how it gets there."""

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.messages import Messages
from braidax.errors import CheckpointError

_BLOCK_BYTES = 16 * 2**20  # that are sent at a time


class Position(NamedTuple):
    """Where a process stands among the others.

    **Fields:** `slot`: its number among the `num_slots` processes of its host. `dest`: who keeps a copy of its part,
    on another host where that can be. `source`: whose part it keeps. `sends_first`: before it receives; of those that
    stand in a ring some do not, so that no ring waits for itself where a send ends when it is received.
    """

    slot: int
    num_slots: int
    dest: int
    source: int
    sends_first: bool


def position_of(rank: int, hosts: Sequence[Any]) -> Position:
    """Returns the position of a process. **Arguments:** `hosts`: of all processes, by rank."""
    size = len(hosts)
    first = {host: hosts.index(host) for host in hosts}
    order = sorted(range(size), key=lambda each: (first[hosts[each]], each))
    distance = max(Counter(hosts).values())  # as many further on, nobody is on the same host, if that can be
    distance = 1 if distance == size else distance
    here = order.index(rank)
    mine = [each for each in order if hosts[each] == hosts[rank]]
    ring = [here]
    while (following := (ring[-1] + distance) % size) != here:
        ring.append(following)
    place = (len(ring) - ring.index(min(ring))) % len(ring)  # in the ring, from where it begins for all
    dest, source = order[(here + distance) % size], order[(here - distance) % size]
    return Position(mine.index(rank), len(mine), dest, source, place % 2 == 0)


def pass_on(messages: Messages, position: Position, folder: Path, sizes: Sequence[tuple[int, int]]) -> Exception | None:
    """Sends the files of this process to its neighbor, and stores those of the other neighbor beside them, durably.

    **Arguments:** `folder`: with the files. `sizes`: bytes of arrays and manifest, of all processes.

    **Returns:** what went wrong here; all processes get through nevertheless.
    """
    failure: Exception | None = None
    for number, name_of in enumerate((data_file, manifest_file)):
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = []
            try:
                files.append(stack.enter_context((folder / name_of(messages.rank)).open("rb")))
                files.append(stack.enter_context((folder / name_of(position.source)).open("xb")))
            except OSError as error:
                failure = error
            num_sent, num_received = sizes[messages.rank][number], sizes[position.source][number]
            for start in range(0, max(num_sent, num_received), _BLOCK_BYTES):
                mine = b""
                try:
                    mine = files[0].read(_BLOCK_BYTES) if failure is None else b""
                except OSError as error:
                    failure = error
                block = _exchanged(messages, position, mine if start < num_sent else None, start < num_received)
                try:
                    if failure is None:
                        files[1].write(block)
                        files[1].flush()
                except OSError as error:
                    failure = error
            if failure is None and files[1].tell() != num_received:
                failure = CheckpointError(f"{folder}: process {position.source} sent less than it said")
            try:
                if failure is None:
                    os.fsync(files[1].fileno())
            except OSError as error:
                failure = error
    return failure


def _exchanged(messages: Messages, position: Position, mine: bytes | None, receives: bool) -> bytes:
    """Sends a block, if there is one, and returns what the other neighbor sends, empty if it sends nothing more."""
    if mine is not None and position.sends_first:
        messages.send(mine, position.dest)
    block = messages.recv(position.source) if receives else b""
    if mine is not None and not position.sends_first:
        messages.send(mine, position.dest)
    return block
