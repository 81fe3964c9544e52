"""Experts: what each of them does with its own samples, which may as well be done where its weights are.

Weights of experts have a dim that products take one by one: each element of it meets its own part of the samples, and
nothing else. From the first such product to the last weight behind it nothing is summed over that dim.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import remat_p, scan_p

from braidax.program.bodies import Path, aval_of, bodies, equation_at
from braidax.program.dim_rules import num_bytes
from braidax.program.dims import find_dims
from braidax.program.inline import inlined
from braidax.program.outline import Unit
from braidax.program.sites import Site, dims_of_value, find_sites
from braidax.program.trace import Program

from .division import Division, Undivided
from .labels import BATCH, labeled
from .parts import Evaluation, Part
from .region import Region
from .unit import WEIGHTS

Dims = tuple[int, int] | None
"""Along which dim of a value samples are, and along which experts; None where neither is."""


@dataclass(frozen=True)
class Experts:
    """Equations that experts do, each for itself.

    **Fields:** `unit`: them. `dims`: by leaf, along which dim of it experts lie. `weights`: by number of what the unit
    takes that is a weight, along which dim of it. `inputs`: of what else it takes, `outputs`: of what it gives.
    `num_bytes`: of both, where something lies along samples and experts, as often as loops run. `remat`: whether they
    are computed again in the backward pass. `count`: of experts.
    """

    unit: Unit
    dims: Mapping[int, int]
    weights: Mapping[int, int]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    num_bytes: int
    remat: bool
    count: int

    def part(self, jaxpr: Jaxpr, args: Sequence[Any], experts: Division, batch: Division) -> list[Any]:
        """Returns what some experts make of some samples.

        **Arguments:** `jaxpr`: of the unit, as it was outlined. `args`: in their parts. **Raises:** `Undivided` where
        that cannot be computed by itself.
        """
        parts: list[Part] = []
        for at, (value, dims) in enumerate(zip(args, self.inputs, strict=True)):
            known = dict(zip(dims or (), (BATCH, WEIGHTS), strict=False)) | {self.weights.get(at, -1): WEIGHTS}
            parts.append(Part(value, tuple(known.get(dim) for dim in range(value.ndim)), given=at))
        made = Evaluation({WEIGHTS: experts, BATCH: batch}).run(jaxpr, (), parts)
        found = [made[var] for var in jaxpr.outvars if isinstance(var, Var)]
        for one, dims in zip(found, self.outputs, strict=True):
            labels = [one.divided.index(label) if label in one.divided else None for label in (BATCH, WEIGHTS)]
            if one.is_partial or labels != [*(dims or ())]:
                raise Undivided("what experts give is no part of it")
        return [one.value for one in found]


def find_experts(
    program: Program, divided: Mapping[int, Sequence[int | None] | int], num_batch_parts: int
) -> tuple[Program, list[Experts]]:
    """Finds what experts do.

    **Arguments:** `program`: its first argument holds weights. `divided`: as of `find_batch_dims`. `num_batch_parts`:
    among how many devices samples are.

    **Returns:** a program of the same values, to which the units belong, and what was found.
    """
    program = inlined(program)
    jaxpr, sites = program.closed.jaxpr, find_sites(program)
    one_by_one = {dim for site in sites for dim in _taken_one_by_one(jaxpr, site)}
    if not one_by_one:
        return program, []
    found: list[Experts] = []
    for group in find_dims(program).groups.values():
        dims = dict(group.leaves)
        if len(dims) < len(group.leaves) or not {*group.leaves} & one_by_one:
            continue
        labels = labeled(program, dims, divided)
        by_path: dict[Path, list[Site]] = {}
        for site in sites:
            by_path.setdefault(site.path, []).append(site)
        own = [site for site in sites if site.value.entry.leaf in dims]
        forms = {id(one) for site in own for one in (*site.value.casts, *site.value.view)}
        for path in dict.fromkeys(site.path[:-1] for site in own if _is_weight(site)):
            body = bodies(equation_at(jaxpr, path[:-1]))[path[-1]].jaxpr if path else jaxpr
            around = [equation_at(jaxpr, path[:end]) for end in range(1, len(path), 2)]
            for root in {labels.leaves[leaf] for leaf in dims} - {BATCH}:
                region = Region(body, path, labels, by_path, forms, root)
                found += _found(region, dims, root, num_batch_parts, around, len(found))
    return program, found


def _is_weight(site: Site) -> bool:
    return site.role == "product" and not site.value.in_loop


def _taken_one_by_one(jaxpr: Jaxpr, site: Site) -> Iterator[tuple[int, int]]:
    """The dims of a leaf that a product has along both sides and in its result."""
    dims = dims_of_value(site.value)
    if _is_weight(site) and dims is not None:
        for dim in equation_at(jaxpr, site.path).params["dimension_numbers"][1][site.operand]:
            yield site.value.entry.leaf, dims[dim]


def _found(
    region: Region,
    dims: Mapping[int, int],
    root: int,
    num_batch_parts: int,
    around: Sequence[JaxprEqn],
    number: int,
) -> Iterator[Experts]:
    times = math.prod(one.params["length"] for one in around if one.primitive is scan_p)
    for members in region.apart():
        jaxpr = region.outlined(members)
        leaves = {region.weights[var].value.entry.leaf for var in jaxpr.invars if var in region.weights}
        try:
            inputs = [None if var in region.weights else _dims(region, var, root) for var in jaxpr.invars]
            weights = {
                at: _experts_of(region, var, root) for at, var in enumerate(jaxpr.invars) if var in region.weights
            }
            outputs = [_dims(region, var, root) for var in jaxpr.outvars]
        except Undivided:
            continue
        pairs = zip((*jaxpr.invars, *jaxpr.outvars), (*inputs, *outputs), strict=True)
        moved = [(var, aval_of(var).shape, at) for var, at in pairs if at is not None]
        if None in outputs or any(shape[at[0]] % num_batch_parts for _, shape, at in moved):
            continue
        ((_, shape, (_, dim)), *_) = moved
        yield Experts(
            Unit(f"experts_{number}", region.path, tuple(sorted(members))),
            {leaf: dims[leaf] for leaf in leaves},
            weights,
            tuple(inputs),
            tuple(outputs),
            sum(num_bytes(var) for var, _, _ in moved) * times,
            any(one.primitive is remat_p for one in around),
            shape[dim],
        )
        number += 1


def _experts_of(region: Region, var: object, root: int) -> int:
    if (dim := region.divided(var, root)) is None:
        raise Undivided("a change of its shape hides along which dim experts lie")
    return dim


def _dims(region: Region, var: object, root: int) -> Dims:
    """The dims of a value. **Raises:** `Undivided` where it has only one of both."""
    batch, experts = region.divided(var, BATCH), region.divided(var, root)
    if batch is None and experts is None:
        return None
    if batch is None or experts is None:
        raise Undivided("it lies along samples, or along experts, but not along both")
    return batch, experts
