"""Training of tables on a mesh, by exchanged rows, and on one device, by dense gradients: they must agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from braidax.parallel import rows
from braidax.program import compile_on

MESHES: dict[str, tuple[dict[str, int], AxisType]] = {
    "8 auto": ({"data": 8}, AxisType.Auto),
    "8 explicit": ({"data": 8}, AxisType.Explicit),
    "4x2 auto": ({"data": 4, "model": 2}, AxisType.Auto),
    "4x2 explicit": ({"data": 4, "model": 2}, AxisType.Explicit),
}


def make_mesh(name: str) -> Mesh:
    sizes, kind = MESHES[name]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


@dataclass(frozen=True)
class Case:
    """Tables `[V, *width]`, and the ids of a batch for each of them."""

    mesh: str = "8 auto"
    axes: tuple[str, ...] = ("data",)
    num_rows: tuple[int, ...] = (37,)
    width: tuple[int, ...] = (6,)
    id_shapes: tuple[tuple[int, ...], ...] = ((16, 3),)
    slack: float = 8.0
    aggregate: Any = "none"

    @property
    def num_shards(self) -> int:
        sizes = MESHES[self.mesh][0]
        return int(np.prod([sizes[axis] for axis in self.axes]))

    def exchange(self) -> rows.Exchange:
        return rows.plan_exchange(
            MESHES[self.mesh][0],
            self.axes,
            num_rows=self.num_rows,
            num_ids=[int(np.prod(shape)) // self.num_shards for shape in self.id_shapes],
            slack=self.slack,
            aggregate=self.aggregate,
        )

    def tables(self) -> list[np.ndarray]:
        random = np.random.default_rng(7)
        return [random.normal(size=(size, *self.width)).astype(np.float32) for size in self.num_rows]

    def batch(self, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Ids with many duplicates, some −1, none at all on the first device; and what rows should become."""
        random = np.random.default_rng(seed)
        ids: list[np.ndarray] = []
        for size, shape in zip(self.num_rows, self.id_shapes, strict=True):
            drawn = np.minimum(random.geometric(0.15, shape) - 1, size - 1).astype(np.int32)
            drawn[random.random(shape) < 0.1] = -1
            drawn[: shape[0] // self.num_shards] = -1
            ids.append(drawn)
        return ids, [random.normal(size=shape + self.width).astype(np.float32) for shape in self.id_shapes]


def gradients(found: Sequence[jax.Array], ids: Sequence[jax.Array], targets: Sequence[jax.Array]) -> list[jax.Array]:
    """The gradient with respect to the rows of the mean of the squared distance to the targets."""

    def loss(found: list[jax.Array]) -> jax.Array:
        return sum(
            (jnp.tanh(x - y) ** 2 * (i >= 0).reshape(i.shape + (1,) * (x.ndim - i.ndim))).mean()
            for x, i, y in zip(found, ids, targets, strict=True)
        ) * jnp.float32(3)

    return jax.grad(loss)(list(found))


def on_one_device(case: Case, optimizers: Sequence[optax.GradientTransformation], *, num_steps: int) -> Any:
    """Tables after plain JAX, and the state of each optimizer."""
    tables = [jnp.asarray(table) for table in case.tables()]
    states = [optimizer.init(table) for optimizer, table in zip(optimizers, tables, strict=True)]

    @jax.jit
    def step(tables: Any, states: Any, ids: Any, targets: Any) -> Any:
        def loss_rows(tables: Any) -> Any:
            return [jnp.where(_spread(i >= 0, t), t[jnp.maximum(i, 0)], 0) for t, i in zip(tables, ids, strict=True)]

        found, back = jax.vjp(loss_rows, tables)
        (dense,) = back(gradients(found, ids, targets))
        moved = []
        for optimizer, gradient, state, table in zip(optimizers, dense, states, tables, strict=True):
            updates, state = optimizer.update(gradient, state, table)
            moved.append((optax.apply_updates(table, updates), state))
        return [list(column) for column in zip(*moved, strict=True)]

    for seed in range(num_steps):
        tables, states = step(tables, states, *case.batch(seed))
    return [np.asarray(table) for table in tables], states


def _spread(mask: jax.Array, table: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (table.ndim - 1))


def quickly(function: Any, *args: Any) -> Any:
    """Compiles a jitted function without costly optimizations: tests run it a few times only."""
    return function.lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})


