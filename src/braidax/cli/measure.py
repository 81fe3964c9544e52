"""What `braidax plan --measure` does: strategies choose by what the devices here compute and send."""

from dataclasses import replace

import typer

from braidax.cli.machine import make_mesh
from braidax.cli.train import Devices
from braidax.errors import ArgumentError
from braidax.parallel import Machine, RotatedTensorParallel, measure_machine


def measured(
    devices: Devices, memory_gb: float | None, *, measure: bool, target: str | None
) -> tuple[Devices, Machine]:
    """Measures the devices of a command, and returns them with strategies that choose by that; and the figures.

    **Arguments:** `memory_gb`: of a device, for variables. `measure`, `target`: what the command was given.

    **Raises:** `typer.BadParameter` where nothing can be measured, or nothing chooses by it.
    """
    if not measure:
        raise typer.BadParameter("it is room for a choice by cost; give --measure, too", param_hint="--memory-gb")
    if target is not None:
        raise typer.BadParameter(
            f"it measures the devices that are here, and --target {target} need not be; leave one of them out",
            param_hint="--measure",
        )
    strategies = devices.strategies or {}
    rings = [axis for axis, one in strategies.items() if isinstance(one, RotatedTensorParallel)]
    if not rings:
        raise typer.BadParameter(
            "no axis has a strategy that chooses by cost; give one, such as --strategy data=rotated",
            param_hint="--measure",
        )
    machine = measure_machine(make_mesh(devices.mesh))
    memory_bytes = None if memory_gb is None else int(memory_gb * 1e9)
    try:
        chosen = RotatedTensorParallel(machine=machine, memory_bytes=memory_bytes)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--memory-gb") from error
    return replace(devices, strategies={**strategies, **dict.fromkeys(rings, chosen)}), machine
