"""The search for a mesh and strategies, of a loss as it is written for one device."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from braidax.errors import ArgumentError, SpecError
from braidax.parallel import DataParallel, Link, PipelinedStep, Plan, Step, Strategy, measure_machine, parallelize
from braidax.parallel.plan.costs.machine import in_time, scaled
from braidax.parallel.plan.planned.stages import PlannedPipeline
from braidax.parallel.plan.text import table
from braidax.program.compiled.targets import HERE, find_target
from braidax.tune.control.comparing import compare

from .candidates import Candidates, candidates
from .cluster import Cluster, Overheads
from .predicting import NUM_PROGRAMS, predict
from .ranking import HEADROOM, Ranked, rank
from .roles import DATA, STAGES
from .workload import Workload, workload

AnyStep = Step | PipelinedStep
_SHOWN, _WARM, _ROUNDS = 10, 2, 16
_LEAST_SUMMED, _MOST_SUMMED = 1 << 20, 1 << 26
_LEAST_SECONDS = 1e-6  # of what is a difference of two times


class Where(NamedTuple):
    """What a search is for.

    **Fields:** `cluster`: devices that need not be here; None: those that are. `devices`: of these; None: all.
    `target`: what the compiler of `cluster` calls that; None: nothing is compiled for it.
    """

    cluster: Cluster | None
    devices: Sequence[Any] | None
    target: str | None


@dataclass(frozen=True)
class Tried:
    """A candidate that was compiled.

    **Fields:** `at`: its place. `step`; None where it cannot be built, and `why` says why. `memory_bytes`: of a device,
    by the compiler, and with stages by their plan. `fits`: whether that is in the limit. `taken`: seconds of the steps
    that were run.
    """

    at: int
    step: AnyStep | None
    memory_bytes: int | None = None
    fits: bool = False
    taken: tuple[float, ...] = ()
    why: str = ""

    @property
    def seconds(self) -> float | None:
        """The median of its steps; None where none was run."""
        return statistics.median(self.taken) if self.taken else None


@dataclass(frozen=True)
class Found:
    """What a search has found.

    **Fields:** `ranked`: all candidates. `tried`: those that were compiled, the fastest first. `at`: the place of the
    winner. `plan`: the winner's, where it was compiled; `parallelize(…, mesh, strategies, plan=found.plan)` takes it.
    """

    ranked: Ranked
    tried: tuple[Tried, ...]
    at: int

    @property
    def plan(self) -> Plan | None:
        """The winner's plan; None for a cluster that is not here."""
        return next((one.step.plan for one in self.tried if one.at == self.at and one.step is not None), None)

    @property
    def axes(self) -> dict[str, int]:
        """The winner's mesh: sizes by name."""
        return self.ranked.many.mesh(self.at)

    @property
    def strategies(self) -> dict[str, Strategy]:
        """What each axis of it is for."""
        return self.ranked.many.strategies(self.at)

    @property
    def microbatches(self) -> int:
        """The winner's."""
        return int(self.ranked.many.microbatches[self.at])

    def __str__(self) -> str:
        """A table of candidates, and why the winner won."""
        rows: list[tuple[str, ...]] = [("candidate", "predicted", "memory", "sent", "measured", "compiled", "verdict")]
        seen = [one.at for one in self.tried]
        for at in [*seen, *(at for at in self.ranked.order if at not in seen)][:_SHOWN]:
            one = next((one for one in self.tried if one.at == at), None)
            measured = "" if one is None or one.seconds is None else in_time(one.seconds)
            compiled = "" if one is None or one.memory_bytes is None else scaled(one.memory_bytes, "B")
            verdict = "wins" if at == self.at else "" if one is None else one.why
            rows.append((*self.ranked.told(at), measured, compiled, verdict))
        total = f"{len(self.ranked.many.sizes):,} candidates, of which {self.ranked.num_refused:,} need too much memory"
        if self.ranked.num_refused and self.ranked.headroom:
            total += f" or may, {100 * self.ranked.headroom:.3g} % more than is predicted: target= would compile them"
        return "\n".join([total, *table(rows, right=[1, 2, 3, 4, 5]), f"why  {self._why()}"])

    def _why(self) -> str:
        timed = [one for one in self.tried if one.taken]
        if len(timed) > 1:
            other, found = self.ranked.name(timed[1].at), compare(timed[1].taken, timed[0].taken)
            if found.is_beyond_noise:
                return f"measured {found} than {other}"
            return f"measured no slower than {other}; the difference is within the noise: {found}"
        return self.ranked.why() if self.at == self.ranked.order[0] else "the fastest of those that fit when compiled"


