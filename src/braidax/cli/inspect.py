"""What `braidax inspect` does: shows what the loader would see."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

from braidax.cli.machine import describe_mesh, make_mesh
from braidax.data import DataLoader, Source
from braidax.data import open as open_source


def inspect(
    path: Path, *, mesh: Mapping[str, int] | None, spec: PartitionSpec, batch_size: int | None, console: Console
) -> None:
    """Prints format, files and samples of a path and, given a mesh, how its batches would lie on the devices.

    **Arguments:** `path`: anything that `braidax.open` recognizes. `mesh`: size of each axis by name. `spec`: of every
    leaf of a batch. `batch_size`: samples in a global batch; the loader's default if `None`.

    **Raises:** `FormatError` for a path that cannot be read, `SpecError` for a batch that does not fit the mesh.
    """
    source = open_source(path)
    console.print(_facts(source))
    console.print(_sample(source))
    if mesh is not None:
        devices = make_mesh(mesh)
        with DataLoader(source, devices, spec, batch_size=batch_size) as loader:
            console.print(_batch(loader, describe_mesh(devices)))


def _facts(source: Source) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in {"samples": f"{len(source):,}", **source.describe()}.items():
        table.add_row(name, value)
    return table


def _sample(source: Source) -> Table:
    table = Table("leaf", "shape", "dtype", "bytes", title="one sample", title_justify="left")
    for name, leaf in _leaves(source.sample_spec):
        table.add_row(name, str(list(leaf.shape)), str(leaf.dtype), f"{_num_bytes(leaf.shape, leaf.dtype):,}")
    return table


def _batch(loader: DataLoader, devices: str) -> Table:
    title = f"a batch of {loader.batch_size:,} on {devices}; {loader.batches_per_epoch:,} batches per epoch"
    table = Table("leaf", "global shape", "on each device", "bytes on each", "spec", title=title, title_justify="left")
    specs = _leaves(loader.source.batch_spec(loader.batch_size))
    for (name, leaf), sharding in zip(specs, jax.tree.leaves(loader.shardings), strict=True):
        shape = sharding.shard_shape(leaf.shape)
        num_bytes = f"{_num_bytes(shape, leaf.dtype):,}"
        table.add_row(name, str(list(leaf.shape)), str(list(shape)), num_bytes, str(sharding.spec))
    return table


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/") or "sample", leaf) for path, leaf in leaves]


def _num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return jax.ShapeDtypeStruct(shape, dtype).size * dtype.itemsize
