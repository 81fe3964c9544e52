"""A traced loss in training as strategies see it, and the tables that a plan then makes of its variables."""

import functools
from collections.abc import Collection, Mapping, Sequence

import jax
import optax
from jax.sharding import Mesh

from braidax.parallel.compute.metrics import BATCH
from braidax.parallel.plan.footprint import state_bytes
from braidax.parallel.plan.layout import Axis
from braidax.parallel.plan.model import Model, RotatedUses, RowWork
from braidax.parallel.plan.plan import Plan
from braidax.parallel.plan.ring_uses import expert_uses, rotated_uses
from braidax.parallel.plan.strategy import Strategy
from braidax.parallel.served.feed import ServedFeed
from braidax.program import (
    Cut,
    LeafUses,
    Path,
    Program,
    Site,
    find_dims_in_pieces,
    find_meetings,
    find_sites,
    join,
    named_leaves,
    without_leaves,
)

from .feed import RowFeed
from .options import RowOptions, row_options
from .reads import LATE, RowReads, row_reads

_ROOT = "params"


class ReadRows:
    """How a loss reads its parameters by rows, and how their rows would move; found out when asked for.

    **Arguments:** `program`: of `(params, variables, key, batch)`. `optimizer`: of the step. `microbatches`: of how
    many runs of the program an update consists. `frozen`: paths of the variables that are not trained.
    """

    def __init__(
        self,
        program: Program,
        optimizer: optax.GradientTransformation,
        strategies: Mapping[str, Strategy],
        microbatches: int,
        frozen: Collection[str] = (),
    ) -> None:
        self._program, self._optimizer, self._frozen = program, optimizer, frozenset(frozen)
        self._strategies, self._microbatches = strategies, microbatches

    def model(self, num_parts: int, batch_axes: Sequence[str]) -> Model:
        """Returns what strategies are told.

        **Arguments:** `num_parts`: among how many devices a batch is divided; `batch_axes`: along which axes.
        """
        variables = dict(named_leaves(self._program.in_specs[0], _ROOT))
        return Model(
            variables,
            num_parts,
            self._microbatches,
            tuple(batch_axes),
            find_uses=self._uses,
            find_sites=self._sites,
            find_met=self._met,
            find_dims=lambda: find_dims_in_pieces(self._program),
            find_rotated=functools.partial(self._rotated, num_parts),
            find_experts=lambda: expert_uses(self._program, [*variables], {BATCH: 0}, num_parts),
            no_rows=self._no_rows,
            row_work=self._row_work,
            find_state_bytes=self._state_bytes,
            frozen=self._frozen,
        )

    def feed(self, mesh: Mesh, plan: Plan) -> RowFeed:
        """Returns the feed of the variables that a plan places by rows."""
        return RowFeed(self._optimizer, self._options, self._program, self._reads.sparse, mesh, plan)

    def served_feed(self, mesh: Mesh, plan: Plan, *, wants_norm: bool) -> ServedFeed:
        """Returns the feed of the variables that a plan has on servers. **Arguments, Raises:** as `ServedFeed`."""
        known = self._reads.sparse
        return ServedFeed(self._optimizer, self._options, self._program, known, mesh, plan, wants_norm=wants_norm)

    @functools.cached_property
    def _reads(self) -> RowReads:
        return row_reads(self._program, microbatches=self._microbatches)

    @functools.cached_property
    def _options(self) -> RowOptions:
        params = without_leaves(self._reads.params, {path.removeprefix(f"{_ROOT}/") for path in self._frozen})
        tables = [name for name in self._reads.sparse if join(_ROOT, name) not in self._frozen]
        loss = jax.ShapeDtypeStruct((), self._program.out_specs[0].dtype)
        return row_options(self._optimizer, self._strategies, params, tables, loss)

    def _uses(self) -> dict[str, LeafUses]:
        found = {join(_ROOT, uses.name): uses for uses in self._reads.uses}
        return {path: uses for path, uses in found.items() if path not in self._frozen}

    def _sites(self) -> dict[str, Sequence[Site]]:
        paths = [path for path, _ in named_leaves(self._program.in_specs[0], _ROOT)]
        found: dict[str, list[Site]] = {path: [] for path in paths}
        for site in find_sites(self._program):
            found[paths[site.value.entry.leaf]].append(site)
        return {path: tuple(sites) for path, sites in found.items()}

    def _met(self) -> dict[Path, bool]:
        return find_meetings(self._program, {site.path for site in find_sites(self._program)}, {BATCH: 0})

    def _rotated(self, num_batch_parts: int, cuts: Mapping[str, Cut], axis: Axis) -> RotatedUses:
        paths = [path for path, _ in named_leaves(self._program.in_specs[0], _ROOT)]
        return rotated_uses(self._program, paths, cuts, axis, {BATCH: 0}, num_batch_parts)

    def _state_bytes(self) -> dict[str, int]:
        frozen = {path.removeprefix(f"{_ROOT}/") for path in self._frozen}
        params = without_leaves(self._program.in_specs[0], frozen)
        return state_bytes(self._optimizer, params, _ROOT)

    def _no_rows(self, path: str) -> str:
        name = path.removeprefix(f"{_ROOT}/")
        return self._options.no_rows(name) if name in self._reads.sparse else LATE

    def _row_work(self, path: str) -> RowWork:
        name = path.removeprefix(f"{_ROOT}/")
        return RowWork(self._reads.shared.get(name, 0), self._options.num_replayed(name))
