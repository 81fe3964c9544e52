"""The pipeline of a plan: which stages there are, what they take, and what they do when."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braidax.parallel.plan.costs.machine import in_time, scaled
from braidax.parallel.plan.text import paragraph, table

from .verdict import Verdict

if TYPE_CHECKING:
    from braidax.parallel.stages.schedules import Costs, Schedule, Simulation, Weights

_INDENT = 14


@dataclass(frozen=True)
class StageCosts:
    """What a stage takes of each of its devices for a microbatch.

    **Fields:** seconds forward, and of the gradients of inputs and of weights; `transfer_seconds`, `sent_bytes`: to the
    next stage, of the last one 0. `activation_bytes`: what its forward pass leaves; `kept_bytes`: what is left of that
    between the two gradients. `held_bytes`: of parameters (all versions), gradients and the optimizer's state, and of
    what a stage that runs again makes for a moment.
    """

    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    transfer_seconds: float
    activation_bytes: int
    kept_bytes: int
    held_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class PlannedPart:
    """A variable, or `rows` of its leading dim, of a stage; it is `owned`, or lent by the stage that owns it."""

    path: str
    rows: tuple[int, int] | None
    owned: bool = True


@dataclass(frozen=True)
class PlannedStage:
    """A stage.

    **Fields:** `device`: its place in the schedule, and along the axis if all stages before have one. `begins`: where
    in the loss; `border`: the same by number, of an equation and of an iteration. `recompute`: whether it runs again on
    the way back. `variables`: that it reads. `replicas`: how many places along the axis it is on, which divide samples.
    """

    device: int
    begins: str
    border: tuple[int, int] | None
    recompute: bool
    costs: StageCosts
    variables: tuple[PlannedPart, ...]
    replicas: int = 1


@dataclass(frozen=True)
class PlannedSchedule:
    """What devices do when.

    **Fields:** `name`; `csv`: as of `schedules.parse_csv`. `seconds` of all that is computed of a batch, by simulation;
    of each device `bubbles`, the part of these in which it is idle, and `peak_bytes` of activations. `bound_seconds`:
    no schedule of these stages on these devices is shorter, where one was searched for. `weights`: which ones
    microbatches see, as of `schedules.Schedule`.
    """

    name: str
    csv: str
    seconds: float
    bubbles: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bound_seconds: float | None = None
    weights: "Weights" = "flushed"


@dataclass(frozen=True)
class PlannedPipeline:
    """Stages along an axis of the mesh.

    **Fields:** `axis`; `inner_devices` of each stage, which divide its samples; `clock`: whether seconds are
    "measured", or "counted" and compare with one another only. `update_seconds`: of each stage, of summing gradients
    over its devices, once an update.
    """

    axis: str
    inner_devices: int
    clock: str
    stages: tuple[PlannedStage, ...]
    schedule: PlannedSchedule
    verdict: Verdict
    update_seconds: tuple[float, ...]

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "PlannedPipeline":
        """Returns the pipeline of what JSON holds of it."""
        made: dict[str, Any] = {
            "stages": tuple(map(_stage_from, tree["stages"])),
            "schedule": PlannedSchedule(**_with_tuples(tree["schedule"])),
            "verdict": Verdict.from_tree(tree["verdict"]),
        }
        return cls(**{**_with_tuples(tree), **made})

    @property
    def places(self) -> tuple[range, ...]:
        """Of each device of the schedule where it is along the axis: at several places if its stage has replicas."""
        counts = {stage.device: stage.replicas for stage in self.stages}
        ends = [*accumulate(counts[device] for device in sorted(counts))]
        return tuple(range(begin, end) for begin, end in pairwise((0, *ends)))

    @property
    def num_devices(self) -> int:
        """How many devices there are along the axis."""
        return self.places[-1].stop

    @property
    def costs(self) -> "Costs":
        """What operations take."""
        from braidax.parallel.stages.schedules import Costs

        each = [stage.costs for stage in self.stages]
        return Costs(
            tuple(one.forward_seconds for one in each),
            tuple(one.input_seconds for one in each),
            tuple(one.weight_seconds for one in each),
            tuple(one.transfer_seconds for one in each[:-1]),
            tuple(one.activation_bytes for one in each),
            tuple(one.kept_bytes for one in each),
            self.update_seconds,
        )

    def parsed(self) -> "Schedule":
        """Returns the schedule. **Raises:** `ArgumentError` for a CSV that is none."""
        from braidax.parallel.stages.schedules import parse_csv

        return parse_csv(self.schedule.csv, name=self.schedule.name, weights=self.schedule.weights)

    def simulated(self) -> "Simulation":
        """Returns the schedule in time, as stages take it."""
        from braidax.parallel.stages.schedules import simulate

        return simulate(self.parsed().computing(), self.costs)

    def evenly(self) -> "Simulation":
        """Returns the schedule in time if every pass took the same, as the papers draw it, and sending took none."""
        from braidax.parallel.stages.schedules import Costs, simulate

        costs, count = self.costs, len(self.stages)
        passes = (*costs.forward_seconds, *costs.input_seconds, *costs.weight_seconds)
        unit, activation = sum(passes) / len(passes), max(costs.activation_bytes)
        even = Costs.even(count, forward=unit, inputs=unit, weight=unit, activation=activation)
        return simulate(self.parsed().computing(), even)

    def timeline(self, path: str | Path | None, *, measured: Any = None, width: int = 100) -> str:
        """As of `Plan.timeline`."""
        from braidax.parallel.stages.schedules import stacked_html, timeline

        devices = [f"device{'s' * (len(one) > 1)} {_numbers(one)}" for one in self.places]
        panels: dict[str, Any] = {"planned": self.evenly(), "simulated": self.simulated()}
        if measured is not None:
            panels["measured"] = measured
        if path is not None:
            sent = [stage.costs.sent_bytes for stage in self.stages]
            told = {f"{name}{_TOLD[name]}": one for name, one in panels.items()}
            page = stacked_html(told, title=self.short, sent_bytes=sent, devices=devices)
            Path(path).write_text(page, encoding="utf-8")
        return "\n\n".join(f"{name}: {timeline(one, width=width, devices=devices)}" for name, one in panels.items())

    @property
    def short(self) -> str:
        """Stages and schedule in a few words."""
        counts = [str(len(one)) for one in self.places]
        on = "" if {*counts} == {"1"} else f" on {', '.join(counts[:-1])} and {counts[-1]} devices"
        return f"{len(self.stages)} stages along {self.axis}{on}, {self.schedule.name}"

    def lines(self) -> list[str]:
        """Returns the text of a plan: a line a stage, the schedule, and the verdict."""
        schedule, how = self.schedule, "" if self.clock == "measured" else " Seconds are counted, not measured."
        rows: list[tuple[str, ...]] = [
            ("stage", "device", "forward", "inputs", "weights", "sends", "a microbatch", "held", "begins")
        ]
        for at, stage in enumerate(self.stages):
            costs = stage.costs
            seconds = (costs.forward_seconds, costs.input_seconds, costs.weight_seconds, costs.transfer_seconds)
            sizes = (costs.activation_bytes, costs.held_bytes)
            begins = stage.begins + (", again on the way back" if stage.recompute else "")
            cells = (*map(in_time, seconds), *(scaled(size, "B") for size in sizes))
            rows.append((str(at), _numbers(self.places[stage.device]), *cells, begins))
        bubbles = ", ".join(f"{100 * one:.0f}" for one in schedule.bubbles)
        peaks = ", ".join(scaled(one, "B") for one in schedule.peak_bytes)
        bound = "" if schedule.bound_seconds is None else f" (none is shorter than {in_time(schedule.bound_seconds)})"
        took = f"{schedule.name}: {in_time(schedule.seconds)} a batch{bound}"
        told = f"{took}; idle {bubbles} %; activations at most {peaks}."
        return [
            *table(rows, right=range(8), narrow=[8]),
            "",
            *paragraph("schedule", told, indent=_INDENT),
            *self._staleness(),
            *paragraph("verdict", f"{self.verdict}{how}", indent=_INDENT),
        ]

    def _staleness(self) -> list[str]:
        """Returns what is to be said of a schedule that does not flush."""
        from braidax.parallel.stages.schedules import versions

        schedule = self.parsed()
        if schedule.is_flushed:
            return []
        found = versions(schedule)
        told = f"{found}; each stage makes {schedule.num_updates} a batch, and holds {_listed(found.num_kept)} versions"
        return paragraph("staleness", f"{told} of its weights. It is not training on one device.", indent=_INDENT)


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


_TOLD = {
    "planned": ": every pass takes the same",
    "simulated": ": with what each stage takes",
    "measured": ": as devices did it",
}


def _numbers(places: range) -> str:
    return str(places[0]) if len(places) == 1 else f"{places[0]}–{places[-1]}"


def _stage_from(tree: dict[str, Any]) -> PlannedStage:
    variables = tuple(PlannedPart(**_with_tuples(one)) for one in tree["variables"])
    made: dict[str, Any] = {"costs": StageCosts(**tree["costs"]), "variables": variables}
    return PlannedStage(**{**_with_tuples(tree), **made})


def _with_tuples(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()}  # pyright: ignore
