"""All named schedules, for tests that hold for each."""

from benchmarks.pipedream.searches import NAMED as FLUSHED
from braidax.parallel.stages.schedules import Costs, double_buffered, pipedream

NAMED = FLUSHED | {
    "PipeDream": pipedream,
    "PipeDream, vertical sync": lambda devices, count: pipedream(devices, count, vertical_sync=True),
    "2BW": lambda devices, count: double_buffered(devices, devices * count),
}


def merged(costs: Costs, size: int) -> Costs:
    """Returns the costs of stages that are so many of these each."""

    def sums(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[start : start + size]) for start in range(0, len(values), size))

    seconds = (sums(costs.forward_seconds), sums(costs.input_seconds), sums(costs.weight_seconds))
    starts = range(0, costs.num_stages, size)
    sizes = tuple(sum(costs.activation_bytes[start : start + size]) for start in starts)
    return Costs(*seconds, costs.transfer_seconds[size - 1 :: size], sizes)
