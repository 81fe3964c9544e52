"""What servers compute with the rows of a table, as programs that travel: they know nothing of the user's code."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from numpy.typing import NDArray

from braidax.errors import ArgumentError, import_extra
from braidax.parallel.given.arrays import strong
from braidax.parallel.plan.placements import Seen
from braidax.parallel.rows import Now, RowOptimizer, Sum, TableUpdate, kept_besides, table_optimizer
from braidax.parallel.rows.dense_update import DenseUpdate, Numbers
from braidax.program import Program, RowsAlone, named_leaves, rows_alone

_MOST_ROWS = 2**31 - 1  # ids are int32
_PLATFORMS = ("cpu",)  # servers compute with what is in their host memory


ReadAs = Literal["bfloat16", "float16"]
"""A type to which a loss may cast all rows that it reads."""


@dataclass(frozen=True)
class KeptForm:
    """What a server keeps of each row besides its value. **Fields:** `name`, `dtype`, and the `shape` of one row."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Programs(NamedTuple):
    """What is computed with rows, as JAX writes programs down.

    They take and give arrays of `m` rows, `values [m, D]` and what is kept of them, and numbers that all rows share.

    **Fields:** `rows`: `(key data, ids [m]) -> first rows [m, D]`, empty where `init` makes no row by itself. `born`:
    `key data -> table` then, and empty otherwise. `begin`: `values -> (*kept, *shared)`. `update`: `(gradients, values,
    *kept, *shared) -> (values, *kept, *shared)`. `settle`: `(values, *kept, *shared) -> (values, *kept)`, rows as they
    are once every step has moved them; empty where rows without a gradient rest. `sums`: `gradients -> (*sums)`, over
    rows, to which a row with a gradient of 0 adds nothing; empty where nobody needs one.
    """

    rows: bytes
    born: bytes
    begin: bytes
    update: bytes
    settle: bytes
    sums: bytes


