"""What the devices of a machine compute and send in a second: the constants by which placements are chosen."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from braidax.errors import ArgumentError


@dataclass(frozen=True)
class Link:
    """How long a device sends along a mesh axis: `latency_seconds + bytes / bytes_per_second` a message.

    That is the model of Hockney (Parallel Computing 20, 1994, p. 389), with what hides it.

    **Arguments:** `hidden`: the part of that time that products beside it hide, 0 to 1.

    **Raises:** `ArgumentError` for what is no such number.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    hidden: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("bytes_per_second", self.bytes_per_second, "50e9")
        if not 0 <= self.latency_seconds < math.inf:
            raise ArgumentError(f"latency_seconds={self.latency_seconds}: expected 0 or more, such as 5e-6")
        if not 0 <= self.hidden <= 1:
            raise ArgumentError(f"hidden={self.hidden}: expected a part of the time, 0 to 1")

    def seconds(self, num_bytes: float, num_messages: float = 1) -> float:
        """Returns how long a device sends. **Arguments:** `num_bytes`: of all messages."""
        return num_bytes / self.bytes_per_second + num_messages * self.latency_seconds

    def exposed(self, sending: float, computing: float) -> float:
        """Returns the seconds of sending that are left where a device computes meanwhile."""
        return sending - self.hidden * min(sending, computing)


@dataclass(frozen=True, repr=False)
class Machine:
    """What the devices of a mesh compute and send: measured by `measure_machine`, or published figures of others.

    **Arguments:** `flops_per_second`: of a device, in products of matrices; a multiplication and an addition are two.
    `permutes`: by mesh axis, messages to the next device along it. `collectives`: by mesh axis, an all-gather or a
    reduce-scatter along it, of which a device sends `(N - 1) / N` of the bytes; an axis that is missing is as in
    `permutes`. `memory_bytes`: of a device, if that is known. `name`: of the devices.

    **Raises:** `ArgumentError` for what is no positive number.
    """

    flops_per_second: float
    permutes: Mapping[str, Link]
    collectives: Mapping[str, Link] = field(default_factory=dict[str, Link])
    memory_bytes: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _check_positive("flops_per_second", self.flops_per_second, "400e12")
        if self.memory_bytes is not None:
            _check_positive("memory_bytes", self.memory_bytes, "80 << 30")

    def permute(self, axis: str) -> Link:
        """Returns the link to the next device along an axis. **Raises:** `ArgumentError` where it is not known."""
        return self._link(axis, self.permutes)

    def collective(self, axis: str) -> Link:
        """Returns the link of all-gathers and reduce-scatters. **Raises:** as `permute`."""
        return self._link(axis, {**self.permutes, **self.collectives})

    def _link(self, axis: str, links: Mapping[str, Link]) -> Link:
        if axis not in links:
            raise ArgumentError(
                f"machine has permutes along {[*self.permutes]}, and none along the axis {axis!r}: measure it on this "
                f"mesh with measure_machine(mesh), or give permutes={{{axis!r}: Link(…)}}"
            )
        return links[axis]

    def to_json(self) -> str:
        """Returns the figures as one JSON object."""
        links = {"permutes": self.permutes, "collectives": self.collectives}
        told = {name: {axis: asdict(link) for axis, link in one.items()} for name, one in links.items()}
        others = {"memory_bytes": self.memory_bytes, "name": self.name}
        return json.dumps({"flops_per_second": self.flops_per_second, **told, **others})

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Returns the machine that `to_json` has written. **Raises:** `ArgumentError` when `text` is none."""
        try:
            tree: dict[str, Any] = json.loads(text)
            for name in ("permutes", "collectives"):
                tree[name] = {axis: Link(**link) for axis, link in tree.get(name, {}).items()}
            return cls(**tree)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"text is no machine ({error!r}): expected what Machine.to_json returns") from error

    def __repr__(self) -> str:
        links = ", ".join(f"{axis} {scaled(link.bytes_per_second, 'B/s')}" for axis, link in self.permutes.items())
        return f"Machine({self.name + ': ' if self.name else ''}{scaled(self.flops_per_second, 'FLOP/s')}; {links})"

    def __str__(self) -> str:
        """What a device computes, and by axis what it sends to the next one, and in gathers and scatters."""
        memory = "" if self.memory_bytes is None else f", and has {scaled(self.memory_bytes, 'B')}"
        lines = [f"machine       {self.name}"] if self.name else []
        lines.append(f"a device      computes {scaled(self.flops_per_second, 'FLOP/s')}{memory}")
        for axis in dict.fromkeys([*self.permutes, *self.collectives]):
            told = {"to the next": self.permutes.get(axis), "gathers": self.collectives.get(axis)}
            links = [f"{name:<11} {_told(link)}" for name, link in told.items() if link is not None]
            lines += [f"{head:<13} {link}" for head, link in zip((f"along {axis}", ""), links, strict=False)]
        return "\n".join(lines)


def _told(link: Link) -> str:
    hidden = f"{100 * link.hidden:.0f} % hidden under products"
    return f"{scaled(link.bytes_per_second, 'B/s')} + {in_time(link.latency_seconds)}, {hidden}"


def scaled(value: float, unit: str) -> str:
    """Returns a number with its unit as a plan prints it: `12.3 GB/s`."""
    scales = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    factor, prefix = next((pair for pair in scales if value >= pair[0]), (1, ""))
    return f"{value / factor:.3g} {prefix}{unit}"


def in_time(seconds: float) -> str:
    """Returns a time as a plan prints it: `3.1 ms`."""
    factor, unit = next((pair for pair in ((1, "s"), (1e-3, "ms")) if seconds >= pair[0]), (1e-6, "µs"))
    return f"{seconds / factor:.3g} {unit}"


def _check_positive(name: str, value: float, example: str) -> None:
    if not 0 < value < math.inf:
        raise ArgumentError(f"{name}={value}: expected a positive number, such as {example}")
