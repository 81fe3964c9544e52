"""The ids that a loss looks up in real batches; nothing of the model is computed for them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.compute.accumulate import microbatches_of
from braidax.parallel.given.arrays import place
from braidax.parallel.given.initial import trace_init, traced_loss
from braidax.parallel.given.loss import Loss
from braidax.parallel.plan.batch import shard_batch
from braidax.program import LeafUses, Program, RowProgram, compile_on, difference, join, specs_of
from braidax.program.prune import prune

from .reads import LATE, RowReads, row_reads, without_rows
from .touched import Touched, count_touched


@dataclass(frozen=True)
class SeenIds:
    """The ids that some steps look up in one table.

    **Fields:** `spec`: of the table, `[V, ...]`. `steps`: for each step the ids of each lookup, int32 `[n, k]` on the
    host: dim 0 is what is divided among devices, dim 1 the microbatches and the runs of loops; negative is no id.
    `num_shared`: as of `Touched`.
    """

    spec: jax.ShapeDtypeStruct
    steps: tuple[tuple[NDArray[np.int32], ...], ...]
    num_shared: int = 0

    def touched(self, num_parts: int) -> Touched:
        """Counts them. **Arguments:** `num_parts`: among how many devices they are divided."""
        num_rows = self.spec.shape[0]
        return count_touched(self.steps, num_rows=num_rows, num_parts=num_parts, num_shared=self.num_shared)


class Seen(NamedTuple):
    """What batches have shown. **Fields:** `tables`: by path. `unknown`: by path, why a table's ids cannot be known."""

    tables: dict[str, SeenIds]
    unknown: dict[str, str]


class Measured(NamedTuple):
    """How much of tables is touched. **Fields:** `tables`: by path. `unknown`: by path, why that cannot be measured."""

    tables: dict[str, Touched]
    unknown: dict[str, str]


class TracedLoss(NamedTuple):
    """A loss as `parallelize` traces it. **Fields:** `born`: `key -> Born`; `program`; `reads`: of the program."""

    born: Program
    program: Program
    reads: RowReads


def measure_touched(
    loss_fn: Callable[..., Any],
    *,
    init: Callable[..., Any],
    batches: Iterable[Any],
    num_parts: int,
    microbatches: int = 1,
    key: jax.Array | None = None,
) -> Measured:
    """Measures how much of each table steps touch, from a few real batches.

    Batch `k` is looked at as step `k` of a run that begins with `key` would see it, ids drawn at random included. Where
    ids depend on `variables`, these are what `init` makes.

    **Arguments:** `loss_fn`, `init`, `microbatches`: as of `parallelize`. `batches`: PyTrees of host arrays, or of
    global arrays, all of one form. `num_parts`: among how many devices the batch will be divided. `key`: from
    `jax.random.key`; `jax.random.key(0)`, when None.

    **Returns:** `Measured`, of all variables that the loss reads by rows only. **Raises:** `ArgumentError` or
    `SpecError` for batches that do not fit.
    """
    given = list(batches)
    loss = trace_reads(loss_fn, init, given, microbatches=microbatches)
    seen = see_ids(loss, given, microbatches=microbatches, key=key)
    return Measured({path: ids.touched(num_parts) for path, ids in seen.tables.items()}, seen.unknown)


def trace_reads(
    loss_fn: Callable[..., Any], init: Callable[..., Any], batches: Sequence[Any], *, microbatches: int = 1
) -> TracedLoss:
    """Traces a loss for batches of one form, and finds out what it reads by rows.

    **Raises:** `ArgumentError` when there is no batch, or when they differ; as `parallelize` for all else.
    """
    if not batches:
        raise ArgumentError("batches is empty, expected a few real batches: ids are counted in them")
    spec = specs_of(batches[0])
    for number, batch in enumerate(batches):
        if message := difference(spec, specs_of(batch), f"batches[{number}]"):
            raise ArgumentError(f"{message}, as in batches[0]: all must have one form; pad the last one")
    shard_batch(_one_device(), (), spec, microbatches=microbatches)  # says what does not divide
    loss = Loss(loss_fn)
    born = trace_init(init, loss)
    program = traced_loss(loss, born.out_specs, spec, microbatches)
    return TracedLoss(born, program, row_reads(program, microbatches=microbatches))


