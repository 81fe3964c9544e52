"""What a pipeline does, as data: operations, and the lists of them that devices go through."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from braidax.errors import ArgumentError


class Kind(StrEnum):
    """What is done; the value is how it is written between stage and microbatch, as in `2F0`."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole gradient: of the inputs and of the weights
    INPUT = "I"  # the gradient of the inputs alone; a WEIGHT follows
    WEIGHT = "W"  # the gradient of the weights
    UPDATE = "U"  # the optimizer; its number stands in place of a microbatch
    SEND_F = "SEND_F"  # activations, to the next stage
    RECV_F = "RECV_F"  # activations, from the previous stage
    SEND_B = "SEND_B"  # gradients, to the previous stage
    RECV_B = "RECV_B"  # gradients, from the next stage


TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
BACKWARDS = (Kind.BACKWARD, Kind.INPUT)
RELEASES = (Kind.BACKWARD, Kind.WEIGHT)
"""After which of them the activations of a microbatch are needed no more."""


@dataclass(frozen=True, order=True, slots=True)
class Operation:
    """One thing that one stage does. **Arguments:** `microbatch`: of an UPDATE its number."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_transfer(self) -> bool:
        """Whether it sends or receives."""
        return self.kind in TRANSFERS

    @property
    def partner(self) -> "Operation":
        """What another stage does at the same time: of a send the receive, of a receive the send."""
        kind, step = {
            Kind.SEND_F: (Kind.RECV_F, 1),
            Kind.RECV_F: (Kind.SEND_F, -1),
            Kind.SEND_B: (Kind.RECV_B, -1),
            Kind.RECV_B: (Kind.SEND_B, 1),
        }[self.kind]
        return Operation(kind, self.stage + step, self.microbatch)


Weights = Literal["flushed", "stashed", "vertical", "double"]
"""Which weights a microbatch sees: one version for all of a step; the newest one, stashed until its backward; that of
the first stage, on all of them; the last but one of two.
"""


@dataclass(frozen=True)
class Schedule:
    """The lists of operations that the devices of a pipeline go through, each in its order.

    **Arguments:** `name`: what people call it. `num_microbatches`: of the step or, where nothing is flushed, of the
    run. `device_of_stage`: where each stage lies. `lists`: of each device. `weights`: which weights a microbatch sees.
    `microbatches_per_update`: how many gradients an update adds up; by default all.

    **Raises:** `ArgumentError` for a device without stage, and for what is not a number of microbatches.
    """

    name: str
    num_microbatches: int
    device_of_stage: tuple[int, ...]
    lists: tuple[tuple[Operation, ...], ...]
    weights: Weights = "flushed"
    microbatches_per_update: int | None = None

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ArgumentError(f"num_microbatches={self.num_microbatches} must be at least 1")
        if set(self.device_of_stage) != set(range(len(self.lists))):
            raise ArgumentError(
                f"device_of_stage={self.device_of_stage} must name each of the {len(self.lists)} devices with lists"
            )
        if self.microbatches_per_update is not None and self.num_microbatches % self.microbatches_per_update:
            raise ArgumentError(
                f"microbatches_per_update={self.microbatches_per_update} does not divide "
                f"num_microbatches={self.num_microbatches}"
            )

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return len(self.lists)

    @property
    def num_stages(self) -> int:
        """How many stages there are, over all devices."""
        return len(self.device_of_stage)

    @property
    def is_flushed(self) -> bool:
        """Whether every microbatch of a step sees the same weights, so that the step is that of one device."""
        return self.weights == "flushed"

    @property
    def num_updates(self) -> int:
        """How many updates each stage makes."""
        return self.num_microbatches // (self.microbatches_per_update or self.num_microbatches)

    def operations(self) -> Iterator[Operation]:
        """Yields all operations, device by device."""
        for operations in self.lists:
            yield from operations

    def with_lists(self, lists: tuple[tuple[Operation, ...], ...]) -> "Schedule":
        """Returns the same schedule with other lists."""
        return replace(self, lists=lists)

    def computing(self) -> "Schedule":
        """Returns the same schedule without sends and receives."""
        return self.with_lists(tuple(tuple(x for x in operations if not x.is_transfer) for operations in self.lists))


def straight(num_devices: int) -> tuple[int, ...]:
    """Returns where stages lie with one a device."""
    return tuple(range(num_devices))


def looped(num_devices: int, num_chunks: int) -> tuple[int, ...]:
    """Returns where stages lie that go through all devices, and again (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(num_devices)) * num_chunks


def folded(num_devices: int) -> tuple[int, ...]:
    """Returns where two stages a device lie in a V: the last device turns back (Qi et al. 2024, section 3)."""
    return (*range(num_devices), *reversed(range(num_devices)))


def with_updates(lists: list[list[Operation]]) -> tuple[tuple[Operation, ...], ...]:
    """Returns lists of one step, with the update of every stage behind all else."""
    return tuple(
        (*operations, *(Operation(Kind.UPDATE, stage, 0) for stage in sorted({each.stage for each in operations})))
        for operations in lists
    )


def check_counts(**counts: int) -> None:
    """Checks that each is at least 1. **Raises:** `ArgumentError`."""
    for name, count in counts.items():
        if count < 1:
            raise ArgumentError(f"{name}={count} must be at least 1")
