"""Schedules that never flush: a stage updates its weights while older microbatches are under way."""

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.named.flush import alternating
from braidax.parallel.stages.schedules.operations import Kind, Operation, Schedule, check_counts, straight


def pipedream(num_devices: int, num_microbatches: int, *, vertical_sync: bool = False) -> Schedule:
    """1F1B with an update behind every backward; weights are stashed from a forward to its backward.

    A stage that has `k` stages behind it updates with gradients that are `k` updates old. With vertical sync all
    stages take the version that the first one took, and all are as stale as that one. Source: Narayanan et al.,
    "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), sections 3.2 and 3.3.

    **Arguments:** `num_devices`: one stage each. `num_microbatches`: of the whole run; the pipeline drains behind it.

    **Raises:** `ArgumentError` for a count below 1.
    """
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    lists = _updating(num_devices, num_microbatches, 1)
    name = "PipeDream, vertical sync" if vertical_sync else "PipeDream"
    weights = "vertical" if vertical_sync else "stashed"
    return Schedule(name, num_microbatches, straight(num_devices), lists, weights, 1)


def double_buffered(num_devices: int, num_microbatches: int, microbatches_per_update: int | None = None) -> Schedule:
    """1F1B with two versions of the weights: gradients of the last but one make the next, one update late everywhere.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), section 3.1 ("2BW").

    **Arguments:** `num_devices`: one stage each. `num_microbatches`: of the whole run. `microbatches_per_update`: how
    many gradients an update adds up; by default as few as may be, one a device.

    **Raises:** `ArgumentError` where an update has fewer microbatches than there are devices, or does not divide them
    all.
    """
    each = num_devices if microbatches_per_update is None else microbatches_per_update
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches, microbatches_per_update=each)
    if each < num_devices:
        raise ArgumentError(
            f"microbatches_per_update={each} is below num_devices={num_devices}: two versions of the weights are "
            "enough only if a microbatch comes back before two updates are made"
        )
    lists = _updating(num_devices, num_microbatches, each)
    return Schedule("2BW", num_microbatches, straight(num_devices), lists, "double", each)


def _updating(num_devices: int, num_microbatches: int, each: int) -> tuple[tuple[Operation, ...], ...]:
    lists: list[tuple[Operation, ...]] = []
    for stage in range(num_devices):
        operations: list[Operation] = []
        for operation in alternating(stage, num_microbatches, num_devices - 1 - stage):
            operations.append(operation)
            if operation.kind is Kind.BACKWARD and (operation.microbatch + 1) % each == 0:
                operations.append(Operation(Kind.UPDATE, stage, operation.microbatch // each))
        lists.append(tuple(operations))
    return tuple(lists)
