"""ZB-H1: gradients of weights wait, and fill the bubbles of 1F1B at its memory."""

from braidax.parallel.stages.schedules.operations import (
    Kind,
    Operation,
    Schedule,
    check_counts,
    straight,
    with_updates,
)


def zero_bubble_h1(num_devices: int, num_microbatches: int) -> Schedule:
    """1F1B in which a stage keeps the gradients of weights waiting for as many microbatches as it has stages before it.

    So all have as many activations as the first. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024),
    section 2.1, figure 3 (top).

    **Arguments:** `num_devices`: one stage each. **Raises:** `ArgumentError` for a count below 1.
    """
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    lists: list[list[Operation]] = []
    for stage in range(num_devices):
        num_ahead = num_devices - 1 - stage
        operations = [Operation(Kind.FORWARD, stage, each) for each in range(min(num_ahead, num_microbatches))]
        for each in range(num_microbatches):
            if each + num_ahead < num_microbatches:
                operations.append(Operation(Kind.FORWARD, stage, each + num_ahead))
            operations.append(Operation(Kind.INPUT, stage, each))
            if each >= stage:
                operations.append(Operation(Kind.WEIGHT, stage, each - stage))
        waiting = range(max(num_microbatches - stage, 0), num_microbatches)
        lists.append([*operations, *(Operation(Kind.WEIGHT, stage, each) for each in waiting)])
    return Schedule("ZB-H1", num_microbatches, straight(num_devices), with_updates(lists))
