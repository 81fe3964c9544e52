"""Which variables go around, stay split, are gathered, perhaps kept, or lie whole, where each may: by what it costs."""

import fnmatch
import functools
import operator
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from braidax.parallel.plan.model import Model
from braidax.parallel.plan.placements import Gathered, Hops, Placement, Replicated, Rotated
from braidax.parallel.plan.strategy import Choice
from braidax.program import Cut

from .choosing import Kind, Offer, cheapest
from .prices import Price, Prices
from .ring import planned_ring


class ByCost(NamedTuple):
    """What was chosen, but for what overrides place.

    **Fields:** by path, the `kinds`; in `words` what each would cost; and `seconds` of a step that the chosen one
    waits, of what is placed alike in the proportion of bytes.
    """

    kinds: Mapping[str, Kind]
    words: Mapping[str, str]
    seconds: Mapping[str, float]


def by_cost(
    model: Model,
    prices: Prices,
    sharded: Mapping[str, Choice],
    rings: Mapping[str, Cut],
    groups: Mapping[str, int],
    overrides: Mapping[str, Placement],
    memory_bytes: int | None,
    *,
    splits: Collection[int] = (),
) -> ByCost:
    """Chooses for each variable of a model, for those that belong together alike, what takes the fewest seconds.

    **Arguments:** `sharded`: what `FullySharded` chooses. `rings`: by path, the dims that may go around. `groups`: by
    path, of which group of `model.dims` that dim is, if of any. `splits`: groups whose variables can stay where they
    are, and the work be split. `memory_bytes`: as of `cheapest`.

    **Raises:** `ArgumentError` when a device has no room for the fewest bytes.
    """
    ruled = {path: one for path in model.variables if (one := _override(overrides, path)) is not None}
    alike: dict[int | str, list[str]] = {}
    for path in model.variables:
        if path not in ruled:
            alike.setdefault(groups.get(path, path) if path in rings else path, []).append(path)
    offers = [_offer(prices, sharded, rings, splits, root, paths) for root, paths in alike.items()]
    fixed = functools.reduce(operator.add, (prices.of(*one) for one in ruled.items()), Price(0.0, 0.0))
    held = fixed.held_bytes + fixed.moment_bytes + model.state_bytes.get("", 0)
    kinds: dict[str, Kind] = {path: "rotated" for path, one in ruled.items() if isinstance(one, Rotated)}
    words, seconds = dict[str, str](), dict[str, float]()
    for offer, kind in zip(offers, cheapest(offers, memory_bytes, held), strict=True):
        kinds |= dict.fromkeys(offer.paths, kind)
        words |= dict.fromkeys(offer.paths, offer.words if len(offer.prices) > 1 else "")
        waits = offer.prices[kind].seconds
        shares = prices.shares(offer.paths, moving=kind != "replicated")
        seconds |= {path: waits * part for path, part in shares.items()}
    return ByCost(kinds, words, seconds)


def _offer(
    prices: Prices,
    sharded: Mapping[str, Choice],
    rings: Mapping[str, Cut],
    splits: Collection[int],
    root: int | str,
    paths: list[str],
) -> Offer:
    """Of variables that are placed alike."""
    told: dict[Kind, Price] = {}
    group, ring, other = root if isinstance(root, int) else None, None, None
    whole, in_parts = (prices.between(group, in_parts=one) for one in (False, True))
    if all(path in rings for path in paths):
        cuts = {path: rings[path] for path in paths}
        told["rotated"] = prices.rotated(cuts, prices.hops) + in_parts
        other_hops: Hops = "ahead" if prices.hops == "in place" else "in place"
        other = other_hops, prices.rotated(cuts, other_hops) + in_parts
        ring = planned_ring("", [prices.ring_work(path, rings[path]) for path in paths])
    if group is not None and group in splits:
        told["split"] = prices.split(paths, group) + whole
    placed = {path: sharded[path].placement for path in paths}
    if dims := {path: one.dim for path, one in placed.items() if isinstance(one, Gathered)}:
        others = [path for path in paths if path not in dims]
        told["gathered"] = prices.gathered(dims) + prices.replicated(others) + whole
        told["kept"] = prices.gathered(dims, keeps=True) + prices.replicated(others) + whole
    told["replicated"] = prices.replicated(paths) + whole
    return Offer((*paths,), told, None if ring is None else ring.break_even_tokens, other)


def placed(choice: Choice, kind: Kind | None) -> tuple[Placement, str]:
    """Returns how what `FullySharded` has chosen to gather lies where cost says `kind`, and what that is in words."""
    if kind == "replicated" or not isinstance(choice.placement, Gathered):
        return Replicated(), "whole, gradient all-reduced"
    if kind == "kept":
        return replace(choice.placement, backward="kept"), "gathered where it is used, and kept; gradient scattered"
    return choice.placement, "gathered where it is used, gradient scattered"


def _override(overrides: Mapping[str, Placement], path: str) -> Placement | None:
    return next((one for pattern, one in overrides.items() if fnmatch.fnmatchcase(path, pattern)), None)
