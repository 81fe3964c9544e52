"""What it costs the host to dispatch an operation of a schedule, with a hundred parameters a stage."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import braidax as bx
from benchmarks.harness import Report, say, take_turns
from braidax.parallel.stages.schedules import Kind

_WIDTH, _SAMPLES = 8, 2
MORE, ALL = "an operation more", "an update / its operations"


def dispatch(report: Report, schedules: tuple[str, ...], *, leaves: int, microbatches: int, rounds: int) -> None:
    """Claims what one operation more costs: updates that compute next to nothing, of once and twice the microbatches.

    What has to be done once an update, whatever its microbatches, is told beside it.

    **Arguments:** `leaves`: of a stage.
    """
    system, found = f"ours, {leaves} leaves a stage", list[float]()
    for name in schedules:
        once, twice = (_Updates(name, leaves, count) for count in (microbatches, 2 * microbatches))
        turns = {"once": once.seconds, "twice": twice.seconds}
        seconds = take_turns(turns, rounds=rounds)
        more = (min(seconds["twice"]) - min(seconds["once"])) / (twice.num_operations - once.num_operations)
        at = f"{name}, {microbatches} microbatches, {once.num_operations} operations"
        found.append(report.add("dispatch", system, MORE, "us", [1e6 * more], at=at))
        whole = [1e6 * one / once.num_operations for one in seconds["once"]]
        report.add("dispatch", system, ALL, "us", whole, at=at)
        say(f"  {at}: {found[-1]:.1f} us; {min(whole):.1f} us with what is done once an update")
    report.at_most("dispatch", max(found), 50)


class _Updates:
    """A step whose updates are timed until they are dispatched. **Fields:** `num_operations`: that are dispatched."""

    def __init__(self, name: str, leaves: int, microbatches: int) -> None:
        self._step, self._state, self._batch = _made(name, leaves, microbatches)
        kinds = [one.kind for one in self._step.schedule.operations()]
        self.num_operations = sum(kind not in (Kind.UPDATE, Kind.RECV_F, Kind.RECV_B) for kind in kinds)
        for _ in range(3):  # the first ones compile
            self.seconds()

    def seconds(self) -> float:
        """Takes the next step."""
        jax.block_until_ready(self._state)
        start = time.perf_counter()
        self._state, _ = self._step.update(self._state, self._batch)
        return time.perf_counter() - start


def _made(name: str, leaves: int, microbatches: int) -> Any:
    def init(key: jax.Array) -> Any:
        def stage(key: jax.Array) -> Any:
            return {f"w{at:03}": jax.random.normal(jax.random.fold_in(key, at), (_WIDTH,)) for at in range(leaves - 1)}

        square = jnp.eye(_WIDTH)
        return {scope: {**stage(key), "square": square} for scope in ("first", "second")}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for scope in ("first", "second"):
            with jax.named_scope(scope):
                own = dict(params[scope])
                x = x @ own.pop("square")
                x = x + sum(own.values())
        return (x**2).mean()

    mesh = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.ones((_SAMPLES * microbatches, _WIDTH))
    pipeline = bx.parallel.Pipeline(name, cuts=("second",), clock="counted")
    batch = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    step = bx.parallelize(
        loss, optax.sgd(0.1), mesh, {"stage": pipeline}, init=init, batch=batch, microbatches=microbatches
    )
    return step, step.init(jax.random.key(0)), jax.device_put({"x": x}, step.batch_shardings)
