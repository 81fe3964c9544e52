"""Which rows without a gradient move in a way whose missed steps can be summed up, read off the optimizer's terms."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from braidax.program import Term, Terms, bounds, terms_of, trace

from .table_update import AdamFading, Fading, TableUpdate

NEGLIGIBLE = 1e-9  # of a sum; float32 has 6e-8
MAX_NODES = 48


def recognized(table: TableUpdate) -> Fading | AdamFading | None:
    """Returns how missed steps can be summed up, where that is known, in float32 and with rates that have a limit."""
    catch_up = table.catch_up
    if catch_up is None or any(scalar.kind != "count" for scalar in catch_up.scalars):
        return None
    if any(term.dtype != np.float32 for term in (table.value, catch_up.move, *(one.term for one in table.kept))):
        return None
    kept = [one.term for one in table.kept]
    factors = [_factor(after, one) for after, one in zip(catch_up.next, kept, strict=True)]
    parts = _parts(table.terms, catch_up.move)
    if parts is None or None in factors:
        return None
    grown = parts.pop(table.value, table.terms.literal(0, (), table.value.dtype))
    low, high = bounds(grown)
    if not -1 < low <= high <= 0 or any(not np.isfinite(bounds(rate)).all() for rate in parts.values()):
        return None
    known = tuple(float(factor) for factor in factors if factor is not None)
    if {*parts} <= {*kept}:
        rates = tuple(parts.get(one) for one in kept)
        fades = all(factor < 1 for factor, rate in zip(known, rates, strict=True) if rate is not None)
        return Fading(known, rates, grown) if fades else None
    if len(parts) == 1:
        ((direction, rate),) = parts.items()
        return _adam(table, direction, rate, known, grown)
    return None


def _factor(after: Term, kept: Term) -> float | None:
    """By what something kept is multiplied in each step, if that is all."""
    if after is kept:
        return 1.0
    if after.equals(0):
        return 0.0
    if after.made_by("mul"):
        one, other = after.operands
        number = other if one is kept else one
        if kept in (one, other) and number.is_literal and 0 <= number.value <= 1:
            return float(number.value)
    return None


def _parts(terms: Terms, move: Term) -> dict[Term, Term] | None:
    """Takes a term apart into a sum of multiples. **Returns:** the scalar that each part is multiplied by."""
    if move.equals(0):
        return {}
    if move.made_by("mul") or move.made_by("div"):
        one, other = move.operands
        if move.made_by("mul") and not one.shape:
            one, other = other, one
        if other.shape or not one.shape:
            return _alone(terms, move)
        return _scaled(_parts(terms, one), lambda rate: _made(terms, move, [rate, other]))
    if move.made_by("neg"):
        return _scaled(_parts(terms, move.operands[0]), lambda rate: _made(terms, move, [rate]))
    if move.made_by("add") or move.made_by("sub"):
        found = [_parts(terms, one) if one.shape else None for one in move.operands]
        if found[0] is None or found[1] is None:
            return None
        zero = terms.literal(0, (), move.dtype)
        return {
            part: _made(terms, move, [found[0].get(part, zero), found[1].get(part, zero)])
            for part in [*found[0], *(part for part in found[1] if part not in found[0])]
        }
    return _alone(terms, move)


def _alone(terms: Terms, part: Term) -> dict[Term, Term]:
    return {part: terms.literal(1, (), part.dtype)}


def _scaled(parts: Mapping[Term, Term] | None, by: Any) -> dict[Term, Term] | None:
    return None if parts is None else {part: by(rate) for part, rate in parts.items()}


def _made(terms: Terms, like: Term, operands: list[Term]) -> Term:
    """The same operation on scalars."""
    assert like.making is not None, "not of an input"
    scalar = jax.ShapeDtypeStruct((), like.dtype)
    return terms.simplified(like.making.primitive, like.making.params, operands, scalar)


def _adam(
    table: TableUpdate, direction: Term, rate: Term, factors: tuple[float, ...], grown: Term
) -> AdamFading | None:
    """Recognizes the direction of `optax.scale_by_adam`: it is the very term that optax' own program comes to."""
    assert table.catch_up is not None
    eps = _added(direction)
    if len(factors) != 2 or eps is None:
        return None
    for scalar in table.catch_up.scalars:
        for mu, nu in ((0, 1), (1, 0)):
            found = AdamFading(mu, nu, factors[mu], factors[nu], eps, scalar.term, rate, grown)
            if not 0 < found.b2 < 1 or found.b1 >= 1 or num_nodes(found.b1, found.b2) > MAX_NODES:
                continue
            if _direction(table, found) is direction:
                return found
    return None


def _added(direction: Term) -> float | None:
    """The number added to a root that something is divided by."""
    if direction.made_by("div") and direction.operands[1].made_by("add"):
        for one in direction.operands[1].operands:
            if one.is_literal and one.value > 0:
                return float(one.value)
    return None


def _direction(table: TableUpdate, found: AdamFading) -> Term:
    """The direction in a row without a gradient, by optax."""
    terms, like = table.terms, jax.ShapeDtypeStruct(table.value.shape, table.value.dtype)
    adam = optax.scale_by_adam(found.b1, found.b2, found.eps)

    def direction(gradient: Any, count: Any, mu: Any, nu: Any) -> Any:
        return adam.update(gradient, optax.ScaleByAdamState(count, mu, nu))[0]

    program = trace(direction, like, jax.ShapeDtypeStruct((), jnp.int32), like, like)
    zero = terms.literal(0, like.shape, like.dtype)
    inputs = [zero, found.count, table.kept[found.mu].term, table.kept[found.nu].term]
    (made,) = terms_of(terms, program.closed, inputs)
    return terms.rested(made)


def num_terms(ratio: float) -> int:
    """Returns how many terms of a series that fades by `ratio` matter."""
    return 1 if ratio == 0 else math.ceil(math.log(NEGLIGIBLE * (1 - ratio)) / math.log(ratio))


def num_nodes(b1: float, b2: float) -> int:
    """Returns how many nodes bring interpolation of Adam below what float32 sees, over the widest range of floors."""
    if b1 == 0:
        return 2
    ratio = b1 / math.sqrt(b2)
    if ratio >= 1 - 1e-3:
        return MAX_NODES + 1
    most = num_terms(ratio)
    length = -most * math.log(b2) / 2 + math.log((1 - b2 ** (most + 1)) / (1 - b2**2)) / 2
    reach = 2 * math.pi / length
    return max(2, math.ceil(math.log(NEGLIGIBLE) / -math.log(reach + math.sqrt(1 + reach**2))))
