"""What a study trains, and where."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optax

from braidax.data import Source
from braidax.errors import ArgumentError

NUM_STAGES = 2
"""Of a pipeline, where it is on."""


@dataclass(frozen=True)
class Workload:
    """What is trained. **Fields:** `loss`, `init`, `optimizer`: as `braidax.parallelize` takes them. `source`: the
    samples."""

    loss: Callable[..., Any]
    init: Callable[..., Any]
    optimizer: optax.GradientTransformation
    source: Source


@dataclass(frozen=True)
class Case:
    """A workload by name.

    **Fields:** `name`, `title`: for people. `facts`: what model and data are, with sizes, and whether data is real.
    `make`: called in each process that trains, to which it is sent.
    `batch_size`: samples in a global batch.
    `mixes_samples`: whether the loss has statistics of a batch, which stages then take of a microbatch.
    """

    name: str
    title: str
    facts: Mapping[str, str]
    make: Callable[[], Workload]
    batch_size: int
    mixes_samples: bool = False


@dataclass(frozen=True)
class Place:
    """Where a study trains.

    **Fields:** `processes`: joined to one `jax.distributed` if there are several. `devices`: virtual ones of all
    processes, where there is no accelerator.

    **Raises:** `ArgumentError` for devices that cannot be divided into two stages, and among the processes.
    """

    processes: int = 1
    devices: int = 4

    def __post_init__(self) -> None:
        if self.processes not in (1, 2):
            raise ArgumentError(f"processes={self.processes}: expected 1 or 2, each of which can have a stage")
        if self.devices < 2 or self.devices % 2:
            raise ArgumentError(f"devices={self.devices}: expected a multiple of 2, the number of stages")
