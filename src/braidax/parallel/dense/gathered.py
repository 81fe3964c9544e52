"""Weights that are split over an axis, gathered where they are used, and whose gradients are scattered back.

A weight enters a part of the program (the whole of it, the body of a loop over layers, what a remat computes again)
as a shard. There it is gathered once. An equation that multiplies by it is computed in the global view; the gradient
of the weight is left as one part a device, and all parts that have come together for one weight are summed and
scattered at once. Rows of a table are looked up in shards, and exchanged. What no rule covers uses the gathered weight
in the global view, and XLA sums its gradient.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh

from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Equation,
    Path,
    Program,
    Site,
    bind,
    equation_at,
    evaluate,
    find_batch_dims,
    find_sites,
    trace,
    viewed,
    with_names_saved,
)

from .last_gradient import Pieces, pieces_of
from .weights import Entered, Key, Weight, covered, key_of, looked_up, weight_of

_KEPT = "braidax_gathered"  # the name of what a remat keeps


def gathered(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
    divided: Mapping[int, Sequence[int | None] | int],
    *,
    rings: Collection[Path] = (),
    in_order: bool = True,
) -> Program:
    """Returns a program that gathers weights where it uses them.

    **Arguments:** `program`: its first argument holds the weights. `layouts`: of the leaves of it that are gathered, by
    number. `mesh`: with automatic axes. `batch_axes`: over which samples are divided. `divided`: as of
    `find_batch_dims`. `rings`: paths of calls that take shards as they lie. `in_order`: whether the compiler keeps to
    an order; else the last gradient is not made in pieces.
    """
    sites = _sites(program, layouts, rings)
    dims = find_batch_dims(program, {site.path for site in sites}, divided)
    weights = _weights(sites, dims, layouts, mesh, batch_axes)
    used = [site for site in sites if key_of(site) in weights]
    if not used:
        return program
    last = max(used, key=lambda site: site.path)
    if in_order and not last.value.entry.level:  # along its own dim, else it is gathered with what is needed first
        weights[key_of(last)] = replace(weights[key_of(last)], is_turned=False)
    kept = {key for key in weights if layouts[key[0].leaf].keeps}
    program = _keeping(program, [site.path for site in used if key_of(site) in kept])
    pieces = _put_off(last, used, program, weights[key_of(last)], dims[last.path]) if in_order else None
    held: dict[Key | None, Entered] = {}

    def enter(level: Path, inputs: list[Any], fed: Any) -> None:
        for key in (key for key in weights if key[0].level == level):
            one = weights[key].enter(inputs[key[0].input])
            held[key] = one._replace(full=checkpoint_name(one.full, _KEPT)) if key in kept else one
            if pieces is not None and key == key_of(last):
                held[None], held[key] = (held[key]._replace(parts=parts) for parts in fed)

    def stand_in(at: Sequence[Site], equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        one = at[0]  # where there are others, the role of each is "other", which nothing covers
        if read := looked_up(*(given := (one, weights[key_of(one)], equation, dims[one.path]))):
            return [read(inputs, held[key_of(one)])]
        if found := covered(*given, stays=one is last or key_of(one) in kept):
            is_put_off = one is last and pieces is not None
            return [found(inputs[1 - one.operand], held[None if is_put_off else key_of(one)], is_put_off=is_put_off)]
        for site in at:
            inputs[site.operand] = viewed(site)(held[key_of(site)].full)
        return bind(equation, inputs)

    rules = {path: partial(stand_in, at) for path, at in _by_path(used).items()}
    levels = {key[0].level: partial(enter, key[0].level) for key in weights}

    def run(*args: Any) -> Any:
        leaves, fed = jax.tree.leaves(args), dict[Path, Any]()
        if pieces is not None:
            leaves, *fed[()] = pieces.put_off(leaves, layouts)
        outputs, _ = evaluate(program.closed, rules, leaves, fed, entered=levels, unguarded=_early(weights))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs, mesh=mesh)


def _weights(
    sites: Sequence[Site],
    dims: Mapping[Path, Sequence[int | None]],
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
) -> dict[Key, Weight]:
    """Returns what is gathered: what samples meet."""
    met = [site for site in sites if any(dim is not None for dim in dims[site.path])]  # else computed on shards
    found = {key_of(one): weight_of(one, layouts[one.value.entry.leaf], mesh, batch_axes) for one in met}
    return {key: weight for key, weight in found.items() if weight.gathers}


def _keeping(program: Program, paths: Sequence[Path]) -> Program:
    """Returns a program whose remats around some uses keep what is gathered for both passes."""
    for path in paths:
        program = with_names_saved(program, path, {_KEPT})
    return program


def _by_path(sites: Sequence[Site]) -> dict[Path, list[Site]]:
    found: dict[Path, list[Site]] = {}
    for site in sites:
        found.setdefault(site.path, []).append(site)
    return found


def _sites(program: Program, leaves: Collection[int], rings: Collection[Path]) -> list[Site]:
    """Returns where some leaves are used, but on rings."""
    sites = [site for site in find_sites(program) if site.value.entry.leaf in leaves and not site.within]
    return [site for site in sites if not any(site.path[: len(ring)] == ring for ring in rings)]


def _early(weights: Mapping[Key, Weight]) -> dict[Path, set[int]]:
    """Returns what a remat in a loop does not hold back: there, too, a layer is gathered under another one's work."""
    early: dict[Path, set[int]] = {}
    for entry, _ in weights:
        if entry.lengths:
            early.setdefault(entry.level[:-1], set()).add(entry.input)
    return early


def _put_off(
    last: Site, used: Sequence[Site], program: Program, weight: Weight, dims: Sequence[int | None]
) -> Pieces | None:
    """Returns in which pieces the gradient of the last use is made, if it is the only one of that weight."""
    others = [site for site in used if site is not last and key_of(site) == key_of(last) and site.role != "rows"]
    equation = equation_at(program.closed.jaxpr, last.path)
    product = None if others else covered(last, weight, equation, dims, stays=True)
    return None if product is None else pieces_of(product)
