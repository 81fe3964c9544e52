"""What a compiled program sends: its collectives, with the number of times that each takes place."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


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


def sent_bytes(text: str, num_devices: int) -> Sent:
    """Counts what a device sends, by the shapes of collectives: rings, and exchanges of everybody with everybody.

    **Arguments:** `text`: of a compiled program. `num_devices`: all take part in each collective.

    **Raises:** `ValueError` where the text has none of what is looked for.
    """
    programs: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            name = begin[1]
            entry = name if line.startswith("ENTRY") else entry
            programs[name] = []
        elif name:
            programs[name].append(line)
    if not entry:
        raise ValueError(f"a program's text begins {text[:80]!r}, expected one with an ENTRY computation")
    found: dict[str, float] = defaultdict(float)
    again = _walk(programs, entry, num_devices, 1, False, found)
    return Sent(dict(found), again)


def _walk(
    programs: dict[str, list[str]], name: str, num_devices: int, times: int, rare: bool, found: dict[str, float]
) -> float:
    """Adds up what a computation sends; returns what it sends in loops of which nobody knows how often they turn."""
    again = 0.0
    for line in programs[name]:
        if collective := _COLLECTIVE.search(line):
            if collective[3]:
                raise ValueError(f"{line.strip()[:80]!r} is asynchronous, expected programs for CPU, where none is")
            num_bytes = times * _one(collective[2], _size(collective[1]), num_devices)
            if rare:
                again += num_bytes
            else:
                found[collective[2]] += num_bytes
            continue
        is_loop = " while(" in line
        trips = _TRIPS.search(line)
        for called in _CALLED.findall(line):
            for one in called.replace("%", "").split(", "):
                turns = int(trips[1]) if is_loop and trips else 1
                unknown = is_loop and trips is None
                again += _walk(programs, one, num_devices, times * turns, rare or unknown, found)
    return again


def _one(kind: str, size: int, num_devices: int) -> float:
    """Returns what a device sends for a result of so many bytes."""
    others = num_devices - 1
    if kind == "collective-permute":
        return size
    return size * {"all-reduce": 2 * others / num_devices, "reduce-scatter": others}.get(kind, others / num_devices)


def _size(shapes: str) -> int:
    return sum(
        _width(dtype) * math.prod(int(dim) for dim in dims.split(",") if dim) for dtype, dims in _SHAPE.findall(shapes)
    )


def _width(dtype: str) -> int:
    return 1 if dtype == "pred" else max(1, int(re.sub(r"\D", "", dtype)) // 8)
