"""Which machine a plan was made on."""

import os
from dataclasses import asdict, dataclass, fields

from jax.sharding import Mesh

from braidax.cores import usable_cores
from braidax.errors import ArgumentError

_SAME_MEMORY = 0.05  # what kernels keep for themselves differs


@dataclass(frozen=True)
class PlannedMachine:
    """The devices of a mesh and the host of this process.

    **Arguments:** `platform`: as of JAX, such as `"cpu"`. `device_kind`: likewise. `num_devices`: of the mesh.
    `num_processes`: that have them. `num_cores`: of the host, that this process may use. `memory_bytes`: of the host.

    **Raises:** `ArgumentError` for what is no such word or number.
    """

    platform: str
    device_kind: str
    num_devices: int
    num_processes: int
    num_cores: int
    memory_bytes: int

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (isinstance(value, str) if one.type is str else is_number):
                what = "a text" if one.type is str else "a positive whole number"
                raise ArgumentError(f"machine has {one.name}={value!r}: expected {what}")

    @classmethod
    def of(cls, mesh: Mesh) -> "PlannedMachine":
        """Returns what the devices of a mesh are, and this host."""
        device = mesh.devices.flat[0]
        processes = {one.process_index for one in mesh.devices.flat}
        return cls(
            device.platform,
            device.device_kind,
            mesh.size,
            len(processes),
            usable_cores(),
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )

    def differences(self, other: "PlannedMachine") -> dict[str, str]:
        """Returns by its field in words what another machine has otherwise."""
        mine, theirs = asdict(self), asdict(other)
        return {
            name: f"{name} is {_told(name, mine[name])}, here it is {_told(name, theirs[name])}"
            for name in mine
            if not _alike(name, mine[name], theirs[name])
        }

    def __str__(self) -> str:
        devices = f"{self.num_devices} × {self.device_kind} ({self.platform})"
        among = f" of {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"{devices}{among}, {self.num_cores} cores, {_told('memory_bytes', self.memory_bytes)}"


DEVICES = ("platform", "device_kind", "num_devices")
"""The fields that are of the devices, whoever has them; others are of hosts."""


def _alike(name: str, mine: object, theirs: object) -> bool:
    if name == "memory_bytes" and isinstance(mine, int) and isinstance(theirs, int):
        return abs(mine - theirs) <= _SAME_MEMORY * max(mine, theirs)
    return mine == theirs


def _told(name: str, value: object) -> str:
    return f"{value / 1e9:.1f} GB" if name == "memory_bytes" and isinstance(value, int) else str(value)