def search(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    given: dict[str, Any],
    where: Where,
    *,
    memory_bytes: int | None,
    measure: int,
    tell: Callable[[str], None],
) -> Found:
    """Does what `plan` says. **Arguments:** as of that; `given`: `init`, and `batch` as specs."""
    cluster, used = where.cluster, _devices(where)
    tell("compiling for one device")
    alone = _made(loss_fn, optimizer, given, jax.devices()[:1])
    is_here, count = cluster is None, len(used) if cluster is None else cluster.devices
    work = workload(alone, loss_fn, optimizer, given, devices=count)
    num_samples = jax.tree.leaves(given["batch"])[0].shape[0]
    if cluster is None:
        tell("measuring what the devices compute and send")
        cluster = _here(functools.partial(_made, loss_fn, optimizer, given), alone, work, given["batch"], used)
    if memory_bytes is not None:
        cluster = replace(cluster, memory_bytes=memory_bytes)
    many = candidates(cluster.devices, num_samples, offered=work.offered)
    is_compiled = is_here or where.target is not None
    many = many if cluster.has_two_links else many.distinct()
    ranked = rank(many, work, cluster, headroom=0.0 if is_compiled else HEADROOM)
    if not is_compiled:
        return Found(ranked, (), ranked.order[0])
    tried: list[Tried] = []
    for at in _compilable(ranked, where, used, measure):
        tell(f"compiling {ranked.name(at)}")
        tried.append(_compiled(loss_fn, optimizer, given, ranked, at, (cluster, used, where.target or HERE)))
    ready = [one for one in tried if one.fits]
    if not ready:
        why = "; ".join(f"{ranked.name(one.at)}: {one.why}" for one in tried)
        raise ArgumentError(f"measure={measure}: none of these could be run ({why}): give a larger number")
    if not is_here:
        return Found(ranked, tuple(tried), ready[0].at)
    tell("running them in turns")
    tried = [*_timed(ready, given["batch"]), *(one for one in tried if not one.fits)]
    return Found(ranked, tuple(tried), tried[0].at)


def _devices(where: Where) -> Sequence[Any]:
    """Returns the devices that programs are compiled for; of a cluster without a target those here, for which none are.

    **Raises:** `ArgumentError` for a target that is none, or has not as many as the cluster.
    """
    if where.target is None:
        return [*(jax.devices() if where.devices is None else where.devices)]
    found, count = find_target(where.target).devices, None if where.cluster is None else where.cluster.devices
    if len(found) != count:
        told = "no cluster is given" if count is None else f"the cluster {count:,}"
        raise ArgumentError(
            f"target={where.target!r}, which has {len(found):,} devices, and {told}: expected cluster= of as many"
        )
    return found


def _compilable(ranked: Ranked, where: Where, devices: Sequence[Any], most: int) -> list[int]:
    """Returns the places of the best candidates that can be compiled.

    Their meshes are such as the devices' grid has. Programs of stages are compiled one by one where they run, so that
    for a machine that is not here candidates with stages are left out.

    **Raises:** `ArgumentError` when there is none.
    """
    found: list[int] = []
    for at in ranked.order:
        if len(found) == most:
            break
        if where.target is not None and np.isin(ranked.many.kinds[at], STAGES).any():
            continue
        try:
            _mesh(ranked, at, devices)
        except NotImplementedError:  # so JAX says that a grid of TPU chips has no such axes
            continue
        found.append(at)
    if found:
        return found
    if where.target is None:
        raise ArgumentError(
            f"devices= has {len(devices):,}, whose grid has the axes of no candidate that fits: give others, or more "
            "memory_bytes"
        )
    raise ArgumentError(
        f"target={where.target!r}: all candidates that fit have stages, or axes that its grid of devices has not: "
        "leave it out, or give more memory_bytes"
    )


def _mesh(ranked: Ranked, at: int, devices: Sequence[Any]) -> Mesh:
    axes = ranked.many.mesh(at)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)


def _made(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    given: dict[str, Any],
    devices: Sequence[Any],
    pieces: int = 1,
) -> Step:
    """Returns the data-parallel step of some devices."""
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    return parallelize(loss_fn, optimizer, mesh, {"data": DataParallel()}, microbatches=pieces, **given)


def _here(
    made: Callable[[Sequence[Any], int], Step], alone: Step, work: Workload, batch: Any, devices: Sequence[Any]
) -> Cluster:
    """Measures the devices that are here: links, the rates at which one computes this loss and updates its variables
    beside all others, and what a microbatch, and a program of all of them, takes besides: a data-parallel step takes as
    long as is predicted."""
    num_samples, count = jax.tree.leaves(batch)[0].shape[0], len(devices)
    where = devices if num_samples % count == 0 else devices[:1]
    pieces = next((some for some in (4, 2) if num_samples % (some * len(where)) == 0), 1)
    all_of_them, one = measure_machine(jax.make_mesh((count,), ("data",), devices=devices)), measure_machine(alone.mesh)
    shared = one.flops_per_second / all_of_them.flops_per_second
    spread = made(where, 1) if len(where) > 1 else alone
    seconds, whole, longer = map(statistics.median, _seconds([alone, spread, made(where, pieces)], batch))
    rate = work.flops / max(seconds - _update_seconds(alone), _LEAST_SECONDS) / shared
    beside = 1.0 if len(where) > 1 else shared
    update = beside * _update_seconds(spread)
    each = beside * max(0.0, longer - whole) / max(1, pieces - 1)
    link = all_of_them.collective("data")
    sums = replace(_sums(devices, work.variable_bytes - work.frozen_bytes), hidden=link.hidden) if count > 1 else None

    def cluster_of(update: float, program_seconds: float = 0.0) -> Cluster:
        updated = max(work.touched_bytes, 1.0) / max(update, _LEAST_SECONDS)
        return Cluster(count, max(rate, 1.0), link, overheads=Overheads(each, program_seconds, updated), sums=sums)

    cluster = cluster_of(update)
    if len(where) == 1:
        return cluster
    expected = predict(Candidates(np.array([[count]]), np.array([[DATA]]), np.array([1]), ("data",)), work, cluster)
    missing = whole - float(expected.seconds[0])
    if missing < 0:  # by itself an update waits until it is dispatched, which gradients hide in a step
        return cluster_of(update + missing)
    return cluster_of(update, missing / NUM_PROGRAMS)


