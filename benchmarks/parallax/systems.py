"""The systems that train a model: ours, one `jax.jit` around everything, and Horovod's gathering of ids and rows."""

import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import braidax as bx
from benchmarks.harness.models import Model
from benchmarks.parallax.hlo import Sent, sent_bytes
from braidax.parallel.plan.plan import follow
from braidax.program import RowProgram, find_uses, named_leaves, trace, without_tables

OURS, MEASURED = "ours, Hybrid", "ours, Hybrid, alpha measured"
DENSE, ROWS = "ours, DataParallel", "ours, rows only"
PLAIN, XLA, GATHER = "plain jit", "XLA, tables by rows", "gather (Horovod)"
PLAIN_TWO = "plain jit, two programs"

System = Callable[[Model, Mesh], "Running"]


class Ran(NamedTuple):
    """Of some steps: the seconds and the loss of each, and how many rounds its exchange took."""

    seconds: list[float]
    losses: list[float]
    rounds: list[int]


class Running:
    """A system whose programs are compiled; it has a state from `begin` to `end`, so that others have room meanwhile.

    **Arguments:** `mesh`; `begin`: returns the first state; `update`: from state and batch to the next state, the loss
    and the rounds; `compiled`: the programs of a step.
    """

    def __init__(
        self,
        mesh: Mesh,
        begin: Callable[[], Any],
        update: Callable[[Any, Any], tuple[Any, Any, Any]],
        compiled: Callable[[], Sequence[Any]],
    ) -> None:
        self._mesh, self._begin, self._update = mesh, begin, update
        self._state: Any = None
        self._compiled = functools.cache(compiled)

    def begin(self) -> None:
        """Makes the first state, the same each time."""
        self._state = jax.block_until_ready(self._begin())

    def end(self) -> None:
        """Lets go of the state."""
        self._state = None
        gc.collect()

    def run(self, batches: Sequence[Any]) -> Ran:
        """Takes a step with each batch, one after the other; a step is over when its state is there."""
        ran = Ran([], [], [])
        for batch in batches:
            placed = place(batch, self._mesh)
            start = time.perf_counter()
            self._state, loss, rounds = self._update(self._state, placed)
            jax.block_until_ready(self._state)
            ran.seconds.append(time.perf_counter() - start)
            ran.losses.append(float(loss))
            ran.rounds.append(int(rounds))
        return ran

    def memory_bytes(self) -> int:
        """Returns the most that any of the programs needs on a device."""
        analyses = [program.memory_analysis() for program in self._compiled()]
        return max(
            one.argument_size_in_bytes + one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes
            for one in analyses
        )

    def sent(self) -> Sent:
        """Returns what a device sends in a step, by its programs."""
        return Sent.all([sent_bytes(program.as_text() or "") for program in self._compiled()])


def make_mesh() -> Mesh:
    """Returns the mesh of all devices, for data parallelism."""
    return jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))


def place(batch: Any, mesh: Mesh) -> Any:
    """Makes a batch of the host, which all processes have, one of the devices."""
    split = NamedSharding(mesh, P("data"))
    return jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, split, lambda at: leaf[at]), batch)


def systems_of(model: Model, mesh: Mesh) -> dict[str, System]:
    """Returns the systems that differ from one another on a model.

    Rows only, where that is another plan than Hybrid's; tables by rows, where there are any; gathering, where rows that
    are not touched stay as they are.
    """
    found: dict[str, System] = {
        OURS: functools.partial(ours, strategy=bx.Hybrid()),
        DENSE: functools.partial(ours, strategy=bx.DataParallel()),
        PLAIN: functools.partial(plain, tables=()),
    }
    if model.tables:
        found[MEASURED] = functools.partial(ours, strategy=_hybrid(model, mesh, MEASURED))
        split = split_by_hybrid(model, mesh)
        if set(split) != set(model.tables):
            overrides = {f"params/{name}": bx.parallel.Rows() for name in model.tables}
            found[ROWS] = functools.partial(ours, strategy=bx.Hybrid(overrides))
        found[XLA] = functools.partial(plain, tables=split or model.tables)
        if model.adagrad is not None:
            found[GATHER] = gathering
    return found


def step_of(model: Model, mesh: Mesh, strategy: Any) -> bx.Step:
    """Returns our step."""
    return bx.parallelize(model.loss, model.optimizer, mesh, {"data": strategy}, init=model.init, batch=model.spec)


