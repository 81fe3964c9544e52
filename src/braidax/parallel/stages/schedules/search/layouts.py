"""Where stages may lie: the layouts that a search over layouts tries."""

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.costs import Costs
from braidax.parallel.stages.schedules.operations import folded, looped
from braidax.parallel.stages.schedules.search.search import Found, search_schedule


def search_layouts(
    costs: Costs, num_microbatches: int, num_devices: int, *, limit_bytes: int | None = None, num_trials: int = 4000
) -> Found:
    """Searches for the best schedule over where stages lie, too: in a V, in loops, in even runs, or by their seconds
    alone.

    **Arguments:** as of `search_schedule`; `num_devices`: at most as many as stages.

    **Raises:** `ArgumentError` for more devices than stages, and where no layout fits into `limit_bytes`.
    """
    found: list[Found] = []
    refused: ArgumentError | None = None
    for device_of_stage in layouts(costs, num_devices):
        try:
            found.append(
                search_schedule(
                    costs, num_microbatches, device_of_stage, limit_bytes=limit_bytes, num_trials=num_trials
                )
            )
        except ArgumentError as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda each: each.seconds)


def layouts(costs: Costs, num_devices: int) -> list[tuple[int, ...]]:
    """Returns the layouts that are tried, each once. **Raises:** `ArgumentError` for more devices than stages."""
    num_stages = costs.num_stages
    if not 1 <= num_devices <= num_stages:
        raise ArgumentError(
            f"num_devices={num_devices} is not between 1 and the {num_stages} stages of costs; cut into more stages"
        )
    seconds = [
        forward + inputs + weight
        for forward, inputs, weight in zip(
            costs.forward_seconds, costs.input_seconds, costs.weight_seconds, strict=True
        )
    ]
    tried = [_runs(seconds, num_devices), _by_seconds(seconds, num_devices)]
    if num_stages == 2 * num_devices:
        tried.append(folded(num_devices))
    if num_stages % num_devices == 0:
        tried.append(looped(num_devices, num_stages // num_devices))
    return list(dict.fromkeys(tried))


def _runs(seconds: list[float], num_devices: int) -> tuple[int, ...]:
    """Returns the layout in runs of neighbors whose slowest device is the least slow."""
    num_stages = len(seconds)
    best: list[dict[int, tuple[float, int]]] = [
        {0: (0.0, 0)}
    ]  # by devices used: of so many stages, slowest, last border
    for device in range(num_devices):
        row: dict[int, tuple[float, int]] = {}
        for end in range(device + 1, num_stages - (num_devices - device - 1) + 1):
            row[end] = min(
                (max(slowest, sum(seconds[start:end])), start)
                for start, (slowest, _) in best[-1].items()
                if start < end
            )
        best.append(row)
    borders = [num_stages]
    for row in reversed(best[1:]):
        borders.append(row[borders[-1]][1])
    runs = borders[::-1]
    return tuple(device for device in range(num_devices) for _ in range(runs[device], runs[device + 1]))


def _by_seconds(seconds: list[float], num_devices: int) -> tuple[int, ...]:
    """Returns the layout that gives each stage, the slowest first, to the device that has least to do."""
    work, home = [0.0] * num_devices, [0] * len(seconds)
    for stage in sorted(range(len(seconds)), key=lambda stage: (-seconds[stage], stage)):
        empty = [device for device in range(num_devices) if work[device] == 0]
        device = empty[0] if empty else min(range(num_devices), key=work.__getitem__)
        home[stage] = device
        work[device] += seconds[stage]
    return tuple(home)