def _sums(devices: Sequence[Any], num_bytes: float) -> Link:
    """Measures how long gradients of so many bytes take to be summed over all devices."""
    mesh, count = jax.make_mesh((len(devices),), ("data",), devices=devices), len(devices)
    spec = PartitionSpec("data")
    summed = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=spec))
    sizes = 1, int(min(max(num_bytes, _LEAST_SUMMED), _MOST_SUMMED)) // 4
    zeros = [
        jax.device_put(np.zeros(count * size, np.float32), jax.sharding.NamedSharding(mesh, spec)) for size in sizes
    ]
    least, most = map(statistics.median, _in_turns([functools.partial(summed, given) for given in zeros]))
    sent = 2 * 4 * (sizes[1] - sizes[0]) * (count - 1) / count
    return Link(sent / max(most - least, _LEAST_SECONDS), least / 2)  # there are two messages to a sum


def _update_seconds(step: Step) -> float:
    """Returns the seconds of the optimizer's update of zeros by itself, the median of several."""
    update = step.lower().apply
    args, _ = update.args_info
    compiled = update.compile()
    zeros = jax.tree.map(lambda info: np.zeros(info.shape, info.dtype), args)
    given = list(jax.device_put(zeros, compiled.input_shardings[0]))

    def updated() -> Any:
        given[:3] = compiled(*given)  # it gives these up
        return given

    (taken,) = _in_turns([updated])
    return statistics.median(taken)


def _compiled(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    given: dict[str, Any],
    ranked: Ranked,
    at: int,
    on: tuple[Cluster, Sequence[Any], str],
) -> Tried:
    cluster, devices, target = on
    mesh, strategies = _mesh(ranked, at, devices), ranked.many.strategies(at)
    try:
        pieces = int(ranked.many.microbatches[at])
        step = parallelize(loss_fn, optimizer, mesh, strategies, microbatches=pieces, **given)
        pipeline = step.plan.pipeline  # whose step is a `PipelinedStep`
        if pipeline is None:
            compiled = step.compile_for(target)
            peak, fits = compiled.peak_bytes, target == HERE or compiled.fits
        else:
            peak, fits = _held(pipeline), True
    except (ArgumentError, SpecError) as error:
        return Tried(at, None, why=f"refused: {error}")
    fits = fits and (cluster.memory_bytes is None or peak <= cluster.memory_bytes)
    return Tried(at, step, peak, fits, why="" if fits else "too large when compiled")


def _held(planned: PlannedPipeline) -> int:
    """Returns the bytes that the fullest device of a pipeline holds."""
    peaks = enumerate(planned.schedule.peak_bytes)
    return max(peak + sum(one.costs.held_bytes for one in planned.stages if one.device == at) for at, peak in peaks)


def _timed(ready: Sequence[Tried], batch: Any) -> list[Tried]:
    """Runs candidates in turns, and returns them with their seconds, the fastest first."""
    seconds = _seconds([one.step for one in ready if one.step is not None], batch)
    timed = [replace(one, taken=tuple(taken)) for one, taken in zip(ready, seconds, strict=True)]
    return sorted(timed, key=lambda one: one.seconds or 0.0)


def _seconds(steps: Sequence[AnyStep], batch: Any) -> list[list[float]]:
    """Runs steps in turns on a batch of zeros. **Returns:** the seconds of each."""
    zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), batch)
    states = [step.init(jax.random.key(0)) for step in steps]

    def updated(place: int) -> Any:
        states[place], metrics = steps[place].update(states[place], zeros)
        return states[place], metrics

    return _in_turns([functools.partial(updated, place) for place in range(len(steps))])


def _in_turns(calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """Calls functions in turns, and waits for what they return. **Returns:** the seconds of each."""
    taken: list[list[float]] = [[] for _ in calls]
    for turn in range(_WARM + _ROUNDS):
        for place, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn >= _WARM:
                taken[place].append(time.perf_counter() - start)
    return taken