def shardings(case: Case) -> tuple[Any, Any, Any]:
    """Those of stored tables, of what is split like ids, and of the states of all optimizers."""
    mesh = make_mesh(case.mesh)
    stored, whole = rows.stored_sharding(mesh, case.axes), NamedSharding(mesh, PartitionSpec())
    states = (rows.RowState(stored, whole),) * len(case.num_rows)
    return stored, NamedSharding(mesh, PartitionSpec(case.axes)), states


def squared_norm(exchange: rows.Exchange, route: Any, pushed: Any) -> jax.Array:
    """The sum of the squares of all gradients."""

    def of(own: jax.Array, _: Any) -> jax.Array:
        return jnp.sum(jnp.square(own))

    number = jax.ShapeDtypeStruct((), jnp.float32)
    sums = [rows.Sum(at, number, of, "add") for at in range(len(exchange.num_rows))]
    return jnp.sum(jnp.stack(rows.sum_rows(exchange, route, pushed, sums, ())))


def make_step(case: Case, optimizers: Sequence[rows.RowOptimizer]) -> Any:
    """The jitted step: `(tables, states, ids, targets) -> (tables, states, number of rounds)`."""
    mesh, exchange = make_mesh(case.mesh), case.exchange()
    stored, split, held = shardings(case)

    def step(tables: Any, states: Any, ids: Any, targets: Any) -> Any:
        route = rows.route_ids(exchange, ids)
        pulled = rows.pull_rows(exchange, route, tables, like=ids, states=states, optimizers=optimizers)
        pushed = rows.push_rows(exchange, route, gradients(pulled.rows, ids, targets))
        tables, states = rows.update_rows(exchange, route, pushed, tables, states, optimizers=optimizers)
        return tables, states, pulled.num_rounds

    whole = NamedSharding(mesh, PartitionSpec())
    specs = (stored, held, split, split)
    return compile_on(mesh, step, in_shardings=specs, out_shardings=(stored, held, whole), donate=(0, 1))


def started(case: Case, optimizers: Sequence[rows.RowOptimizer]) -> tuple[Any, Any]:
    """Stored tables, and states, on the mesh."""
    stored, _, held = shardings(case)
    tables = jax.device_put(
        tuple(np.asarray(rows.to_stored(jnp.asarray(t), case.num_shards)) for t in case.tables()), stored
    )

    def init(tables: Any) -> Any:
        return tuple(optimizer.init(table) for optimizer, table in zip(optimizers, tables, strict=True))

    made = compile_on(make_mesh(case.mesh), init, in_shardings=(stored,), out_shardings=held)
    return tables, quickly(made, tables)(tables)


def settled(case: Case, optimizers: Sequence[rows.RowOptimizer], tables: Any, states: Any) -> tuple[Any, Any]:
    """Tables and states with all missed steps taken."""
    stored, _, held = shardings(case)

    def settle(tables: Any, states: Any) -> Any:
        each = zip(optimizers, tables, states, strict=True)
        pairs = [rows.settle_rows(case.axes, table, state, optimizer=o, block=3) for o, table, state in each]
        return tuple(zip(*pairs, strict=True))

    made = compile_on(make_mesh(case.mesh), settle, in_shardings=(stored, held), out_shardings=(stored, held))
    return quickly(made, tables, states)(tables, states)


def on_mesh(
    case: Case,
    optimizers: Sequence[rows.RowOptimizer],
    *,
    num_steps: int,
) -> tuple[list[np.ndarray], Any, list[int]]:
    """Tables `[V, …]` after steps on the mesh, the stored states, and the number of rounds of each step."""
    tables, states = started(case, optimizers)
    split, num_rounds = shardings(case)[1], list[int]()
    step: Any = None
    for seed in range(num_steps):
        ids, targets = (tuple(x) for x in jax.device_put(case.batch(seed), split))
        step = step or quickly(make_step(case, optimizers), tables, states, ids, targets)
        tables, states, rounds = step(tables, states, ids, targets)
        num_rounds.append(int(rounds))
    tables, states = settled(case, optimizers, tables, states)
    dense = [np.asarray(table).reshape(-1, *case.width) for table in tables]
    for table, size in zip(dense, case.num_rows, strict=True):
        np.testing.assert_array_equal(table[size:], 0)
    return [table[:size] for table, size in zip(dense, case.num_rows, strict=True)], states, num_rounds
