"""Saves and reads checkpoints without a `Checkpointer`: what tests of its parts share."""

from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.checkpoint.format import folders, loading
from braidax.checkpoint.format.manifest import About
from braidax.checkpoint.format.reading import Reader, read_content
from braidax.checkpoint.format.writing import Checksums, checksums_of, write
from braidax.checkpoint.places import persist
from braidax.checkpoint.places.place import Order, Part
from braidax.checkpoint.processes import alone
from braidax.checkpoint.snapshot import hold as snapshot
from braidax.checkpoint.snapshot import ownership
from braidax.checkpoint.snapshot.boxes import whole
from braidax.checkpoint.snapshot.hold import Snapshot, hold
from braidax.spans import Trace


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """A table that is stored by rows, padded."""

    table: Any
    padded_rows: Mapping[str, int] = field(metadata={"static": True}, default_factory=dict)

    def __hash__(self) -> int:
        return hash(tuple(self.padded_rows.items()))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Longer:
    """Arrays with zeros behind their ends, or whose rows are several leaves."""

    arrays: Any
    true_shapes: Mapping[str, tuple[int, ...]] = field(metadata={"static": True}, default_factory=dict)

    def __hash__(self) -> int:
        return hash(tuple(self.true_shapes.items()))


def commit(root: Path, tree: Any, step: int = 1, metric: float | None = None) -> Path:
    """Saves a tree from this process alone in the folder of a run, which is made; returns that of the checkpoint."""
    root.mkdir(exist_ok=True)
    order = Order(step, "save", lambda: metric, None, Trace())
    return persist.commit(root, order, part_of(hold(tree).copy()), alone(30.0))


def commit_as_many(root: Path, tree: Any, num_processes: int, step: int = 1) -> Path:
    """Saves what each of several processes would, which share the devices out, one after the other in this one."""
    unfinished = folders.begin(root, step)
    about = About(step, folders.token_of(unfinished), num_processes, None, "0")
    with devices_shared_by(num_processes):
        for process in range(num_processes):
            copied = hold(tree, process=process, num_processes=num_processes).copy()
            write(unfinished, copied, part_of(copied).checksums, about, process=process)
    return folders.finish(unfinished, step)


@contextmanager
def devices_shared_by(num_processes: int) -> Generator[None]:
    """Has the devices of this process belong to as many, in equal shares."""
    share = len(jax.devices()) // num_processes
    cached = (ownership.ownership, snapshot._shares)
    with pytest.MonkeyPatch.context() as patch:
        for each in cached:
            each.cache_clear()
        patch.setattr(ownership, "process_of", lambda device: device.id // share)
        try:
            yield
        finally:
            for each in cached:
                each.cache_clear()


def part_of(copied: Snapshot) -> Part:
    """Returns a snapshot as `persist` takes it."""
    owned: Future[Snapshot] = Future()
    owned.set_result(copied)
    checksums: Future[Checksums] = Future()
    checksums.set_result(checksums_of(copied))
    return Part(owned, checksums)


def load(folder: Path, like: Any) -> Any:
    """Restores a checkpoint into the form of `like`."""
    content = read_content(folder)
    return loading.load(content, like, loading.match(content, like))


def read_all(folder: Path) -> dict[str, Any]:
    """Returns all leaves of a checkpoint by path, PRNG keys as their data."""
    content = read_content(folder)
    with Reader(content) as reader:
        return {
            path: reader.read(entry, whole(entry.shape)) if entry.leaf.dtype else entry.number
            for path, entry in content.entries.items()
        }


def bits(leaf: Any) -> tuple[Any, ...]:
    """Returns what two leaves have alike that are equal bit for bit."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (type(leaf), str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes())
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return (type(leaf), str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
    return (type(leaf), repr(leaf))


def names(root: Path) -> list[str]:
    """Returns what is in a folder, the lock aside."""
    return sorted(path.name for path in root.iterdir() if path.name != folders.LOCK_FILE)
