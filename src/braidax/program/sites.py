"""Where a program uses each leaf of an argument, and as what: rows, one side of a product, a kernel, or otherwise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    closed_call_p,
    cond_p,
    conv_general_dilated_p,
    convert_element_type_p,
    copy_p,
    dot_general_p,
    gather_p,
    jit_p,
    name_p,
    reduce_precision_p,
    remat_p,
    reshape_p,
    scan_p,
    sharding_constraint_p,
    squeeze_p,
    transpose_p,
    while_p,
)

from .bodies import Path, aval_of, bind
from .costs import Cost, cost_of
from .flow import Place, carried, flow
from .kinds import ELEMENTWISE
from .trace import Program

Role = Literal["rows", "product", "kernel", "elementwise", "other"]

_UNKNOWN = Cost()
_COUNTED = ("product", "kernel", "rows")
_CASTS = (convert_element_type_p, reduce_precision_p)
_SHAPES = (transpose_p, reshape_p, squeeze_p, broadcast_in_dim_p, copy_p, name_p, sharding_constraint_p)


@dataclass(frozen=True)
class Entry:
    """A value by which a leaf enters a part of a program that is computed by itself.

    The whole program is such a part, and so are the body of a scan that takes a slice of the leaf in each step, and
    what a remat computes again.

    **Fields:** `leaf`: its number. `level`: the path of the part's jaxpr, () for the whole program; `input`: which of
    its inputs. `dtype`: of the value. `dims`: for each dim of it, which dim of the leaf it is. `lengths`: of all scans
    around it.
    """

    leaf: int
    level: Path
    input: int
    dtype: Any
    dims: tuple[int, ...]
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Value:
    """What a use reads of a leaf.

    **Fields:** `entry`; `casts`, then `view`: the equations that make it of the entry's value, other types first, other
    shapes behind. `in_loop`: whether it is used several times for one run of the entry's level. `remat`: whether that
    level is computed again in the backward pass.
    """

    entry: Entry
    casts: tuple[JaxprEqn, ...] = ()
    view: tuple[JaxprEqn, ...] = ()
    in_loop: bool = False
    remat: bool = False


@dataclass(frozen=True)
class Site:
    """One use of a leaf.

    **Fields:** `value`: what is used. `path`: of the equation, empty for an output of the program; and which
    `operand` of it. `role`: "rows" for a gather of whole rows, "product" for a side of a `dot_general`, "kernel" of
    a convolution, "elementwise" for one of two operands of such an operation, else "other". `within`: whether what
    uses it holds jaxprs, or is the end of one: nothing can stand in place of that. `source`: tells the user's line.
    `cost`: of a product, convolution or lookup, as often as loops run it.
    """

    value: Value
    path: Path
    operand: int
    role: Role
    within: bool
    source: Any
    cost: Cost = _UNKNOWN


def find_sites(program: Program, argument: int = 0) -> tuple[Site, ...]:
    """Finds every use of every leaf of one argument, through casts, changes of shape, loops, branches and remat.

    **Arguments:** `argument`: which argument of the program. **Returns:** the sites, in the order of the program.
    """
    skipped = len(jax.tree.leaves(program.in_specs[:argument]))
    leaves = jax.tree.leaves(program.in_specs[argument])
    jaxpr = program.closed.jaxpr
    inputs: list[Any] = [None] * len(jaxpr.invars)
    for leaf, spec in enumerate(leaves):
        entry = Entry(leaf, (), skipped + leaf, spec.dtype, tuple(range(len(spec.shape))))
        inputs[skipped + leaf] = Value(entry)
    found = _Found()
    for at, held in enumerate(flow(jaxpr, inputs, found)):
        if held is not None:
            found.record(held, Place(), at, None)
    return tuple(found.sites.values())


class _Found:
    def __init__(self) -> None:
        self.sites: dict[tuple[Path, int, int], Site] = {}  # branches give several leaves for one result

    def record(
        self, held: Value, place: Place, operand: int, source: Any, role: Role | None = None, cost: Cost = _UNKNOWN
    ) -> None:
        site = Site(held, place.path, operand, role or "other", role is None, source, cost)
        self.sites[place.path, operand, held.entry.leaf] = site

    def through(self, equation: JaxprEqn, facts: Sequence[Any], place: Place) -> Sequence[Any]:
        held, primitive = facts[0], equation.primitive
        if held is not None and len(equation.invars) == 1:
            if primitive in _CASTS and _is_float(equation.outvars[0]):
                return [replace(held, casts=(*held.casts, equation))]
            if primitive in _SHAPES and aval_of(equation.outvars[0]).size == aval_of(equation.invars[0]).size:
                return [replace(held, view=(*held.view, equation))]
        for operand, one in enumerate(facts):
            if one is not None:
                role = _role(equation, operand, facts)
                cost = cost_of(equation) * prod(place.lengths) if role in _COUNTED else _UNKNOWN
                self.record(one, place, operand, place.source or equation.source_info, role, cost)
        return [None] * len(equation.outvars)

    def into(self, equation: JaxprEqn, operand: int, fact: Any, place: Place) -> Any:
        held: Value = fact
        if equation.primitive is remat_p:
            if held.in_loop:
                return held
            return self._entered(held, equation, operand, place, dims=dims_of_value(held), remat=True)
        if equation.primitive is scan_p:
            first, num_carry = carried(equation)
            if operand < first:
                return replace(held, in_loop=True)
            dims = dims_of_value(held)
            if operand >= first + num_carry and dims is not None:
                return self._entered(held, equation, operand, place, dims=dims[1:], remat=held.remat)
        elif equation.primitive is while_p:
            first, _ = carried(equation)
            if operand < first:
                return replace(held, in_loop=True)
        elif equation.primitive is not cond_p or operand > 0:
            return held
        self.record(held, place, operand, place.source or equation.source_info)
        return None

    def _entered(self, held: Value, equation: JaxprEqn, operand: int, place: Place, *, dims: Any, remat: bool) -> Any:
        """A new entry; what has lost its dims is used here, whole, and so is what a while would enter again."""
        if dims is None or place.in_while:
            self.record(held, place, operand, place.source or equation.source_info)
            return None
        lengths = place.lengths + ((equation.params["length"],) if equation.primitive is scan_p else ())
        dtype = aval_of(equation.invars[operand]).dtype
        return Value(Entry(held.entry.leaf, (*place.path, 0), operand, dtype, dims, lengths), remat=remat)

    def out_of(self, equation: JaxprEqn, result: int, fact: Any, place: Place) -> Any:
        held: Value = fact
        if equation.primitive in (jit_p, closed_call_p) and held.entry.level[: len(place.path)] != place.path:
            return held
        self.record(held, place, -1 - result, place.source or equation.source_info)
        return None

    def join(self, one: Any, other: Any) -> Any:
        return None


def _is_float(atom: Any) -> bool:
    return jax.numpy.issubdtype(aval_of(atom).dtype, jax.numpy.floating)


def dims_of_value(value: Value) -> tuple[int, ...] | None:
    """Returns which dim of the leaf each dim of a value is; None where that is not known any more."""
    dims: tuple[int, ...] = value.entry.dims
    for equation in value.view:
        before, after = aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape
        if equation.primitive is transpose_p:
            dims = tuple(dims[at] for at in equation.params["permutation"])
        elif before != after:
            return None
    return dims


def _role(equation: JaxprEqn, operand: int, facts: Sequence[Any]) -> Role:
    if sum(one is not None for one in facts) > 1:
        return "other"
    if equation.primitive is dot_general_p:
        return "product"
    if equation.primitive is conv_general_dilated_p and operand == 1:
        return "kernel"
    if equation.primitive is gather_p and operand == 0 and reads_rows(equation):
        return "rows"
    if equation.primitive in ELEMENTWISE and len(equation.invars) == 2 and _is_float(equation.outvars[0]):
        return "elementwise"
    return "other"


def reads_rows(equation: JaxprEqn) -> bool:
    """Whether a gather reads whole rows along dim 0."""
    table, params = aval_of(equation.invars[0]), equation.params
    sizes, numbers = tuple(params["slice_sizes"]), params["dimension_numbers"]
    whole = sizes[:1] == (1,) and sizes[1:] == tuple(table.shape[1:])
    return whole and not numbers.operand_batching_dims and tuple(numbers.start_index_map) == (0,)


def row_reader(equation: JaxprEqn, dim: int) -> tuple[Callable[[Any, Any], Any], int]:
    """Of a gather that reads whole rows of a table, returns how it reads those of a part that is split along a dim.

    **Returns:** a function of the part and the ids; and along which dim of its result rows are in parts.
    """
    table, params = aval_of(equation.invars[0]), equation.params

    def read(part: Any, ids: Any) -> Any:
        sizes = (1, *part.shape[1:])
        return equation.primitive.bind(part, ids, **{**params, "slice_sizes": sizes})

    return read, params["dimension_numbers"].offset_dims[range(1, table.ndim).index(dim)]


def viewed(site: Site) -> Callable[[Any], Any]:
    """Returns the function that makes a site's operand of the entry's value in the type that it is used in."""

    def view(value: Any) -> Any:
        for equation in site.value.view:
            (value,) = bind(equation, [value])
        return value

    return view
