"""Frames: plans of Polars that are written for one process and computed by many."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braidax.frame.clusters.dask import from_dask, to_dask
    from braidax.frame.clusters.ray import from_ray, to_ray
    from braidax.frame.collecting import collect, collect_partition, profile
    from braidax.frame.explaining import explain
    from braidax.frame.frame import Frame, concat, from_polars, scan_csv, scan_ipc, scan_ndjson, scan_parquet
    from braidax.frame.sight.profiled import Profile
    from braidax.frame.spilling.memory import Memory

__all__ = [
    "Frame",
    "Memory",
    "Profile",
    "collect",
    "collect_partition",
    "concat",
    "explain",
    "from_dask",
    "from_polars",
    "from_ray",
    "profile",
    "scan_csv",
    "scan_ipc",
    "scan_ndjson",
    "scan_parquet",
    "to_dask",
    "to_ray",
]

# Where the names come from, imported at their first use: who imports braidax need not have Polars.
_HOMES = {
    "braidax.frame.clusters.dask": ("from_dask", "to_dask"),
    "braidax.frame.clusters.ray": ("from_ray", "to_ray"),
    "braidax.frame.collecting": ("collect", "collect_partition", "profile"),
    "braidax.frame.explaining": ("explain",),
    "braidax.frame.frame": ("Frame", "concat", "from_polars", "scan_csv", "scan_ipc", "scan_ndjson", "scan_parquet"),
    "braidax.frame.sight.profiled": ("Profile",),
    "braidax.frame.spilling.memory": ("Memory",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
