"""Proving that a jaxpr gives its results part by part: it is evaluated on the shapes of parts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var, primitives

from braidax.program.bodies import aval_of
from braidax.program.dim_rules import line_at
from braidax.program.flow import Place
from braidax.program.prune import inputs_of

from .division import Division, Undivided
from .labels import BATCH
from .parts import Evaluation, Part
from .unit import WEIGHTS, Length, Maxima, Result, RotatedUnit

_MOST_SLICES = 4
_LEAST_SLICE = 1024  # narrower products are slower


def checked(unit: RotatedUnit, num_parts: int, num_batch_parts: int) -> RotatedUnit:
    """Returns a unit that was seen to work on parts, with what is known of its results.

    **Arguments:** `unit`: with what is known of its inputs. **Raises:** `Undivided` where it does not.
    """
    jaxpr, tops = unit.jaxpr, unit.tops
    known, one = _tried(unit, num_parts, num_batch_parts)
    cuts = {(at, dim) for at, dim, of in one.cut if of == BATCH and at not in one.uncut}
    more = dict(cuts)
    if more and len(more) == len(cuts):  # what is not made of samples, and met by them along one dim
        taken = tuple(one._replace(batch=more.get(at, one.batch)) for at, one in enumerate(unit.taken))
        unit = replace(unit, taken=taken)
        known, one = _tried(unit, num_parts, num_batch_parts)
    shifts, of_tops = _relative_to_maxima(jaxpr, tops, known) if tops else ({}, frozenset[Var]())
    makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    results: list[Result] = []
    for var in unit.outputs:
        part = known[var]
        if BATCH not in part.divided:
            raise Undivided("a result of it does not go along the samples", makers[var])
        if WEIGHTS not in part.divided and not part.is_partial and var not in of_tops:
            raise Undivided("a result of it is made of no part of a weight", makers[var])
        stacked = part.divided.index(WEIGHTS) if WEIGHTS in part.divided else None
        results.append(Result(part.divided.index(BATCH), stacked))
    numbers = {var: at for at, var in enumerate(jaxpr.outvars)}
    return replace(
        unit,
        results=tuple(results),
        maxima=Maxima(
            tuple(known[top].divided.index(BATCH) for top in tops),
            {numbers[var]: shift for var, shift in shifts.items() if var in numbers},
            frozenset(numbers[var] for var in of_tops if var in numbers),
        ),
    )


def in_slices(unit: RotatedUnit, num_parts: int, num_batch_parts: int) -> RotatedUnit:
    """Returns a unit whose long parts are cut again, as far as it was seen to work on slices.

    Weights, their gradients and what is computed of them are then there for one slice at a time.

    **Arguments:** `unit`: that was checked.
    """
    sizes = [aval_of(unit.jaxpr.invars[at]).shape[one.divided] for at, one in unit.weights.items()]
    parts = [-(-size // num_parts) for size in sizes]
    for num_slices in range(min(_MOST_SLICES, min(parts) // _LEAST_SLICE), 1, -1):
        one = replace(unit, length=Length(unit.size, num_slices))
        if any(part % num_slices for part in parts):
            if len({*sizes}) > 1 or any(result.stacked is not None for result in unit.results):
                continue
            one = replace(unit, length=Length(sizes[0], num_slices))
        try:
            _tried(one, num_parts, num_batch_parts)
        except Undivided:
            continue
        return one
    return unit


def joined(unit: RotatedUnit, num_parts: int, num_batch_parts: int, least_bytes: int) -> RotatedUnit:
    """Returns a unit whose short parts are taken two, four, … as one, as far as it was seen to work on those.

    **Arguments:** `unit`: that was checked. `least_bytes`: of weights; what has as many is not joined further.
    """
    if unit.num_slices > 1:
        return unit
    part_bytes = sum(_num_bytes(unit.jaxpr.invars[at]) for at in unit.weights) // num_parts
    while num_parts % (4 * unit.num_joined) == 0 and unit.num_joined * part_bytes < least_bytes:
        one = replace(unit, length=unit.length._replace(num_joined=2 * unit.num_joined))
        try:
            _tried(one, num_parts, num_batch_parts)
        except Undivided:
            break
        unit = one
    return replace(unit, length=unit.length._replace(is_ordered=_needs_place(unit, num_parts, num_batch_parts)))


def _needs_place(unit: RotatedUnit, num_parts: int, num_batch_parts: int) -> bool:
    """Whether it matters to a unit which part of the whole it is given."""
    if unit.tops or any(result.stacked is not None for result in unit.results):
        return True

    def part(index: Any, other: Any, *args: Any) -> list[Any]:
        weights, _ = _divisions(unit, num_parts, num_batch_parts, index)
        return unit.part(args, weights, _divisions(unit, num_parts, num_batch_parts, other)[1])

    index = jax.ShapeDtypeStruct((), jnp.int32)
    closed = jax.make_jaxpr(part)(index, index, *_specs_of_parts(unit, num_parts, num_batch_parts))
    return any(0 in inputs_of(closed, at) for at in range(len(closed.jaxpr.outvars)))


def keeping(unit: RotatedUnit, num_parts: int, num_batch_parts: int) -> RotatedUnit:
    """Returns a unit whose backward pass computes no product again that a device has room for.

    That is when all it keeps is no longer than its weights, all parts of them. **Arguments:** `unit`: that was checked.
    """
    known, _ = _tried(unit, num_parts, num_batch_parts)
    products = (one.outvars[0] for one in unit.jaxpr.eqns if one.primitive is primitives.dot_general_p)
    there = {var: known[var].divided for var in products if not known[var].is_partial}
    kept = {var: dims.index(BATCH) for var, dims in there.items() if BATCH in dims and WEIGHTS in dims}
    if sum(map(_num_bytes, kept)) <= num_batch_parts * sum(_num_bytes(unit.jaxpr.invars[at]) for at in unit.weights):
        return replace(unit, length=unit.length._replace(keeps=kept))
    return unit


def _num_bytes(var: Var) -> int:
    return aval_of(var).size * aval_of(var).dtype.itemsize


def _tried(unit: RotatedUnit, num_parts: int, num_batch_parts: int) -> tuple[dict[Var, Part], Evaluation]:
    """Evaluates a unit on the shapes of parts."""
    kept: list[Any] = []

    def divided(index: Any) -> tuple[Division, Division]:
        return _divisions(unit, num_parts, num_batch_parts, index)

    def run(index: Any, maxima: list[Any], *args: Any) -> None:
        one = unit.evaluation(*divided(index), maxima)
        kept[:] = [unit.run(one, args), one]

    index, specs = jax.ShapeDtypeStruct((), jnp.int32), _specs_of_parts(unit, num_parts, num_batch_parts)

    def maxima(index: Any, *args: Any) -> list[Any]:
        return unit.maxima_of(args, *divided(index)) if unit.tops else []

    jax.eval_shape(run, index, jax.eval_shape(maxima, index, *specs), *specs)
    return kept[0], kept[1]


def _divisions(unit: RotatedUnit, num_parts: int, num_batch_parts: int, index: Any) -> tuple[Division, Division]:
    part = Division(num_parts, index, unit.size, True, unit.num_slices, index, unit.num_joined)
    return part, Division(num_batch_parts, index, sums=False)


def _specs_of_parts(unit: RotatedUnit, num_parts: int, num_batch_parts: int) -> list[jax.ShapeDtypeStruct]:
    weights, batch = _divisions(unit, num_parts, num_batch_parts, 0)
    to: dict[int, Division] = {WEIGHTS: weights, BATCH: batch}
    specs: list[jax.ShapeDtypeStruct] = []
    for at, aval in enumerate(map(aval_of, unit.jaxpr.invars)):
        labels = unit.divided(at)
        shape = [n if one is None else to[one].part_size(n) for n, one in zip(aval.shape, labels, strict=True)]
        specs.append(jax.ShapeDtypeStruct(tuple(shape), aval.dtype))
    return specs


def _relative_to_maxima(
    jaxpr: Jaxpr, tops: Sequence[Var], known: Mapping[Var, Part]
) -> tuple[dict[Var, Var], frozenset[Var]]:
    """Returns the sums of `exp(x - m)`, and what each has for `m`; and what follows from maxima alone.

    **Raises:** `Undivided` where a maximum is used otherwise, or has a gradient.
    """
    follows, stopped = {*tops}, set[Var]()
    shifts, exps, scales = dict[Var, Var](), dict[Var, Var](), dict[Var, Var]()
    for equation in jaxpr.eqns:
        reads = [atom for atom in equation.invars if not isinstance(atom, Literal) and atom in follows]
        if not reads:
            continue
        (made, *_) = equation.outvars
        operand, name = equation.invars[-1], equation.primitive
        if all(atom in stopped for atom in reads) or name is primitives.stop_gradient_p:
            stopped.update(equation.outvars)
        follows.update(equation.outvars)
        in_parts = [atom for atom in reads if WEIGHTS in known[atom].divided]
        if WEIGHTS in known[made].divided:
            if name is primitives.sub_p and reads == [operand] and not in_parts and operand in stopped:
                shifts[made] = operand
            elif name is primitives.exp_p and reads[0] in shifts:
                exps[made] = shifts[reads[0]]
            elif name is primitives.convert_element_type_p and reads[0] in {**shifts, **exps}:
                of = shifts if reads[0] in shifts else exps
                of[made] = of[reads[0]]
            else:
                raise Undivided(f"{name.name} at {line_at(equation, Place())} uses a maximum before all parts are seen")
        elif in_parts:
            if name is not primitives.reduce_sum_p or reads[0] not in exps:
                raise Undivided(f"{name.name} at {line_at(equation, Place())} uses a maximum before all parts are seen")
            scales[made] = exps[reads[0]]
    of_tops = frozenset(var for var in follows if var not in scales and WEIGHTS not in known[var].divided)
    outputs = {var for var in jaxpr.outvars if var in follows}
    if wrong := outputs - {*scales} - (of_tops & stopped):
        raise Undivided(f"a maximum with a gradient, or what is made of it, is used elsewhere: {wrong.pop().aval}")
    return scales, of_tops
