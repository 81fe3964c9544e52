"""What tensor parallelism splits of a loss: it depends on how many devices an axis has, and what stays is on each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from braidax.parallel import FullySharded, Gathered, Split, TensorParallel
from braidax.parallel.plan.costs.between import between_of
from braidax.parallel.plan.layout import Axis, Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.strategy import num_bytes


class Splits(NamedTuple):
    """Which part of a loss is split along an axis, or along each of `n`.

    **Fields:** of `size` devices; of the bytes of `variables`, and of `activations`, and of `flops`: from 0 to 1;
    `summed_bytes`: of what products sum, forward and backward. Numbers, or float `[n]` each.
    """

    size: Any
    variables: Any
    activations: Any
    flops: Any
    summed_bytes: Any


def splits_of(model: Model, *, flops: float, activation_bytes: float, sizes: Sequence[int]) -> tuple[Splits, ...]:
    """Returns what `TensorParallel` splits along axes of some sizes.

    **Arguments:** `flops`: of one run of the loss. `activation_bytes`: at its peak.
    """
    taken = {path: Layout.whole(spec.shape) for path, spec in model.variables.items()}
    kept = {root: between_of(model, root) for root in model.dims.groups}
    paths, whole = [*model.variables], sum(map(num_bytes, model.variables.values()))
    found: list[Splits] = []
    for size in sizes:
        chosen = TensorParallel().place(model, Axis("tensor", size), taken)
        split = {path for path, choice in chosen.items() if isinstance(choice.placement, Split)}
        roots = [
            root
            for root, group in model.dims.groups.items()
            if group.leaves and all(_is_along(chosen[paths[leaf]].placement, dim) for leaf, dim in group.leaves)
        ]
        computed = sum(site.cost.flops for path in split for site in model.sites.get(path, ()))
        found.append(
            Splits(
                size,
                sum(num_bytes(model.variables[path]) for path in split) / max(whole, 1),
                min(1.0, sum(kept[root].kept for root in roots) / max(activation_bytes, 1.0)),
                min(1.0, computed / max(flops, 1.0)),
                2 * sum(kept[root].summed for root in roots),
            )
        )
    return tuple(found)


def gathered_of(model: Model, sizes: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Returns which part of the bytes of variables `FullySharded` splits along axes of some sizes: what is small, or
    has no dim that an axis divides, stays whole."""
    taken = {path: Layout.whole(spec.shape) for path, spec in model.variables.items()}
    whole, found = sum(map(num_bytes, model.variables.values())), list[tuple[int, float]]()
    for size in sizes:
        chosen = FullySharded().place(model, Axis("sharded", size), taken)
        split = [path for path, choice in chosen.items() if isinstance(choice.placement, Gathered)]
        found.append((size, sum(num_bytes(model.variables[path]) for path in split) / max(whole, 1)))
    return tuple(found)


def along(splits: Sequence[Splits], sizes: Any) -> Splits:
    """Returns what is split along axes of some sizes, float `[n]` each. All is, where nothing is known of a size."""
    known = {one.size: one for one in splits}
    every, at = np.unique(sizes.astype(int), return_inverse=True)
    rows = [known.get(int(size), Splits(int(size), 1.0, 1.0, 1.0, np.nan)) for size in every]
    return Splits(*(np.array(column)[at] for column in zip(*rows, strict=True)))


def _is_along(placement: Any, dim: int) -> bool:
    return isinstance(placement, Split) and placement.dim == dim
