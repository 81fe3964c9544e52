"""What a host copies and decodes: measured by the copies that snapshots and batches are made by."""

import statistics
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.checkpoint.snapshot.hold import Memory, hold
from braidax.cores import usable_cores
from braidax.errors import WaitTimeout
from braidax.parallel.plan.costs.measure import wait_for
from braidax.tune.calibration.rates import Copies, Cores

_BYTES = 64 << 20  # of a copy
_NUM_COPIES = 3
_BLOCK_BYTES = 1 << 20
_DECODE_SECONDS = 0.3
_MAX_THREADS = 64


def measure_copies(device: Any, *, wait_seconds: float) -> Copies:
    """Measures copies between a device and its host, and within the host's memory.

    **Arguments:** `device`: a `jax.Device` of this process. **Raises:** `WaitTimeout` when the device does not answer.
    """
    kept = np.ones(_BYTES // 4, np.float32)
    memory, other = Memory(), np.empty_like(kept)
    add = jax.jit(lambda array: array + 1)

    def send(number: int) -> Any:
        return jax.device_put(kept, device, may_alias=False)

    def snapshot(made: Any) -> None:
        hold({"state": made}, memory).copy()

    on_device = jax.device_put(jnp.zeros(_BYTES // 4, jnp.float32), device)
    to_device = [_seconds(lambda: wait_for(send(0), "a copy to a device", wait_seconds)) for _ in range(_NUM_COPIES)]
    to_host: list[float] = []
    for _ in range(_NUM_COPIES):
        on_device = add(on_device)  # whose content is not on the host yet
        wait_for(on_device, "a sum", wait_seconds)
        made = on_device
        to_host.append(_seconds(lambda made=made: snapshot(made)))
    in_memory = [_seconds(lambda: np.copyto(other, kept)) for _ in range(_NUM_COPIES)]
    return Copies(*(float(f"{_BYTES / statistics.median(taken[1:]):.3g}") for taken in (to_host, to_device, in_memory)))


def measure_cores(*, wait_seconds: float) -> Cores:
    """Measures how much threads that drop the GIL decode at once, up to one for each core.

    **Raises:** `WaitTimeout` when they do not end.
    """
    block = zlib.compress(np.arange(_BLOCK_BYTES // 4, dtype=np.int32).tobytes(), 1)
    most = min(usable_cores(), _MAX_THREADS)
    counts = sorted({1, most, *(2**power for power in range(8) if 2**power < most)})
    rates = {count: _decoded(block, count, wait_seconds) for count in counts}
    speedups = tuple((count, float(f"{rate / rates[1]:.3g}")) for count, rate in rates.items())
    return Cores(float(f"{rates[1]:.3g}"), speedups)


def _decoded(block: bytes, num_threads: int, wait_seconds: float) -> float:
    """Returns the bytes a second that threads decode."""
    begun = time.perf_counter()
    until = begun + _DECODE_SECONDS

    def decode(_: int) -> int:
        num_bytes = 0
        while time.perf_counter() < until or not num_bytes:
            num_bytes += len(zlib.decompress(block))
        return num_bytes

    with ThreadPoolExecutor(num_threads, "braidax-calibration") as pool:
        under_way = [pool.submit(decode, number) for number in range(num_threads)]
        try:
            made = sum(one.result(timeout=wait_seconds) for one in under_way)
        except TimeoutError as error:
            raise WaitTimeout(f"wait_seconds={wait_seconds}: threads that decode did not end by then") from error
    return made / (time.perf_counter() - begun)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return max(time.perf_counter() - begun, 1e-9)
