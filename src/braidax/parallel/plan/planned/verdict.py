"""Whether a pipeline pays, as a plan says it."""

from dataclasses import dataclass
from typing import Any

from braidax.parallel.plan.costs.machine import in_time, scaled


@dataclass(frozen=True)
class Alternative:
    """A way to compute the gradients of a batch on the devices of a mesh.

    **Fields:** `name`; `seconds`; `bytes` of the device that holds most; `microbatches` that a device computes one
    after the other; `fits`: whether that is in the room that there is.
    """

    name: str
    seconds: float
    bytes: int
    microbatches: int
    fits: bool = True

    def __str__(self) -> str:
        """`data parallel 3.2 ms in 12 MB`."""
        return f"{self.name} {in_time(self.seconds)} in {scaled(self.bytes, 'B')}"


@dataclass(frozen=True)
class Verdict:
    """Pipeline or not.

    **Fields:** `pipeline`, `others`: what they take. `room_bytes`: of a device: what it has where `is_room_known`,
    else what the pipeline takes. `link_bytes_per_second`: to the next device along the axis.
    `turns_at_bytes_per_second`: at which such a link both would take the same time, None where at none.
    `num_devices`: along the axis; `turns_at_devices`: the closest number of them, of those that were looked at, with
    which the other one wins.
    """

    pipeline: Alternative
    others: tuple[Alternative, ...]
    room_bytes: int
    is_room_known: bool
    link_bytes_per_second: float
    turns_at_bytes_per_second: float | None
    num_devices: int
    turns_at_devices: int | None

    @property
    def best_other(self) -> Alternative | None:
        """The fastest way without a pipeline that fits."""
        return min((one for one in self.others if one.fits), key=lambda one: one.seconds, default=None)

    @property
    def wins(self) -> bool:
        """Whether the pipeline is the fastest way that fits."""
        other = self.best_other
        return other is None or self.pipeline.seconds <= other.seconds

    def __str__(self) -> str:
        """Who wins, and by how much; where it would turn."""
        other, known = self.best_other, self.is_room_known
        whose = "a device has" if known else "the pipeline takes of a device"
        room = f"in the {scaled(self.room_bytes, 'B')} that {whose}"
        told = "; ".join(map(str, (self.pipeline, *self.others)))
        if other is None:
            return f"pipeline: nothing else fits {room}. {told}."
        first, second = (self.pipeline, other) if self.wins else (other, self.pipeline)
        loser = second.name if self.wins else "the pipeline"
        faster = f"{first.name}: {second.seconds / first.seconds:.3g} × as fast as {loser}, {room}"
        return f"{faster}. {told}. {self._turns(loser)}."

    def _turns(self, other: str) -> str:
        link, now = self.turns_at_bytes_per_second, self.link_bytes_per_second
        words = list[str]()
        if link is not None:
            less = "less" if link < now else "more"
            words.append(f"with a link of {scaled(link, 'B/s')} or {less} (it has {scaled(now, 'B/s')})")
        if self.turns_at_devices is not None:
            words.append(f"on {self.turns_at_devices} devices in place of {self.num_devices} along the axis")
        if not words:
            return "It would turn with no other link, and on no other number of devices that was looked at"
        return f"It would turn to {other} {', or '.join(words)}"

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "Verdict":
        """Returns the verdict of what JSON holds of it."""
        others = tuple(Alternative(**one) for one in tree["others"])
        fields: dict[str, Any] = {**tree, "pipeline": Alternative(**tree["pipeline"]), "others": others}
        return cls(**fields)
