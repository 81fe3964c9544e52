"""What the formulas say that a device sends in a step, and how many rows a step really touches."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from benchmarks.harness.models import Model
from benchmarks.parallax.systems import DENSE, GATHER, MEASURED, OURS, PLAIN, ROWS, split_by_hybrid, touched_of
from braidax.parallel.rows import all_reduce_bytes, exchange_bytes, plan_exchange, shared_bytes
from braidax.parallel.rows import touched as counted
from braidax.parallel.rows.exchange.traffic import ID_BYTES
from braidax.program import named_leaves

FORMULA = "  formula"


class Formulas:
    """What a device sends in a step, by each way to keep variables in step. **Arguments:** `model`, `mesh`."""

    def __init__(self, model: Model, mesh: Mesh) -> None:
        specs, _ = jax.eval_shape(model.init, jax.random.key(0))
        self._leaves = dict(named_leaves(specs))
        self._model, self._mesh = model, mesh
        tables = touched_of(model, mesh)
        self.touched = {path.removeprefix("params/"): tables[path] for path in tables}

    @property
    def num_parameters(self) -> int:
        """Of the model."""
        return sum(math.prod(leaf.shape) for leaf in self._leaves.values())

    @property
    def alpha(self) -> float:
        """Returns the bytes of rows that a step touches, over those of all tables."""
        whole = sum(self._num_bytes(name) for name in self.touched)
        return sum(touched.alpha * self._num_bytes(name) for name, touched in self.touched.items()) / whole

    def of(self, system: str) -> dict[str, float]:
        """Returns bytes, by the name that a report gives them; nothing for what XLA chooses."""
        if system in (PLAIN, DENSE):
            return {FORMULA: self._dense()}
        if system == GATHER:
            sent = [counted.gathered_bytes(self.touched[name], self._row_bytes(name)) for name in self._model.tables]
            return {FORMULA: self._dense(self._model.tables) + sum(sent)}
        if system not in (OURS, MEASURED, ROWS):
            return {}
        split = self._model.tables if system == ROWS else split_by_hybrid(self._model, self._mesh, system)
        rows = self._seen(split) if system == MEASURED else self._planned(split)
        least = "    for rows, no room to spare"
        return {FORMULA: self._dense(split) + rows, "    for rows": rows, least: self._least(split)}

    def _dense(self, but: Sequence[str] = ()) -> float:
        """Everything but some tables, all-reduced."""
        kept = sum(self._num_bytes(name) for name in self._leaves if name not in but)
        return all_reduce_bytes(1, kept, self._mesh.size)

    def _planned(self, tables: Sequence[str]) -> float:
        """Rows of tables, exchanged: room for 1.25 times the ids of a device."""
        total = 0.0
        for name in tables:
            touched = self.touched[name]
            ids = [touched.num_ids]
            rows = [touched.num_rows]
            exchange = plan_exchange(self._mesh.shape, ("data",), num_rows=rows, num_ids=ids, num_unique=ids)
            total += sum(exchange_bytes(exchange, self._row_bytes(name))) + self._shared(name)
        return total

    def _seen(self, tables: Sequence[str]) -> float:
        """Rows of tables, exchanged: room for the most different ids that were seen, and a tenth more."""
        return sum(
            counted.rows_bytes(self.touched[name], self._row_bytes(name)) + self._shared(name) for name in tables
        )

    def _shared(self, name: str) -> float:
        """What candidates that all devices share cost besides: all-gathered rows, all-reduced gradients."""
        return shared_bytes(self.touched[name].num_shared, self._row_bytes(name), self._mesh.size)

    def _least(self, tables: Sequence[str]) -> float:
        """The different rows of each device alone: `(N - 1) / N * u (i + 2 D b)`."""
        share = (self._mesh.size - 1) / self._mesh.size
        return share * sum(self.touched[name].num_unique * (ID_BYTES + 2 * self._row_bytes(name)) for name in tables)

    def _num_bytes(self, name: str) -> int:
        leaf = self._leaves[name]
        return math.prod(leaf.shape) * leaf.dtype.itemsize

    def _row_bytes(self, name: str) -> int:
        return self._num_bytes(name) // self._leaves[name].shape[0]
