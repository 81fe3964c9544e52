"""The mesh that a command asks for, on the devices that the machine has."""

import contextlib
import math
import os
from collections.abc import Mapping

import jax
import typer
from jax.sharding import Mesh, PartitionSpec

from braidax.comm.environment import rank_from_environment
from braidax.errors import ArgumentError
from braidax.gang.runner import num_threads
from braidax.program import pass_by_compilers

_DEFAULT_ON_CPU = {"data": 4, "model": 2}
_FORCED = "xla_force_host_platform_device_count"


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the axes of a mesh that `--mesh` says as `data=4,model=2`.

    **Raises:** `typer.BadParameter` for anything else.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in axes:
            raise typer.BadParameter(
                f"{text!r}: expected different axes with positive sizes, such as data=4,model=2", param_hint="--mesh"
            )
        axes[name] = int(size)
    return axes


def parse_spec(text: str) -> PartitionSpec:
    """Returns the `PartitionSpec` that `--spec` says as an entry per dim: `data`, `data+model`, or `-` for whole dims.

    `data+model,-` is `PartitionSpec(("data", "model"), None)`.

    **Raises:** `typer.BadParameter` for anything else.
    """
    entries: list[str | tuple[str, ...] | None] = []
    for part in text.split(","):
        names = tuple(part.strip().split("+"))
        if part.strip() != "-" and not all(name.isidentifier() for name in names):
            raise typer.BadParameter(
                f"{text!r}: expected mesh axes per dim, such as data or data+model,-", param_hint="--spec"
            )
        entries.append(None if part.strip() == "-" else names)
    return PartitionSpec(*entries)


def make_mesh(axes: Mapping[str, int] | None) -> Mesh:
    """Makes a mesh, on virtual CPU devices where the machine has no accelerator and too few devices.

    **Arguments:** `axes`: size of each axis by name; by default one axis `data` over all accelerators, or 4 × 2 virtual
    CPU devices.

    **Raises:** `ArgumentError` if the machine has not as many devices.
    """
    pass_by_compilers()
    wanted = math.prod((axes or _DEFAULT_ON_CPU).values())
    num_processes = _num_processes()
    os.environ.setdefault("PJRT_NPROC", str(num_threads(os.environ, wanted)))
    if _FORCED not in os.environ.get("XLA_FLAGS", ""):
        # JAX may have started already, inside another program; then what it has is counted below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", max(1, wanted // num_processes))
    devices = jax.devices()
    if axes is None:
        axes = _DEFAULT_ON_CPU if devices[0].platform == "cpu" else {"data": len(devices)}
    wanted = math.prod(axes.values())
    if wanted > len(devices):
        shape = ",".join(f"{name}={size}" for name, size in axes.items())
        raise ArgumentError(
            f"--mesh {shape} asks for {wanted} devices, but there are {len(devices)} of platform "
            f"{devices[0].platform!r}; ask for fewer, or set JAX_PLATFORMS=cpu to use virtual CPU devices"
        )
    if num_processes > 1 and wanted != len(devices):
        raise ArgumentError(
            f"the mesh has {wanted} devices, and {num_processes} processes have {len(devices)}; take a --mesh "
            "of all of them, of which each process has as many, or other --processes"
        )
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices[:wanted])


def _num_processes() -> int:
    """Returns how many processes `braidax launch` has joined to this one, without starting JAX's backend."""
    place = rank_from_environment(os.environ) if jax.distributed.is_initialized() else None
    return 1 if place is None else place.size


def describe_mesh(mesh: Mesh) -> str:
    """Returns the devices of a mesh in words, such as `8 virtual CPU devices as data=4 x model=2`."""
    shape = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    virtual = "virtual " if device.platform == "cpu" and mesh.size > 1 else ""
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    note = f" on {os.cpu_count()} cores, as there is no accelerator" if virtual else ""
    return f"{mesh.size} {virtual}{kind} device{'s' if mesh.size > 1 else ''} as {shape}{note}"
