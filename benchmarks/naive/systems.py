"""Ours and the peers by name, over one source, each as an iterator of batches on their devices."""

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import braidax as bx
from benchmarks.naive import loops
from braidax.data import Knobs

OURS, PILLOW_FLAX, PILLOW, OPENCV = "ours", "Pillow, prefetch_to_device", "Pillow, device_put", "OpenCV, device_put"
PEERS = (PILLOW_FLAX, PILLOW, OPENCV)
NEEDS = {PILLOW_FLAX: "PIL", PILLOW: "PIL", OPENCV: "cv2"}
RESIZES: Mapping[str, Callable[[], loops.Resize]] = {
    PILLOW_FLAX: loops.by_pillow,
    PILLOW: loops.by_pillow,
    OPENCV: loops.by_opencv,
}
SIZES = {"cifar100@224": (224, 224), "mnist@30": (30, 30)}


def mesh_of(num_devices: int) -> Mesh:
    """Returns the first devices as one axis."""
    return jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])


def our_loader(source: Any, mesh: Mesh, batch_size: int, threads: int | None) -> bx.DataLoader:
    """Returns our loader of a source, without an end."""
    knobs = Knobs(threads=threads)
    return bx.DataLoader(source, mesh, PartitionSpec("data"), batch_size=batch_size, epochs=None, knobs=knobs)


Start = Callable[[Mesh, int, int, Any], Iterator[Any]]
"""Starts a system. **Arguments:** the mesh, the batch size, the threads, and the shardings of a step (None: split by
the mesh)."""


def systems_of(name: str, path: Path) -> dict[str, Start]:
    """Returns all systems over a training set; what a peer imports, it imports when it is started."""
    source, images, size = bx.open(path, image_size=SIZES[name]), loops.read(path), SIZES[name]
    return {OURS: partial(_ours, source), **{peer: partial(_peer, peer, images, size) for peer in PEERS}}


def _ours(source: Any, mesh: Mesh, batch_size: int, threads: int, shardings: Any) -> Iterator[Any]:
    return iter(our_loader(source, mesh, batch_size, threads))


def _peer(
    name: str, images: loops.Images, size: tuple[int, int], mesh: Mesh, batch_size: int, threads: int, shardings: Any
) -> Generator[Any]:
    batches = loops.host_batches(images, RESIZES[name](), size, batch_size, threads)
    if name == PILLOW_FLAX:
        return loops.to_replicas(batches, list(mesh.devices.flat))
    return loops.to_shardings(batches, shardings or NamedSharding(mesh, PartitionSpec("data")))
