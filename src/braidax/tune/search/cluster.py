"""A cluster as the search sees it: how many devices, what each computes, and what lies between them."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from braidax.errors import ArgumentError
from braidax.parallel import Link


def _check_positive(figures: Any, *names: str) -> None:
    for name in names:
        value = getattr(figures, name)
        if value is not None and not value > 0:
            raise ArgumentError(f"{name}={value}: expected a positive number, such as 8")


@dataclass(frozen=True)
class Overheads:
    """What a step takes besides its products and messages.

    **Arguments:** `step_seconds`: each microbatch. `program_seconds`: each program that all devices run: to be
    dispatched to them, and to meet. `update_bytes_per_second`: at which the optimizer's update reads and writes on one
    device; None: it takes no time.

    **Raises:** `ArgumentError` for what is no such number.
    """

    step_seconds: float = 0.0
    program_seconds: float = 0.0
    update_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in ("step_seconds", "program_seconds"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"{name}={getattr(self, name)}: expected 0 or more, such as 1e-3")
        _check_positive(self, "update_bytes_per_second")


@dataclass(frozen=True)
class Cluster:
    """Devices that need not be here.

    **Arguments:** `devices`: how many. `flops_per_second`: of one, in products of matrices. `inside`: the link between
    devices of a host. `between`: that of one device to another host; None: as `inside`. `devices_per_host`: None: all.
    `memory_bytes`: of a device, if that limits. `overheads`: what a step takes besides. `sums`: the link as gradients
    are summed over it inside a host, where that is slower than to gather; None: as `inside`.

    **Raises:** `ArgumentError` for what is no such number.
    """

    devices: int
    flops_per_second: float
    inside: Link
    between: Link | None = None
    devices_per_host: int | None = None
    memory_bytes: int | None = None
    overheads: Overheads = Overheads()
    sums: Link | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "devices", "flops_per_second", "devices_per_host", "memory_bytes")

    @property
    def has_two_links(self) -> bool:
        """Whether messages take longer between hosts than inside one."""
        per_host = self.devices if self.devices_per_host is None else self.devices_per_host
        return self.between not in (None, self.inside) and per_host < self.devices

    def to_json(self) -> str:
        """Returns the figures as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Cluster":
        """Returns the cluster that `to_json` has written. **Raises:** `ArgumentError` when `text` is none."""
        try:
            tree: dict[str, Any] = json.loads(text)
            links: dict[str, Any] = {
                name: Link(**tree[name]) for name in ("inside", "between", "sums") if tree.get(name) is not None
            }
            parts: dict[str, Any] = {**links, "overheads": Overheads(**tree.get("overheads", {}))}
            return cls(**{**tree, **parts})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"text is no cluster ({error!r}): expected what Cluster.to_json returns") from error
