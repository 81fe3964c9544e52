"""Activations that the executor holds, beside the formulas of the schedules' papers."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import braidax as bx
from benchmarks.harness import Report, say
from benchmarks.pipedream.searches import NAMED
from braidax.parallel.stages.schedules import Schedule, peak_formula
from braidax.parallel.stages.segments import drawn
from braidax.program import Stage, bytes_of

HELD, FORMULA, PLANNED = "held at once", "formula", "by the list, with what W needs"
_WIDER = 32  # what a layer keeps for the way back is many times what it sends, as that of a transformer is
_PASSES = ("forward", "backward", "inputs", "weights")


def memory(
    report: Report, schedules: Sequence[str], *, width: int, samples: int, num_devices: int, microbatches: int
) -> None:
    """Claims that no device holds more bytes of activations at once than its schedule's formula says.

    What is held is counted behind every program that is dispatched: all arrays on the device but those that were there
    before the first one. Of a last stage that goes there and back in one program, what its forward pass would keep
    counts while that runs, besides all that is there before. A formula counts a microbatch as all that differentiation
    keeps of it, until its gradients are made: what `jax.vjp` does. Ours keeps less behind a forward pass. Beside it
    stands what a plan says: the same list, of which a microbatch counts between `I` and `W` as what the products of `W`
    need.
    """
    worst = 0.0
    for name in schedules:
        schedule = NAMED[name](num_devices, microbatches)
        held, formula, planned = _peaks(schedule, width, samples)
        at = f"{name}, {num_devices} devices, {schedule.num_microbatches} microbatches"
        device = max(range(num_devices), key=lambda one: held[one] / formula[one])
        report.add(
            "memory", "ours, the device that holds most of its formula", HELD, "KiB", [held[device] / 2**10], at=at
        )
        report.add("memory", FORMULA, HELD, "KiB", [formula[device] / 2**10], at=at)
        report.add("memory", PLANNED, HELD, "KiB", [planned[device] / 2**10], at=at)
        worst = max(worst, held[device] / formula[device])
        by_list = max(one / other for one, other in zip(held, planned, strict=True))
        say(f"  {at}: {held[device] / formula[device]:.3f} of the formula, device {device}; {by_list:.3f} of the plan")
    report.at_most("memory", worst, 1.1)


def _peaks(schedule: Schedule, width: int, samples: int) -> tuple[list[int], list[float], tuple[int, ...]]:
    """Returns of each device the most bytes that are held at once, those by formula, and those of the plan."""
    devices = jax.devices()[: schedule.num_devices]
    mesh = jax.make_mesh((len(devices),), ("stage",), axis_types=(AxisType.Auto,), devices=devices)

    num_layers = schedule.num_stages

    def init(key: jax.Array) -> Any:
        return {
            "up": jnp.ones((num_layers, width, _WIDER * width)),
            "down": jnp.ones((num_layers, _WIDER * width, width)),
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return (jax.lax.scan(layer, batch["x"], params)[0] ** 2).mean()

    spec = {"x": jax.ShapeDtypeStruct((samples * schedule.num_microbatches, width), jnp.float32)}
    step: Any = bx.parallelize(
        loss,
        optax.sgd(0.1),
        mesh,
        {"stage": bx.parallel.Pipeline(schedule, clock="counted")},
        init=init,
        batch=spec,
        microbatches=schedule.num_microbatches,
    )
    state = step.init(jax.random.key(0))
    batch = {"x": jax.device_put(jnp.ones(spec["x"].shape), step.batch_shardings["x"])}
    found = _Held(devices)
    for programs in step._work.run.stage_programs:
        found.watch(programs)
    step.update(state, batch)
    each = [_kept_by_vjp(stage) for stage in step.cut.stages]
    own = [
        [each[stage] for stage, home in enumerate(schedule.device_of_stage) if home == at] for at in range(len(devices))
    ]
    counts = [peak_formula(schedule, at) for at in range(len(devices))]
    formula = [float(count * max(one)) for count, one in zip(counts, own, strict=True)]
    return [found.peak(one) for one in devices], formula, step.plan.pipeline.schedule.peak_bytes


def _kept_by_vjp(stage: Stage) -> int:
    """Returns the bytes that `jax.vjp` keeps of a microbatch, but for weights: those of a stage of one layer."""
    params, *given, incoming = drawn(stage.program.in_specs)
    _, pull = jax.vjp(lambda params, moved: stage.program(params, *given, moved), params, incoming)
    shapes = {one.shape for one in jax.tree.leaves(params)}
    return sum(one.nbytes for one in jax.tree.leaves(pull) if one.shape not in shapes)


class _Held:
    """Counts bytes on devices behind each program, but for sums, turned weights and what is there before the first."""

    def __init__(self, devices: Any) -> None:
        self._devices = devices
        self._before: dict[Any, int] | None = None
        self._peaks = dict.fromkeys(devices, 0)

    def watch(self, programs: Any) -> None:
        """Counts behind each of a stage's passes from now on."""
        for name in _PASSES:
            setattr(programs, name, self._counted(getattr(programs, name)))
        if not programs.stage.outgoing:
            both, kept = programs.forward_backward, sum(bytes_of(one) for one in programs.ran_specs.kept)
            both.whole = self._counted(both.whole, kept)
            both.halves.inputs = self._counted(both.halves.inputs, kept)
            both.halves.weights = self._counted(both.halves.weights)
        programs.zeros, programs.turn = map(self._left_out, (programs.zeros, programs.turn))

    def peak(self, device: Any) -> int:
        """Returns the most bytes that were held at once."""
        return self._peaks[device]

    def _counted(self, run: Callable[..., Any], inside: int = 0) -> Callable[..., Any]:
        """Returns what counts behind a pass. **Arguments:** `inside`: bytes that it holds while it runs."""

        def counted(*args: Any) -> Any:
            if self._before is None:
                self._before = self._now()
            if inside:
                self._count(jax.tree.leaves(args)[0].devices(), inside)
            made = run(*args)
            self._count((), 0)
            return made

        return counted

    def _count(self, devices: Collection[Any], more: int) -> None:
        """Counts what is there, and more on some devices."""
        assert self._before is not None, "a pass has begun"
        for device, size in self._now().items():
            self._peaks[device] = max(self._peaks[device], size - self._before[device] + more * (device in devices))

    def _left_out(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def left_out(*args: Any) -> Any:
            made = run(*args)
            if self._before is None:
                return made
            for array in jax.tree.leaves(made):
                for device in array.devices():
                    self._before[device] += array.nbytes
            return made

        return left_out

    def _now(self) -> dict[Any, int]:
        found = dict.fromkeys(self._devices, 0)
        for array in jax.live_arrays():
            for device in array.devices():
                if device in found:
                    found[device] += array.nbytes
        return found
