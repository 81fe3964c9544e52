"""How a program uses each leaf of one of its arguments: by rows, or whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import (
    closed_call_p,
    cond_p,
    convert_element_type_p,
    copy_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    dynamic_slice_p,
    gather_p,
    jit_p,
    name_p,
    reduce_precision_p,
    remat_p,
    reshape_p,
    scan_p,
    sharding_constraint_p,
    stop_gradient_p,
    while_p,
)
from jax.lax import GatherScatterMode

from .bodies import Path, aval_of
from .flow import Place, flow
from .lines import line_of
from .names import named_leaves
from .trace import Program

OutOfRange = Literal["clip", "fill", "promise"]
_MODES: dict[Any, OutOfRange] = {
    GatherScatterMode.CLIP: "clip",
    GatherScatterMode.FILL_OR_DROP: "fill",
    GatherScatterMode.PROMISE_IN_BOUNDS: "promise",
}
_SAYS: dict[OutOfRange, str] = {
    "clip": "clipped",
    "fill": "filled",
    "promise": "promised not to occur",
}
# The same numbers in another type, or under another name: what follows may be done to rows as well as to the table.
_ON_ROWS = (convert_element_type_p, reduce_precision_p, stop_gradient_p)
_UNCHANGED = (copy_p, name_p, sharding_constraint_p)


@dataclass(frozen=True)
class RowRead:
    """A gather of whole rows along dim 0.

    `ids_shape` is the shape of its ids, `lengths` those of the scans around it, `out_of_range` what becomes of ids
    outside of the table (after JAX has wrapped negative ones): the nearest row is read ("clip", gradient included), a
    constant stands for the row ("fill"), or the nearest row is read and gets no gradient ("promise": JAX leaves it
    open, and that is what it does). `casts` are the equations that made the gathered value from the leaf, in order.
    """

    ids_shape: tuple[int, ...]
    lengths: tuple[int, ...]
    out_of_range: OutOfRange
    casts: tuple[JaxprEqn, ...] = ()

    @property
    def num_ids(self) -> int:
        """The number of ids of one run of the program."""
        return math.prod(self.ids_shape) * math.prod(self.lengths)


@dataclass(frozen=True)
class Use:
    """One use of a leaf: `kind`, the `path` of its equation (empty for an output), why, and the user's `file:line`."""

    kind: Literal["rows", "dense"]
    path: Path
    why: str
    line: str
    rows: RowRead | None = None


@dataclass(frozen=True)
class LeafUses:
    """All uses of one leaf, and the `verdict`: sparse (by rows only), dense, mixed, or unused."""

    name: str
    spec: jax.ShapeDtypeStruct
    uses: tuple[Use, ...]

    @property
    def verdict(self) -> Literal["sparse", "dense", "mixed", "unused"]:
        """What kinds of use there are."""
        kinds = {use.kind for use in self.uses}
        if len(kinds) == 2:
            return "mixed"
        return "unused" if not kinds else "sparse" if kinds == {"rows"} else "dense"

    @property
    def why(self) -> str:
        """One sentence."""
        rows = [use for use in self.uses if use.kind == "rows"]
        dense = [use for use in self.uses if use.kind == "dense"]
        if not self.uses:
            return "nothing reads it"
        if not rows:
            return _told(dense)
        if not dense:
            num_ids = sum(use.rows.num_ids for use in rows if use.rows)
            return f"{_told(rows)}: {num_ids:,} ids of {self.spec.shape[0]:,} rows"
        return f"{_told(rows)}, but {_told(dense)}: its gradient is dense"


def find_uses(program: Program, argument: int = 0) -> tuple[LeafUses, ...]:
    """Finds every use of every leaf of one argument.

    Looks through casts, copies, constraints and reshapes that change nothing, and into jit, closed_call, remat, cond,
    and into scan where the leaf is a constant of the loop; custom_jvp, custom_vjp and unknown primitives are not
    entered, and use a leaf whole.

    **Arguments:** `argument`: which argument of the program.

    **Returns:** one `LeafUses` for every leaf, in JAX's order.
    """
    leaves = named_leaves(program.in_specs[argument])
    skipped = len(jax.tree.leaves(program.in_specs[:argument]))
    jaxpr = program.closed.jaxpr
    aliases: list[_Alias | None] = [None] * len(jaxpr.invars)
    aliases[skipped : skipped + len(leaves)] = [_Alias(leaf) for leaf in range(len(leaves))]
    found = _Uses([[] for _ in leaves])
    for alias in flow(jaxpr, aliases, found):
        if alias is not None:
            found.uses[alias.leaf].append(Use("dense", (), "returned by the program", ""))
    return tuple(LeafUses(name, spec, tuple(uses)) for (name, spec), uses in zip(leaves, found.uses, strict=True))


@dataclass(frozen=True)
class _Alias:
    """A value that is a leaf, after `casts`."""

    leaf: int
    casts: tuple[JaxprEqn, ...] = ()


