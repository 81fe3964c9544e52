"""BERT, ResNet-50 and DLRM: ours beside one `jax.jit` that is given the same shardings."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import braidax as bx
from benchmarks.harness import Report, say, take_turns
from benchmarks.harness.models import Model
from benchmarks.harness.systems import XLA
from braidax.parallel.plan.plan import follow, layouts_of
from braidax.program import Collective, collectives_of, named_leaves, total_sent

STEP, SENT, MEMORY = "step", "sent by a device, a step", "memory of a device"
_NUM_BATCHES = 2
_ALIKE = 2e-3  # losses, relative: both compute the same in another order


class Task(NamedTuple):
    """A system that trains a model.

    **Fields:** `programs` of a step. `begin()`: makes a state. `update(state, batch)`: gives the next one and the loss.
    `held_bytes`: what lies on a device between steps.
    """

    programs: Sequence[Any]
    begin: Callable[[], Any]
    update: Callable[[Any, Any], tuple[Any, Any]]
    held_bytes: int

    def memory_bytes(self) -> int:
        """Returns the most that a program needs, with what lies on the device meanwhile and is no argument of it."""
        found = [program.memory_analysis() for program in self.programs]
        return max(
            max(one.argument_size_in_bytes, self.held_bytes)
            + one.temp_size_in_bytes
            + one.output_size_in_bytes
            - one.alias_size_in_bytes
            for one in found
        )

    def collectives(self) -> list[Collective]:
        """Returns those of all programs."""
        return [one for program in self.programs for one in collectives_of(program.as_text() or "")]


def measure(report: Report, claim: str, name: str, model: Model, mesh: Mesh, strategy: Any, *, rounds: int) -> None:
    """Lets ours and XLA take steps in turns, from the same first state; claims steps, bytes and memory.

    **Arguments:** `claim`: what the claims begin with. `name`: of ours.

    **Raises:** `AssertionError` when their losses differ.
    """
    step = bx.parallelize(model.loss, model.optimizer, mesh, {"data": strategy}, init=model.init, batch=model.spec)
    found = {name: _ours(step), XLA: _jitted(model, mesh, step)}
    case = f"{model.name}, {mesh.size} devices"
    say(f"{case} …")
    batches = [_placed(model.batch(number), step.batch_shardings) for number in range(_NUM_BATCHES)]
    states: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    for system, task in found.items():
        state, seen = task.begin(), list[float]()
        for batch in batches:
            state, loss = task.update(state, batch)
            seen.append(float(loss))
        states[system], losses[system] = state, seen
    np.testing.assert_allclose(losses[XLA], losses[name], rtol=_ALIKE, err_msg=case)

    def turn(system: str) -> Callable[[], float]:
        def taken() -> float:
            start = time.perf_counter()
            states[system], _ = jax.block_until_ready(found[system].update(states[system], batches[0]))
            return time.perf_counter() - start

        return taken

    figures = take_turns({system: turn(system) for system in found}, rounds=rounds)
    for system, seconds in figures.items():
        sent = total_sent(found[system].collectives())
        report.add(case, system, STEP, "ms", [1e3 * one for one in seconds])
        report.add(case, system, MEMORY, "MB", [found[system].memory_bytes() / 1e6])
        report.add(case, system, SENT, "MB", [sum(sent.values()) / 1e6])
        for kind, num_bytes in sorted(sent.items()):
            report.add(case, system, f"by {kind}", "MB", [num_bytes / 1e6])
        say(f"  {system}: {1e3 * statistics.median(seconds):.0f} ms, {sum(sent.values()) / 1e6:.1f} MB")
    for metric, suffix in ((STEP, "step"), (SENT, "bytes"), (MEMORY, "memory")):
        report.against(f"{claim}_{suffix}", case, metric, ours=name, peers=[XLA])


def _ours(step: bx.Step) -> Task:
    """A step of braidax."""

    def update(state: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = step.update(state, batch)
        return state, metrics["loss"]

    programs = [lowered.compile() for lowered in step.lower()]
    return Task(programs, lambda: step.init(jax.random.key(0)), update, _bytes_on_a_device(step.state_specs))


def _jitted(model: Model, mesh: Mesh, like: bx.Step) -> Task:
    """One `jax.jit` around `value_and_grad` and the optimizer; XLA chooses all collectives.

    Variables, and what the optimizer keeps of them, are split as ours are: tables that ours splits by rows are split
    along these, and filled up, since a dim is split evenly or not at all.
    """
    whole = NamedSharding(mesh, P())
    specs, splits = zip(*_splits(like), strict=True)

    def first(key: jax.Array) -> Any:
        params, variables = model.init(key)
        leaves = [
            jnp.pad(leaf, [(0, more) for more in padding])
            for (_, leaf), padding in zip(named_leaves(params), splits, strict=True)
        ]
        params = jax.tree.unflatten(jax.tree.structure(params), leaves)
        return params, model.optimizer.init(params), variables, jnp.zeros((), jnp.int32), key

    shapes = jax.eval_shape(first, jax.random.key(0))
    leaves = [NamedSharding(mesh, spec) for spec in specs]
    params = jax.tree.unflatten(jax.tree.structure(shapes[0]), leaves)
    moments = follow(shapes[0], params, shapes[1], lambda _: whole)
    held = (params, moments, *jax.tree.map(lambda _: whole, shapes[2:]))
    jitted = jax.jit(
        model.update, in_shardings=(held, like.batch_shardings), out_shardings=(held, whole), donate_argnums=0
    )
    compiled = jitted.lower(shapes, model.spec).compile()

    def begin() -> Any:
        dense = like.to_dense(like.init(jax.random.key(0)))
        given = (dense.params, dense.opt_state, dense.variables, dense.step, dense.key)
        return jax.tree.map(lambda leaf, spec, on: jax.device_put(_filled(leaf, spec.shape), on), given, shapes, held)

    return Task([compiled], begin, compiled, 0)


def _splits(step: bx.Step) -> list[tuple[P, tuple[int, ...]]]:
    """Returns how a step splits each variable, and by how much its dims are longer then."""
    found: list[tuple[P, tuple[int, ...]]] = []
    for layout in layouts_of(step.plan):
        dims = [layout.axes_of(dim) or None for dim in range(len(layout.shape))]
        found.append((P(*dims), layout.padding))
    return found


def _filled(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    more = [(0, size - old) for size, old in zip(shape, leaf.shape, strict=True)]
    return jnp.pad(leaf, more) if any(after for _, after in more) else leaf


def _placed(batch: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda leaf, on: jax.device_put(leaf, on), batch, shardings)


def _bytes_on_a_device(specs: Any) -> int:
    total = 0
    for spec in jax.tree.leaves(specs):
        is_key = jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)
        total += math.prod(spec.sharding.shard_shape(spec.shape)) * (8 if is_key else np.dtype(spec.dtype).itemsize)
    return total
