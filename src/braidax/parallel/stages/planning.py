"""A pipeline is planned: the loss is cut, a schedule chosen, and both are compared with doing without."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.parallel.plan.costs.machine import Link
from braidax.parallel.plan.costs.measure import measure_machine
from braidax.parallel.plan.placements import Staged
from braidax.parallel.plan.plan import Plan
from braidax.parallel.plan.planned.stages import PlannedPart, PlannedPipeline, PlannedSchedule, PlannedStage, StageCosts
from braidax.program import Program, Stage, bytes_of, named_leaves

from .balance import Pricing, Shares
from .costs_of_cut import bytes_between_halves, costs_of_cut, sent_bytes
from .cut import CutLoss, cut, remembered
from .link import COUNTED_LINK, measured_link
from .pipeline import Pipeline
from .running.home import sub_meshes, without_mesh
from .running.owning.ownership import Ownership
from .schedules import Costs, Kind, Schedule, Simulation, format_csv, simulate, versions, with_transfers
from .searching import searched
from .segments import Backward, Clock, counted, measured
from .verdict import Compared, Devices
from .whole_loss import whole_loss

_PARAMS, _BATCH = 0, 3


class Setting(NamedTuple):
    """Where a pipeline lies, and of what.

    **Fields:** `traced`: gives the loss on a batch in so many pieces. `axis`: of the stages; `batch_axes`: others,
    over which samples are divided. `microbatches`: of a batch. `bytes_per_parameter`: as of `Pricing`.
    `sums_per_update`: how often the devices of a stage sum gradients. `frozen`: leaves of parameters that have none.
    """

    pipeline: Pipeline
    traced: Callable[[int], Program]
    mesh: Mesh
    axis: str
    batch_axes: tuple[str, ...]
    microbatches: int
    bytes_per_parameter: float
    sums_per_update: int
    frozen: frozenset[int] = frozenset()

    @property
    def inner(self) -> int:
        """How many devices a stage has."""
        return math.prod(self.mesh.shape[one] for one in self.batch_axes)

    @property
    def is_measured(self) -> bool:
        """Whether the passes of stages are timed."""
        return self.pipeline.clock == "measured"

    def devices(self) -> Devices:
        """Returns the devices with the links between them, and the memory of each: as a machine is said to have them,
        else measured, else counted. Processes that share the mesh measure it together.
        """
        machine, room = self.pipeline.machine, self.pipeline.memory_bytes
        if machine is None and self.is_measured and self.mesh.is_multi_process:
            machine = measure_machine(self.mesh)
        count, inner = self.mesh.shape[self.axis], self.inner
        if machine is not None:
            between, along = (machine.permute(self.axis), machine.collective(self.axis)) if count > 1 else (_FREE,) * 2
            links = [machine.collective(one) for one in self.batch_axes if self.mesh.shape[one] > 1]
            within = min(links, key=lambda one: one.bytes_per_second, default=_FREE)
            return Devices(count, inner, between, along, within, machine.memory_bytes if room is None else room)
        if not self.is_measured:
            return Devices(count, inner, COUNTED_LINK, COUNTED_LINK, COUNTED_LINK, room)
        stages = [[*one.devices.flat] for one in sub_meshes(self.mesh, self.axis)]
        between = measured_link([own[0] for own in stages])
        within = measured_link(stages[0])
        if room is None:
            room = (stages[0][0].memory_stats() or {}).get("bytes_limit")
        return Devices(count, inner, between, between, within, room)


_FREE = Link(1e30)


class PlannedStages(NamedTuple):
    """What there is to run: the loss in stages, and what they do when; and the same as data."""

    found: CutLoss
    schedule: Schedule
    planned: PlannedPipeline


class _Way(NamedTuple):
    """A cut with its schedule. **Fields:** `costs`: with links of some devices. `held`: as `PlannedStage` has it."""

    found: CutLoss
    costs: Callable[[Devices], Costs]
    held: list[int]
    schedule: Schedule
    bound_seconds: float | None
    simulation: Simulation


def plan_stages(setting: Setting, devices: Devices) -> PlannedStages:
    """Cuts a loss, chooses the schedule, and says whether it pays.

    **Arguments:** `devices`: those of the setting.

    **Raises:** `ArgumentError` naming what does not fit, before anything is compiled for the step.
    """
    program, pipeline, microbatches = setting.traced(setting.microbatches), setting.pipeline, setting.microbatches
    found, of_costs, held, schedule, bound, simulation = _fastest(program, setting, devices)
    costs, count = of_costs(devices), devices.size
    of_share = (lambda: setting.traced(count * devices.inner)) if setting.is_measured and _divides(setting) else None
    with without_mesh():
        loss = whole_loss(found, of_share, bytes_per_parameter=setting.bytes_per_parameter)
    compared = Compared(
        schedule.computing(), of_costs, found.replicas, tuple(held), loss, devices, _samples(program) * microbatches,
        lambda count: pipeline.on(count, microbatches),
    )  # fmt: skip
    text, places = format_csv(schedule), range(schedule.num_devices)
    schedule = _sending(schedule, costs)
    planned = PlannedPipeline(
        setting.axis,
        devices.inner,
        pipeline.clock,
        _planned(found, schedule, costs, held, (*sent_bytes(found, devices.inner), 0.0), program),
        PlannedSchedule(
            schedule.name,
            text,
            simulation.makespan_seconds,
            tuple(map(simulation.bubble, places)),
            tuple(map(simulation.peak_bytes, places)),
            bound,
            schedule.weights,
        ),
        compared.verdict(),
        costs.update_seconds or (0.0,) * len(found.stages),
    )
    return PlannedStages(found, schedule, planned)


def _fastest(program: Program, setting: Setting, devices: Devices) -> _Way:
    """Returns of the ways to divide devices among stages the one by which a batch takes least."""

    @functools.cache
    def clock(backward: Backward) -> Clock:
        return remembered(measured(backward=backward) if setting.is_measured else counted())

    found: list[_Way] = []
    refused: list[ArgumentError] = []
    for places in setting.pipeline.places(devices.size):
        try:
            found.append(_way(program, setting, devices, places, clock))
        except ArgumentError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return min(found, key=lambda one: one.simulation.makespan_seconds)


def _way(program: Program, setting: Setting, devices: Devices, places: int, clock: Callable[[Backward], Clock]) -> _Way:
    pipeline, microbatches = setting.pipeline, setting.microbatches
    schedule = None if pipeline.searches else pipeline.scheduled(places, microbatches)
    shares = pipeline.shares(devices.size, places)
    check_rows(program, devices.inner, () if shares is None else shares.each)
    halved = schedule is None or _is_halved(schedule)
    counts = pipeline.num_stages(places, microbatches), places
    found = _cut(program, setting, devices, counts, shares, clock("halves" if halved else "whole"))
    held = [
        math.ceil(size * setting.bytes_per_parameter + again / (devices.inner * count))
        for size, again, count in zip(_parameter_bytes(found), found.rerun_bytes, found.replicas, strict=True)
    ]

    with without_mesh():
        between = bytes_between_halves(found) if halved else None

    def costs(on: Devices) -> Costs:
        return _with_sums(
            costs_of_cut(found, on.between, inner_devices=on.inner, kept_bytes=between),
            found,
            on,
            setting.sums_per_update,
        )

    bound = None
    if schedule is None:
        best = searched(costs(devices), microbatches, places, held_bytes=held, memory_bytes=devices.memory_bytes)
        schedule, bound = best.schedule, best.bound_seconds
    kept = versions(schedule).num_kept
    held = [size + (one - 1) * own for size, one, own in zip(held, kept, _parameter_bytes(found), strict=True)]
    simulation = simulate(schedule.computing(), costs(devices))
    _check_memory(simulation, held, devices.memory_bytes)
    return _Way(found, costs, held, schedule, bound, simulation)


def check_rows(program: Program, inner: int, replicas: Sequence[int]) -> None:
    """Checks that the devices of stages divide the samples of a microbatch. **Raises:** `ArgumentError`.

    **Arguments:** `inner`: how many devices each replica is of.
    """
    samples = _samples(program)
    for stage, count in enumerate(replicas):
        parts = count * inner
        if samples % parts:
            beside = f" ({count} for each of {inner} along other axes)" if inner > 1 else ""
            raise ArgumentError(
                f"stages={tuple(replicas)}: stage {stage} has {parts} devices{beside}, which do not divide the "
                f"{samples} samples of a microbatch: choose a batch size of which a microbatch has a multiple of "
                f"{parts}, other microbatches, or other numbers of devices"
            )


def with_stages(plan: Plan, planned: PlannedPipeline) -> Plan:
    """Returns a plan that has a pipeline, and says of each variable with which stage it lies."""
    at = [one.name for one in plan.axes].index(planned.axis)
    owners: dict[str, list[int]] = {}
    lent: dict[str, list[int]] = {}
    for number, stage in enumerate(planned.stages):
        for part in stage.variables:
            (owners if part.owned else lent).setdefault(part.path, []).append(number)
    variables = tuple(
        replace(
            one,
            placements=(
                *one.placements[:at],
                Staged(tuple(owners.get(one.path, (0,))), tuple(lent.get(one.path, ()))),
                *one.placements[at + 1 :],
            ),
        )
        for one in plan.variables
    )
    return replace(plan, variables=variables, pipeline=planned)


def bytes_per_parameter(params: Any, optimizer: optax.GradientTransformation, moved: Any = None) -> float:
    """Returns for each byte of parameters those of it, its gradient's sum, and what the optimizer keeps.

    **Arguments:** `params`: PyTree of specs. `moved`: those of them that are trained, by default all.
    """
    moved = params if moved is None else moved
    own = sum(map(bytes_of, jax.tree.leaves(params)))
    wide = [_wide_bytes(one) for one in jax.tree.leaves(moved)]
    state = sum(map(bytes_of, jax.tree.leaves(jax.eval_shape(optimizer.init, moved))))
    return (own + sum(wide) + state) / max(own, 1)


def _wide_bytes(spec: Any) -> int:
    return math.prod(spec.shape) * np.dtype(jnp.promote_types(spec.dtype, jnp.float32)).itemsize


def _cut(
    program: Program,
    setting: Setting,
    devices: Devices,
    counts: tuple[int, int],
    shares: Shares | None,
    clock: Clock,
) -> CutLoss:
    """Cuts the loss. **Arguments:** `counts`: of stages, and of places of the schedule. `shares`: devices of these."""
    pipeline, room, (num_stages, num_places) = setting.pipeline, devices.memory_bytes, counts
    a_device = -(-num_stages // num_places)
    links = [devices.within] * (devices.inner > 1 or shares is None) + [devices.along] * (shares is not None)
    pricing = Pricing(
        setting.microbatches,
        devices.between,
        min(links, key=lambda one: one.bytes_per_second),
        memory_bytes=math.inf if room is None else room / a_device,
        bytes_per_parameter=setting.bytes_per_parameter,
        recompute=None if room is not None and not pipeline.recompute else pipeline.recompute,
        samples=_samples(program) // devices.inner,
        inner_devices=devices.inner,
    )
    with without_mesh():
        return cut(
            program,
            None if pipeline.cuts else num_stages,
            pricing=pricing,
            cuts=pipeline.cuts,
            num_devices=shares,
            clock=clock,
            frozen=setting.frozen,
            mixes_samples=pipeline.mixes_samples,
        )


def _with_sums(costs: Costs, found: CutLoss, devices: Devices, sums_per_update: int) -> Costs:
    """Returns costs with what the devices of a stage take to sum gradients: once an update, or with each microbatch."""
    if devices.inner == max(found.replicas) == 1:
        return costs
    sums: list[float] = []
    for size, replicas in zip(_parameter_bytes(found, trained=True), found.replicas, strict=True):
        ways = [(devices.within, devices.inner), (devices.along, replicas)]
        sums.append(sum(link.seconds(2 * size * (n - 1) / n, 2) for link, n in ways if size and n > 1))
    if sums_per_update == 1:
        return replace(costs, update_seconds=tuple(sums))
    pairs = zip(costs.weight_seconds, sums, strict=True)
    return replace(costs, weight_seconds=tuple(one + more for one, more in pairs))


def _parameter_bytes(found: CutLoss, *, trained: bool = False) -> list[int]:
    """Returns the bytes of the parameters that each stage reads. **Arguments:** `trained`: of those with a gradient."""
    own = [[leaf for leaf in one.leaves if leaf.argument == _PARAMS] for one in found.stages]
    return [sum(leaf.num_bytes for leaf in leaves if not (trained and leaf.frozen)) for leaves in own]


def _check_memory(simulation: Simulation, held: Sequence[int], memory_bytes: int | None) -> None:
    schedule = simulation.schedule
    for device in range(schedule.num_devices if memory_bytes is not None else 0):
        own = sum(size for size, home in zip(held, schedule.device_of_stage, strict=True) if home == device)
        peak = simulation.peak_bytes(device)
        if memory_bytes is not None and own + peak > memory_bytes:
            raise ArgumentError(
                f"memory_bytes={memory_bytes}: device {device} would hold {own} bytes of parameters, gradients and "
                f"optimizer's state, and at most {peak} of activations by schedule {schedule.name!r}: take "
                f'schedule="searched", more microbatches or devices, or recompute=True'
            )


def _is_halved(schedule: Schedule) -> bool:
    return any(one.kind is Kind.INPUT for one in schedule.operations())


def _sending(schedule: Schedule, costs: Costs) -> Schedule:
    """Returns a schedule with transfers."""
    if schedule.num_devices == 1 or any(one.is_transfer for one in schedule.operations()):
        return schedule
    return with_transfers(schedule, costs)


def _samples(program: Program) -> int:
    return jax.tree.leaves(program.in_specs[_BATCH])[0].shape[0]


def _divides(setting: Setting) -> bool:
    """Whether the devices of a mesh can have equal shares of the batch."""
    samples = _samples(setting.traced(1))
    return samples % (setting.mesh.shape[setting.axis] * setting.inner) == 0


def parts_of(stages: Sequence[Stage], program: Program) -> list[tuple[PlannedPart, ...]]:
    """Returns which variables each stage has: those that it owns, and those that it is lent."""
    named = named_leaves(program.in_specs[_PARAMS], "params")
    ownership = Ownership.of(stages, [leaf for _, leaf in named], _PARAMS)
    found: list[tuple[PlannedPart, ...]] = []
    for at, stage in enumerate(stages):
        owned = {one.leaf: one.rows for one in ownership.pieces[at]}
        read = {leaf.number: leaf.rows for leaf in stage.leaves if leaf.argument == _PARAMS}
        lent = {leaf: rows for leaf, rows in read.items() if leaf not in owned}
        parts = [PlannedPart(named[leaf][0], rows) for leaf, rows in owned.items()]
        found.append((*parts, *(PlannedPart(named[leaf][0], rows, False) for leaf, rows in lent.items())))
    return found


def _planned(
    found: CutLoss, schedule: Schedule, costs: Costs, held: Sequence[int], borders: Sequence[float], program: Program
) -> tuple[PlannedStage, ...]:
    transfers, parts = (*costs.transfer_seconds, 0.0), parts_of(found.stages, program)
    kept = costs.activation_bytes if costs.kept_bytes is None else costs.kept_bytes
    stages: list[PlannedStage] = []
    for at in range(len(found.stages)):
        border = found.borders[at - 1] if at else None
        of_stage = StageCosts(
            costs.forward_seconds[at],
            costs.input_seconds[at],
            costs.weight_seconds[at],
            transfers[at],
            costs.activation_bytes[at],
            kept[at],
            held[at],
            math.ceil(borders[at]),
        )
        begins = "with the loss" if border is None else str(border)
        number = None if border is None else (border.at, border.iteration)
        device = schedule.device_of_stage[at]
        replicas = found.replicas[at]
        stages.append(PlannedStage(device, begins, number, found.recompute[at], of_stage, parts[at], replicas))
    return tuple(stages)
