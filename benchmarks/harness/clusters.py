"""Ray on this machine, with nothing that it says of itself to others."""

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
