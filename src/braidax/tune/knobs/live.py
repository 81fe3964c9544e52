"""Knobs of a loader, a checkpointer and a step that are there: read off them, and set while they run."""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

from braidax.checkpoint import Adaptive, Checkpointer, Saver
from braidax.checkpoint.interval.adaptive import Adapting
from braidax.data import DataLoader
from braidax.errors import ArgumentError
from braidax.parallel import Plan
from braidax.parallel.plan.planned.knobs import (
    KNOBS,
    CheckpointingKnobs,
    ComputingKnobs,
    Knob,
    LoadingKnobs,
    PlannedKnobs,
)

Adapted = Literal["left", "fixed"]


@runtime_checkable
class Planned(Protocol):
    """A step that says by which plan it was made."""

    @property
    def plan(self) -> Plan:
        """As of `Step`."""
        ...


@dataclass(frozen=True)
class LiveKnob:
    """A hot knob of what runs.

    **Fields:** `knob`: what there is to know of it. `read`, `write`: the value now; None where a controller adapts it.
    """

    knob: Knob
    read: Callable[[], Any]
    write: Callable[[Any], None]


def read_knobs(
    loader: DataLoader | None = None,
    saver: Saver | None = None,
    step: Planned | None = None,
    *,
    adapted: Adapted = "left",
) -> PlannedKnobs:
    """Returns the knobs that a loader, a checkpointer and a step have now; those of what is not given as by default.

    **Arguments:** `saver`: knobs of a `Checkpointer` are read, of others none. `adapted`: whether what their own
    controllers adapt is left to these, as None, or fixed at the numbers that it has now.
    """
    machine = None if step is None else step.plan.knobs.machine
    computing = ComputingKnobs() if step is None else step.plan.knobs.computing
    loading = LoadingKnobs() if loader is None else _loading(loader, adapted)
    checkpointing = _checkpointing(saver, adapted) if isinstance(saver, Checkpointer) else CheckpointingKnobs()
    return PlannedKnobs(loading, checkpointing, computing, machine)


def apply_knobs(
    knobs: PlannedKnobs,
    loader: DataLoader | None = None,
    saver: Saver | None = None,
    step: Planned | None = None,
) -> tuple[str, ...]:
    """Sets all hot knobs of a loader and a checkpointer that run, from the thread of the loop, between two steps.

    A number of threads, batches or updates is set for good; None gives it back to the controller that adapts it.

    **Returns:** the names of the other knobs whose values differ: they need a rebuild of what `Knob.where` says.
    **Raises:** `ArgumentError` on a process that follows process 0 in when checkpoints are due.
    """
    before = read_knobs(loader, saver, step)
    wanted, has = knobs.values(), before.values()
    parts = {"loading": loader, "checkpointing": saver if isinstance(saver, Checkpointer) else None, "computing": step}
    differing = [one for one in KNOBS if wanted[one.name] != has[one.name] and parts[_part(one)] is not None]
    live = {one.knob.name: one for one in hot_knobs(loader, saver)}
    for one in differing:
        if one.name in live and _may_be(one, wanted[one.name], saver):
            live[one.name].write(wanted[one.name])
    now = read_knobs(loader, saver, step).values()
    return tuple(one.name for one in differing if wanted[one.name] != now[one.name])


def hot_knobs(loader: DataLoader | None = None, saver: Saver | None = None) -> tuple[LiveKnob, ...]:
    """Returns the hot knobs of a loader and of a `Checkpointer`, to list, read and write one at a time."""
    live: list[LiveKnob] = []
    for knob in KNOBS:
        part, name = knob.name.split(".")
        if knob.change == "hot" and part == "loading" and loader is not None:
            live.append(LiveKnob(knob, _loader_reads(loader, name), _loader_writes(loader, name)))
        if knob.change == "hot" and part == "checkpointing" and isinstance(saver, Checkpointer):
            live.append(LiveKnob(knob, _saver_reads(saver, name), _saver_writes(saver, name)))
    return tuple(live)


