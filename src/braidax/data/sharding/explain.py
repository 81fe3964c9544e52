"""What every process reads of a batch, computed before anything is read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from numpy.typing import NDArray

from braidax.data.sharding.leaf_plan import LeafPlan
from braidax.data.sharding.load_plan import LoadPlan
from braidax.data.sharding.load_sharding import part_indices, process_indices
from braidax.errors import ArgumentError

_RANGES = 8  # shown of processes that read the same


@dataclass(frozen=True)
class LeafPath:
    """How one leaf gets from the source to its devices.

    **Fields:** `path`. `num_bytes`: of the leaf in one batch. `read_bytes`: by process. `target`, `load`: the
    `PartitionSpec`s of the array that the step takes and of what is read. `why`: they differ, or "".
    """

    path: str
    num_bytes: int
    read_bytes: Mapping[int, int]
    target: PartitionSpec
    load: PartitionSpec
    why: str

    @property
    def redundancy(self) -> float:
        """Bytes that the processes read together, over those of the leaf."""
        return sum(self.read_bytes.values()) / max(self.num_bytes, 1)


@dataclass(frozen=True)
class Explanation:
    """What the processes read of one batch; printed as tables.

    **Fields:** `leaves`. `records`: how many samples each process reads something of, by process. `batch_size`.
    """

    leaves: Sequence[LeafPath]
    records: Mapping[int, int]
    batch_size: int

    @property
    def read_bytes(self) -> Mapping[int, int]:
        """Bytes that each process reads, by process."""
        return {process: sum(leaf.read_bytes[process] for leaf in self.leaves) for process in self.records}

    @property
    def redundancy(self) -> float:
        """Bytes that the processes read together, over those of the batch: 1 when nothing is read twice."""
        return sum(self.read_bytes.values()) / max(sum(leaf.num_bytes for leaf in self.leaves), 1)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        leaves = Table("leaf", "bytes", "read", "step takes", "is read as", "why", title="leaves", title_justify="left")
        for leaf in self.leaves:
            load = str(leaf.load) if leaf.load != leaf.target else "the same"
            numbers = f"{leaf.num_bytes:,}", f"{leaf.redundancy:.3g} x"
            leaves.add_row(leaf.path or "sample", *numbers, str(leaf.target), load, leaf.why)
        title = f"a batch of {self.batch_size:,}: redundancy {self.redundancy:.3g} (read / unique)"
        processes = Table("process", "records", "bytes", title=title, title_justify="left")
        groups: dict[tuple[int, int], list[int]] = {}
        for process, records in self.records.items():
            groups.setdefault((records, self.read_bytes[process]), []).append(process)
        for (records, num_bytes), members in groups.items():
            processes.add_row(_ranges(members), f"{records:,}", f"{num_bytes:,}")
        return Group(leaves, processes)


def explain(plan: LoadPlan) -> Explanation:
    """Returns what every process reads of a batch of the plan, from its shardings alone."""
    num_processes = 1 + max(int(process_indices(leaf.sharding.mesh).max()) for leaf in plan.leaves)
    depths = [0] * len(plan.leaves) if plan.cut_dims is None else plan.cut_dims
    held = [_held(leaf, depth) for leaf, depth in zip(plan.leaves, depths, strict=True)]
    records = _covered(np.concatenate([rows for rows, _ in held]), num_processes)
    present = sorted({int(process) for leaf in plan.leaves for process in process_indices(leaf.sharding.mesh).flat})
    leaves: list[LeafPath] = []
    for leaf, (rows, volumes) in zip(plan.leaves, held, strict=True):
        if plan.cut_dims is None:
            numbers = records * math.prod(leaf.sample_shape)
        else:
            numbers = np.bincount(rows[:, 0], (rows[:, 2] - rows[:, 1]) * volumes, num_processes)
        read = {process: int(numbers[process]) * leaf.dtype.itemsize for process in present}
        num_bytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        target, load = leaf.sharding.spec, leaf.loading.sharding.spec
        leaves.append(LeafPath(leaf.path, num_bytes, read, target, load, leaf.loading.why))
    return Explanation(leaves, {process: int(records[process]) for process in present}, plan.batch_size)


@dataclass(frozen=True)
class SimulatedDevice:
    """What a plan needs to know of a device."""

    id: int
    process_index: int
    platform: str = "simulated"
    device_kind: str = "simulated"


def simulated_mesh(axes: Mapping[str, int], *, num_processes: int) -> Mesh:
    """Returns a mesh of devices that are not there, to plan for: a loader on it can `explain`, but load nothing.

    **Arguments:** `axes`: size of each mesh axis by name. `num_processes`: among which the devices are dealt in order,
    equally many to each.

    **Raises:** `ArgumentError` when they cannot be.
    """
    num_devices = math.prod(axes.values())
    if num_processes < 1 or num_devices % num_processes:
        raise ArgumentError(
            f"num_processes={num_processes}: expected a positive number that divides the {num_devices} devices of "
            f"{dict(axes)}; choose one that does"
        )
    each = num_devices // num_processes
    devices = np.array([SimulatedDevice(number, number // each) for number in range(num_devices)], dtype=object)
    kinds = (AxisType.Auto,) * len(axes)
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=kinds)


def _held(leaf: LeafPlan, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns what is read of a leaf: int64 `[n, 3]`, process, first and last row; and the numbers of each sample."""
    loading = leaf.loading
    parts = part_indices(loading.sharding, len(loading.shape))
    first = loading.lead + 1
    columns = [process_indices(loading.sharding.mesh), *parts[loading.lead : first + depth]]
    distinct = np.unique(np.stack([column.ravel() for column in columns], axis=1), axis=0)
    whole, spec = leaf.sample_shape, loading.sharding
    cut = spec.shard_shape(loading.shape)[first : first + depth]
    volume = math.prod(cut) * math.prod(whole[depth:])
    _, num_pieces, num_rows, stride = loading.pieces
    part, piece = np.divmod(distinct[:, 1], num_pieces)
    place, between = np.divmod(piece, stride)
    begin = part * loading.part_rows + np.minimum(place * num_rows, loading.part_rows)
    end = part * loading.part_rows + np.minimum((place + 1) * num_rows, loading.part_rows)
    end = np.where(between, begin, end)
    moved = np.arange(math.prod(loading.shape[: loading.lead])) * loading.num_rows
    rows = np.stack(
        [
            np.repeat(distinct[:, 0], len(moved)),
            (begin[:, None] + moved).ravel(),
            (end[:, None] + moved).ravel(),
        ],
        axis=1,
    )
    return rows, np.full(len(rows), volume)


def _covered(rows: NDArray[np.int64], num_processes: int) -> NDArray[np.int64]:
    """Returns how many rows each process has in some of its ranges. **Arguments:** `rows`: as `_held` returns them."""
    size = int(rows[:, 2].max(initial=0)) + 1
    begin, end = (rows[:, 0] * size + rows[:, column] for column in (1, 2))
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
    fresh = np.maximum(end - np.maximum(begin, before), 0)
    return np.bincount(rows[order, 0], fresh, num_processes).astype(np.int64)


def _ranges(numbers: Sequence[int]) -> str:
    """Returns whole numbers in short: `0-3, 7`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found[:_RANGES])
    return shown if len(found) <= _RANGES else f"{shown}, … ({len(numbers):,} in all)"
