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

from .balance import Shares
from .schedules import (
    Schedule,
    double_buffered,
    dual_pipe_v,
    eager_one_forward_one_backward,
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
    "Eager1F1B": eager_one_forward_one_backward,
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
_STALE = ("PipeDream", "PipeDream, vertical sync", "2BW")
"""Schedules that do not flush."""
_ONE_EACH = ("GPipe", "1F1B", "Eager1F1B", "ZB-H1", _SEARCHED, *_STALE)
"""Schedules of one stage a device, or of one on several devices."""
_PLANNED = "planned"


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

    **Arguments:** `schedule`: by name, "GPipe", "1F1B", "Eager1F1B", "Interleaved1F1B", "ZB-H1", "ZB-V", "V-Half",
    "V-Min", "DualPipeV", "PipeDream", "PipeDream, vertical sync" or "2BW"; "searched": the shortest one that is found
    for what the stages take, in the memory that there is; or a `Schedule`, such as one that is read from CSV. `stages`:
    how many, by default as many as the schedule has on these devices; others for "Interleaved1F1B", two a device by
    default, and "searched", one by default. Fewer than devices, by a schedule of one stage a device, share these as
    makes the slowest fastest; `(2, 1, 1)` says on how many devices along the axis each stage is, which divide the
    samples of a microbatch; "planned" chooses both, from one device a stage to two stages, by the seconds of a batch.
    `cuts`: instead of where the loss is narrow, the names of `jax.named_scope`s before which it is cut. `clock`:
    whether stages are timed on this machine to balance them, or their operations counted. `recompute`: whether stages
    keep nothing but what comes in, and run again on the way back. `mixes_samples`: whether a loss may mix samples, of
    which each microbatch then has its own. `machine`: of `measure_machine`, or with published figures: how fast stages
    send; by default that is measured between the first two of them, or counted. `memory_bytes`: what parameters,
    gradients, optimizer's state and activations may take of a device; stages that would not fit keep nothing but what
    comes in. None: all that the machine has, if that is known.

    **Raises:** `ArgumentError` for other names, for stages without devices, and for no memory.
    """

    schedule: str | Schedule = "1F1B"
    stages: int | tuple[int, ...] | Literal["planned"] | None = None
    cuts: tuple[str, ...] = ()
    clock: Literal["measured", "counted"] = "measured"
    recompute: bool = False
    mixes_samples: bool = False
    machine: Machine | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule not in _NAMES:
            raise ArgumentError(f"schedule={self.schedule!r}: expected one of {_NAMES}, or a Schedule")
        if isinstance(self.stages, str) and self.stages != _PLANNED:
            raise ArgumentError(f'stages={self.stages!r}: expected a number, numbers of devices, or "planned"')
        if isinstance(self.stages, tuple) and (not self.stages or min(self.stages) < 1):
            raise ArgumentError(f"stages={self.stages}: expected for each stage on how many devices it is, 1 or more")
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
    def name(self) -> str:
        """Of the schedule."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    @property
    def is_flushed(self) -> bool:
        """Whether no gradient is applied to other weights than it was computed with."""
        return self.schedule.is_flushed if isinstance(self.schedule, Schedule) else self.schedule not in _STALE

    @property
    def searches(self) -> bool:
        """Whether the schedule is searched for, once it is known what the stages take."""
        return self.schedule == _SEARCHED

    def places(self, num_devices: int) -> tuple[int, ...]:
        """Returns among how many places of a schedule the devices along the axis are divided, or may be.

        **Raises:** `ArgumentError` for stages that do not have these devices.
        """
        stages, made = self.stages, self.schedule if isinstance(self.schedule, Schedule) else None
        one_each = self.schedule in _ONE_EACH if made is None else made.num_stages == made.num_devices
        if stages is None or (isinstance(stages, int) and (stages >= num_devices or not one_each)):
            return (num_devices,)
        if not one_each:
            raise ArgumentError(
                f"stages={stages!r}: a schedule with several stages a device has them on one each: take one of "
                f"{[*_ONE_EACH]}, or leave stages out"
            )
        if isinstance(stages, tuple):
            if sum(stages) != num_devices:
                raise ArgumentError(
                    f"stages={stages} are on {sum(stages)} devices, and the axis has {num_devices}: give each device "
                    f"of the axis to a stage"
                )
            return (len(stages),)
        if isinstance(stages, int):
            if stages < 1:
                raise ArgumentError(f"stages={stages}: expected 1 or more")
            return (stages,)
        if made is not None or self.cuts:
            return (len(self.cuts) + 1 if made is None else made.num_devices,)
        return tuple(range(num_devices, 1, -1)) or (num_devices,)

    def shares(self, num_devices: int, num_places: int) -> Shares | None:
        """Returns how the devices are divided among so many places; None: each has one."""
        if isinstance(self.stages, tuple):
            return Shares(num_devices, self.stages)
        return None if num_places == num_devices else Shares(num_devices)

    def num_stages(self, num_places: int, num_microbatches: int) -> int:
        """Returns into how many stages the loss is cut. **Raises:** as `scheduled`."""
        if not self.searches:
            return self.scheduled(num_places, num_microbatches).num_stages
        stages = self.stages if isinstance(self.stages, int) else num_places
        if self.stages is None and self.cuts:
            stages = len(self.cuts) + 1
        if stages < num_places:
            raise ArgumentError(
                f"cuts={[*self.cuts]} makes {stages} stages, fewer than {num_places} devices: name more, or let stages "
                f'have several devices each with stages="planned"'
            )
        if self.cuts and len(self.cuts) + 1 != stages:
            raise ArgumentError(
                f"cuts={list(self.cuts)} makes {len(self.cuts) + 1} stages, and stages={stages}: name {stages - 1}"
            )
        return stages

    def on(self, num_devices: int, num_microbatches: int) -> Schedule | None:
        """Returns the schedule of the same name on other devices; None where none has such a name there."""
        name = self.name
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
        if isinstance(self.stages, int) and self.stages != made.num_stages:
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
        stages = self.stages if isinstance(self.stages, int) else 2 * num_devices
        if stages < 1 or stages % num_devices:
            raise ArgumentError(f"stages={stages}: expected a multiple of the {num_devices} devices along the axis")
        return interleaved(num_devices, num_microbatches, stages // num_devices)
