"""What an operation needs before it, wherever that is done."""

from braidax.parallel.stages.schedules.operations import BACKWARDS, Kind, Operation, Schedule


class Dependencies:
    """Answers what the operations of one schedule need. Sends and receives count where it has them."""

    def __init__(self, schedule: Schedule) -> None:
        self._device_of_stage = schedule.device_of_stage
        self._backwards = {(x.stage, x.microbatch): x for x in schedule.operations() if x.kind in BACKWARDS}
        self._transfers = {x for x in schedule.operations() if x.is_transfer}

    def backward(self, stage: int, microbatch: int) -> Operation:
        """Returns the backward, whole or of the inputs alone, of a microbatch."""
        return self._backwards.get((stage, microbatch), Operation(Kind.BACKWARD, stage, microbatch))

    def of(self, operation: Operation) -> list[Operation]:
        """Returns what an operation needs, but for its partner and for what an update adds up."""
        kind, stage, each = operation.kind, operation.stage, operation.microbatch
        if kind is Kind.FORWARD and stage > 0:
            return [self._received(Operation(Kind.RECV_F, stage, each), Operation(Kind.FORWARD, stage - 1, each))]
        if kind in BACKWARDS:
            forward = Operation(Kind.FORWARD, stage, each)
            if stage == len(self._device_of_stage) - 1:
                return [forward]
            return [forward, self._received(Operation(Kind.RECV_B, stage, each), self.backward(stage + 1, each))]
        if kind is Kind.WEIGHT:
            return [Operation(Kind.INPUT, stage, each)]
        if kind is Kind.SEND_F:
            return [Operation(Kind.FORWARD, stage, each)]
        if kind is Kind.SEND_B:
            return [self.backward(stage, each)]
        return []

    def _received(self, receive: Operation, made: Operation) -> Operation:
        return receive if receive in self._transfers else made


def crossings(schedule: Schedule) -> list[Operation]:
    """Returns the sends that a schedule needs: all between stages that lie on different devices."""
    home = schedule.device_of_stage
    sends: list[Operation] = []
    for stage in range(schedule.num_stages - 1):
        if home[stage] != home[stage + 1]:
            for each in range(schedule.num_microbatches):
                sends += [Operation(Kind.SEND_F, stage, each), Operation(Kind.SEND_B, stage + 1, each)]
    return sends
