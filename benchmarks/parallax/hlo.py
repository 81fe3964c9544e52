"""What the programs of a step send."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from braidax.program import collectives_of, total_sent


class Sent(NamedTuple):
    """Bytes that a device sends in a run of a program.

    **Fields:** `always`: by kind of collective. `again`: in one turn of the loops of which nobody knows how often they
    turn: here these are further rounds of an exchange.
    """

    always: dict[str, float]
    again: float

    @classmethod
    def all(cls, parts: Sequence["Sent"]) -> "Sent":
        """Returns what several programs send."""
        always: dict[str, float] = defaultdict(float)
        for part in parts:
            for kind, num_bytes in part.always.items():
                always[kind] += num_bytes
        return cls(dict(always), sum(part.again for part in parts))

    def total(self, further_rounds: float) -> float:
        """Returns the sum of all kinds."""
        return sum(self.always.values()) + further_rounds * self.again


def sent_bytes(text: str) -> Sent:
    """Counts what a device sends. **Arguments:** `text`: of a compiled program."""
    found = collectives_of(text)
    return Sent(dict(total_sent(found)), sum(one.times * one.sent_bytes for one in found if one.in_unknown_loop))
