"""All named schedules, for tests that hold for each."""

from collections.abc import Callable

from braidax.parallel.stages.schedules import (
    Costs,
    Schedule,
    double_buffered,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    pipedream,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_v,
)

FLUSHED: dict[str, Callable[[int, int], Schedule]] = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "Interleaved1F1B": lambda devices, count: interleaved(devices, -(-count // devices) * devices),
    "ZB-H1": zero_bubble_h1,
    "ZB-V": zero_bubble_v,
    "V-Half": v_half,
    "V-Min": v_min,
    "DualPipeV": lambda devices, count: dual_pipe_v(devices, max(count, 2 * devices)),
}
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
