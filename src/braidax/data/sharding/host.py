"""Batches that stay in host memory: a mesh of one device that is not there, which is this process."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from braidax.errors import ArgumentError


@dataclass(frozen=True)
class _Host:
    """What a plan needs to know of a device, of this process."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "host"


def host_mesh(mesh: Mesh | None, specs: Any, like: Any) -> tuple[Mesh, PartitionSpec]:
    """Returns mesh and specs of batches that this process has whole. **Raises:** `ArgumentError` for given ones."""
    for name, given in (("mesh", mesh), ("specs", specs), ("like", like)):
        if given is not None:
            raise ArgumentError(
                f"{name}= was given beside placement='host', which puts batches on no device; leave one of them out"
            )
    device: Any = np.array([_Host(0, jax.process_index())], dtype=object)
    return Mesh(device, ("host",), axis_types=(AxisType.Auto,)), PartitionSpec()
