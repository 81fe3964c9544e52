"""Processes of one `jax.distributed`, and a source that counts: what tests of loading together share."""

import contextlib
import os
import socket
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from braidax.data.source import Box, Source
from braidax.gang import LocalGang
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

RUN_SECONDS = 120.0


@contextlib.contextmanager
def jax_gang(num_processes: int, devices_per_process: int) -> Generator[LocalGang]:
    """Ranks that are the processes of one `jax.distributed`."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PJRT_NPROC": str(max(os.cpu_count() or 1, 2 * devices_per_process)),  # see gang/runner.py
    }
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, *LOAD_AND_SAVE)
        with LocalGang(num_processes, environment=environment) as gang:
            gang.run(_join, devices_per_process, timeout_seconds=RUN_SECONDS)
            yield gang


def _join(comm: Any, devices_per_process: int) -> None:
    # Processes that shared what they compile were seen to stand still.
    jax.config.update("jax_enable_compilation_cache", False)
    address = b""
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}".encode()
    address = bytes(comm.broadcast(address)).decode()
    jax.config.update("jax_num_cpu_devices", devices_per_process)
    jax.distributed.initialize(address, comm.size, comm.rank, cluster_detection_method="deactivate")
    assert jax.device_count() == comm.size * devices_per_process


@dataclass(frozen=True)
class LeafCase:
    """A leaf: of one sample the shape and dtype; the entries of its `PartitionSpec`; the number of its mesh."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...]
    mesh: int


@dataclass(frozen=True)
class Case:
    """Meshes, each `(shape, numbers of devices)`; leaves; what the source can cut, and how it is loaded."""

    meshes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    leaves: tuple[LeafCase, ...]
    num_samples: int
    batch_size: int
    microbatches: int | None = None
    cuts: bool = False
    explicit: bool = False
    remainder: Any = "drop"
    small_bytes: int = 1  # so that leaves need not be large to be cut
    again_bytes: int = 0  # so that nothing is read again because it was seen to be quicker
    at_hand: bool = False  # so that several batches are read at once

    def shardings(self) -> dict[str, NamedSharding]:
        """Returns the shardings by leaf."""
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        devices = np.array(jax.devices())
        meshes = [
            Mesh(devices[list(numbers)].reshape(shape), tuple("abc"[: len(shape)]), axis_types=(kind,) * len(shape))
            for shape, numbers in self.meshes
        ]
        return {
            f"leaf{number}": NamedSharding(meshes[leaf.mesh], PartitionSpec(*leaf.spec))
            for number, leaf in enumerate(self.leaves)
        }

    def source(self) -> "Counting":
        """Returns the source: one that can cut samples, or not."""
        spec = {
            f"leaf{number}": jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))
            for number, leaf in enumerate(self.leaves)
        }
        return (CountingSliced if self.cuts else Counting)(spec, self.num_samples, at_hand=self.at_hand)


class Counting(Source):
    """Samples whose numbers tell record, leaf and place; counts the bytes of each leaf and the records read."""

    is_at_hand = False

    def __init__(self, spec: dict[str, jax.ShapeDtypeStruct], num_samples: int, *, at_hand: bool = False) -> None:
        self._spec = spec
        self._num_samples = num_samples
        self.is_at_hand = at_hand
        self._lock = threading.Lock()
        self.forget()

    @property
    def sample_spec(self) -> Any:
        return self._spec

    def __len__(self) -> int:
        return self._num_samples

    def forget(self) -> None:
        """Begins to count anew."""
        self.num_bytes = dict.fromkeys(sorted(self._spec), 0)
        self.records: list[int] = []

    def values(self, name: str, indices: Any) -> Any:
        """Returns whole samples of a leaf, `[n, *shape]`."""
        leaf = self._spec[name]
        places = np.arange(int(np.prod(leaf.shape))).reshape(leaf.shape)
        found = (
            np.asarray(indices).reshape(-1, *[1] * len(leaf.shape)) * 7919 + places * 31 + int(name[4:]) * 101
        ) % 251
        return found.astype(leaf.dtype)

    def read(self, indices: np.ndarray, out: Any) -> None:
        with self._lock:
            self.records += indices.tolist()
        for name in self._spec:
            out[name][...] = self.values(name, indices)
            with self._lock:
                self.num_bytes[name] += out[name].nbytes

    def describe(self) -> dict[str, str]:
        return {}


class CountingSliced(Counting):
    """The same, which reads parts of samples."""

    @property
    def cut_dims(self) -> Sequence[int]:
        return [len(self._spec[name].shape) for name in sorted(self._spec)]

    def read_slices(self, indices: np.ndarray, boxes: Sequence[Box | None], out: Sequence[Any]) -> None:
        with self._lock:
            self.records += indices.tolist()
        for name, box, place in zip(sorted(self._spec), boxes, out, strict=True):
            assert (box is None) == (place is None)
            if box is not None:
                place[...] = self.values(name, indices)[(slice(None), *(slice(*bound) for bound in box))]
                with self._lock:
                    self.num_bytes[name] += place.nbytes
