"""Of which machine rates are: its devices and how they are laid out, its processor, and the disk of a folder."""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.parallel import PlannedMachine

_MOUNTS = Path("/proc/self/mountinfo")
_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Identity:
    """Of which machine rates are.

    **Arguments:** `devices`: of the mesh, and the host. `axes`: of the mesh, names and sizes. `processor`: model of the
    CPU. `jax_version`. `filesystem`, `disk`: of the folder that was written to: its type, such as `"ext4"`, and what it
    lies on; empty where the system does not say.
    """

    devices: PlannedMachine
    axes: tuple[tuple[str, int], ...]
    processor: str
    jax_version: str
    filesystem: str
    disk: str

    @classmethod
    def of(cls, mesh: Mesh, folder: Path) -> "Identity":
        """Returns that of a mesh and a folder, which is there."""
        filesystem, disk = filesystem_of(folder)
        return cls(PlannedMachine.of(mesh), tuple(mesh.shape.items()), _processor(), jax.__version__, filesystem, disk)

    def differences(self, other: "Identity") -> list[str]:
        """Returns in words what another machine has otherwise."""
        told = [*self.devices.differences(other.devices).values()]
        mine, theirs = asdict(self), asdict(other)
        told += [
            f"{name} is {mine[name]!r}, here it is {theirs[name]!r}"
            for name in mine
            if name != "devices" and mine[name] != theirs[name]
        ]
        return told

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "Identity":
        """Returns the identity of what JSON holds of it. **Raises:** `ArgumentError`, `TypeError`, `ValueError`."""
        axes = tuple((name, size) for name, size in tree["axes"])
        given: dict[str, Any] = {**tree, "devices": PlannedMachine(**tree["devices"]), "axes": axes}
        made = cls(**given)
        texts = (made.processor, made.jax_version, made.filesystem, made.disk, *(name for name, _ in axes))
        if not all(isinstance(text, str) for text in texts) or not all(type(size) is int for _, size in axes):
            raise ArgumentError(f"identity has {tree}: expected texts, and axes with their sizes")
        return made

    def __str__(self) -> str:
        axes = " × ".join(f"{name}={size}" for name, size in self.axes)
        return f"{self.devices}, mesh {axes}; {self.processor}; JAX {self.jax_version}"


def _processor() -> str:
    try:
        lines = _PROCESSORS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return models[0] if models and models[0] else platform.processor() or platform.machine()


def filesystem_of(folder: Path) -> tuple[str, str]:
    """Returns the type of a folder's filesystem, and what it lies on, as Linux tells it."""
    number = folder.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return "", ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        words = rest.split()
        if fields.split()[2:3] == [wanted] and len(words) >= 2:
            return words[0], words[1]
    return "", ""
