"""DualPipeV: two stages a device in the shape of a V, a forward of one beside a backward of the other."""

from collections import deque

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.operations import (
    Kind,
    Operation,
    Schedule,
    check_counts,
    folded,
    with_updates,
)


def dual_pipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """The half of DualPipe that one direction needs: each forward has a backward of the other stage to be overlapped
    with.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1 (DualPipe); cut in half by Qi et al. of
    Sea AI Lab, "DualPipe could be better without the Dual" (2025). A forward stands right before the backward beside
    it.

    **Arguments:** `num_devices`: two stages each. `num_microbatches`: at least two a device.

    **Raises:** `ArgumentError` for fewer.
    """
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    if num_microbatches < 2 * num_devices:
        raise ArgumentError(
            f"num_microbatches={num_microbatches} is too few for DualPipeV on num_devices={num_devices}: "
            f"it needs at least {2 * num_devices}, two a device; take ZB-V for fewer"
        )
    lists = [_list(device, num_devices, num_microbatches) for device in range(num_devices)]
    return Schedule("DualPipeV", num_microbatches, folded(num_devices), with_updates(lists))


def _list(device: int, num_devices: int, num_microbatches: int) -> list[Operation]:
    before, behind = device + 1, num_devices - 1 - device  # devices up to this one, and behind it
    actions = _Actions((device, 2 * num_devices - 1 - device))
    actions.add("F0", 2 * behind)
    actions.add("F0 F1", before)
    actions.add("I1 W F1", behind)
    actions.add("F0 B1 F1 B0", num_microbatches - 2 * num_devices + before)
    actions.add("B1 F1 B0", behind)
    for number, action in enumerate(["B1", "B0"] * before):  # from the middle on, gradients of weights wait
        actions.add(action if number < before else action.replace("B", "I"), 1)
    actions.add("W I0", behind)
    actions.add("W", before)
    return actions.done


class _Actions:
    """Writes operations of two stages, each in the order of microbatches."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.done: list[Operation] = []
        self._stages = stages
        self._counts: dict[tuple[str, int], int] = {}
        self._waiting: deque[Operation] = deque()

    def add(self, actions: str, times: int) -> None:
        """Adds, so many times, actions such as `F0`, `B1`, `I1` (whose W waits) or `W` (the one that waits longest)."""
        for action in actions.split() * times:
            if action == "W":
                self.done.append(self._waiting.popleft())
                continue
            kind, stage = Kind(action[0]), self._stages[int(action[1])]
            stream = ("F" if kind is Kind.FORWARD else "B", stage)
            each = self._counts.get(stream, 0)
            self._counts[stream] = each + 1
            self.done.append(Operation(kind, stage, each))
            if kind is Kind.INPUT:
                self._waiting.append(Operation(Kind.WEIGHT, stage, each))
