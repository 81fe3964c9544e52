"""The weight that is used last and is whole on every device: its gradient is summed behind all others, in pieces.

XLA's partitioner sums what each use leaves by itself: of tied embeddings a table's bytes twice, the second time behind
all work. Here all uses add to the same parts, which cross once, a piece while the next one is made.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Equation,
    Path,
    Program,
    Site,
    equation_at,
    evaluate,
    find_batch_dims,
    find_sites,
    trace,
)

from .last_gradient import Pieces, may_be_cut, pieces_of
from .weights import Covered, Entered, covered, key_of, weight_of

_ALONE = 8  # pieces; of a weight with one use nothing is saved, and fewer hide no more than XLA's own order


class _Found(NamedTuple):
    """**Fields:** `pieces`: of the last product's gradient. `others`: by path, other uses of its weight."""

    pieces: Pieces
    others: Mapping[Path, Covered]


def summed_last(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
    divided: Mapping[int, Sequence[int | None] | int],
) -> Program:
    """Returns a program whose last large weight has its gradient behind all others; itself where there is none.

    **Arguments:** as of `gathered`; `layouts`: of the leaves that are whole on the devices with other samples.
    """
    found = _find(program, layouts, mesh, batch_axes, divided)
    if found is None:
        return program
    pieces, last = found.pieces, found.pieces.product.site
    specs = jax.tree.leaves(program.in_specs[0])
    weights = [leaf for leaf, spec in enumerate(specs) if leaf in layouts and jnp.issubdtype(spec.dtype, jnp.inexact)]
    held: dict[bool, Entered] = {}

    def enter(inputs: list[Any], fed: Any) -> None:
        for is_last, parts in zip((True, False), fed, strict=True):
            held[is_last] = pieces.product.weight.enter(inputs[last.value.entry.input], parts)

    def replace(one: Covered, is_last: bool, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        return [one(inputs[1 - one.site.operand], held[is_last], is_put_off=is_last)]

    rules = {path: partial(replace, one, False) for path, one in found.others.items()}
    rules[last.path] = partial(replace, pieces.product, True)

    def run(*args: Any) -> Any:
        leaves, known, rest = pieces.put_off(jax.tree.leaves(args), weights)
        outputs, _ = evaluate(program.closed, rules, leaves, {(): (known, rest)}, entered={(): enter})
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs, mesh=mesh)


def _find(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
    divided: Mapping[int, Sequence[int | None] | int],
) -> _Found | None:
    specs = enumerate(jax.tree.leaves(program.in_specs[0]))
    large = {leaf for leaf, spec in specs if leaf in layouts and not layouts[leaf].axes and may_be_cut(spec)}
    sites = [site for site in find_sites(program) if site.value.entry.leaf in large] if large else []
    sites = [site for site in sites if not (site.within or site.value.entry.level or site.value.in_loop)]
    if all(site.role != "product" for site in sites):
        return None
    dims = find_batch_dims(program, {site.path for site in sites}, divided)

    def used(site: Site) -> Covered | None:
        weight = weight_of(site, layouts[site.value.entry.leaf], mesh, batch_axes)
        return covered(site, weight, equation_at(program.closed.jaxpr, site.path), dims[site.path])

    for last in sorted(sites, key=lambda site: site.path, reverse=True):
        product = used(last) if last.role == "product" else None
        pieces = None if product is None else pieces_of(product)
        if pieces is not None:
            same = [site for site in sites if site is not last and key_of(site) == key_of(last)]
            others = {site.path: one for site in same if (one := used(site)) is not None}
            if others or len(pieces.bounds) > _ALONE:
                return _Found(pieces, others)
    return None
