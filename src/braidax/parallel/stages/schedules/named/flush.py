"""Schedules of one step that flush: every microbatch sees the same weights."""

from dataclasses import replace

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.operations import (
    Kind,
    Operation,
    Schedule,
    check_counts,
    looped,
    straight,
    with_updates,
)


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Source: Huang et al., "GPipe" (NeurIPS 2019), section 2.3, figure 2(c).

    Gradients are added in the order of microbatches, as with one device.

    **Arguments:** `num_devices`: one stage each. **Raises:** `ArgumentError` for a count below 1.
    """
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    lists = [
        [Operation(kind, stage, each) for kind in (Kind.FORWARD, Kind.BACKWARD) for each in range(num_microbatches)]
        for stage in range(num_devices)
    ]
    return Schedule("GPipe", num_microbatches, straight(num_devices), with_updates(lists))


def one_forward_one_backward(num_devices: int, num_microbatches: int) -> Schedule:
    """A backward as soon as there is one, so that a stage keeps few activations; flushed at the end of the step.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), section 3.4
    ("PipeDream-Flush").

    **Arguments:** `num_devices`: one stage each. **Raises:** `ArgumentError` for a count below 1.
    """
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    lists = [alternating(stage, num_microbatches, num_devices - 1 - stage) for stage in range(num_devices)]
    return Schedule("1F1B", num_microbatches, straight(num_devices), with_updates(lists))


def eager_one_forward_one_backward(num_devices: int, num_microbatches: int) -> Schedule:
    """1F1B in which a stage runs twice as many forwards ahead: what is late by less than one of them holds up nobody.

    Source: Zhuang et al., "On Optimizing the Communication of Model Parallelism" (MLSys 2023),
    "eager-1F1B". Behind the last forward of a stage backwards are in halves: nothing else is left to do while the stage
    before waits for a gradient (Qi et al., ICLR 2024).

    **Arguments:** `num_devices`: one stage each. **Raises:** `ArgumentError` for a count below 1.
    """
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    lists: list[list[Operation]] = []
    for stage in range(num_devices):
        num_ahead = 2 * (num_devices - 1 - stage)
        first_halved = num_microbatches - 1 - num_ahead if stage else num_microbatches
        lists.append([])
        for one in alternating(stage, num_microbatches, num_ahead):
            is_halved = one.kind is Kind.BACKWARD and one.microbatch >= first_halved
            kinds = (Kind.INPUT, Kind.WEIGHT) if is_halved else (one.kind,)
            lists[-1] += [replace(one, kind=kind) for kind in kinds]
    return Schedule("Eager1F1B", num_microbatches, straight(num_devices), with_updates(lists))


def alternating(stage: int, num_microbatches: int, num_ahead: int) -> list[Operation]:
    """Returns the list of a stage that runs some forwards ahead, and then one forward and one backward in turn."""
    operations = [Operation(Kind.FORWARD, stage, each) for each in range(min(num_ahead, num_microbatches))]
    for each in range(num_microbatches):
        if each + num_ahead < num_microbatches:
            operations.append(Operation(Kind.FORWARD, stage, each + num_ahead))
        operations.append(Operation(Kind.BACKWARD, stage, each))
    return operations


def interleaved(num_devices: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """1F1B with several stages a device: groups of as many microbatches as devices go through one stage after the
    other.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC
    2021), section 2.2.

    **Arguments:** `num_chunks`: how many stages a device has.

    **Raises:** `ArgumentError` for a count below 1, and where devices do not divide microbatches.
    """
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches, num_chunks=num_chunks)
    if num_chunks > 1 and num_microbatches % num_devices:
        raise ArgumentError(
            f"num_microbatches={num_microbatches} is no multiple of num_devices={num_devices}, "
            "which interleaved groups need"
        )
    groups = [
        range(start, min(start + num_devices, num_microbatches)) for start in range(0, num_microbatches, num_devices)
    ]
    order = [(chunk, each) for group in groups for chunk in range(num_chunks) for each in group]
    back = [(num_chunks - 1 - chunk, each) for chunk, each in order]
    lists: list[list[Operation]] = []
    for device in range(num_devices):
        forwards = [Operation(Kind.FORWARD, chunk * num_devices + device, each) for chunk, each in order]
        backwards = [Operation(Kind.BACKWARD, chunk * num_devices + device, each) for chunk, each in back]
        num_ahead = 2 * (num_devices - 1 - device) + (num_chunks - 1) * num_devices
        if num_chunks == 1:
            num_ahead = num_devices - 1 - device
        operations = forwards[:num_ahead]
        for number, backward in enumerate(backwards):
            operations += [*forwards[num_ahead + number : num_ahead + number + 1], backward]
        lists.append(operations)
    return Schedule("Interleaved1F1B", num_microbatches, looped(num_devices, num_chunks), with_updates(lists))
