"""The knobs of a plan: what a loader, a checkpointer and a step are made with, beside where variables lie."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal

from braidax.errors import ArgumentError
from braidax.parallel.plan.planned.machine import PlannedMachine

Change = Literal["hot", "rebuild"]
_META = "knob"


@dataclass(frozen=True)
class Values:
    """Which values a knob may have.

    **Fields:** `least`, `most`: both are among them. `choices`: words. `none`: what None stands for, empty where there
    has to be a value. `is_whole`: whether it is a whole number.
    """

    least: float = 1
    most: float = math.inf
    choices: tuple[str, ...] = ()
    none: str = ""
    is_whole: bool = True

    def __str__(self) -> str:
        if self.choices:
            told = " | ".join(self.choices)
        elif self.is_whole:
            told = f"{self.least:g} or more" if math.isinf(self.most) else f"{self.least:g} to {self.most:g}"
        else:
            told = "0 or more" if self.least == 0 else "more than 0"
        return f"{told}, or None: {self.none}" if self.none else told

    def has(self, value: object) -> bool:
        """Returns whether a value is one of them."""
        if value is None:
            return bool(self.none)
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else int | float):
            return False
        return self.least <= value <= self.most


@dataclass(frozen=True)
class Knob:
    """What there is to know of a knob.

    **Fields:** `name`: such as `"loading.threads"`; `meaning`; `unit`; `default`; `values` that it may have; `change`:
    `"hot"`, while a run goes on, or `"rebuild"`; `where`: the public attribute that changes it, or what is made anew
    with it.
    """

    name: str
    meaning: str
    unit: str
    default: Any
    values: Values
    change: Change
    where: str


def _knob(meaning: str, unit: str, default: Any, values: Values, change: Change, where: str) -> Any:
    return field(default=default, metadata={_META: (meaning, unit, values, change, where)})


def _check(part: Any, name: str) -> None:
    for one in fields(part):
        value, values = getattr(part, one.name), one.metadata[_META][2]
        if not values.has(value):
            raise ArgumentError(f"knob {name}.{one.name}={value!r} is out of its range: expected {values}")


_LEAST = math.ulp(0.0)  # above 0
_MOST = sys.float_info.max  # finite
_SAVER = "Checkpointer(…, Adaptive(…))"


@dataclass(frozen=True)
class LoadingKnobs:
    """Knobs of a `DataLoader`. **Raises:** `ArgumentError` naming the one that is out of its range."""

    threads: int | None = _knob(
        "that read, decode and transform, each with one read in flight",
        "threads",
        None,
        Values(none="the loader adapts it"),
        "hot",
        "loader.knobs.threads; loader.depth.threads where that is None",
    )
    prefetch: int | None = _knob(
        "batches in flight ahead of the one in use, on the host and on their devices; 0: each begins when asked for",
        "batches",
        None,
        Values(0, none="the loader adapts it"),
        "hot",
        "loader.knobs.prefetch; loader.depth.prefetch where that is None",
    )
    max_bytes: int = _knob(
        "that batches in flight take, which holds prefetch down", "bytes", 1 << 30, Values(), "hot", "loader.knobs"
    )
    read_bytes: int = _knob(
        "that one read fills at most: what a thread reads, decodes and transforms at once",
        "bytes",
        2 << 20,
        Values(),
        "hot",
        "loader.knobs",
    )
    hedge_seconds: float | None = _knob(
        "after which a read that is waited for is done a second time",
        "seconds",
        None,
        Values(0, none="when it takes much longer than the others", is_whole=False),
        "hot",
        "loader.knobs",
    )
    workers: Literal["threads", "processes"] = _knob(
        "what runs the user's code in a source; processes are for code that holds the GIL",
        "",
        "threads",
        Values(choices=("threads", "processes")),
        "rebuild",
        "DataLoader(workers=…)",
    )

    def __post_init__(self) -> None:
        _check(self, "loading")


@dataclass(frozen=True)
class CheckpointingKnobs:
    """Knobs of a `Checkpointer`. **Raises:** `ArgumentError` naming the one that is out of its range."""

    every: int | None = _knob(
        "updates between two checkpoints",
        "updates",
        None,
        Values(none="as far apart as overhead asks for"),
        "hot",
        "saver.spacing.num_updates, and saver.spacing.paused",
    )
    overhead: float = _knob(
        "of checkpoints, where they are adapted: as a share of the time of a step",
        "share",
        0.035,
        Values(_LEAST, _MOST, is_whole=False),
        "rebuild",
        _SAVER,
    )
    max_lost_seconds: float | None = _knob(
        "of work that a failure may cost at worst, which prevails over overhead",
        "seconds",
        None,
        Values(_LEAST, _MOST, none="no limit", is_whole=False),
        "rebuild",
        _SAVER,
    )
    mtbf_seconds: float | None = _knob(
        "from one failure of the job to the next, on average",
        "seconds",
        None,
        Values(_LEAST, _MOST, none="not known", is_whole=False),
        "rebuild",
        _SAVER,
    )
    snapshot: Literal["under step", "at once"] = _knob(
        "when a checkpoint is copied to the host: while the next gradients run, or before the loop goes on",
        "",
        "under step",
        Values(choices=("under step", "at once")),
        "hot",
        "saver.snapshot",
    )
    limit_bytes_per_second: float | None = _knob(
        "that a process writes to a folder",
        "bytes a second",
        None,
        Values(_LEAST, _MOST, none="as fast as it can", is_whole=False),
        "hot",
        "saver.limit_bytes_per_second",
    )

    def __post_init__(self) -> None:
        _check(self, "checkpointing")


@dataclass(frozen=True)
class ComputingKnobs:
    """Knobs of a step that a plan has nowhere else. **Raises:** `ArgumentError` naming the one out of its range."""

    combine_bytes: int | None = _knob(
        "from which on gradients are sent, several of them in one all-reduce (of GPUs)",
        "bytes",
        None,
        Values(0, none="by the sizes of variables"),
        "rebuild",
        "parallelize(plan=…), or strategies' combine_bytes",
    )
    coming: Literal["auto", "known", "unknown"] = _knob(
        "whether updates are told the next batch, whose rows are then fetched under them",
        "",
        "auto",
        Values(choices=("auto", "known", "unknown")),
        "rebuild",
        "fit(coming=…)",
    )

    def __post_init__(self) -> None:
        _check(self, "computing")


@dataclass(frozen=True)
class PlannedKnobs:
    """The knobs of a plan, and the machine that it was made on.

    Plain values: `braidax.tune` reads them off what runs, sets those that are hot, and makes of the others what
    constructors take. `print` shows those that are not as by default. Numbers of microbatches, placements, stages and
    schedule are elsewhere in a plan, see `PLAN_KNOBS`.

    **Arguments:** `loading`, `checkpointing`, `computing`: by what has them. `machine`: None where it fits any.
    """

    loading: LoadingKnobs = LoadingKnobs()
    checkpointing: CheckpointingKnobs = CheckpointingKnobs()
    computing: ComputingKnobs = ComputingKnobs()
    machine: PlannedMachine | None = None

    def values(self) -> dict[str, Any]:
        """Returns all values by the names of `KNOBS`, such as `"loading.threads"`."""
        return {f"{name}.{knob}": value for name, one in self._parts() for knob, value in asdict(one).items()}

    def changed(self) -> dict[str, Any]:
        """Returns the values that are not as by default."""
        defaults = PlannedKnobs().values()
        return {name: value for name, value in self.values().items() if value != defaults[name]}

    def with_values(self, values: Mapping[str, Any]) -> "PlannedKnobs":
        """Returns knobs some of which have other values. **Arguments:** `values`: by the names of `KNOBS`.

        **Raises:** `ArgumentError` for a name that is none, and for a value out of range.
        """
        new = self.values()
        for name, value in values.items():
            if name not in new:
                raise ArgumentError(f"knob {name!r} is not known: expected one of {', '.join(new)}")
            new[name] = value
        tree: dict[str, Any] = {}
        for name, value in new.items():
            part, _, knob = name.partition(".")
            tree.setdefault(part, {})[knob] = value
        made = PlannedKnobs.from_tree(tree)
        return PlannedKnobs(made.loading, made.checkpointing, made.computing, self.machine)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "PlannedKnobs":
        """Returns the knobs of what JSON holds of them, those that are missing as by default.

        **Raises:** `ArgumentError` for a value out of range, `TypeError` for what is no knob.
        """
        machine = tree.get("machine")
        parts: dict[str, Any] = {name: kind(**tree.get(name, {})) for name, kind in _PARTS.items()}
        if strange := [name for name in tree if name not in (*_PARTS, "machine")]:
            raise TypeError(f"{strange} are no knobs")
        return cls(**parts, machine=None if machine is None else PlannedMachine(**machine))

    def __str__(self) -> str:
        """Those that are not as by default; empty where all are."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changed().items())

    def _parts(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in _PARTS)


