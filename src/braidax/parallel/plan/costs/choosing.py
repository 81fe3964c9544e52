"""The choice of placements by what they cost: the fewest seconds whose bytes a device has room for."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from braidax.errors import ArgumentError
from braidax.parallel.plan.placements import Hops
from braidax.parallel.plan.strategy import in_words

from .machine import in_time
from .prices import Price

Kind = str
"""Of a placement: "rotated", "split", "gathered", "kept" (gathered, and kept for the backward pass) or "replicated"."""


class Offer(NamedTuple):
    """Variables that are placed alike, because they belong together, and what they cost in each way that they can be.

    **Fields:** their `paths`; `prices`. `break_even_tokens`: from which on hops of their parts are hidden, if there are
    any; `other_hops`: the other way to hand these on, and its price.
    """

    paths: tuple[str, ...]
    prices: Mapping[Kind, Price]
    break_even_tokens: int | None = None
    other_hops: tuple[Hops, Price] | None = None

    @property
    def words(self) -> str:
        """All prices, as a plan prints them."""
        told = [f"{kind} {_told(price)}" for kind, price in self.prices.items()]
        if self.other_hops is not None:
            hops, price = self.other_hops
            told[0] += f" ({hops} {_told(price)})"
        if self.break_even_tokens is not None:
            told.append(f"its hops are hidden from {self.break_even_tokens:,} tokens a device on")
        several = f"{len(self.paths)} variables: " if len(self.paths) > 1 else ""
        return f"{several}{'; '.join(told)}"


def cheapest(offers: Sequence[Offer], memory_bytes: int | None, fixed_bytes: float = 0.0) -> list[Kind]:
    """Returns for each offer what takes the fewest seconds, all of them within what a device has room for.

    Beginning with the fewest bytes, room goes to what saves the most seconds for each of them (the greedy solution of a
    multiple-choice knapsack: Sinha and Zoltners, Operations Research 27, 1979, p. 503). What is there for a moment only
    takes the room of its largest.

    **Arguments:** `memory_bytes`: of a device, for variables; None: the fastest of each. `fixed_bytes`: that it holds
    in any case.

    **Raises:** `ArgumentError` when nothing fits.
    """
    if memory_bytes is None:
        return [_least(one.prices, _by_seconds) for one in offers]
    found: list[tuple[float, list[Kind]]] = []
    fewest: list[float] = []
    for moment in sorted({price.moment_bytes for one in offers for price in one.prices.values()}) or [0.0]:
        within = [{kind: price for kind, price in one.prices.items() if price.moment_bytes <= moment} for one in offers]
        if all(within):
            fewest.append(fixed_bytes + moment + sum(min(p.held_bytes for p in one.values()) for one in within))
            if fewest[-1] <= memory_bytes:
                kinds = _filled(within, memory_bytes - fixed_bytes - moment)
                found.append((sum(one[kind].seconds for one, kind in zip(within, kinds, strict=True)), kinds))
    if not found:
        raise ArgumentError(
            f"memory_bytes={memory_bytes:,}: expected at least {-int(-min(fewest) // 1):,}, which the variables of a "
            f"device take with gradients and optimizer's state where each lies in the fewest bytes; give more, or more "
            f"devices along the axis"
        )
    return min(found, key=lambda pair: pair[0])[1]


def _filled(offers: Sequence[Mapping[Kind, Price]], room: float) -> list[Kind]:
    """Gives room to what saves most seconds a byte."""
    kinds = [_least(one, lambda price: (price.held_bytes, price.seconds)) for one in offers]
    room -= sum(one[kind].held_bytes for one, kind in zip(offers, kinds, strict=True))
    steps = [(rate, at, kind) for at, one in enumerate(offers) for rate, kind in _steps(one, kinds[at])]
    closed: set[int] = set()
    for _, at, kind in sorted(steps, key=lambda step: -step[0]):
        more = offers[at][kind].held_bytes - offers[at][kinds[at]].held_bytes
        if offers[at][kind].seconds >= offers[at][kinds[at]].seconds:
            continue
        if at not in closed and more <= room:
            room, kinds[at] = room - more, kind
        else:
            closed.add(at)
    while steps := _that_fit(offers, kinds, room):  # saves less a byte than what had no room
        _, at, kind = max(steps)
        room, kinds[at] = room - (offers[at][kind].held_bytes - offers[at][kinds[at]].held_bytes), kind
    return kinds


def _that_fit(
    offers: Sequence[Mapping[Kind, Price]], kinds: Sequence[Kind], room: float
) -> list[tuple[float, int, Kind]]:
    """Returns how many seconds are saved by what there is room for, of which offer, and what it is."""
    return [
        (offers[at][now].seconds - price.seconds, at, kind)
        for at, now in enumerate(kinds)
        for kind, price in offers[at].items()
        if price.seconds < offers[at][now].seconds and price.held_bytes - offers[at][now].held_bytes <= room
    ]


def _steps(prices: Mapping[Kind, Price], first: Kind) -> list[tuple[float, Kind]]:
    """Returns what to go on to from the fewest bytes, and how many seconds a byte that saves: less with each step."""
    steps: list[tuple[float, Kind]] = []
    now = prices[first]
    while better := [kind for kind, price in prices.items() if price.seconds < now.seconds]:
        rates = [(now.seconds - prices[kind].seconds) / (prices[kind].held_bytes - now.held_bytes) for kind in better]
        rate, kind = max(zip(rates, better, strict=True))
        steps.append((rate, kind))
        now = prices[kind]
    return steps


def _least(prices: Mapping[Kind, Price], key: Callable[[Price], tuple[float, float]]) -> Kind:
    return min(prices.items(), key=lambda pair: key(pair[1]))[0]


def _by_seconds(price: Price) -> tuple[float, float]:
    return price.seconds, price.held_bytes + price.moment_bytes


def _told(price: Price) -> str:
    return f"{in_time(price.seconds)} a step, {in_words(round(price.held_bytes + price.moment_bytes))}"
