"""Programs whose tables are read by rows: ids first, rows as inputs, and gradients of rows alone."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.extend.core.primitives import gather_p

from braidax.errors import ArgumentError

from .bodies import Path, equations_of
from .names import named_leaves
from .prune import prune, without_prints
from .rewrite import Rule, evaluate
from .trace import Program, trace
from .uses import LeafUses, RowRead

OUT_OF_RANGE = -2
"""An id that no row has, where it was asked for."""

# Stands for a lookup while a program is taken apart; a rule always replaces it before anything is computed.
_lookup_p = Primitive("braidax_lookup")
_lookup_p.def_abstract_eval(
    lambda ids, *, index, row, dtype: ShapedArray((*ids.shape, *row), dtype)  # pyright: ignore
)


@dataclass(frozen=True)
class Lookup:
    """One place where rows of a table are read.

    `name` is the table's, `path` that of the equation in the traced program, `num_rows` the rows of the table. `ids`
    and `rows` are specs: int32 [*lengths, num_ids] and [*lengths, num_ids, *row], with a leading dim for every scan
    around it; rows have the table's dtype. Ids are at least 0 and below `num_rows`, or -1 where no row is read: out of
    range in mode "fill", or in a branch that was not taken. `late` says that ids depend on parameters, or on effects.
    """

    name: str
    path: Path
    num_rows: int
    ids: jax.ShapeDtypeStruct
    rows: jax.ShapeDtypeStruct
    late: bool


@dataclass(frozen=True)
class RowProgram:
    """A program without its tables. Arguments are the program's, with None in place of every table.

    `lookups` are the places where rows are read; `ids` is the program of the arguments that gives the ids of each, and
    None for those that are `late`: nothing of the model is computed.
    """

    lookups: tuple[Lookup, ...]
    ids: Program
    opened: Program

    def fed(self) -> Program:
        """Returns the program that takes, behind its arguments, the tuple of rows of every lookup.

        Its gradient with respect to them is the gradient of the rows: scattered to the ids it is that of the table.
        Rows at id -1 may be anything, and get no gradient.

        **Raises:** `ArgumentError` when a lookup is late.
        """
        if late := [lookup.name for lookup in self.lookups if lookup.late]:
            raise ArgumentError(f"ids of {late[0]} depend on parameters, so that rows cannot be fed: use tapped")
        call = self.tapped(_no_lookup)
        specs = (*self.opened.in_specs, tuple(lookup.rows for lookup in self.lookups))
        program = trace(lambda *args: call(*args)[0], *specs)
        num_inputs = len(program.closed.jaxpr.invars)
        closed, _ = prune(program.closed, [True] * len(program.closed.jaxpr.outvars), [False] * num_inputs)
        return Program(closed, program.in_specs, program.out_specs)

    def tapped(
        self, lookup: Callable[[Lookup, jax.Array], jax.Array], *, at: Collection[int] | None = None
    ) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
        """Returns the function that looks rows up in place and adds a tap, whose gradient is that of the rows.

        **Arguments:** `lookup`: called with a `Lookup` and ids [num_ids] (-1 where any row will do); gives the rows
        [num_ids, *row], which get no gradient. It runs under the mesh of the caller, inside the loops of the model.
        `at`: indices of the lookups to tap, at least those that are late, which is the default; others are fed.

        **Returns:** a function of the arguments and of a tuple with an array like `rows` for every lookup (zeros
        where it is tapped, rows where it is fed); it gives the outputs, and a tuple of ids (None where fed).

        **Raises:** `ArgumentError` when `at` leaves out a lookup that is late.
        """
        late = {index for index, one in enumerate(self.lookups) if one.late}
        chosen = late if at is None else set(at)
        if not late <= chosen <= set(range(len(self.lookups))):
            raise ArgumentError(f"at is {sorted(chosen)}, expected indices of lookups, with those late: {sorted(late)}")
        places = _places(self.opened.closed.jaxpr)

        def rule(index: int) -> Rule:
            one = self.lookups[index]

            def replace(_: JaxprEqn, inputs: list[Any], fed: Any) -> tuple[list[Any], Any]:
                if index not in chosen:
                    return [fed], None
                rows = lookup(one, inputs[0])
                if (rows.shape, rows.dtype) != (fed.shape, fed.dtype):
                    raise ArgumentError(
                        f"lookup gave {rows.dtype}{list(rows.shape)} for {one.name}, expected "
                        f"{fed.dtype}{list(fed.shape)}: one row of the table for every id"
                    )
                return [jax.lax.stop_gradient(rows) + fed], inputs[0]

            return Rule(replace, absent=-1)

        def call(*args: Any) -> tuple[Any, tuple[Any, ...]]:
            *own, added = args
            if len(added) != len(self.lookups):
                raise ArgumentError(
                    f"{len(added)} arrays of rows were given, expected one for each lookup: {len(self.lookups)}"
                )
            rules = {path: rule(index) for index, path in places.items()}
            fed = {path: added[index] for index, path in places.items()}
            outputs, taken = evaluate(self.opened.closed, rules, jax.tree.leaves(tuple(own)), fed)
            result = jax.tree.unflatten(jax.tree.structure(self.opened.out_specs), outputs)
            return result, tuple(taken[places[index]] for index in range(len(self.lookups)))

        return call


def without_tables(
    program: Program,
    tables: Sequence[LeafUses],
    *,
    argument: int = 0,
    leading: Mapping[Path, int] | None = None,
    out_of_range: Literal["as read", "mark"] = "as read",
) -> RowProgram:
    """Takes tables out of a program, so that it reads their rows only.

    **Arguments:** `tables`: of `find_uses(program, argument)`, those with the verdict sparse that shall go. `argument`:
    which argument holds them. `leading`: for the path of a use, which dim of its ids comes first when they are laid
    flat: the one that is split over devices, as `find_batch_dims` tells. Dim 0 where nothing is said.
    `out_of_range`: with "mark", ids that no row has are `OUT_OF_RANGE`, whatever the mode of the read.

    **Returns:** the `RowProgram`. **Raises:** `ArgumentError` for a table with another verdict.
    """
    positions = {name: at for at, (name, _) in enumerate(named_leaves(program.in_specs[argument]))}
    for table in tables:
        if table.verdict != "sparse" or table.name not in positions:
            raise ArgumentError(
                f"tables holds {table.name}, which is {table.verdict} ({table.why}), expected sparse ones"
            )
    reads = [(table, use.path, use.rows) for table in tables for use in table.uses if use.rows is not None]
    rules = {
        path: Rule(_opening(index, table, read, (leading or {}).get(path, 0), out_of_range == "mark"))
        for index, (table, path, read) in enumerate(reads)
    }
    gone = {positions[table.name] for table in tables}
    opened = _opened(program, rules, argument, gone)
    ids, late = _ids_program(opened, len(reads), argument)
    lookups: list[Lookup] = []
    for index, (table, path, read) in enumerate(reads):
        shape = (*read.lengths, int(np.prod(read.ids_shape, dtype=np.int64)))
        rows = jax.ShapeDtypeStruct((*shape, *table.spec.shape[1:]), table.spec.dtype)
        spec = jax.ShapeDtypeStruct(shape, np.dtype(np.int32))
        lookups.append(Lookup(table.name, path, table.spec.shape[0], spec, rows, late[index]))
    return RowProgram(tuple(lookups), ids, opened)


def _opened(program: Program, rules: dict[Path, Rule], argument: int, gone: set[int]) -> Program:
    """The program with lookups in place of gathers, and without the inputs that are tables."""
    skipped = len(jax.tree.leaves(program.in_specs[:argument]))
    rewritten = trace(lambda *leaves: evaluate(program.closed, rules, leaves)[0], *jax.tree.leaves(program.in_specs))
    droppable = [at - skipped in gone for at in range(len(rewritten.in_specs))]
    closed, kept = prune(rewritten.closed, [True] * len(rewritten.closed.jaxpr.outvars), droppable)
    if any(may and still for may, still in zip(droppable, kept, strict=True)):
        raise ArgumentError("tables holds one that the program still reads: pass what find_uses gave for this program")
    leaves, structure = jax.tree.flatten(program.in_specs[argument])
    emptied = structure.unflatten([None if at in gone else leaf for at, leaf in enumerate(leaves)])
    in_specs = (*program.in_specs[:argument], emptied, *program.in_specs[argument + 1 :])
    return Program(closed, in_specs, program.out_specs)


def _ids_program(opened: Program, num_lookups: int, argument: int) -> tuple[Program, list[bool]]:
    """The program of the ids that need no parameter, and which do."""
    places = _places(opened.closed.jaxpr)

    def keep(equation: JaxprEqn, inputs: list[Any], _: Any) -> tuple[list[Any], Any]:
        return [_lookup_p.bind(*inputs, **equation.params)], inputs[0]

    def every(*leaves: Any) -> list[Any]:
        rules = {path: Rule(keep, absent=-1) for path in places.values()}
        taken = evaluate(opened.closed, rules, leaves)[1]
        return [taken[places[index]] for index in range(num_lookups)]

    leaves = jax.tree.leaves(opened.in_specs)
    before = len(jax.tree.leaves(opened.in_specs[:argument]))
    parameters = range(before, before + len(jax.tree.leaves(opened.in_specs[argument])))
    traced = trace(every, *leaves)
    if traced.closed.effects:  # the loss itself prints, once
        printing, specs = traced.closed, traced.out_specs
        traced = Program(
            trace(lambda *leaves: without_prints(printing, leaves), *leaves).closed, traced.in_specs, specs
        )
    late: list[bool] = []
    for index in range(num_lookups):
        wanted = [other == index for other in range(num_lookups)]
        closed, kept = prune(traced.closed, wanted, [True] * len(leaves))
        late.append(any(kept[at] for at in parameters) or bool(_places(closed.jaxpr)) or bool(closed.effects))
    closed, _ = prune(traced.closed, [not one for one in late], [False] * len(leaves))
    specs = tuple(None if one else spec for one, spec in zip(late, traced.out_specs, strict=True))
    return Program(closed, opened.in_specs, specs), late


def _opening(index: int, table: LeafUses, read: RowRead, leading: int, marked: bool) -> Any:
    """The rule that turns one gather into a lookup of its rows in the table's own dtype, then does the rest."""
    num_rows, row = table.spec.shape[0], tuple(table.spec.shape[1:])

    def replace(equation: JaxprEqn, inputs: list[Any], _: Any) -> tuple[list[Any], None]:
        ids = _ids_of(equation, inputs)
        ids = jnp.moveaxis(ids, leading, 0) if leading else ids
        moved = ids.shape
        ids, inside = _in_range(ids.reshape(-1), num_rows, absent=read.out_of_range == "fill")
        ids = jnp.where(inside, ids, OUT_OF_RANGE) if marked else ids
        rows = _lookup_p.bind(ids, index=index, row=row, dtype=table.spec.dtype)
        for cast in read.casts:
            rows = cast.primitive.bind(rows, **cast.params)
        inside = inside.reshape(-1, *[1] * len(row))
        if read.out_of_range == "fill":
            rows = jnp.where(inside, rows, jnp.asarray(equation.params["fill_value"], rows.dtype))
        elif read.out_of_range == "promise":
            rows = jnp.where(inside, rows, jax.lax.stop_gradient(rows))  # the scatter of the gradient drops them
        rows = rows.reshape(*moved, *row)
        return [_arranged(equation, jnp.moveaxis(rows, 0, leading) if leading else rows, read)], None

    return replace