@functools.cache
def touched_of(model: Model, mesh: Mesh) -> dict[str, bx.parallel.Touched]:
    """Returns what three batches touch, by path of a table."""
    if not model.tables:
        return {}
    batches = model.batches(3)
    return bx.parallel.measure_touched(model.loss, init=model.init, batches=batches, num_parts=mesh.size).tables


@functools.cache
def split_by_hybrid(model: Model, mesh: Mesh, system: str = OURS) -> tuple[str, ...]:
    """Returns the tables whose rows `Hybrid` exchanges. **Arguments:** `system`: `OURS` or `MEASURED`."""
    return rows_of(step_of(model, mesh, _hybrid(model, mesh, system)))


def rows_of(step: bx.Step) -> tuple[str, ...]:
    """Returns the variables that a plan splits by rows."""
    return tuple(
        variable.path.removeprefix("params/")
        for variable in step.plan.variables
        if any(isinstance(placement, bx.parallel.Rows) for placement in variable.placements)
    )


def ours(model: Model, mesh: Mesh, strategy: Any) -> Running:
    """Braidax with a strategy."""
    step = step_of(model, mesh, strategy)

    def update(state: Any, batch: Any) -> tuple[Any, Any, Any]:
        state, metrics = step.update(state, batch)
        return state, metrics["loss"], metrics.get("row_rounds", 1)

    def compiled() -> list[Any]:
        return [lowered.compile() for lowered in step.lower()]

    return Running(mesh, lambda: step.init(jax.random.key(0)), update, compiled)


def plain(model: Model, mesh: Mesh, tables: Sequence[str]) -> Running:
    """One `jax.jit` around `value_and_grad` and the optimizer; XLA chooses all collectives.

    **Arguments:** `tables`: that are split by rows; they are filled up, since a dim is split evenly or not at all.
    """
    whole, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def first(key: jax.Array) -> Any:
        own, others = jax.random.split(key)
        params, variables = model.init(own)
        params = _mapped(params, tables, lambda leaf: _filled(leaf, mesh.size))
        return params, model.optimizer.init(params), variables, jnp.zeros((), jnp.int32), others

    key = jax.random.key(0)
    specs = jax.eval_shape(first, key)
    params = _mapped(jax.tree.map(lambda _: whole, specs[0]), tables, lambda _: by_rows)
    held = (params, follow(specs[0], params, specs[1], lambda _: whole), *jax.tree.map(lambda _: whole, specs[2:]))

    return _running(mesh, model.update, first, held, (specs, model.spec))


def plain_in_two(model: Model, mesh: Mesh) -> Running:
    """As `plain`, without tables, in two programs: one for the gradients, one for the update."""
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def first(key: jax.Array) -> Any:
        own, others = jax.random.split(key)
        params, variables = model.init(own)
        return params, model.optimizer.init(params), variables, jnp.zeros((), jnp.int32), others

    def differentiate(params: Any, variables: Any, number: Any, key: Any, batch: Any) -> Any:
        evaluate = jax.value_and_grad(model.loss, has_aux=True)
        (loss, aux), gradients = evaluate(params, batch, jax.random.fold_in(key, number), variables)
        return gradients, aux["variables"], number + 1, loss

    def move(params: Any, opt_state: Any, gradients: Any) -> Any:
        updates, opt_state = model.optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    specs = jax.eval_shape(first, jax.random.key(0))
    params, opt_state, variables, number, key = specs
    evaluated = (
        jax.jit(differentiate, in_shardings=(whole, whole, whole, whole, split), out_shardings=whole, donate_argnums=1)
        .lower(params, variables, number, key, model.spec)
        .compile()
    )
    moved = (
        jax.jit(move, in_shardings=whole, out_shardings=whole, donate_argnums=(0, 1))
        .lower(params, opt_state, params)
        .compile()
    )

    def update(state: Any, batch: Any) -> tuple[Any, Any, Any]:
        params, opt_state, variables, number, key = state
        gradients, variables, number, loss = evaluated(params, variables, number, key, batch)
        params, opt_state = moved(params, opt_state, gradients)
        return (params, opt_state, variables, number, key), loss, 1

    begin = jax.jit(first, out_shardings=whole)
    return Running(mesh, lambda: begin(jax.random.key(0)), update, lambda: [evaluated, moved])


