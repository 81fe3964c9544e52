"""`Pipeline`: the strategy of a mesh axis along which stages of a loss lie."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from braidax.errors import ArgumentError
from braidax.parallel.plan.costs.machine import Machine
from braidax.parallel.plan.layout import Axis, Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.placements import Replicated
from braidax.parallel.plan.strategy import Choice, shown

from .schedules import (
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

_MADE: Mapping[str, Callable[[int, int], Schedule]] = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "ZB-H1": zero_bubble_h1,
    "ZB-V": zero_bubble_v,
    "V-Half": v_half,
    "V-Min": v_min,
    "DualPipeV": dual_pipe_v,
    "PipeDream": pipedream,
    "PipeDream, vertical sync": functools.partial(pipedream, vertical_sync=True),
    "2BW": double_buffered,
}
_INTERLEAVED = "Interleaved1F1B"
_SEARCHED = "searched"
_NAMES = [*_MADE, _INTERLEAVED, _SEARCHED]


@dataclass(frozen=True, repr=False)
class Pipeline:
    """Cuts the loss into stages that lie along the axis, each of which computes the microbatches of a batch in turn.

    A step is that of one device with the same microbatches: a schedule flushes at its end (Huang et al., NeurIPS 2019;
    Qi et al., ICLR and NeurIPS 2024). The loss is cut where few values go over, also between the iterations of a loop,
    so that the slowest stage takes least.

    Three schedules do not flush, and are NOT training on one device: each microbatch (2BW: as many as there are stages)
    has an update of its own, made by each stage when its gradient is there, and of a weight on stage `s` of `P` the
    gradient is late by so many updates: "PipeDream" (weights stashed from forward to backward) `P - 1 - s`; "PipeDream,
    vertical sync" `P - 1`; "2BW" 1. A step drains them (Narayanan et al., SOSP 2019; ICML 2021).

    **Arguments:** `schedule`: by name, "GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZB-V", "V-Half", "V-Min",
    "DualPipeV", "PipeDream", "PipeDream, vertical sync" or "2BW"; "searched": the shortest one that is found for what
    the stages take, in the memory that there is; or a `Schedule`, such as one that is read from CSV. `stages`: how
    many, by default as many as the schedule has on these devices; others for "Interleaved1F1B", two a device by
    default, and "searched", one by default. `cuts`: instead of where the loss is narrow, the names of
    `jax.named_scope`s before which it is cut. `clock`: whether stages are timed on this machine to balance them, or
    their operations counted. `recompute`: whether stages keep nothing but what comes in, and run again on the way back.
    `mixes_samples`: whether a loss may mix samples, of which each microbatch then has its own. `machine`: of
    `measure_machine`, or with published figures: how fast stages send; by default that is measured between the first
    two of them, or counted. `memory_bytes`: what parameters, gradients, optimizer's state and activations may take of a
    device; stages that would not fit keep nothing but what comes in. None: all that the machine has, if that is known.

    **Raises:** `ArgumentError` for other names, and for no memory.
    """

    schedule: str | Schedule = "1F1B"
    stages: int | None = None
    cuts: tuple[str, ...] = ()
    clock: Literal["measured", "counted"] = "measured"
    recompute: bool = False
    mixes_samples: bool = False
    machine: Machine | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule not in _NAMES:
            raise ArgumentError(f"schedule={self.schedule!r}: expected one of {_NAMES}, or a Schedule")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ArgumentError(f"memory_bytes={self.memory_bytes}: expected a size in bytes, such as 16 << 30")
        if self.clock not in ("measured", "counted"):
            raise ArgumentError(f'clock={self.clock!r}: expected "measured" or "counted"')

    def __repr__(self) -> str:
        return shown(self)

    @property
    def cuts_loss(self) -> bool:
        """True: stages lie along the axis."""
        return True

    @property
    def splits_batch(self) -> bool:
        """False: all stages see all samples."""
        return False

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> dict[str, Choice]:
        """Chooses `Replicated`, of the devices of the stage that owns a variable."""
        choice = Choice(Replicated(), "pipeline: with the stage that reads it")
        return dict.fromkeys(model.variables, choice)

    @property
    def searches(self) -> bool:
        """Whether the schedule is searched for, once it is known what the stages take."""
        return self.schedule == _SEARCHED

    def num_stages(self, num_devices: int, num_microbatches: int) -> int:
        """Returns into how many stages the loss is cut. **Raises:** as `scheduled`."""
        if not self.searches:
            return self.scheduled(num_devices, num_microbatches).num_stages
        stages = (len(self.cuts) + 1 if self.cuts else num_devices) if self.stages is None else self.stages
        if stages < num_devices:
            raise ArgumentError(f"stages={stages}: expected at least one for each of {num_devices} devices")
        if self.cuts and len(self.cuts) + 1 != stages:
            raise ArgumentError(
                f"cuts={list(self.cuts)} makes {len(self.cuts) + 1} stages, and stages={stages}: name {stages - 1}"
            )
        return stages

    def on(self, num_devices: int, num_microbatches: int) -> Schedule | None:
        """Returns the schedule of the same name on other devices; None where none has such a name there."""
        name = self.schedule if isinstance(self.schedule, str) else self.schedule.name
        try:
            if name == _INTERLEAVED:
                return interleaved(num_devices, num_microbatches, 2)
            return _MADE[name](num_devices, num_microbatches) if name in _MADE else None
        except ArgumentError:
            return None

    def scheduled(self, num_devices: int, num_microbatches: int) -> Schedule:
        """Returns the schedule on so many devices, one that is not searched for.

        **Raises:** `ArgumentError` where it has other devices or microbatches, or devices do not divide stages.
        """
        made = self._made(num_devices, num_microbatches)
        for name, wanted in (("num_devices", num_devices), ("num_microbatches", num_microbatches)):
            if getattr(made, name) != wanted:
                raise ArgumentError(f"schedule {made.name!r} has {name}={getattr(made, name)}, and the step {wanted}")
        if self.stages not in (None, made.num_stages):
            raise ArgumentError(
                f"stages={self.stages}: schedule {made.name!r} has {made.num_stages} on {num_devices} devices; leave "
                f'it out, or take "{_INTERLEAVED}"'
            )
        if self.cuts and len(self.cuts) + 1 != made.num_stages:
            raise ArgumentError(
                f"cuts={list(self.cuts)} makes {len(self.cuts) + 1} stages, and schedule {made.name!r} has "
                f"{made.num_stages} on {num_devices} devices: name {made.num_stages - 1}"
            )
        return made

    def _made(self, num_devices: int, num_microbatches: int) -> Schedule:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if self.schedule != _INTERLEAVED:
            return _MADE[self.schedule](num_devices, num_microbatches)
        stages = 2 * num_devices if self.stages is None else self.stages
        if stages < 1 or stages % num_devices:
            raise ArgumentError(f"stages={stages}: expected a multiple of the {num_devices} devices along the axis")
        return interleaved(num_devices, num_microbatches, stages // num_devices)
