"""Tables on servers as a feed: what a step computes with the rows that it is given."""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.parallel.compute.accumulate import microbatches_of
from braidax.parallel.compute.feed import Check, Pulled, Update
from braidax.parallel.given.arrays import strong
from braidax.parallel.plan.placements import Served
from braidax.parallel.plan.plan import Plan
from braidax.parallel.rows import Sum, kept_besides
from braidax.parallel.rows.dense_update import DenseUpdate, Numbers, row_sum
from braidax.parallel.rows.ids import ids_alone
from braidax.parallel.rows.laid_flat import LaidFlat
from braidax.parallel.rows.options import RowOptions
from braidax.parallel.rows.reads import row_reads, without_rows
from braidax.program import LeafUses, Program, join, named_leaves, of_no_rows, reads_argument, sums_below

from .programs import ReadAs, RowRules, TableForm, growing, rules_of_own, rules_of_split, shared_of, table_form
from .row_memory import sums_on_host

_SQUARES = Sum(
    0,
    jax.ShapeDtypeStruct((), jnp.float32),
    lambda gradients, _: jnp.sum(jnp.square(gradients.astype(jnp.float32))),
    "add",
)


class Fed(NamedTuple):
    """What devices are given of tables. **Fields:** by table `rows`, `[N, K, D]`, and `slots`, int32 `[N, m]`, which of
    its rows each of a device's ids is; or how they lie."""

    rows: Any
    slots: Any