def see_ids(loss: TracedLoss, batches: Sequence[Any], *, microbatches: int = 1, key: jax.Array | None = None) -> Seen:
    """Reads the ids of batches from a traced loss.

    **Arguments:** as of `measure_touched`; global arrays are read over the mesh that they are on, by all its processes.

    **Returns:** `Seen`, the same in every process. **Raises:** `ArgumentError` when `key` is none of JAX's.
    """
    born, reads = loss.born, loss.reads
    key = jax.random.key(0) if key is None else key
    if difference(born.in_specs[0], key, "key"):
        raise ArgumentError(f"key is {key!r}, expected one {born.in_specs[0].dtype}: make it with jax.random.key(seed)")
    tables = list(reads.sparse.values())
    unknown = {
        join("params", uses.name): LATE
        for uses in reads.uses
        if uses.verdict == "sparse" and uses.name not in reads.sparse
    }
    if not tables:
        return Seen({}, unknown)
    names, program = ids_program(loss.program, tables)
    mesh, shardings = _where(batches[0])
    whole = NamedSharding(mesh, PartitionSpec())

    def ids_of(variables: Any, key: Any, step: Any, batch: Any) -> Any:
        key = jax.random.fold_in(key, step)
        if microbatches == 1:
            return program((), variables, key, batch)
        pieces = microbatches_of(key, batch, microbatches)
        return jax.vmap(lambda key, batch: program((), variables, key, batch))(*pieces)

    first = compile_on(mesh, lambda key: born(key)[1:], in_shardings=(whole,), out_shardings=whole)
    run = compile_on(mesh, ids_of, in_shardings=(whole, whole, whole, shardings), out_shardings=whole)
    variables, key = first(place(key, whole))
    steps: list[list[NDArray[np.int32]]] = []
    for number, batch in enumerate(batches):
        found = run(variables, key, place(np.int32(number), whole), place(batch, shardings))
        steps.append([np.moveaxis(np.asarray(ids), -1, 0).reshape(ids.shape[-1], -1) for ids in found])

    def of_table(name: str) -> tuple[tuple[NDArray[np.int32], ...], ...]:
        return tuple(tuple(ids for one, ids in zip(names, step, strict=True) if one == name) for step in steps)

    def seen(one: LeafUses) -> SeenIds:
        return SeenIds(one.spec, of_table(one.name), reads.shared[one.name] * microbatches)

    return Seen({join("params", one.name): seen(one) for one in tables}, unknown)


def ids_program(program: Program, tables: Sequence[LeafUses]) -> tuple[tuple[str, ...], Program]:
    """Cuts a traced loss down to the ids of its lookups.

    **Arguments:** `program`: of `(params, variables, key, batch)`. `tables`: of `RowReads.sparse`.

    **Returns:** for each lookup the name of its table; and the program, which takes `()` in place of the parameters
    and gives for each lookup ids, int32 `[*lengths, n]`.
    """
    rows = without_rows(program, tables, "as jax")
    return tuple(one.name for one in rows.lookups), ids_alone(rows)


def ids_alone(rows: RowProgram) -> Program:
    """Returns the program of ids, which takes `()` in place of the parameters, as none of these leads to ids."""
    num_params = len(jax.tree.leaves(rows.ids.in_specs[0]))
    inputs = rows.ids.closed.jaxpr.invars
    closed, _ = prune(
        rows.ids.closed,
        [True] * len(rows.ids.closed.jaxpr.outvars),
        [at < num_params for at in range(len(inputs))],
    )
    return Program(closed, ((), *rows.ids.in_specs[1:]), rows.ids.out_specs)


def _where(batch: Any) -> tuple[Mesh, Any]:
    """The mesh that a batch is on, one of a single device for host arrays; and the sharding of each leaf."""
    held = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(batch)]
    mesh = next((one.mesh for one in held if isinstance(one, NamedSharding)), None)
    mesh = mesh if isinstance(mesh, Mesh) else _one_device()
    whole = NamedSharding(mesh, PartitionSpec())

    def sharding(leaf: Any) -> NamedSharding:
        own = getattr(leaf, "sharding", None)
        return own if isinstance(own, NamedSharding) else whole

    return mesh, jax.tree.map(sharding, batch)


def _one_device() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]), ("data",))
