"""The peers that move objects between workers: Ray through its object store, Dask as a task's dependency.

As with messages, an array goes from one worker process to another one on the same host and back again, and what counts
is half of that. All of them are warm. Ray and Dask let the receiver read the array where it lies; that is counted as
received, although its pages are not mapped yet.
"""

import contextlib
import importlib
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness.clusters import dask_cluster, ray_module

RAY_NEAR = ("Ray put", "Ray call")
RAY_FAR = ("Ray put, 2 nodes", "Ray call, 2 nodes")
DASK = "Dask"

Transfer = Callable[[int, int], float]
"""Moves an array of so many bytes there and back so many times; returns seconds one way."""


@contextmanager
def ray_transfers(*, store_bytes: int) -> Generator[Mapping[str, Transfer]]:
    """Actors on a Ray of two nodes, both on this machine, two on the first and one on the second.

    Inside a node the object store is shared memory; between nodes an object travels over TCP from store to store.

    **Arguments:** `store_bytes`: of shared memory that the object store of each node takes.
    """
    ray = ray_module()
    cluster_of: Any = importlib.import_module("ray.cluster_utils").Cluster
    node = {"num_cpus": 2, "object_store_memory": store_bytes, "include_dashboard": False}
    with contextlib.ExitStack() as stack:
        cluster = cluster_of(initialize_head=True, head_node_args={**node, "resources": {"first": 2}})
        stack.callback(cluster.shutdown)
        cluster.add_node(**node, resources={"second": 1})
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        stack.callback(ray.shutdown)
        holder = ray.remote(_Holder)
        source, near, far = [holder.options(resources={name: 1}).remote() for name in ("first", "first", "second")]
        ray.get([source.echo.remote(b""), near.echo.remote(b""), far.echo.remote(b"")])
        yield {
            name: lambda num_bytes, count, way=way, other=other: ray.get(way.remote(other, num_bytes, count))
            for name, way, other in (
                (RAY_NEAR[0], source.put_and_get, near),
                (RAY_NEAR[1], source.call, near),
                (RAY_FAR[0], source.put_and_get, far),
                (RAY_FAR[1], source.call, far),
            )
        }


@contextmanager
def dask_transfers() -> Generator[Mapping[str, Transfer]]:
    """Two worker processes of Dask."""
    with dask_cluster(2) as client:
        here, there = sorted(client.nthreads())

        def transfer(num_bytes: int, count: int) -> float:
            array = client.submit(_array, num_bytes, workers=[here], pure=False)
            client.submit(len, array, workers=[here], pure=False).result()
            start = time.perf_counter()
            for _ in range(count):
                array = client.submit(_same, array, workers=[there], pure=False)
                array = client.submit(_same, array, workers=[here], pure=False)
            client.submit(len, array, workers=[here], pure=False).result()
            return (time.perf_counter() - start) / count / 2

        yield {DASK: transfer}


class _Holder:
    """An actor of Ray that sends arrays to another one, and sends back what it is sent."""

    def put_and_get(self, other: Any, num_bytes: int, count: int) -> float:
        import ray

        array: Any = np.zeros(num_bytes, np.uint8)
        ray.get(ray.get(other.echo_object.remote([ray.put(array)])))
        start = time.perf_counter()
        for _ in range(count):
            (back,) = ray.get(other.echo_object.remote([ray.put(array)]))
            array = ray.get(back)
        return (time.perf_counter() - start) / count / 2

    def call(self, other: Any, num_bytes: int, count: int) -> float:
        import ray

        array: Any = np.zeros(num_bytes, np.uint8)
        ray.get(other.echo.remote(array))
        start = time.perf_counter()
        for _ in range(count):
            array = ray.get(other.echo.remote(array))
        return (time.perf_counter() - start) / count / 2

    def echo(self, array: Any) -> Any:
        return array

    def echo_object(self, held: list[Any]) -> list[Any]:
        import ray

        return [ray.put(ray.get(held[0]))]


def _array(num_bytes: int) -> Any:
    return np.zeros(num_bytes, np.uint8)


def _same(array: Any) -> Any:
    return array
