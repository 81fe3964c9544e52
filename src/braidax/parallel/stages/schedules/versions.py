"""Which version of the weights each microbatch sees, and how old it is when its gradient is applied."""

from collections.abc import Sequence
from dataclasses import dataclass

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.operations import Kind, Operation, Schedule


@dataclass(frozen=True)
class Versions:
    """Versions of weights, by stage; a version is the number of updates that have made it.

    **Fields:** `used`: of each stage and microbatch, by its forward and its backward alike. `staleness`: of each
    stage, the most updates that lie between the version a gradient was computed with and the one it is applied to.
    `num_kept`: of each stage, the most versions that are held at once.
    """

    used: tuple[tuple[int, ...], ...]
    staleness: tuple[int, ...]
    num_kept: tuple[int, ...]

    def __str__(self) -> str:
        if not any(self.staleness):
            return "every gradient is applied to the weights it was computed with"
        lags = ", ".join(f"{lag} on stage {stage}" for stage, lag in enumerate(self.staleness))
        return f"gradients are applied late, by up to so many updates: {lags}"


def versions(schedule: Schedule) -> Versions:
    """Finds which weights a schedule computes with.

    **Raises:** `ArgumentError` when a version is wanted before its update, or when more would have to be held than the
    schedule's kind of weights allows.
    """
    made = [_made(schedule, stage) for stage in range(schedule.num_stages)]
    each = schedule.microbatches_per_update or schedule.num_microbatches
    used: list[tuple[int, ...]] = []
    for stage in range(schedule.num_stages):
        wanted = {
            "flushed": [0] * schedule.num_microbatches,
            "stashed": made[stage],
            "vertical": made[0],
            "double": [max(number // each - 1, 0) for number in range(schedule.num_microbatches)],
        }[schedule.weights]
        for number, (want, have) in enumerate(zip(wanted, made[stage], strict=True)):
            if want > have:
                raise ArgumentError(
                    f"{Operation(Kind.FORWARD, stage, number)} needs version {want} of the weights of stage {stage}, "
                    f"and only {have} updates stand before it in its list"
                )
        used.append(tuple(wanted))
    staleness = tuple(
        max(number // each - version for number, version in enumerate(versions)) if not schedule.is_flushed else 0
        for versions in used
    )
    kept = tuple(_num_kept(schedule, stage, used[stage]) for stage in range(schedule.num_stages))
    if schedule.weights == "double" and max(kept) > 2:
        raise ArgumentError(
            f"schedule {schedule.name!r} holds {max(kept)} versions of the weights of stage {kept.index(max(kept))}, "
            "expected at most 2: an update comes before all microbatches of the last but one are back"
        )
    return Versions(tuple(used), staleness, kept)


def _made(schedule: Schedule, stage: int) -> list[int]:
    """Returns how many updates of a stage stand before each of its forwards."""
    count, made = 0, [0] * schedule.num_microbatches
    for operation in schedule.lists[schedule.device_of_stage[stage]]:
        if operation.stage == stage and operation.kind is Kind.UPDATE:
            count += 1
        elif operation.stage == stage and operation.kind is Kind.FORWARD:
            made[operation.microbatch] = count
    return made


def _num_kept(schedule: Schedule, stage: int, used: tuple[int, ...]) -> int:
    """Returns the most versions held at once: each until the last use of it, and the newest one."""
    given_up = _given_up(schedule, stage, used)
    held = most = 1
    for operation in _own(schedule, stage):
        held += (operation.kind is Kind.UPDATE) - len(given_up.get(operation, ()))
        most = max(most, held)
    return most


def given_up(schedule: Schedule, used: Sequence[Sequence[int]]) -> dict[Operation, tuple[int, ...]]:
    """Returns the operations behind which versions of the weights of their stage are needed no more, and which.

    The newest one is needed until the next is made. With vertical sync microbatches that are still before a stage want
    older versions: those are needed, too.

    **Arguments:** `used`: as of `Versions`.
    """
    found: dict[Operation, tuple[int, ...]] = {}
    for stage in range(schedule.num_stages):
        found.update(_given_up(schedule, stage, used[stage]))
    return found


def _given_up(schedule: Schedule, stage: int, used: Sequence[int]) -> dict[Operation, tuple[int, ...]]:
    own = _own(schedule, stage)
    last_use = {used[x.microbatch]: place for place, x in enumerate(own) if x.kind is not Kind.UPDATE}
    newest, held, found = 0, {0}, dict[Operation, tuple[int, ...]]()
    for place, operation in enumerate(own):
        if operation.kind is Kind.UPDATE:
            newest += 1
            held.add(newest)
        gone = {version for version in held if version != newest and last_use.get(version, -1) <= place}
        if gone:
            found[operation] = tuple(sorted(gone))
            held -= gone
    return found


def _own(schedule: Schedule, stage: int) -> list[Operation]:
    operations = schedule.lists[schedule.device_of_stage[stage]]
    return [one for one in operations if one.stage == stage and not one.is_transfer]
