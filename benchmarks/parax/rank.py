"""What a process of the job does: joins the others, then what the benchmark asks, all processes at once."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.sockets import Sent
from benchmarks.parax.broadcast import ThroughJax, ThroughRay, join_ray
from benchmarks.parax.cases import NUM_PROCESSES, Case
from benchmarks.parax.system import Arrays, System
from benchmarks.parax.systems import Alpa, Grain, MaxText, Ours
from benchmarks.parax.training import Step
from braidax.data import Cursor
from braidax.data.sharding.load_plan import plan_load
from braidax.data.source import allocate

OURS, GRAIN, MAXTEXT = "ours", "Grain", "MaxText"
ALPA, ALPA_SHUFFLED = "Alpa, in order", "Alpa, shuffled"
RAY, RAY_THREADS = "broadcast Ray", "broadcast Ray, 4 x threads"
JAX, JAX_THREADS = "broadcast JAX", "broadcast JAX, 4 x threads"
SYSTEMS: Mapping[str, Callable[[Case], System]] = {
    OURS: Ours,
    RAY: ThroughRay,
    RAY_THREADS: lambda case: ThroughRay(case, NUM_PROCESSES * case.threads),
    JAX: ThroughJax,
    JAX_THREADS: lambda case: ThroughJax(case, NUM_PROCESSES * case.threads),
    ALPA: lambda case: Alpa(case, "in order"),
    ALPA_SHUFFLED: lambda case: Alpa(case, "shuffled"),
    GRAIN: Grain,
    MAXTEXT: MaxText,
}
NEEDS: Mapping[str, tuple[str, ...]] = {
    RAY: ("ray", "psutil"),
    RAY_THREADS: ("ray", "psutil"),
    GRAIN: ("grain",),
    MAXTEXT: ("grain",),
}
"""The modules that a system imports, of those that need one."""


class Counts(NamedTuple):
    """What one process did in one epoch.

    **Fields:** `records`, `read_bytes`: as a `Tally`. `sent_bytes`: by its sockets, to other processes, less
    `told_bytes`: by way of JAX's coordination service. `received_bytes`: otherwise, from other processes.
    """

    records: int
    read_bytes: int
    sent_bytes: int
    told_bytes: int
    received_bytes: int


def join(comm: Any, devices_each: int, port: int, ray_address: str) -> None:
    """Makes the ranks the processes of one `jax.distributed`, whose service is at a port, and users of the actor.

    **Arguments:** `ray_address`: "" where there is no Ray.
    """
    jax.config.update("jax_num_cpu_devices", devices_each)
    jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, comm.rank, cluster_detection_method="deactivate")
    if ray_address:
        join_ray(ray_address)


def timed(comm: Any, case: Case, system: str, num_epochs: int, iterations: int | None) -> float:
    """Returns seconds a batch: until it is ready on all devices of all processes, or until the loop has used it.

    From before the first batch is asked for until the last one: so no system loads what is not counted, and none has
    loaded before what is. An epoch goes before, in which programs are compiled.

    **Arguments:** `iterations`: of the loop's step; None for no loop.
    """
    use = _ready if iterations is None else _stepping(_step(case, system), iterations)
    _go_through(case, system, 1, use)
    comm.barrier()
    start = time.perf_counter()
    num_batches = _go_through(case, system, num_epochs, use)
    comm.barrier()
    return (time.perf_counter() - start) / num_batches


def counted(comm: Any, case: Case, system: str, port: int) -> Counts:
    """Goes through one epoch, and not beyond it. **Arguments:** `port`: as in `join`."""
    running = _system(case, system)
    comm.barrier()
    tally, sent, received = running.tally, Sent.now(port), running.received_bytes
    comm.barrier()  # before anybody begins
    _go_through(case, system, 1, _ready)
    comm.barrier()
    read_now = running.tally.since(tally)
    return Counts(*read_now, *Sent.now(port).since(sent), running.received_bytes - received)


def found_records(comm: Any, case: Case, system: str) -> dict[int, set[int]]:
    """Keeps a batch, and returns which record each of its rows is, by what shards of this process hold of it."""
    with _drawn(case, system, None) as batches:
        next(batches)
        batch = _held(case, system)["batch"] = next(batches)
        _ready(batch)
    array = batch[case.heavy]
    whole = _everything(case)[case.heavy]
    found: dict[int, set[int]] = {}
    for shard in array.addressable_shards:
        rows, *inner = shard.index
        known = {part.tobytes(): record for record, part in enumerate(whole[(slice(None), *inner)])}
        first = rows.indices(case.batch_size)[0]
        for row, part in enumerate(np.asarray(shard.data)):
            found.setdefault(first + row, set()).add(known.get(part.tobytes(), -1))
    return found


def drawn_records(comm: Any, case: Case) -> list[int]:
    """Returns the records of the batch that `found_records` keeps, as our loader tells them ahead."""
    running = _system(case, OURS)
    assert isinstance(running, Ours)
    running.loader.cursor = Cursor(0)
    return running.loader.peek(2)[1].tolist()


def num_wrong(comm: Any, case: Case, system: str, records: list[int]) -> int:
    """Returns how many numbers of the batch that was kept differ from what these records hold, on this process."""
    expected, batch = _everything(case), _held(case, system).pop("batch")
    if set(batch) != set(expected) or any(batch[name].shape[1:] != leaf.shape[1:] for name, leaf in expected.items()):
        return -1
    return sum(
        int((np.asarray(shard.data) != expected[name][records][shard.index]).sum())
        for name, array in batch.items()
        for shard in array.addressable_shards
    )


def needed_bytes(comm: Any, case: Case, system: str) -> int:
    """Returns the bytes that have to come to this process from others for one batch of ours or MaxText's.

    What its devices hold of the target, once, less what it has read.
    """
    running, leaves = _system(case, system), _plan(case).leaves
    total = 0
    for name, leaf in zip(sorted(running.shardings), leaves, strict=True):
        needed = _mask(leaf.shape, running.shardings[name].addressable_devices_indices_map(leaf.shape).values())
        if isinstance(running, MaxText):
            had = running.load_shardings[name].addressable_devices_indices_map(leaf.shape).values()
        else:
            had = [tuple(slice(*bounds) for bounds in ((row.start, row.stop), *row.box)) for row in leaf.rows]
        total += int((needed & ~_mask(leaf.shape, had)).sum()) * leaf.dtype.itemsize * math.prod(leaf.shape[2:])
    return total


def exchange_seconds(comm: Any, case: Case, count: int) -> list[float]:
    """Returns how long it takes to make batches of load arrays that are ready, with nothing else going on."""
    plan = _plan(case)
    arrays = plan.arrays(np.zeros(plan.num_bytes, np.uint8))
    seconds: list[float] = []
    for number in range(count + 2):
        comm.barrier()
        start = time.perf_counter()
        jax.block_until_ready(plan.batch(jax.block_until_ready(arrays)))
        comm.barrier()
        if number >= 2:
            seconds.append(time.perf_counter() - start)
    return seconds


def step_seconds(comm: Any, case: Case, iterations: int, count: int) -> float:
    """Returns how long the loop's step takes on a batch that is there."""
    with _drawn(case, OURS, None) as batches:
        batch = next(batches)
    step = _step(case, OURS)
    jax.block_until_ready(step(batch, iterations))
    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        jax.block_until_ready(step(batch, iterations))
    comm.barrier()
    return (time.perf_counter() - start) / count


