"""Gradients that are summed over devices once for several runs of a loss: until then each device has its part.

XLA's partitioner sums a gradient over devices wherever it is made, because a loop carries whole arrays and no partial
sums. So the loss takes zeros for each weight, `[N, ...]`, one part a device, whose gradient is the weight's: parts add
up over runs without leaving their device, and are summed behind the last.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Equation,
    Path,
    Program,
    Site,
    aval_of,
    equation_at,
    evaluate,
    find_batch_dims,
    find_sites,
    trace,
)

from .weights import Covered, Entered, Key, Weight, covered, key_of, weight_of


class InParts(NamedTuple):
    """A loss that takes parts behind its arguments.

    **Fields:** `program`; its last argument is the tuple of parts. `leaves`: for each of these the leaf that it is of.
    `alone`: the leaves that have no gradient but in parts. `weights`: how the parts come together.
    """

    program: Program
    leaves: tuple[int, ...]
    alone: frozenset[int]
    weights: tuple[Weight, ...]

    def zeros(self) -> tuple[jax.Array, ...]:
        """Returns parts that are nothing yet."""
        pairs = zip(self.program.in_specs[-1], self.weights, strict=True)
        return tuple(jax.lax.with_sharding_constraint(jnp.zeros(x.shape, x.dtype), _spec(x, w)) for x, w in pairs)

    def summed(self, parts: Sequence[jax.Array], leaves: Sequence[Any]) -> list[Any]:
        """Adds the sums of parts to gradients. **Arguments:** `leaves`: gradients, None for those of `alone`."""
        found = list(leaves)
        for leaf, one, weight in zip(self.leaves, parts, self.weights, strict=True):
            total = weight.total(one, at=one.ndim - len(weight.sizes) - 1)
            found[leaf] = total if found[leaf] is None else found[leaf] + total
        return found


def in_parts(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
    divided: Mapping[int, Sequence[int | None] | int],
) -> InParts | None:
    """Returns a loss whose gradients of weights stay in parts; None where there are none.

    **Arguments:** as of `gathered`; `layouts`: of the leaves that are whole on the devices with other samples.
    """
    jaxpr = program.closed.jaxpr
    sites = [site for site in find_sites(program) if site.value.entry.leaf in layouts]
    dims = find_batch_dims(program, {site.path for site in sites if not site.within}, divided)
    chosen: dict[Key, Weight] = {}
    specs: dict[Key, jax.ShapeDtypeStruct] = {}
    rules: dict[Path, Any] = {}
    others: set[int] = set()
    held: dict[Key, Entered] = {}

    def replace(key: Key, found: Covered, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        return [found(inputs[1 - found.site.operand], held[key])]

    for site in sites:
        key, leaf, found = key_of(site), site.value.entry.leaf, None
        if not site.within and _is_leading(site, layouts):
            weight, equation = weight_of(site, layouts[leaf], mesh, batch_axes), equation_at(jaxpr, site.path)
            if found := covered(site, weight, equation, dims[site.path]):
                chosen[key], specs[key] = weight, _part_spec(site, weight, equation)
                rules[site.path] = partial(replace, key, found)
        if found is None:
            others.add(leaf)
    if not chosen:
        return None

    def enter(level: Path, inputs: list[Any], fed: Any) -> None:
        for number, key in enumerate(chosen):
            if key[0].level == level:
                held[key] = chosen[key].enter(inputs[key[0].input], fed[number])

    levels = {key[0].level: partial(enter, key[0].level) for key in chosen}

    def run(*args: Any) -> Any:
        *own, parts = args
        fed: dict[Path, Any] = {level: {} for level in levels}
        for number, key in enumerate(chosen):
            fed[key[0].level][number] = parts[number]
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(own), fed, entered=levels)
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    traced = trace(run, *program.in_specs, tuple(specs.values()), mesh=mesh)
    leaves = tuple(key[0].leaf for key in chosen)
    return InParts(traced, leaves, frozenset(leaves) - others, tuple(chosen.values()))


def _is_leading(site: Site, layouts: Mapping[int, Layout]) -> bool:
    """Whether scans have taken the first dims of a leaf, in their order, so that parts stack up to its shape."""
    entry = site.value.entry
    return entry.dims == tuple(range(len(entry.lengths), len(layouts[entry.leaf].shape)))


def _part_spec(site: Site, weight: Weight, equation: Equation) -> jax.ShapeDtypeStruct:
    sizes = (*site.value.entry.lengths, weight.num_parts, *weight.sizes)
    return jax.ShapeDtypeStruct(sizes, aval_of(equation.invars[site.operand]).dtype)


def _spec(parts: Any, weight: Weight) -> PartitionSpec:
    lengths = len(parts.shape) - len(weight.sizes) - 1
    return PartitionSpec(*[None] * lengths, weight.batch_axes, *weight.kept)