@final
class ServedReading:
    """A program that is fed rows.

    **Arguments:** `tables`: specs by name. `found`: how it reads what it reads by rows, by name. `options`: how rows
    move. `microbatches`: of how many runs of the program an update consists.
    """

    def __init__(
        self,
        program: Program,
        tables: Mapping[str, jax.ShapeDtypeStruct],
        found: Mapping[str, LeafUses],
        options: RowOptions,
        mesh: Mesh,
        batch_axes: tuple[str, ...],
        microbatches: int,
    ) -> None:
        if others := [name for name in tables if name not in found]:
            raise ArgumentError(
                f"{join('params', others[0])} is on servers, and a function of the step does not read it by rows that "
                f"are known before: expected lookups such as jnp.take(table, ids, axis=0); read it whole by "
                f"step.to_dense(state)"
            )
        self._rows = without_rows(program, [found[name] for name in tables], options.out_of_range)
        self._ids = ids_alone(self._rows)
        self._tables, self._mesh, self._microbatches = dict(tables), mesh, microbatches
        self._program, self._flat = self._rows.fed(), LaidFlat(self._rows.lookups, microbatches)
        self.num_parts = math.prod(mesh.shape[axis] for axis in batch_axes)
        self.on_parts = NamedSharding(mesh, PartitionSpec(batch_axes or None))
        """Of what has a dim for devices in front."""

    @property
    def program(self) -> Program:
        """The loss without tables, which takes the rows of every lookup."""
        return self._program

    @property
    def names(self) -> Collection[str]:
        """Of all tables."""
        return self._tables.keys()

    @property
    def batch_dims(self) -> Sequence[int]:
        """The dim of ids, behind the lengths of the scans around a lookup."""
        return [len(lookup.ids.shape) - 1 for lookup in self._rows.lookups]

    @property
    def metrics(self) -> Collection[str]:
        """None."""
        return ()

    @property
    def pulled_shardings(self) -> Any:
        """Nothing is fetched by a program: it is fed from the host."""
        return ()

    @property
    def payload_shardings(self) -> Any:
        """Of the gradients of each device's rows."""
        return dict.fromkeys(self._tables, self.on_parts)

    @property
    def fed_shardings(self) -> Fed:
        """Of what devices are given."""
        return Fed(dict.fromkeys(self._tables, self.on_parts), dict.fromkeys(self._tables, self.on_parts))

    @property
    def knows_ahead(self) -> bool:
        """Whether the ids of a batch depend on it, and the key and number of its step, alone."""
        return not reads_argument(self._ids, 1)

    @property
    def draws_ids(self) -> bool:
        """Whether ids depend on the key and number of a step."""
        return reads_argument(self._ids, 2)

    @functools.cached_property
    def read_as(self) -> dict[str, ReadAs]:
        """By table the type to which the program casts all of its rows at once, where that is narrower."""
        from braidax.program.excerpts import excerpts_read  # what others do without

        read = excerpts_read(self._program)[-len(self._rows.lookups) :]
        types = {name: {read[at].dtype for at in self._flat.of_table(name)} for name in self._tables}
        return {name: one for name in types for one in get_args(ReadAs) if types[name] == {one}}

    def ids(self, variables: Any, key: Any, batch: Any) -> dict[str, jax.Array]:
        """Returns the ids that each device has of each table, int32 `[N, m]`."""
        if self._microbatches == 1:
            found = self._ids((), variables, key, batch)
        else:
            pieces = microbatches_of(key, batch, self._microbatches)
            found = jax.vmap(lambda key, batch: self._ids((), variables, key, batch))(*pieces)
        return {
            name: self._flat.pack(self._flat.of_table(name), found, self.num_parts, filler=-1) for name in self._tables
        }

    def pull(
        self, dense: Any, variables: Any, key: Any, batch: Any, stored: Mapping[str, jax.Array], held: Fed
    ) -> Pulled:
        """Looks up what devices were given. **Arguments:** `held`: that."""
        rows: dict[int, jax.Array] = {}
        for name, spec in self._tables.items():
            found = jax.vmap(lambda rows, slots: rows[slots])(held.rows[name], held.slots[name])
            shaped = found.reshape(*found.shape[:2], *spec.shape[1:])
            rows |= self._flat.unpack(self._flat.of_table(name), shaped)
        return Pulled(tuple(rows[at] for at in range(len(self._rows.lookups))), held, {})

    def route(self, dense: Any, variables: Any, key: Any, batch: Any) -> Any:
        """Not asked: `ids` tells."""
        raise AssertionError("rows come from servers")

    def send(self, routed: Any, read: Any, stored: Mapping[str, jax.Array]) -> Pulled:
        """Not asked: servers send."""
        raise AssertionError("rows come from servers")

    def push(self, ticket: Fed, gradients: Any) -> dict[str, jax.Array]:
        """Sums the gradients of each device's rows, `[N, K, D]`; where the host sums, its ids', `[N, m, D]`, stay."""
        found: dict[str, jax.Array] = {}
        for name, spec in self._tables.items():
            own = self._flat.pack(self._flat.of_table(name), gradients, self.num_parts, filler=0)
            own = own.reshape(*own.shape[:2], -1).astype(spec.dtype)
            if self.sums_on_host(name):
                found[name] = own
                continue
            num = ticket.rows[name].shape[1]
            sums = functools.partial(jax.ops.segment_sum, num_segments=num)
            found[name] = jax.vmap(sums)(own, ticket.slots[name])
        return found

    def sums_on_host(self, name: str) -> bool:
        """Whether gradients of equal ids of a table are summed by the host."""
        return sums_on_host(self._mesh.devices.flat[0].platform, self._tables[name].dtype)

    def sum_of_squares(self, payload: Any) -> jax.Array:
        """0: servers sum over rows, of which several devices may have the same, and the step adds that."""
        return jnp.zeros((), jnp.float32)


