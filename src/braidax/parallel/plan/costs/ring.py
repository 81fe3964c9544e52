"""The ring of a plan: from how many tokens a device on a hop is hidden under products."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_MACHINE = "parallel.measure_machine tells that of the devices here"


class RingWork(NamedTuple):
    """What a device sends and computes in one hop of a variable's parts, forward, in one run of the loss.

    **Fields:** `flops` of the products by the parts, of which there are `elements`. `sent_bytes`. `hop_seconds`,
    `flops_per_second`, `hidden`: of a machine, where there are figures of one.
    """

    flops: float
    elements: float
    sent_bytes: float
    hop_seconds: float | None = None
    flops_per_second: float | None = None
    hidden: float | None = None


@dataclass(frozen=True)
class PlannedRing:
    """A ring on one mesh axis, and what hides its hops.

    A hop takes as long as the products beside it from `c F / (2 W)` tokens a device on, of `F` flops a second, `W`
    bytes a second and `c` bytes an element; a message's latency adds to that. Backward there are two hops, and twice
    the products.

    **Fields:** `axis`; `tokens`: how many rows a device multiplies with a weight in one run of the loss, on average;
    `flops_per_byte`: that it computes in that for each byte of a hop. `break_even_tokens`: None where no machine's
    figures were given; `hidden`: as of `Link`.
    """

    axis: str
    tokens: int
    flops_per_byte: float
    break_even_tokens: int | None = None
    hidden: float | None = None

    def __str__(self) -> str:
        """From how many tokens on a hop is hidden, and how many there are."""
        if self.break_even_tokens is None:
            flops = f"{self.flops_per_byte:,.{0 if self.flops_per_byte >= 10 else 1}f} flops"
            return (
                f"along {self.axis}: a device has {self.tokens:,} tokens in a run of the loss, and computes with them "
                f"{flops} for each byte of a hop: that is hidden where it computes no more "
                f"while it sends one ({_MACHINE})"
            )
        little = "" if self.hidden in (None, 1) else f"; products hide {100 * self.hidden:.0f} % of such a time here"
        return (
            f"along {self.axis}: a part's hop is hidden from {self.break_even_tokens:,} tokens a device on, and it has "
            f"{self.tokens:,} in a run of the loss{little}"
        )

    @property
    def short(self) -> str:
        """The same in a few words."""
        if self.break_even_tokens is None:
            return f"{self.tokens:,} tokens a device"
        return f"{self.tokens:,} tokens a device, hidden from {self.break_even_tokens:,} on"


def planned_ring(axis: str, works: Iterable[RingWork | None]) -> PlannedRing | None:
    """Returns the ring of several variables; None where no product is beside any hop.

    **Arguments:** `axis`: along which they go around. `works`: of each, if that is known.
    """
    known = [work for work in works if work is not None]
    flops, elements = sum(work.flops for work in known), sum(work.elements for work in known)
    sent = sum(work.sent_bytes for work in known)
    if not flops or not elements or not sent:
        return None
    tokens, first = flops / (2 * elements), known[0]
    made = PlannedRing(axis, round(tokens), float(f"{flops / sent:.6g}"))
    hops = [work.hop_seconds for work in known if work.hop_seconds is not None]
    if len(hops) < len(known) or first.flops_per_second is None:
        return made
    even = tokens * sum(hops) * first.flops_per_second / flops
    return PlannedRing(axis, made.tokens, made.flops_per_byte, math.ceil(even), first.hidden)
