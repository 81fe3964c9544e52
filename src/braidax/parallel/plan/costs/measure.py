"""Calibration: what the devices of a mesh compute and send is measured by small programs on these devices."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError, WaitTimeout

from .machine import Link, Machine

_SMALL_BYTES, _LARGE_BYTES = 64 << 10, 8 << 20  # messages: the first are mostly latency, of the second it is little
_WIDTHS = (128, 512, 2048, 8192)  # of products; the first that takes long enough
_MOST_TURNS = 1000
_MOST_UNROLLED = 8
_LEAST_SECONDS = 2e-3  # of a run, so that dispatching it and looking whether it is done count little
_LOOK_SECONDS = 1e-4


def measure_machine(mesh: Mesh, *, dtype: Any = None, num_runs: int = 5, wait_seconds: float = 60.0) -> Machine:
    """Measures what the devices of a mesh compute and send in a second, for `RotatedTensorParallel(machine=…)`.

    Products of square matrices; along each axis of several devices a message to the next device, and an all-gather with
    a reduce-scatter, of two sizes, which tells latency and rate apart; and how much of either is hidden where products
    are beside it. Nothing else should run meanwhile. Processes that share the mesh call it together, and get the same.

    **Arguments:** `mesh`: of devices that are here; of others give published figures, `Machine(…)`. `dtype`: of the
    products; by default float32 on CPUs, bfloat16 on others. `num_runs`: of each program; the median counts.
    `wait_seconds`: that one run may take.

    **Returns:** a `Machine`, of three digits. **Raises:** `ArgumentError` where nothing would be run or waited for;
    `WaitTimeout` when the devices do not answer.
    """
    if num_runs < 1 or wait_seconds <= 0:
        raise ArgumentError(f"num_runs={num_runs}, wait_seconds={wait_seconds}: expected one run, and time, or more")
    device = mesh.devices.flat[0]
    dtype = (jnp.float32 if device.platform == "cpu" else jnp.bfloat16) if dtype is None else dtype
    bench = _Bench(mesh, num_runs, wait_seconds)
    width, product = _products(bench, dtype)
    permutes, collectives = dict[str, Link](), dict[str, Link]()
    matrices = bench.matrices(width, dtype)
    for axis, count in mesh.shape.items():
        if count > 1:
            permutes[axis] = _link(bench, _hop(axis, count), matrices, product)
            collectives[axis] = _link(bench, _gather(axis, count), matrices, product)
    stats = device.memory_stats() if device.process_index == jax.process_index() else None
    memory_mib = bench.agreed((stats or {}).get("bytes_limit", 0) / 2**20, np.max)
    return Machine(
        _rounded(2 * width**3 / product),
        permutes,
        collectives,
        int(memory_mib) << 20 if memory_mib else None,
        f"{mesh.size} × {device.device_kind}",
    )


Body = Callable[[Any], Any]


class _Bench:
    """Runs programs on all devices of a mesh, each device on arrays of its own, and takes their time."""

    def __init__(self, mesh: Mesh, num_runs: int, wait_seconds: float) -> None:
        self._mesh, self._num_runs, self._wait_seconds = mesh, num_runs, wait_seconds
        self._spec, self.num_devices = PartitionSpec(mesh.axis_names), mesh.size

    def vector(self, num_bytes: int) -> jax.Array:
        """Returns numbers of so many bytes a device, float32."""
        return self._made(lambda: jnp.ones(self.num_devices * max(1, num_bytes // 4), jnp.float32))

    def matrices(self, width: int, dtype: Any) -> jax.Array:
        """Returns a square matrix a device, `[devices, width, width]`, whose powers are itself."""
        return self._made(lambda: jnp.full((self._mesh.size, width, width), 1 / width, dtype))

    def _made(self, make: Callable[[], jax.Array]) -> jax.Array:
        return jax.jit(make, out_shardings=NamedSharding(self._mesh, self._spec))()

    def seconds(self, body: Body, carried: Any) -> float:
        """Returns how long a turn takes of a loop of `body`, which makes a value like the one that it is given."""
        return float(np.median(self.rounds((body, carried))))

    def rounds(self, *loops: tuple[Body, Any]) -> list[list[float]]:
        """Returns for each run how long a turn of each loop takes, all of them one after the other in every run."""
        programs = [(self._looped(body, carried), carried) for body, carried in loops]
        for program, carried in programs:
            self._timed(program, 1, carried)
        longest = max(self._timed(program, 1, carried) for program, carried in programs)
        turns = int(min(max(_LEAST_SECONDS / max(longest, 1e-9), 1), _MOST_TURNS))
        return [
            [max(self._timed(program, turns, carried) / turns, 1e-12) for program, carried in programs]
            for _ in range(self._num_runs)
        ]

    def _looped(self, body: Body, carried: Any) -> Any:
        specs = jax.tree.map(lambda _: self._spec, carried)

        def run(num_turns: Any, carried: Any) -> Any:
            return jax.lax.fori_loop(0, num_turns, lambda _, one: body(one), carried)

        in_specs = (PartitionSpec(), specs)
        mapped = jax.shard_map(run, mesh=self._mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
        return jax.jit(mapped).lower(np.int32(1), carried).compile()

    def _timed(self, program: Any, num_turns: int, carried: Any) -> float:
        begun = time.perf_counter()
        self._wait(program(np.int32(num_turns), carried), f"a run of {num_turns} turns")
        return self.agreed(time.perf_counter() - begun, np.mean)

    def _wait(self, outputs: Any, what: str) -> None:
        wait_for(outputs, f"{what} on {self.num_devices} devices", self._wait_seconds)

    def agreed(self, value: float, of_all: Callable[[Any], Any]) -> float:
        """As the function, on this mesh."""
        return agreed(self._mesh, value, of_all, wait_seconds=self._wait_seconds)


def agreed(mesh: Mesh, value: float, of_all: Callable[[Any], Any], *, wait_seconds: float) -> float:
    """Returns one value for all processes of a mesh, so that they go on alike; all call it.

    **Arguments:** `value`: of this process. `of_all`: makes one of those of all devices, float32 `[devices]`.

    **Raises:** `WaitTimeout` when the devices do not answer.
    """
    if not mesh.is_multi_process:
        return value
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = jax.make_array_from_callback((mesh.size,), each, lambda _: np.array([value], np.float32))
    whole = jax.jit(lambda one: one + 0, out_shardings=NamedSharding(mesh, PartitionSpec()))(own)
    wait_for(whole, f"an exchange of times on {mesh.size} devices", wait_seconds)
    return float(of_all(np.asarray(whole.addressable_data(0))))


def wait_for(outputs: Any, what: str, wait_seconds: float) -> None:
    """Waits until arrays are computed. **Raises:** `WaitTimeout` at the limit, saying `what` was not done."""
    deadline = time.perf_counter() + wait_seconds
    while not all(output.is_ready() for output in jax.tree.leaves(outputs)):
        if time.perf_counter() > deadline:
            raise WaitTimeout(
                f"wait_seconds={wait_seconds}: {what} was not done by then: a process of the mesh does not measure, or "
                f"devices hang; else give more"
            )
        time.sleep(_LOOK_SECONDS)


def _products(bench: _Bench, dtype: Any) -> tuple[int, float]:
    """Returns the width of a product, and how long it takes."""
    width, taken = _WIDTHS[0], 0.0
    for width in _WIDTHS:
        taken = bench.seconds(_product, bench.matrices(width, dtype))
        if taken >= _LEAST_SECONDS:
            break
    return width, taken


def _product(matrices: Any) -> Any:
    return matrices @ matrices


class _Sending(NamedTuple):
    """What a device sends along an axis.

    **Fields:** `body`: gives a device's numbers, sent and brought back into their form. `num_messages` that are in
    it, in each of which a device sends `others` times what it has.
    """

    body: Body
    num_messages: int
    others: int


def _hop(axis: str, count: int) -> _Sending:
    """A message to the next device."""
    pairs = [(at, (at - 1) % count) for at in range(count)]
    return _Sending(lambda one: jax.lax.ppermute(one, axis, pairs), 1, 1)


def _gather(axis: str, count: int) -> _Sending:
    """An all-gather and a reduce-scatter."""

    def gather(one: Any) -> Any:
        whole = jax.lax.all_gather(one, axis, tiled=True)
        return jax.lax.psum_scatter(whole, axis, tiled=True) / count

    return _Sending(gather, 2, count - 1)


def _link(bench: _Bench, sending: _Sending, matrices: Any, product: float) -> Link:
    """Measures what is sent along an axis, alone and beside products. **Arguments:** `product`: seconds of one."""
    sizes = [size // sending.others for size in (_SMALL_BYTES, _LARGE_BYTES)]  # that a device has
    vectors = [bench.vector(size) for size in sizes]
    once = [bench.seconds(sending.body, vector) for vector in vectors]
    (few, many), (short, long) = (
        (vector.nbytes / bench.num_devices * sending.others for vector in vectors),
        (seconds / sending.num_messages for seconds in once),
    )
    rate = (many - few) / (long - short) if long > short else many / long
    latency = max(0.0, short - few / rate)
    sends, products = _repeats(once[1], product)

    def send(sent: Any) -> Any:
        for _ in range(sends):
            sent = sending.body(sent)
        return sent

    def compute(made: Any) -> Any:
        for _ in range(products):
            made = _product(made)
        return made

    def both(carried: Any) -> Any:
        return send(carried[0]), compute(carried[1])

    rounds = bench.rounds((send, vectors[1]), (compute, matrices), (both, (vectors[1], matrices)))
    hidden = float(np.median([(one + other - beside) / min(one, other) for one, other, beside in rounds]))
    return Link(_rounded(rate), _rounded(latency), round(min(max(hidden, 0.0), 1.0), 2))


def _repeats(one: float, other: float) -> tuple[int, int]:
    """Returns how many of two things take about as long as one another."""
    return (
        min(max(round(other / one), 1), _MOST_UNROLLED),
        min(max(round(one / other), 1), _MOST_UNROLLED),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
