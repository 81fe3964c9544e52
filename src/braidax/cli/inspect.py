"""What `braidax inspect` does: shows what the loader would see."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

from braidax.cli.machine import describe_mesh, make_mesh
from braidax.data import DataLoader, Source, simulated_mesh
from braidax.data.source import allocate, is_varying


def inspect(
    source: Source,
    *,
    mesh: Mapping[str, int] | None,
    spec: PartitionSpec,
    batch_size: int | None,
    processes: int | None,
    console: Console,
) -> None:
    """Prints format, files and samples of a source and, given a mesh, how its batches would lie on the devices.

    **Arguments:** `source`: what `braidax.open` returned. `mesh`: size of each axis by name. `spec`: of every
    leaf of a batch. `batch_size`: samples in a global batch; the loader's default if `None`. `processes`: among which
    the devices of the mesh are dealt, all of them simulated; None for those of this machine.

    **Raises:** `SpecError` for a batch that does not fit the mesh, `ArgumentError` for leaves of varying size, which
    cannot be in one.
    """
    console.print(_facts(source))
    console.print(_sample(source))
    if mesh is not None:
        devices = make_mesh(mesh) if processes is None else simulated_mesh(mesh, num_processes=processes)
        with DataLoader(source, devices, spec, batch_size=batch_size) as loader:
            console.print(_batch(loader, describe_mesh(devices)))
            console.print(loader.explain())


def _facts(source: Source) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in {"samples": f"{len(source):,}", **source.describe()}.items():
        table.add_row(name, value)
    return table


def _sample(source: Source) -> Table:
    table = Table("leaf", "shape", "dtype", "bytes", title="one sample", title_justify="left")
    first = allocate(source.sample_spec, 1)
    source.read(np.zeros(1, np.int64), first)
    for (name, leaf), values in zip(_leaves(source.sample_spec), jax.tree.leaves(first), strict=True):
        if is_varying(leaf):
            shape, dtype, num_bytes = _varying(values[0])
            table.add_row(name, "varies", dtype, f"{num_bytes:,} in the first{shape}")
        else:
            table.add_row(name, str(list(leaf.shape)), str(leaf.dtype), f"{_num_bytes(leaf.shape, leaf.dtype):,}")
    return table


def _varying(value: Any) -> tuple[str, str, int]:
    """Returns shape, type and bytes of a value of varying size, as they are shown."""
    if isinstance(value, np.ndarray):
        return f", {list(value.shape)}", str(value.dtype), value.nbytes
    return "", type(value).__name__, len(value.encode() if isinstance(value, str) else value)


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
