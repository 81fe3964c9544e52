"""Experts: whether their weights go around, or stay and are sent what is for them; by bytes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from braidax.program import Cut

from .layout import Axis, Layout
from .model import Model, RotatedUses
from .placements import Split
from .strategy import Choice, in_words, num_bytes


@dataclass(frozen=True)
class ChosenExperts:
    """**Fields:** `exchanged`: choices for weights that stay. `told`: of those that go around, what staying sends."""

    exchanged: Mapping[str, Choice] = field(default_factory=dict[str, Choice])
    told: Mapping[str, str] = field(default_factory=dict[str, str])


def dims_of_experts(
    model: Model, axis: Axis, may: Collection[tuple[str, int]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns, by path, the dims along which experts can go around although something else cannot do them part by
    part, such as a `top_k` that picks them; and the groups that these are.

    **Arguments:** `may`: paths and dims that are free for it.
    """
    paths, found, roots = [*model.variables], dict[str, int](), dict[str, int]()
    seeds = {pair for one in model.experts for pair in one.dims.items()}
    for root, group in model.dims.groups.items():
        dims = {paths[leaf]: dim for leaf, dim in group.leaves}
        own = {path for path, dim in seeds if dims.get(path) == dim}
        if not group.blocked or group.divisor % axis.size or not own or not {*dims.items()} <= {*may}:
            continue
        uses = model.find_rotated({path: Cut(dim, ()) for path, dim in dims.items()}, axis)
        summed = {path for unit in uses.units if not unit.stacks for path in unit.paths} - {*uses.left}
        if own <= summed:
            found |= {path: dims[path] for path in summed}
            roots |= dict.fromkeys(summed, root)
    return found, roots


def choose_experts(
    model: Model, axis: Axis, uses: RotatedUses, taken: Mapping[str, Layout], name: str
) -> ChosenExperts:
    """Compares, for experts that may go around, what that sends with what is sent where they stay.

    Going around sends weights forward, backward, and gradients: `3 W (N - 1) / N` a device. Staying sends what comes to
    experts and what they give, forward, backward, and under a remat again: `2 R (N - 1) / N` or `3 R (N - 1) / N` for
    the `R` bytes of a device's own samples.
    """
    exchanged, told = dict[str, Choice](), dict[str, str]()
    for one in model.experts:
        around = [unit.paths for unit in uses.units if unit.paths & {*one.dims}]
        even = one.num_experts % axis.size == 0 and not any(taken[path].axes for path in one.dims)
        if not around or {path for paths in around for path in paths} != {*one.dims} or not even:
            continue
        weights = 3 * sum(num_bytes(model.variables[path]) for path in one.dims) * _others(axis) * model.microbatches
        samples = one.num_bytes / model.num_parts * _others(axis) * model.microbatches
        of_weights, of_samples = in_words(weights), f"{in_words(samples)} of what is for them, there and back"
        for path, dim in one.dims.items():
            if samples < weights:
                why = f"experts stay: a device sends {of_samples}, a step; weights around a ring would be {of_weights}"
                exchanged[path] = Choice(Split(dim), f"{name}: {why}")
            else:
                told[path] = f"; experts go around: a device sends {of_weights} a step; if they stayed, {of_samples}"
    return ChosenExperts(exchanged, told)


def _others(axis: Axis) -> float:
    return (axis.size - 1) / axis.size
