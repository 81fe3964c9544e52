"""A schedule for stages that are cut: the shortest that is found for what they take, in the memory of a device."""

from collections.abc import Iterator, Sequence

from braidax.errors import ArgumentError

from .schedules import (
    Costs,
    Found,
    Schedule,
    dual_pipe_v,
    eager_one_forward_one_backward,
    gpipe,
    interleaved,
    one_forward_one_backward,
    search_schedule,
    straight,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_v,
)
from .schedules.search.layouts import layouts


def searched(
    costs: Costs, num_microbatches: int, num_devices: int, *, held_bytes: Sequence[int], memory_bytes: float | None
) -> Found:
    """Searches for the schedule of the shortest step, from all named ones on; over where stages lie, too, if there are
    more of them than devices.

    **Arguments:** `held_bytes`: of each stage, what its device holds beside activations. `memory_bytes`: of a device.

    **Raises:** `ArgumentError` where nothing fits.
    """
    tried = [straight(num_devices)] if costs.num_stages == num_devices else layouts(costs, num_devices)
    found: list[Found] = []
    refused: ArgumentError | None = None
    for layout in tried:
        held = [sum(size for size, home in zip(held_bytes, layout, strict=True) if home == at) for at in {*layout}]
        limit = None if memory_bytes is None else int(memory_bytes) - max(held)
        known = [one for one in named(num_devices, num_microbatches) if one.device_of_stage == layout]
        try:
            if limit is not None and limit < 0:
                raise ArgumentError(
                    f"memory_bytes={int(memory_bytes or 0)}: parameters, gradients and optimizer's state of a device "
                    f"take {max(held)} bytes, and no activation fits: take more devices, or more memory"
                )
            found.append(search_schedule(costs, num_microbatches, layout, limit_bytes=limit, known=known))
        except ArgumentError as error:
            refused = error
    if not found:
        assert refused is not None, "at least one layout is tried"
        raise refused
    return min(found, key=lambda one: one.seconds)


def named(num_devices: int, num_microbatches: int) -> Iterator[Schedule]:
    """Yields all named schedules that flush, on so many devices, one or two stages on each; those of less memory first:
    of what is as short a search takes the first.
    """
    few = zero_bubble_h1, one_forward_one_backward, v_min, v_half, zero_bubble_v
    makers = (*few, eager_one_forward_one_backward, interleaved, dual_pipe_v, gpipe)
    for make in makers:
        try:
            yield make(num_devices, num_microbatches)
        except ArgumentError:  # not with so many microbatches
            continue
