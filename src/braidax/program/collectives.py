"""What a compiled program sends: its collectives, read from the text of its optimized HLO."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"]

_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]<=)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{((?:'\w+',? ?)+)\}")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    **Fields:** `kind`. `result_bytes`: of its result on a device. `group_size`: how many devices take part together.
    `times`: how often a run of the program runs it, `in_unknown_loop`: where loops of which nobody knows how often they
    turn are counted once.
    """

    kind: Kind
    result_bytes: int
    group_size: int
    times: int
    in_unknown_loop: bool

    @property
    def sent_bytes(self) -> float:
        """What a device sends for it once: around a ring, or to everybody."""
        others, count = self.group_size - 1, self.group_size
        factor = {"all-reduce": 2 * others / count, "reduce-scatter": float(others), "collective-permute": 1.0}
        return self.result_bytes * factor.get(self.kind, others / count)


def collectives_of(text: str) -> tuple[Collective, ...]:
    """Reads the collectives of a compiled program, each with the number of times that it takes place.

    **Arguments:** `text`: `compiled.as_text()`, whose entry has `num_partitions` devices.

    **Raises:** `ValueError` where the text has no entry, or a collective is asynchronous (programs for CPU have none).
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
    found = _PARTITIONS.search(text)
    return tuple(_within(programs, entry, int(found[1]) if found else 1))


def total_sent(collectives: Iterable[Collective]) -> Mapping[str, float]:
    """Returns the bytes that a device sends in a run, by kind. What is in loops of unknown length is left out."""
    total: dict[str, float] = {}
    for one in collectives:
        if not one.in_unknown_loop:
            total[one.kind] = total.get(one.kind, 0.0) + one.times * one.sent_bytes
    return total


def _within(programs: Mapping[str, list[str]], name: str, num_devices: int) -> Iterable[Collective]:
    for line in programs[name]:
        if collective := _COLLECTIVE.search(line):
            if collective[3]:
                raise ValueError(f"{line.strip()[:80]!r} is asynchronous, expected programs for CPU, where none is")
            kind: Kind = collective[2]  # pyright: ignore[reportAssignmentType]
            yield Collective(kind, _size(collective[1]), _group_size(line, num_devices), 1, False)
            continue
        is_loop = " while(" in line
        trips = _TRIPS.search(line)
        for called in _CALLED.findall(line):
            for one in called.replace("%", "").split(", "):
                for inner in _within(programs, one, num_devices):
                    yield replace(
                        inner,
                        times=inner.times * (int(trips[1]) if is_loop and trips else 1),
                        in_unknown_loop=inner.in_unknown_loop or (is_loop and trips is None),
                    )


def _group_size(line: str, num_devices: int) -> int:
    if found := _GROUPS.search(line):
        return len(found[1].split(",")) if found[1] else int(found[2])
    if found := _MESH.search(line):  # "mesh['data'=2,'model'=4] {'model'}"
        sizes = dict(entry.split("=") for entry in found[1].split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in found[2].split(","))
    if "replica_groups=" in line and "replica_groups={}" not in line:
        raise ValueError(f"{line.strip()!r} has groups of devices in a form that is not known")
    return num_devices


def _size(shapes: str) -> int:
    return sum(
        _width(dtype) * math.prod(int(dim) for dim in dims.split(",") if dim) for dtype, dims in _SHAPE.findall(shapes)
    )


def _width(dtype: str) -> int:
    return 1 if dtype == "pred" else max(1, int(re.sub(r"\D", "", dtype)) // 8)
