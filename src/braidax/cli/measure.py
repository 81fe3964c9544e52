"""What `braidax plan --measure` does: strategies choose by what the devices here compute and send."""

from dataclasses import replace

import typer

from braidax.cli.machine import make_mesh
from braidax.cli.train import Devices
from braidax.parallel import FullySharded, Machine, RotatedTensorParallel, measure_machine


def check_measured(devices: Devices, memory_gb: float | None, *, measure: bool, target: str | None) -> None:
    """Raises `typer.BadParameter` where what is here cannot be measured, or nothing chooses by it.

    **Arguments:** `memory_gb`, `measure`, `target`: what the command was given.
    """
    if memory_gb is not None and not measure:
        raise typer.BadParameter("it is room for a choice by cost; give --measure, too", param_hint="--memory-gb")
    if memory_gb is not None and memory_gb <= 0:
        raise typer.BadParameter(f"{memory_gb:g}: expected some room, such as 16", param_hint="--memory-gb")
    if measure and target not in (None, "here"):
        raise typer.BadParameter(
            f"it measures the devices that are here, and --target {target} need not be; leave one of them out",
            param_hint="--measure",
        )
    if measure and not _that_choose(devices):
        raise typer.BadParameter(
            "no axis has a strategy that chooses by cost; give one, such as --strategy data=rotated",
            param_hint="--measure",
        )


def measured(devices: Devices, memory_gb: float | None) -> tuple[Devices, Machine]:
    """Measures the devices of a command, and returns them with strategies that choose by that; and the figures.

    **Arguments:** `memory_gb`: of a device, for variables.
    """
    machine = measure_machine(make_mesh(devices.mesh))
    memory_bytes = None if memory_gb is None else max(1, int(memory_gb * 1e9))
    priced = {
        axis: replace(one, machine=machine, memory_bytes=memory_bytes) for axis, one in _that_choose(devices).items()
    }
    return replace(devices, strategies={**(devices.strategies or {}), **priced}), machine


def _that_choose(devices: Devices) -> dict[str, FullySharded | RotatedTensorParallel]:
    """Returns the strategies that choose by cost, by axis."""
    given = (devices.strategies or {}).items()
    return {axis: one for axis, one in given if isinstance(one, FullySharded | RotatedTensorParallel)}
