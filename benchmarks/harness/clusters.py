"""Ray on this machine, with nothing that it says of itself to others."""

import contextlib
import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


def ray_module() -> Any:
    """Returns Ray's module, which then tells nobody that it is used."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return importlib.import_module("ray")


@contextmanager
def ray_cluster(num_cpus: int, *, store_bytes: int = 1 << 28) -> Generator[Any]:
    """A Ray of this machine; yields its module."""
    ray = ray_module()
    ray.init(
        num_cpus=num_cpus,
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def dask_cluster(num_workers: int) -> Generator[Any]:
    """A Dask of this machine with one thread a worker; yields its client."""
    dask: Any = importlib.import_module("dask")
    distributed: Any = importlib.import_module("distributed")
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set({"distributed.logging.distributed": "error"}))
        cluster = distributed.LocalCluster(
            n_workers=num_workers, threads_per_worker=1, processes=True, memory_limit=0, dashboard_address=None
        )
        stack.enter_context(cluster)
        yield stack.enter_context(distributed.Client(cluster))
