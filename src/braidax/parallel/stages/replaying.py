"""A pipeline that is given in a plan: the loss is cut as it says, and nothing is timed."""

import json
from dataclasses import asdict

from braidax.errors import ArgumentError
from braidax.parallel.plan.planned.stages import PlannedPipeline
from braidax.program import Border, Chain, Program, Stage

from .balance import StageCost
from .cut import CutLoss
from .planning import PlannedStages, Setting, check_rows, parts_of, plan_stages
from .running.sending.agreement import Agreement
from .schedules import with_transfers
from .segments import Seconds


def agreed_stages(setting: Setting, agreement: Agreement | None) -> PlannedStages:
    """Plans stages, alike on all processes: where clocks run, the first one plans, and the others follow its plan.

    **Arguments:** `agreement`: of the processes, if there are several. **Raises:** as `plan_stages`, on the first one.
    """
    devices = setting.devices()
    if agreement is None or not setting.is_measured:
        return plan_stages(setting, devices)
    text = agreement.first(lambda: json.dumps(asdict(plan_stages(setting, devices).planned)))
    return replay_stages(PlannedPipeline.from_tree(json.loads(text)), setting)


def replay_stages(planned: PlannedPipeline, setting: Setting) -> PlannedStages:
    """Returns what there is to run by a plan.

    **Raises:** `ArgumentError` when it is of another axis, of another loss, or of other microbatches.
    """
    program, schedule = setting.traced(setting.microbatches), planned.parsed()
    if planned.axis != setting.axis:
        raise ArgumentError(
            f"plan has its stages along {planned.axis!r}, and strategies has the Pipeline along {setting.axis!r}: give "
            f"it that axis, or plan anew"
        )
    told = {
        "num_stages": (schedule.num_stages, len(planned.stages)),
        "num_devices": (planned.num_devices, setting.mesh.shape[setting.axis]),
        "num_microbatches": (schedule.num_microbatches, setting.microbatches),
        "inner_devices": (planned.inner_devices, setting.inner),
    }
    for name, (of_plan, of_step) in told.items():
        if of_plan != of_step:
            raise ArgumentError(f"plan's pipeline has {name}={of_plan}, and the step {of_step}: plan anew")
    replicas = tuple(one.replicas for one in planned.stages)
    check_rows(program, planned.inner_devices, replicas)
    (borders, stages), each = _cut(planned, program, setting.frozen), [one.costs for one in planned.stages]
    parts = [planned.inner_devices * count for count in replicas]
    seconds = tuple(
        Seconds(one.forward_seconds * n, one.input_seconds * n, one.weight_seconds * n)
        for one, n in zip(each, parts, strict=True)
    )
    whole = zip(seconds, each, parts, strict=True)
    costs = tuple(StageCost(own.total / n, one.held_bytes + one.activation_bytes) for own, one, n in whole)
    left = tuple(one.activation_bytes * n for one, n in zip(each, parts, strict=True))
    recompute = tuple(one.recompute for one in planned.stages)
    found = CutLoss(stages, borders, replicas, recompute, seconds, costs, left, (0,) * len(stages))
    if schedule.num_devices > 1 and not any(one.is_transfer for one in schedule.operations()):
        schedule = with_transfers(schedule, planned.costs)
    return PlannedStages(found, schedule, planned)


def _cut(
    planned: PlannedPipeline, program: Program, frozen: frozenset[int]
) -> tuple[tuple[Border, ...], tuple[Stage, ...]]:
    chain = Chain(program, frozen=frozen)
    known = {one: one for one in chain.borders()}  # with the lines of code
    given = [Border(*one.border) for one in planned.stages if one.border is not None]
    borders = tuple(known.get(one, one) for one in given)
    try:
        stages = chain.stages(borders)
    except (ArgumentError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"plan cuts another loss ({error}): plan anew") from error
    for at, (one, parts) in enumerate(zip(planned.stages, parts_of(stages, program), strict=True)):
        if one.variables != parts:
            then, now = (", ".join(part.path for part in own) or "nothing" for own in (one.variables, parts))
            raise ArgumentError(
                f"plan cuts another loss: stage {at} has {then} in it, or other rows of that, and of this loss {now}: "
                f"plan anew"
            )
    return borders, stages