@final
class ServedFeed:
    """The variables that a plan places by `Served`. A state has nothing of them, and for each `Numbers`.

    **Arguments:** as of `RowFeed`. `wants_norm`: whether the norm of all gradients is a metric.

    **Raises:** `ArgumentError` where servers cannot move the rows by themselves.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        options: RowOptions,
        program: Program,
        sparse: Mapping[str, LeafUses],
        mesh: Mesh,
        plan: Plan,
        *,
        wants_norm: bool = False,
    ) -> None:
        self._wants_norm = wants_norm
        self._optimizer, self._options, self._mesh, self._batch_axes = optimizer, options, mesh, plan.batch_axes
        self._program, self._sparse = program, sparse
        specs = dict(named_leaves(program.in_specs[0]))
        pairs = zip(specs, plan.variables, strict=True)
        self.tables = {name: specs[name] for name, variable in pairs if is_served(variable)}
        found = {one for v in plan.variables for one in v.placements if isinstance(one, Served)}
        if len(found) > 1:
            told = sorted(map(repr, found))
            raise ArgumentError(f"tables are {' and '.join(told)}: expected the same for all that are on servers")
        self.placement = found.pop()
        _check_wire(self.placement, self.tables)
        self._own = {name: own for name in self.tables if (own := options.own(name)) is not None}
        self._split = options.split(self.tables)
        self._update = DenseUpdate(self._split, self.tables, lambda wanted, known, totals: totals)
        self._sums = sums_below(self._update.wanted)
        for term in self._sums:
            if of_no_rows(term.operands) or sums_below(term.operands):
                raise ArgumentError(
                    f"optimizer has {term.name} over all rows of {term.operands[0].table}, which is on servers, of "
                    f"more than their gradients: expected a sum of these alone, as optax.clip_by_global_norm takes it, "
                    f'first in a chain; or keep the table on devices: Hybrid(tables="rows")'
                )

    @property
    def names(self) -> Collection[str]:
        """Of the tables."""
        return self.tables.keys()

    @property
    def padded(self) -> Sequence[tuple[str, int]]:
        """Nothing is."""
        return ()

    @property
    def checks(self) -> Mapping[str, Check]:
        """None: ids are looked at when rows are asked for."""
        return {}

    @property
    def raises_out_of_range(self) -> bool:
        """Whether ids that no row has are an error."""
        return self._options.out_of_range == "raise"

    def reading(self, program: Program, *, microbatches: int = 1) -> ServedReading:
        """Takes the tables out of a traced loss."""
        known = program is self._program
        found = self._sparse if known else row_reads(program, microbatches=microbatches).sparse
        return ServedReading(program, self.tables, found, self._options, self._mesh, self._batch_axes, microbatches)

    def forms(self, born: Program) -> dict[str, TableForm]:
        """Returns the tables as servers have them. **Arguments:** `born`: `key -> Born`. **Raises:** as `growing`."""
        forms = {name: table_form(name, spec, born, self._rules(name)) for name, spec in self.tables.items()}
        seen = self.placement.seen
        return forms if seen is None else {name: growing(form, seen, born) for name, form in forms.items()}

    def _rules(self, name: str) -> RowRules:
        norm = (_SQUARES,) if self._wants_norm else ()
        if name in self._own:
            return rules_of_own(self._own[name])._replace(sums=norm)
        update = self._split.tables[name]
        rules = rules_of_split(update, self._update, self._init_of(name))
        sums = [row_sum(update, term, ()) for term in self._sums if term.operands[0].table == name]
        return rules._replace(sums=(*sums, *norm))

    @property
    def wants_sums(self) -> bool:
        """Whether servers sum over the gradients of rows before these move."""
        return bool(self._sums) or self._wants_norm

    @property
    def stages(self) -> bool:
        """Whether servers have all gradients of an update before a row moves: for sums, or to see if there is room."""
        return self.wants_sums or self.placement.seen is not None

    @property
    def sum_specs(self) -> dict[str, list[jax.ShapeDtypeStruct]]:
        """By table, what servers sum over its rows, in the order of its rules; nothing where nobody needs sums."""
        found = {name: [one.spec for one in self._rules(name).sums] for name in self.tables}
        return {name: specs for name, specs in found.items() if specs}

    def totals(self, sums: Mapping[str, Sequence[Any]]) -> tuple[dict[int, Any], Any]:
        """Returns what `apply` needs of sums, by number, and the sum of all squares, 0 where the norm is not wanted.

        **Arguments:** `sums`: by table, in the order of its rules.
        """
        squares = sum(float(some[-1]) for some in sums.values()) if self._wants_norm else 0.0
        return self.terms_of(sums), np.float32(squares)

    def terms_of(self, sums: Mapping[str, Sequence[Any]]) -> dict[int, Any]:
        """Returns what `apply` needs of sums, by number. **Arguments:** as of `totals`."""
        left = {name: iter(some) for name, some in sums.items()}
        return {term.number: next(left[term.operands[0].table]) for term in self._sums}

    def _init_of(self, name: str) -> Callable[[jax.Array], Any]:
        leaves = dict(named_leaves(self._options.params))

        def init(rows: jax.Array) -> Any:
            every = [rows if one == name else jnp.zeros(spec.shape, spec.dtype) for one, spec in leaves.items()]
            return self._optimizer.init(jax.tree.unflatten(jax.tree.structure(self._options.params), every))

        return init

    # As of `Feed`

    def begin(self, params: Any, born: Mapping[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """Stores nothing, and splits the optimizer's first state."""
        leaves = jax.tree.leaves(strong(self._optimizer.init(params)))
        return {}, self._update.dense(leaves), self._begun(leaves)

    def _begun(self, leaves: Sequence[Any]) -> dict[str, Any]:
        kept: dict[str, Any] = dict.fromkeys(self._own, ())
        for update, now, shared in self._update.begun(leaves):
            kept[update.name] = Numbers(now, shared_of(update, now), now, shared, jnp.zeros((), bool))
        return kept

    def shardings(self, kept: Any) -> Any:
        """Numbers are on every device."""
        return jax.tree.map(lambda _: NamedSharding(self._mesh, PartitionSpec()), kept)

    def held(self, dense: Any, kept: Any) -> Any:
        """Nothing of a state: what programs are fed comes from servers."""
        return ()

    def load(self, name: str, stored: Any) -> Any:
        """Not asked: a state has no tables."""
        raise AssertionError("tables are on servers")

    def whole(self, name: str, stored: Any, held: Any) -> Any:
        """Not asked: `reading` refuses programs that do not read it by rows."""
        raise AssertionError("tables are on servers")

    def apply(self, update: Update, reading: Any, stored: Any, kept: Any) -> tuple[Any, Any, dict[str, Any], Any]:
        """Takes an update of what is dense, and computes by which numbers rows move."""
        moved = self._update.apply(update, {name: one.shared for name, one in kept.items() if name not in self._own})
        return moved.params, moved.dense, {}, {**dict.fromkeys(self._own, ()), **moved.numbers}

    @property
    def waits_for_gradients(self) -> bool:
        """Not asked: rows are read by servers."""
        return True

    def read_behind(self, update: Update, reading: Any, routed: Any, stored: Any, kept: Any) -> Any:
        """Not asked: rows are read by servers."""
        raise AssertionError("tables are on servers")

    def settled(self, stored: Any, dense: Any, kept: Any) -> tuple[dict[str, Any], Any]:
        """Nothing of a state lags behind."""
        return {}, kept

    def joined(self, dense: Any, kept: Any) -> Any:
        """Puts what is kept of rows into the optimizer's state. **Arguments:** `kept`: by table and name, `[V, …]`."""
        leaves = self._update.leaves(dense)
        for name, update in self._split.tables.items():
            for one in update.kept:
                leaves[one.at] = kept[name][one.name].reshape(one.term.shape)
        return jax.tree.unflatten(jax.tree.structure(self._update.state), [leaves[at] for at in range(len(leaves))])

    def kept_rows(self, opt_state: Any) -> dict[str, tuple[dict[str, Any], list[Any]]]:
        """Undoes `joined` for the servers: for each table what rows keep, by name, and the numbers that all share."""
        leaves, found = jax.tree.leaves(opt_state), dict[str, tuple[dict[str, Any], list[Any]]]()
        for update, now, _ in self._update.begun(leaves):
            kept = {one.name: leaves[one.at] for one in update.kept}
            kept |= kept_besides(update, now, self.tables[update.name].shape[:1])
            found[update.name] = dict(named_leaves(kept)), jax.tree.leaves(shared_of(update, now))
        return found

    def parted(self, opt_state: Any, params: Mapping[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Takes the optimizer's state of single-device training apart, without what has rows."""
        leaves = jax.tree.leaves(opt_state)
        return {}, self._update.dense(leaves), self._begun(leaves)

    def dense_state(self) -> Any:
        """That of the optimizer of all variables."""
        if self._own:
            raise ArgumentError(
                f"row_optimizers moves {[*self._own]} in a way that is no dense optimizer's, so that single-device "
                f"training has no such state: read tables by step.table(name)"
            )
        return self._update.state


def _check_wire(placement: Served, tables: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises `ArgumentError` where rows are to travel in fewer bits that are not float32."""
    others = [name for name, spec in tables.items() if spec.dtype != np.float32]
    if placement.wire is not None and others:
        raise ArgumentError(
            f"wire={placement.wire!r} of Served, and {join('params', others[0])} is {tables[others[0]].dtype}: "
            f"expected tables of float32; keep it on devices by overrides, or leave wire out"
        )


def is_served(variable: Any) -> bool:
    """Whether a planned variable is on servers."""
    return any(isinstance(placement, Served) for placement in variable.placements)
