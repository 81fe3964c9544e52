"""A simulated schedule as text: a line a device, columns of time."""

from collections.abc import Sequence

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.simulate import Simulation, Timed

_MIN_WIDTH = 20


def timeline(simulation: Simulation, *, width: int = 100, devices: Sequence[str] = ()) -> str:
    """Draws what each device does when, how much of the step it is idle, and the most activations it holds.

    An operation is its kind and microbatch, as far as there is room, and `─` while it lasts; `·` is idle. A second
    stage of a device is written in small letters, a third in capitals again. Sends and receives are not drawn.

    **Arguments:** `width`: how many columns the step takes. `devices`: what each is called; by default "device 0" and
    so on. **Raises:** `ArgumentError` for fewer than 20.
    """
    if width < _MIN_WIDTH:
        raise ArgumentError(f"width={width} is below {_MIN_WIDTH} columns")
    schedule, makespan = simulation.schedule, simulation.makespan_seconds
    scale = width / makespan if makespan else 0.0
    names = devices or [f"device {device}" for device in range(schedule.num_devices)]
    room = max(map(len, names))
    lines = [
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, {makespan:.4g} s; "
        f"a column is {makespan / width:.3g} s"
    ]
    for device, name in enumerate(names):
        stages = [stage for stage, home in enumerate(schedule.device_of_stage) if home == device]
        drawn = _drawn(simulation.timed[device], stages, scale, width)
        holds = f"at most {simulation.peak_live(device)} activations"
        lines.append(f"{name:<{room}} │{drawn}│ idle {simulation.bubble(device):4.0%}, {holds}")
    return "\n".join(lines)


def _drawn(timed: tuple[Timed, ...], stages: list[int], scale: float, width: int) -> str:
    columns = ["·"] * width
    for each in timed:
        operation = each.operation
        first, end = round(each.start * scale), round(each.end * scale)
        if operation.is_transfer or end == first:
            continue
        label = f"{operation.kind}{operation.microbatch}"
        label = label.lower() if stages.index(operation.stage) % 2 else label
        columns[first:end] = label[: end - first].ljust(end - first, "─")
    return "".join(columns)
