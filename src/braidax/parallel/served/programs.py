"""What servers compute with the rows of a table, as programs that travel: they know nothing of the user's code."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from braidax.errors import import_extra
from braidax.parallel.given.arrays import strong
from braidax.parallel.rows import Now, RowOptimizer, Sum, TableUpdate, kept_besides, no_growth
from braidax.parallel.rows.dense_update import Numbers
from braidax.program import Program, named_leaves

_PLATFORMS = ("cpu",)  # servers compute with what is in their host memory


@dataclass(frozen=True)
class KeptForm:
    """What a server keeps of each row besides its value. **Fields:** its `name`, the `shape` of one row, and `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TableForm:
    """A table as servers have it, with the programs that begin, move and read its rows.

    Programs take and give arrays of `m` rows, `values [m, D]` and what is kept of them, and numbers that all rows
    share.

    **Fields:** `name`. `shape`, `dtype`: of the whole table. `kept`: forms. `num_shared`: how many numbers the rows
    share. `born`: `key data -> table`. `begin`: `values -> (*kept, *shared)`. `update`:
    `(gradients, values, *kept, *shared) -> (values, *kept, *shared)`. `settle`: `(values, *kept, *shared) ->
    (values, *kept)`, rows as they are once every step has moved them; empty where rows without a gradient rest. `sums`:
    `gradients -> (*sums)`, over rows, to which a row with a gradient of 0 adds nothing; empty where nobody needs one.
    `joins`: how the sums of several servers are put together, by `JOINS`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kept: tuple[KeptForm, ...]
    num_shared: int
    born: bytes
    begin: bytes
    update: bytes
    settle: bytes
    sums: bytes = b""
    joins: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape[1:])


JOINS: dict[str, np.ufunc] = {"add": np.add, "and": np.logical_and, "or": np.logical_or}
"""How sums over rows are put together."""


class RowRules(NamedTuple):
    """How the rows of a table begin and move.

    **Fields:** `begin`: `values [m, D] -> (kept, shared)`. `optimizer`. `sums`: that are taken of gradients `[m, D]`.
    """

    begin: Callable[[jax.Array], tuple[Any, Any]]
    optimizer: RowOptimizer
    sums: tuple[Sum, ...] = ()


def rules_of_split(update: TableUpdate, optimizer: RowOptimizer, init: Callable[[jax.Array], Any]) -> RowRules:
    """Returns the rules of a table that the optimizer of all variables moves.

    **Arguments:** `update`, `optimizer`: of the table. `init`: returns that optimizer's state where the table has the
    rows `[m, …]` that it is given.
    """

    def begin(values: jax.Array) -> tuple[Any, Any]:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(strong(init(values)))]
        scalars = tuple(leaves[one.at] for one in update.catch_up.scalars) if update.catch_up else ()
        now = Now(jnp.zeros((), jnp.int32), scalars, grown=no_growth(update)) if update.catch_up else Now((), ())
        wide = {one.name: leaves[one.at] for one in update.kept}
        kept = {name: leaf if leaf.ndim > 1 else leaf[:, None] for name, leaf in wide.items()}
        return kept | kept_besides(update, now, values.shape[:1]), shared_of(update, now)

    return RowRules(begin, optimizer)


def rules_of_own(optimizer: RowOptimizer) -> RowRules:
    """Returns the rules of a table that has a row optimizer of its own."""

    def begin(values: jax.Array) -> tuple[Any, Any]:
        state = optimizer.init(values[:, None])
        return jax.tree.map(lambda leaf: leaf[:, 0], state.rows), state.shared

    return RowRules(begin, optimizer)


def shared_of(update: TableUpdate, now: Now) -> Now:
    """Returns numbers with a context, as an update has them. **Arguments:** `now`: without one."""
    return now._replace(context=tuple(jnp.zeros(term.shape, term.dtype) for term in update.context))


def numbers_to_send(numbers: Numbers) -> list[Any]:
    """Returns the leaves that servers are told of an update: by which rows move, by which they are read behind it."""
    behind = numbers.behind._replace(context=numbers.now.context)
    return [*jax.tree.leaves((numbers.before._replace(context=numbers.now.context), numbers.now, behind))]


def table_form(name: str, spec: jax.ShapeDtypeStruct, born: Program, rules: RowRules) -> TableForm:
    """Makes the programs of a table.

    **Arguments:** `name`: its leaf in what `born` makes. `spec`: of the whole table. `born`: `key -> Born`.
    """
    impls: list[Any] = []

    def data_of(key: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(data_of, born.in_specs[0])

    def table(data: jax.Array) -> jax.Array:
        made = born(jax.random.wrap_key_data(data, impl=impls[0]))
        return dict(named_leaves(made.params))[name].reshape(spec.shape)

    (count,) = export.symbolic_shape("m")
    row, width = spec.shape[1:], math.prod(spec.shape[1:])
    values = jax.ShapeDtypeStruct((count, width), spec.dtype)

    def begin(values: jax.Array) -> Any:
        return rules.begin(values.reshape(values.shape[0], *row))

    kept, shared = jax.eval_shape(begin, jax.ShapeDtypeStruct((3, width), spec.dtype))
    names, kept_leaves, kept_tree = [one for one, _ in named_leaves(kept)], *jax.tree.flatten(kept)
    shared_leaves, shared_tree = jax.tree.flatten(shared)
    forms = tuple(
        KeptForm(one, tuple(leaf.shape[1:]), str(leaf.dtype)) for one, leaf in zip(names, kept_leaves, strict=True)
    )
    given = [jax.ShapeDtypeStruct((count, *one.shape), leaf.dtype) for one, leaf in zip(forms, kept_leaves, strict=True)]

    def flat(leaf: jax.Array) -> jax.Array:
        return leaf if leaf.ndim == 1 else leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))

    def taken(leaves: Sequence[jax.Array]) -> tuple[Any, Any]:
        kept, shared = leaves[: len(forms)], leaves[len(forms) :]
        return kept_tree.unflatten(map(flat, kept)), shared_tree.unflatten(shared)

    def shaped(kept: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(kept)
        return [
            leaf.reshape(leaf.shape[0], *one.shape).astype(one.dtype) for leaf, one in zip(leaves, forms, strict=True)
        ]

    settled = rules.optimizer.settle

    def settle(values: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        kept, shared = taken(leaves)
        assert settled is not None, "exported where rows move without a gradient"
        values, kept = settled(values, kept, shared)
        return [values.astype(spec.dtype), *shaped(kept)]

    def update(gradients: jax.Array, values: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        kept, shared = taken(leaves)
        if settled is not None:
            values, kept = settled(values, kept, shared)
        moves, kept, shared = rules.optimizer.update(gradients, values, kept, shared)
        return [(values + moves).astype(spec.dtype), *shaped(kept), *jax.tree.leaves(shared)]

    def begun(values: jax.Array) -> list[jax.Array]:
        kept, shared = begin(values)
        return [*shaped(kept), *jax.tree.leaves(shared)]

    of_rows = (values, *given, *shared_leaves)
    return TableForm(
        name,
        tuple(spec.shape),
        str(spec.dtype),
        forms,
        len(shared_leaves),
        born=_exported(table, data),
        begin=_exported(begun, values),
        update=_exported(update, values, *of_rows),
        settle=b"" if settled is None else _exported(settle, *of_rows),
        sums=_exported(lambda gradients: [one.of(gradients, ()) for one in rules.sums], values) if rules.sums else b"",
        joins=tuple(one.join for one in rules.sums),
    )


def _exported(fn: Callable[..., Any], *specs: Any) -> bytes:
    import_extra("flatbuffers", "servers", purpose="sending programs to servers of tables")
    return bytes(export.export(jax.jit(fn), platforms=_PLATFORMS)(*specs).serialize())
