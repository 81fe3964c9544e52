"""What the ranks do when they are told to: loops of one operation, and waiting."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.comm.endpoint import Endpoint, Operation
from benchmarks.comm.stream_loops import STREAM_LOOPS


def ping_pong(endpoint: Endpoint, num_bytes: int, count: int) -> float:
    """Sends one message there and back again, between ranks 0 and 1, 2 and 3 … at once.

    **Returns:** seconds one way, the mean over `count` rounds.
    """
    peer, array = endpoint.rank ^ 1, np.full(num_bytes, endpoint.rank, np.uint8)
    send, receive = endpoint.sender(array, peer), endpoint.receiver(array, peer)
    first, second = (send, receive) if endpoint.rank < peer else (receive, send)
    endpoint.barrier()
    _repeat(first, second, count=1 + count // 10)
    _check(_sample(array) == {min(endpoint.rank, peer)}, "the message came back as another one")
    endpoint.barrier()
    return _repeat(first, second, count=count) / count / 2


def all_to_all(endpoint: Endpoint, num_bytes: int, count: int) -> float:
    """Each rank has `num_bytes`, an equal part of them for each rank. **Returns:** seconds, the mean over `count`."""
    parts = np.full((endpoint.size, num_bytes // endpoint.size), endpoint.rank, np.uint8)
    exchange = endpoint.all_to_all(parts)
    endpoint.barrier()
    for rank, part in enumerate(exchange()):
        _check(_sample(np.asarray(part)) == {rank}, f"what rank {rank} sent came as something else")
    return _timed(endpoint, exchange, count)


def all_reduce(endpoint: Endpoint, num_bytes: int, count: int) -> float:
    """Sums float32 arrays of `num_bytes`. **Returns:** seconds, the mean over `count`."""
    array = np.full(num_bytes // 4, endpoint.rank + 1, np.float32)
    reduce = endpoint.all_reduce(array)
    endpoint.barrier()
    total = endpoint.size * (endpoint.size + 1) / 2
    _check(_sample(reduce()) == {total}, f"the sum is not {total:g} everywhere")
    array[:] = 0
    return _timed(endpoint, reduce, count)


def connected(endpoint: Endpoint, seconds: float) -> float:
    """Does nothing. **Returns:** the share of a core that the process uses, 0 to 1 or more."""
    endpoint.barrier()
    time.sleep(0.2)  # what it has to put in order is not idleness
    return _share(lambda: time.sleep(seconds))


def receiving(endpoint: Endpoint, seconds: float) -> float:
    """Waits for a message of the last rank, which sends it late. **Returns:** as `connected`; 0 for the last rank."""
    array, last = np.zeros(8, np.uint8), endpoint.size - 1
    endpoint.barrier()
    if endpoint.rank < last:
        return _share(endpoint.receiver(array, last))
    time.sleep(seconds)
    for rank in range(last):
        endpoint.sender(array, rank)()
    return 0.0


LOOPS: Mapping[str, Callable[..., Any]] = {
    **STREAM_LOOPS,
    **{loop.__name__: loop for loop in (ping_pong, all_to_all, all_reduce, connected, receiving)},
}


def _timed(endpoint: Endpoint, operation: Operation, count: int) -> float:
    for _ in range(count // 10):
        operation()
    endpoint.barrier()
    start = time.perf_counter()
    for _ in range(count):
        operation()
    return (time.perf_counter() - start) / count


def _repeat(first: Operation, second: Operation, *, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        first()
        second()
    return time.perf_counter() - start


def _share(wait: Operation) -> float:
    used, start = time.process_time(), time.perf_counter()
    wait()
    return (time.process_time() - used) / (time.perf_counter() - start)


def _sample(array: NDArray[Any]) -> set[Any]:
    """Returns the values of an array; of a large one those of some of its elements, the last one included."""
    return set(np.unique(array[:: -max(1, array.size >> 18)]).tolist())


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)