def forget(comm: Any) -> None:
    """Drops the systems of a case that is done."""
    for cache in (_system, _step, _plan, _held, _everything):
        cache.cache_clear()


@contextlib.contextmanager
def _drawn(case: Case, system: str, epochs: int | None) -> Generator[Iterator[Arrays]]:
    with contextlib.closing(_system(case, system).batches(epochs)) as batches:
        yield batches


def _go_through(case: Case, system: str, num_epochs: int, use: Callable[[Arrays], None]) -> int:
    """Uses the batches of so many epochs, and loads no other ones. **Returns:** how many they were."""
    num_batches = 0
    with _drawn(case, system, num_epochs) as batches:
        for batch in batches:
            use(batch)
            num_batches += 1
    return num_batches


def _ready(batch: Arrays) -> None:
    jax.block_until_ready(batch)


def _stepping(step: Step, iterations: int) -> Callable[[Arrays], None]:
    """Returns what takes a batch into a step; the step before may still be under way then, no earlier one."""
    before: list[Any] = [None]

    def use(batch: Arrays) -> None:
        weights = step(batch, iterations)
        jax.block_until_ready(before[0])
        before[0] = weights

    return use


@functools.cache
def _system(case: Case, system: str) -> System:
    return SYSTEMS[system](case)


@functools.cache
def _step(case: Case, system: str) -> Step:
    return Step(_system(case, system).shardings)


@functools.cache
def _plan(case: Case) -> Any:
    source = case.source()
    spec = source.batch_spec(case.batch_size)
    return plan_load(spec, None, case.shardings(), reads="once", cut_dims=source.cut_dims)


@functools.cache
def _held(case: Case, system: str) -> dict[str, Any]:
    return {}


@functools.cache
def _everything(case: Case) -> dict[str, NDArray[Any]]:
    """All records, as our source reads them one after the other."""
    source = case.source()
    found = allocate(source.sample_spec, len(source))
    source.read(np.arange(len(source)), found)
    return found


def _mask(shape: tuple[int, ...], indices: Iterable[Any]) -> NDArray[np.bool_]:
    """Returns which rows and columns of an array some indices cover, bool `shape[:2]`; no case cuts further dims."""
    found = np.zeros(shape[:2], np.bool_)
    for index in indices:
        found[index[:2]] = True
    return found
