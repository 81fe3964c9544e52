"""Gangs: where ranks come from. Each starts processes that call functions and keep things, watches and ends them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braidax.gang.calling.call import GangFuture
    from braidax.gang.dask import DaskGang
    from braidax.gang.gang import Gang
    from braidax.gang.local import LocalGang
    from braidax.gang.ray import RayGang

__all__ = ["DaskGang", "Gang", "GangFuture", "LocalGang", "RayGang"]

_HOMES = {
    "DaskGang": "dask",
    "Gang": "gang",
    "GangFuture": "calling.call",
    "LocalGang": "local",
    "RayGang": "ray",
}  # a rank needs none of them


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'braidax.gang' has no attribute {name!r}")
    return getattr(import_module(f"braidax.gang.{_HOMES[name]}"), name)