_PARTS: dict[str, type[Any]] = {
    "loading": LoadingKnobs,
    "checkpointing": CheckpointingKnobs,
    "computing": ComputingKnobs,
}


def _known() -> Iterator[Knob]:
    for part, kind in _PARTS.items():
        for one in fields(kind):
            assert one.default is not MISSING
            meaning, unit, values, change, where = one.metadata[_META]
            yield Knob(f"{part}.{one.name}", meaning, unit, one.default, values, change, where)


KNOBS: tuple[Knob, ...] = tuple(_known())
"""All knobs of `PlannedKnobs`, in their order."""

_STEP = "parallelize(…)"

PLAN_KNOBS: tuple[Knob, ...] = (
    Knob(
        "microbatches",
        "pieces of a batch that gradients are accumulated over, or that stages compute in turn",
        "pieces",
        1,
        Values(),
        "rebuild",
        "parallelize(microbatches=…); Plan.microbatches",
    ),
    Knob(
        "placements",
        "of each variable on each axis: replicated, split, gathered, rotated (and its hops), by rows, on servers",
        "",
        "by strategies",
        Values(choices=("a Placement",)),
        "rebuild",
        "strategies' overrides; Plan.variables",
    ),
    Knob(
        "stages",
        "of a pipeline, and where the loss is cut",
        "stages",
        None,
        Values(none="no pipeline"),
        "rebuild",
        "Pipeline(stages=…, cuts=…); Plan.pipeline",
    ),
    Knob(
        "schedule",
        "what stages do when",
        "",
        "1F1B",
        Values(choices=("a name", "a Schedule")),
        "rebuild",
        "Pipeline(schedule=…); Plan.pipeline",
    ),
    Knob(
        "hops",
        "of a ring: parts of weights move while products run, or where they are used",
        "",
        "ahead",
        Values(choices=("ahead", "in place")),
        "rebuild",
        "RotatedTensorParallel(hops=…); Rotated(hops=…) in Plan.variables",
    ),
    Knob(
        "servers",
        "processes that have tables, or all variables, in their host memory",
        "processes",
        None,
        Values(none="no servers"),
        "rebuild",
        'parallelize(servers=…) with Hybrid(tables="servers") or ParameterServers()',
    ),
)
"""Knobs that are other parts of a plan, or arguments of `parallelize`."""