@contextlib.contextmanager
def controllers_paused(loader: DataLoader | None = None, saver: Saver | None = None) -> Generator[None, None, None]:
    """Keeps `loader.depth` and `saver.spacing` from changing anything inside the `with` block, so that one may own all.

    Spacings that follow process 0 are left as they are: they never decide. Who was paused before stays so.
    """
    with contextlib.ExitStack() as undo:
        if loader is not None:
            undo.callback(setattr, loader.depth, "paused", loader.depth.paused)
            loader.depth.paused = True
        spacing = saver.spacing if isinstance(saver, Checkpointer) else None
        if isinstance(spacing, Adapting):
            undo.callback(setattr, spacing, "paused", spacing.paused)
            spacing.paused = True
        yield


def _may_be(knob: Knob, value: Any, saver: Saver | None) -> bool:
    """Returns whether a hot knob may have a value: nothing adapts checkpoints that were not made to be adapted."""
    is_adapted = isinstance(saver, Checkpointer) and isinstance(saver.interval, Adaptive)
    return knob.name != "checkpointing.every" or value is not None or is_adapted


def _part(knob: Knob) -> str:
    return knob.name.partition(".")[0]


def _loading(loader: DataLoader, adapted: Adapted) -> LoadingKnobs:
    knobs = loader.knobs
    is_fixed = adapted == "fixed" or loader.depth.paused
    return LoadingKnobs(
        threads=knobs.threads or (loader.depth.threads if is_fixed else None),
        prefetch=loader.depth.prefetch if is_fixed and knobs.prefetch is None else knobs.prefetch,
        max_bytes=knobs.max_bytes,
        read_bytes=knobs.read_bytes,
        hedge_seconds=knobs.hedge_seconds,
        workers=loader.workers,
    )


def _loader_reads(loader: DataLoader, name: str) -> Callable[[], Any]:
    return lambda: getattr(_loading(loader, "left"), name)


def _loader_writes(loader: DataLoader, name: str) -> Callable[[Any], None]:
    def write(value: Any) -> None:
        replace(LoadingKnobs(), **{name: value})  # in its range
        loader.knobs = replace(loader.knobs, **{name: value})

    return write


def _checkpointing(saver: Checkpointer, adapted: Adapted) -> CheckpointingKnobs:
    asked = saver.interval if isinstance(saver.interval, Adaptive) else Adaptive()
    return CheckpointingKnobs(
        every=_every(saver, adapted),
        overhead=asked.overhead,
        max_lost_seconds=asked.max_lost_seconds,
        mtbf_seconds=asked.mtbf_seconds,
        snapshot=saver.snapshot,
        limit_bytes_per_second=saver.limit_bytes_per_second,
    )


def _every(saver: Checkpointer, adapted: Adapted = "left") -> int | None:
    spacing = saver.spacing
    is_left = isinstance(saver.interval, Adaptive) and not (isinstance(spacing, Adapting) and spacing.paused)
    return None if is_left and adapted == "left" else spacing.num_updates


def _saver_reads(saver: Checkpointer, name: str) -> Callable[[], Any]:
    return (lambda: _every(saver)) if name == "every" else (lambda: getattr(saver, name))


def _saver_writes(saver: Checkpointer, name: str) -> Callable[[Any], None]:
    def write(value: Any) -> None:
        replace(CheckpointingKnobs(), **{name: value})  # in its range
        if name == "every":
            _space(saver, value)
        else:
            setattr(saver, name, value)

    return write


def _space(saver: Checkpointer, every: int | None) -> None:
    """Sets how far checkpoints are apart, or gives that back to what adapts it."""
    spacing = saver.spacing
    if isinstance(saver.interval, Adaptive):
        spacing.paused = every is not None
    elif every is None:
        raise ArgumentError(
            f"checkpointing.every=None asks for checkpoints that are adapted, and this Checkpointer has "
            f"{saver.interval!r}: make it with Adaptive(…)"
        )
    if every is not None:
        spacing.num_updates = every