def _ids_of(equation: JaxprEqn, inputs: list[Any]) -> Any:
    if equation.primitive is not gather_p:
        return jnp.asarray(inputs[1])
    return inputs[1][..., equation.params["dimension_numbers"].start_index_map.index(0)]


def _in_range(ids: Any, num_rows: int, *, absent: bool) -> tuple[Any, Any]:
    """Ids as int32, those out of range moved to the nearest or to -1; and which were in range."""
    if jnp.iinfo(ids.dtype).bits < 32:
        ids = ids.astype(jnp.int32)
    inside = (ids >= 0) & (ids < num_rows)
    nearest = jnp.clip(ids, 0, num_rows - 1).astype(jnp.int32)
    return jnp.where(inside, nearest, -1) if absent else nearest, inside


def _arranged(equation: JaxprEqn, rows: Any, read: RowRead) -> Any:
    """Rows [*ids_shape, *row] in the shape that the gather gives."""
    num_dims = len(read.ids_shape)
    if equation.primitive is not gather_p:
        return rows[None]
    numbers = equation.params["dimension_numbers"]
    if 0 not in numbers.collapsed_slice_dims:
        rows = jnp.expand_dims(rows, num_dims)
    of_ids, of_rows = iter(range(num_dims)), iter(range(num_dims, rows.ndim))
    order = [next(of_rows if dim in numbers.offset_dims else of_ids) for dim in range(rows.ndim)]
    return jnp.transpose(rows, order)


def _places(jaxpr: Jaxpr) -> dict[int, Path]:
    """Where each lookup stands, by its index."""
    return {one.params["index"]: path for path, one in equations_of(jaxpr) if one.primitive is _lookup_p}


def _no_lookup(lookup: Lookup, ids: jax.Array) -> jax.Array:
    raise ArgumentError(f"rows of {lookup.name} are fed, and need no lookup of {ids.shape}")