def gathering(model: Model, mesh: Mesh) -> Running:
    """Horovod's rule: tables on all devices; all gather ids and row gradients, and each updates its own copy.

    The model is without variables, and its optimizer is Adagrad.
    """
    adagrad = model.adagrad
    assert adagrad is not None, "gathering moves rows by Adagrad"
    whole = NamedSharding(mesh, P())
    rows, tables = without_rows(model)
    fed = rows.fed()

    def first(key: jax.Array) -> Any:
        own, others = jax.random.split(key)
        params, _ = model.init(own)
        held = {name: leaf for name, leaf in named_leaves(params) if name in tables}
        dense = _mapped(params, tables, lambda _: None)
        sums = {name: jnp.full_like(table, adagrad.initial) for name, table in held.items()}
        return dense, model.optimizer.init(dense), held, sums, jnp.zeros((), jnp.int32), others

    def step(state: Any, batch: Any) -> Any:
        dense, opt_state, tables, sums, number, key = state
        now = jax.random.fold_in(key, number)
        ids = rows.ids(dense, batch, now)
        taken = tuple(tables[one.name][x] for one, x in zip(rows.lookups, ids, strict=True))
        loss, (gradients, of_rows) = jax.value_and_grad(fed, argnums=(0, 3))(dense, batch, now, taken)
        updates, opt_state = model.optimizer.update(gradients, opt_state, dense)
        for name in tables:
            members = [at for at, one in enumerate(rows.lookups) if one.name == name]
            all_ids, all_rows = (
                jnp.concatenate([jax.lax.with_sharding_constraint(part[at], whole) for at in members])
                for part in (ids, of_rows)
            )
            unique, places = jnp.unique(all_ids, size=len(all_ids), fill_value=len(tables[name]), return_inverse=True)
            summed = jnp.zeros_like(all_rows).at[places].add(all_rows)
            total = sums[name].at[unique].get(mode="fill", fill_value=1.0) + summed**2
            scale = jnp.where(total > 0, jax.lax.rsqrt(total + adagrad.eps), 0)
            sums[name] = sums[name].at[unique].set(total, mode="drop")
            tables[name] = tables[name].at[unique].add(-adagrad.rate * summed * scale, mode="drop")
        return (optax.apply_updates(dense, updates), opt_state, tables, sums, number + 1, key), loss

    specs = jax.eval_shape(first, jax.random.key(0))
    return _running(mesh, step, first, jax.tree.map(lambda _: whole, specs), (specs, model.spec))


def without_rows(model: Model) -> tuple[RowProgram, tuple[str, ...]]:
    """Takes the tables out of a loss `(params, batch, key)`; returns what is left, and the names of the tables."""
    key = jax.random.key(0)
    params, variables = jax.eval_shape(model.init, key)

    def loss(params: Any, batch: Any, key: jax.Array) -> Any:
        return model.loss(params, batch, key, variables)[0]

    program = trace(loss, params, model.spec, jax.eval_shape(lambda: key))
    return without_tables(program, [uses for uses in find_uses(program) if uses.name in model.tables]), model.tables


def _hybrid(model: Model, mesh: Mesh, system: str) -> bx.Hybrid:
    return bx.Hybrid(touched=touched_of(model, mesh)) if system == MEASURED else bx.Hybrid()


def _running(mesh: Mesh, step: Any, first: Any, held: Any, specs: Any) -> Running:
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    jitted = jax.jit(step, in_shardings=(held, split), out_shardings=(held, whole), donate_argnums=0)
    compiled = jitted.lower(*specs).compile()

    def update(state: Any, batch: Any) -> tuple[Any, Any, Any]:
        return *compiled(state, batch), 1

    begin = jax.jit(first, out_shardings=held)
    return Running(mesh, lambda: begin(jax.random.key(0)), update, lambda: [compiled])


def _mapped(params: Any, names: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """Changes the leaves of some names."""
    leaves = [change(leaf) if name in names else leaf for name, leaf in named_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _filled(table: jax.Array, num_parts: int) -> jax.Array:
    return jnp.pad(table, [(0, -len(table) % num_parts)] + [(0, 0)] * (table.ndim - 1))
