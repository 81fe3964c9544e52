"""Rows of an output of a program, computed without the others, where each is made by itself."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from braidax.program.bodies import bind
from braidax.program.kinds import ELEMENTWISE
from braidax.program.trace import Program

from .positions import Positions
from .rules import RULES, NotAloneError, elementwise
from .values import Value, outputs_of

_MOST_WHOLE = 1 << 20  # elements of a value that does not go by rows: it is computed again for each few rows


class RowsAlone(NamedTuple):
    """How rows of an output are computed by themselves.

    **Fields:** `compute`: takes the flat inputs of the program, and ids, int32 or uint32 `[m]`, each of which is a row;
    it gives the rows, `[m, …]`. None where they cannot be, and `why`.
    """

    compute: Callable[..., jax.Array] | None
    why: str = ""


def rows_alone(program: Program, output: int) -> RowsAlone:
    """Finds how rows of an output are computed, bit by bit as in the whole of it, without an array of all rows.

    Rows are followed through what computes each element by itself, changes shapes, joins or cuts arrays, or writes to
    some rows at known places, back to constants, counts (`iota`) and random bits. The bits of a Threefry key at a
    position are a function of the position alone (`jax_threefry_partitionable`).

    **Arguments:** `program`: traced. `output`: which of its flat outputs, of shape `[V, …]`.
    """
    value = outputs_of(program.closed)[output]
    if not value.shape or value.shape[0] < 1:
        return RowsAlone(None, "it has no rows")
    if value.shape[0] > 1 << 32:
        return RowsAlone(None, f"it has {value.shape[0]} rows, and ids have 32 bits")

    def compute(*inputs_and_ids: Any) -> jax.Array:
        *inputs, ids = inputs_and_ids
        return _Rows(inputs, value).alone(value, Positions(np.uint32(0), jnp.asarray(ids).astype(jnp.uint32)))

    specs = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in jax.tree.leaves(program.in_specs)]
    try:
        jax.eval_shape(compute, *specs, jax.ShapeDtypeStruct((3,), np.dtype(np.int32)))
    except NotAloneError as error:
        return RowsAlone(None, str(error))
    return RowsAlone(compute)


@final
class _Rows:
    """Computes rows of values, each once. **Arguments:** `inputs`: of the program. `wanted`: whose rows are."""

    def __init__(self, inputs: Sequence[Any], wanted: Value) -> None:
        self._inputs, self._size, self._num_rows = inputs, math.prod(wanted.shape), wanted.shape[0]
        self._whole: dict[int, Any] = {}
        self._alone: dict[tuple[int, int], tuple[Positions, Any]] = {}

    def alone(self, value: Value, at: Positions) -> Any:
        """Returns the rows of a value at some positions, `[m, …]`. **Raises:** `NotAloneError`."""
        key = value.number, id(at)
        if key not in self._alone:
            try:
                rows = self._rows(value, at)
            except NotAloneError as error:
                rows = jnp.take(self._part(value, error), at.low, axis=0, mode="clip")
            self._alone[key] = at, rows
        return self._alone[key][1]

    def _part(self, value: Value, error: NotAloneError) -> Any:
        """Returns a part of the table that is small, such as first rows of their own, whole. **Raises:** the error."""
        try:
            return self.whole(value)
        except NotAloneError:
            raise error from None

    def _rows(self, value: Value, at: Positions) -> Any:
        if value.equation is not None and value.equation.effects:
            raise NotAloneError(f"{value.name} has effects")
        if value.constant is not None:
            return jnp.take(jnp.asarray(value.constant), at.low, axis=0, mode="clip")
        if value.equation is None:
            raise NotAloneError("its rows are those of an input")
        if value.equation.primitive in ELEMENTWISE:
            return elementwise(self, value, value.equation, at)
        rule = RULES.get(value.name)
        if rule is None:
            raise NotAloneError(f"{value.name} makes all rows at once")
        return rule(self, value, value.equation, at)

    def whole(self, value: Value) -> Any:
        """Returns a value that does not go by rows. **Raises:** `NotAloneError` where it is made of whole tables."""
        found, todo = dict[int, Value](), [value]
        while todo:
            one = todo.pop()
            if one.number not in found and one.number not in self._whole:
                self._check(one)
                found[one.number] = one
                todo += one.operands
        for _, one in sorted(found.items()):
            if one.number not in self._whole:
                self._compute(one)
        return self._whole[value.number]

    def _check(self, value: Value) -> None:
        size = math.prod(value.shape)
        is_table = size >= self._size or (value.shape and value.shape[0] == self._num_rows > 1)
        if is_table or size > _MOST_WHOLE:
            raise NotAloneError(f"a row is made of a whole array, {value.name or 'given'} {list(value.shape)}")
        if value.equation is not None and value.equation.effects:
            raise NotAloneError(f"{value.name} has effects")

    def _compute(self, value: Value) -> None:
        if value.equation is None:
            self._whole[value.number] = self._inputs[value.at] if value.constant is None else value.constant
            return
        results = bind(value.equation, [self._whole[one.number] for one in value.operands])
        self._whole[value.number] = results[value.output]