@dataclass(frozen=True)
class _Uses:
    """Records the uses of aliases, by leaf."""

    uses: list[list[Use]]

    def through(self, equation: JaxprEqn, facts: Sequence[_Alias | None], place: Place) -> Sequence[_Alias | None]:
        primitive, first = equation.primitive, facts[0]
        if first is not None and (primitive in _UNCHANGED or _keeps_shape(equation)):
            return [first]
        if first is not None and primitive in _ON_ROWS and _is_float(aval_of(equation.outvars[0]).dtype):
            return [replace(first, casts=(*first.casts, equation))]
        if first is not None and not any(facts[1:]) and primitive in (gather_p, dynamic_slice_p):
            rows = _row_read(equation, place, first.casts)
            if isinstance(rows, RowRead):
                why = f"gathered by rows (ids out of range are {_SAYS[rows.out_of_range]})"
                self._record("rows", first, equation, place, why, rows)
            else:
                self._record("dense", first, equation, place, rows)
        else:
            for alias in facts:
                if alias is not None:
                    self._record("dense", alias, equation, place, _why_whole(equation))
        return [None] * len(equation.outvars)

    def into(self, equation: JaxprEqn, operand: int, fact: _Alias, place: Place) -> _Alias | None:
        why = _why_blocked(equation, operand)
        if why:
            self._record("dense", fact, equation, place, why)
        return None if why else fact

    def out_of(self, equation: JaxprEqn, result: int, fact: _Alias, place: Place) -> _Alias | None:
        if equation.primitive in (jit_p, closed_call_p, remat_p):
            return fact
        self._record("dense", fact, equation, place, f"passed on whole by {equation.primitive.name}")
        return None

    def join(self, one: Any, other: Any) -> None:
        return None

    def _record(
        self,
        kind: Literal["rows", "dense"],
        alias: _Alias,
        equation: JaxprEqn,
        place: Place,
        why: str,
        rows: RowRead | None = None,
    ) -> None:
        line = line_of(place.source or equation.source_info)
        self.uses[alias.leaf].append(Use(kind, place.path, why, line, rows))


def _why_blocked(equation: JaxprEqn, operand: int) -> str:
    """Why an operand of an equation with bodies cannot be followed into them; empty when it can."""
    params = equation.params
    if equation.primitive is cond_p and operand == 0:
        return "used whole to choose a branch of cond"
    if equation.primitive is scan_p and operand >= params["num_consts"]:
        carried = operand < params["num_consts"] + params["num_carry"]
        return "carried whole through scan" if carried else "sliced step by step by scan"
    if equation.primitive is while_p and operand >= params["cond_nconsts"] + params["body_nconsts"]:
        return "carried whole through while"
    return ""


def _why_whole(equation: JaxprEqn) -> str:
    name = equation.primitive.name
    if equation.primitive in (custom_jvp_call_p, custom_vjp_call_p):
        return f"used inside {name.removesuffix('_call')}, which is not entered, lest its own derivative be lost"
    return f"used whole by {name}"


def _row_read(equation: JaxprEqn, place: Place, casts: tuple[JaxprEqn, ...]) -> RowRead | str:
    """What a gather or a dynamic slice reads, or why that is no rows."""
    table, ids = (aval_of(atom) for atom in equation.invars[:2])
    params = equation.params
    sizes: tuple[int, ...] = tuple(params["slice_sizes"])
    if not sizes or sizes[0] != 1 or sizes[1:] != tuple(table.shape[1:]):
        return f"read by {equation.primitive.name} in slices of {list(sizes)}, which are no rows"
    mode: OutOfRange = "clip"
    ids_shape: tuple[int, ...] = ()
    if equation.primitive is gather_p:
        numbers = params["dimension_numbers"]
        if params["mode"] not in _MODES:
            return f"read by gather in mode {params['mode']}, which has no rule"
        mode, ids_shape = _MODES[params["mode"]], tuple(ids.shape[:-1])
        # Whole dims have one place to start from, which a clipped or promised index cannot miss.
        if numbers.operand_batching_dims or 0 not in numbers.start_index_map:
            return "read by gather along another dim than the first"
        if mode == "fill" and tuple(numbers.start_index_map) != (0,):
            return "read by gather with several indices that may be out of range"
    if place.in_while:
        return "read by rows inside while, whose number of steps is unknown"
    return RowRead(ids_shape, place.lengths, mode, casts)


def _keeps_shape(equation: JaxprEqn) -> bool:
    return equation.primitive is reshape_p and aval_of(equation.invars[0]).shape == aval_of(equation.outvars[0]).shape


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _told(uses: Sequence[Use]) -> str:
    """`gathered by rows (…) at model.py:3 and model.py:5`."""
    places: dict[str, list[str]] = {}
    for use in uses:
        known = places.setdefault(use.why, [])
        line = use.line.replace("\\", "/").rpartition("/")[2]
        if line and line not in known:
            known.append(line)
    return ", ".join(why + (f" at {' and '.join(lines)}" if lines else "") for why, lines in places.items())