@dataclass(frozen=True)
class TableForm:
    """A table as servers have it.

    **Fields:** `name`. `spec`: of the whole table. `kept`: forms. `num_shared`: how many numbers the rows share.
    `joins`: how the sums of several servers are put together, by `JOINS`. `programs`. `adagrad`: as of `RowOptimizer`;
    None where programs alone move rows. `seen`: if it grows.
    """

    name: str
    spec: jax.ShapeDtypeStruct
    kept: tuple[KeptForm, ...]
    num_shared: int
    joins: tuple[str, ...]
    programs: Programs
    adagrad: tuple[float, float] | None = None
    seen: Seen | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole table."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """Of the table."""
        return str(self.spec.dtype)

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape[1:])

    @property
    def of_row(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shapes and dtypes of what servers have of a row: its values, flat, and what is kept."""
        of_kept = [(tuple(one.shape), np.dtype(jax.numpy.dtype(one.dtype))) for one in self.kept]
        return [((self.width,), np.dtype(jax.numpy.dtype(self.dtype))), *of_kept]

    def most_rows(self, part: int, parts: int) -> int:
        """Returns how many rows a part may come to have; all it has where the table does not grow."""
        return len(range(part, self.shape[0], parts)) if self.seen is None else -(-self.seen.capacity // parts)


JOINS: dict[str, np.ufunc] = {"add": np.add, "and": np.logical_and, "or": np.logical_or}
"""How sums over rows are put together."""


def joined_sums(joins: Sequence[str], number: int, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the sums over the rows of a table. **Arguments:** `number`: of the table. `parts`: of all servers, by
    `"{number}/{sum}"`."""
    every = [[one[f"{number}/{at}"] for one in parts] for at in range(len(joins))]
    return [functools.reduce(JOINS[join], some) for join, some in zip(joins, every, strict=True)]


class TablePart(NamedTuple):
    """Consecutive rows of a table, as all servers have them.

    **Fields:** `first`: of them. `values`: `[m, D]`. `kept`: arrays `[m, …]` of what the optimizer keeps of them.
    `shared`: the numbers by which they are brought up.
    """

    first: int
    values: NDArray[Any]
    kept: list[NDArray[Any]]
    shared: list[NDArray[Any]]


class RowRules(NamedTuple):
    """How the rows of a table begin and move.

    **Fields:** `begin`: `values [m, D] -> (kept, shared)`. `optimizer`. `sums`: that are taken of gradients `[m, D]`.
    """

    begin: Callable[[jax.Array], tuple[Any, Any]]
    optimizer: RowOptimizer
    sums: tuple[Sum, ...] = ()


def rules_of_split(update: TableUpdate, besides: DenseUpdate, init: Callable[[jax.Array], Any]) -> RowRules:
    """Returns the rules of a table that the optimizer of all variables moves.

    **Arguments:** `update`: of the table. `besides`: that optimizer. `init`: returns its state where the table has the
    rows `[m, …]` that it is given.
    """

    def begin(values: jax.Array) -> tuple[Any, Any]:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(strong(init(values)))]
        now, _ = besides.first(update, leaves)
        found = {one.name: leaves[one.at] for one in update.kept}
        kept = {name: leaf if leaf.ndim > 1 else leaf[:, None] for name, leaf in found.items()}
        return kept | kept_besides(update, now, values.shape[:1]), shared_of(update, now)

    return RowRules(begin, table_optimizer(update))


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
    """Returns what servers are told of an update: leaves of `before`, `now` and `behind`, alike, and `changed`."""
    behind = numbers.behind._replace(context=numbers.now.context)
    before = numbers.before._replace(context=numbers.now.context)
    return [*jax.tree.leaves((before, numbers.now, behind)), numbers.changed]


def table_form(name: str, spec: jax.ShapeDtypeStruct, born: Program, rules: RowRules) -> TableForm:
    """Makes the programs of a table.

    **Arguments:** `name`: its leaf in what `born` makes. `spec`: of the whole table. `born`: `key -> Born`.
    """
    rows = _FlatRows(spec, rules)
    (count,) = export.symbolic_shape("m")
    values = jax.ShapeDtypeStruct((count, math.prod(spec.shape[1:])), spec.dtype)
    given = [jax.ShapeDtypeStruct((count, *one.shape), jnp.dtype(one.dtype)) for one in rows.forms]
    of_rows = (values, *given, *rows.shared)
    moves = rules.optimizer.settle is not None
    data, of_ids, whole = _born(name, spec, born)
    programs = Programs(
        rows=exported(of_ids, data, jax.ShapeDtypeStruct((count,), np.dtype(np.int32))) if of_ids else b"",
        born=b"" if of_ids else exported(whole, data),
        begin=exported(rows.begin, values),
        update=exported(rows.update, values, *of_rows),
        settle=exported(rows.settle, *of_rows) if moves else b"",
        sums=exported(lambda gradients: [one.of(gradients, ()) for one in rules.sums], values) if rules.sums else b"",
    )
    joins = tuple(one.join for one in rules.sums)
    table = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    return TableForm(name, table, rows.forms, len(rows.shared), joins, programs, rules.optimizer.adagrad)


class _FlatRows:
    """The rules of a table as functions of flat lists: values, what is kept of rows, and what all share."""

    def __init__(self, spec: jax.ShapeDtypeStruct, rules: RowRules) -> None:
        self._spec, self._rules = spec, rules
        some = jax.ShapeDtypeStruct((3, math.prod(spec.shape[1:])), spec.dtype)
        kept, shared = jax.eval_shape(self._begun, some)
        leaves, self._kept = jax.tree.flatten(kept)
        self.shared, self._shared = jax.tree.flatten(shared)
        self.forms = tuple(
            KeptForm(path, tuple(leaf.shape[1:]), str(leaf.dtype))
            for (path, _), leaf in zip(named_leaves(kept), leaves, strict=True)
        )

    def _begun(self, values: jax.Array) -> Any:
        return self._rules.begin(values.reshape(values.shape[0], *self._spec.shape[1:]))

    def begin(self, values: jax.Array) -> list[jax.Array]:
        """Of `Programs`."""
        kept, shared = self._begun(values)
        return [*self._flat(kept), *jax.tree.leaves(shared)]

    def settle(self, values: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        """Of `Programs`."""
        values, kept, _ = self._settled(values, leaves)
        return [values.astype(self._spec.dtype), *self._flat(kept)]

    def update(self, gradients: jax.Array, values: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        """Of `Programs`."""
        values, kept, shared = self._settled(values, leaves)
        moves, kept, shared = self._rules.optimizer.update(gradients, values, kept, shared)
        return [(values + moves).astype(self._spec.dtype), *self._flat(kept), *jax.tree.leaves(shared)]

    def _settled(self, values: jax.Array, leaves: Sequence[jax.Array]) -> tuple[jax.Array, Any, Any]:
        count, settle = len(self.forms), self._rules.optimizer.settle
        rows = [leaf if leaf.ndim == 1 else leaf.reshape(leaf.shape[0], -1) for leaf in leaves[:count]]
        kept, shared = self._kept.unflatten(rows), self._shared.unflatten(leaves[count:])
        if settle is not None:
            values, kept = settle(values, kept, shared)
        return values, kept, shared

    def _flat(self, kept: Any) -> list[jax.Array]:
        pairs = zip(jax.tree.leaves(kept), self.forms, strict=True)
        return [leaf.reshape(leaf.shape[0], *one.shape).astype(one.dtype) for leaf, one in pairs]


def _born(
    name: str, spec: jax.ShapeDtypeStruct, born: Program
) -> tuple[Any, Callable[[jax.Array, jax.Array], jax.Array] | None, Callable[[jax.Array], jax.Array]]:
    """Returns the form of the numbers of a key, and what makes of these: first rows by ids, if anything does, and the
    table."""
    data, impl = key_form(born.in_specs[0])
    alone = _alone(name, born).compute

    def rows(data: jax.Array, ids: jax.Array) -> jax.Array:
        assert alone is not None, "it is asked for where rows are made by themselves"
        found = alone(jax.random.wrap_key_data(data, impl=impl), ids)
        return found.reshape(ids.shape[0], math.prod(spec.shape[1:]))

    def table(data: jax.Array) -> jax.Array:
        made = born(jax.random.wrap_key_data(data, impl=impl))
        return dict(named_leaves(made.params))[name].reshape(spec.shape)

    return data, rows if alone is not None and spec.shape[0] <= _MOST_ROWS else None, table


def _alone(name: str, born: Program) -> RowsAlone:
    names = [path for path, _ in named_leaves(born.out_specs.params)]
    return rows_alone(born, jax.tree.leaves(_numbered(born.out_specs).params)[names.index(name)])


def growing(form: TableForm, seen: Seen, born: Program) -> TableForm:
    """Returns the form of a table of which servers have the rows that were seen.

    **Raises:** `ArgumentError` where nobody can tell what a row is that was not seen.
    """
    told = f"seen={seen} of Served, and {form.name}, {form.dtype}{list(form.shape)},"
    if not form.programs.rows:
        raise ArgumentError(
            f"{told} has rows that init makes from others: {_alone(form.name, born).why}; expected rows that are made "
            f"each by itself, such as jax.random.normal(key, shape), or seen=None and room for all rows"
        )
    return replace(form, seen=seen)


def _numbered(tree: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), range(len(jax.tree.leaves(tree))))


def key_form(key: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, Any]:
    """Returns the spec of the numbers of a typed key, and what makes a key of them. **Arguments:** `key`: its spec."""
    impls: list[Any] = []

    def data_of(key: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    return jax.eval_shape(data_of, key), impls[0]


def exported(fn: Callable[..., Any], *specs: Any) -> bytes:
    """Returns a function as a program for servers, who compute with what is in their host memory."""
    import_extra("flatbuffers", "servers", purpose="sending programs to servers of tables")
    return bytes(export.export(jax.jit(fn), platforms=_PLATFORMS)(*specs).serialize())
