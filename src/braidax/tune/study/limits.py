"""Limits that stand in for other hardware: memory, cores, disk and network of the processes that train."""

import ctypes
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from braidax.cores import usable_cores
from braidax.errors import ArgumentError

from .control_groups import Group, make_groups
from .network import Network, make_network

_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30}
_BITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET, of sched.h; os.setns came with Python 3.12
_LEAST_MEMORY = 512 << 20


@dataclass(frozen=True)
class Limits:
    """What all processes that train may take; None: what there is.

    **Fields:** `memory_bytes`: of all of them. `cores`: how many; a whole number is as many cores alone, another one a
    share of the time. `disk_bytes_per_second`: read and written where the study's folder is, each.
    `network_bits_per_second`: between the processes.

    **Raises:** `ArgumentError` for what no process could run with.
    """

    memory_bytes: int | None = None
    cores: float | None = None
    disk_bytes_per_second: int | None = None
    network_bits_per_second: int | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < _LEAST_MEMORY:
            raise ArgumentError(
                f"limit memory={self.memory_bytes} bytes: JAX alone takes {_LEAST_MEMORY >> 20}M; allow more"
            )
        if self.cores is not None and not 0 < self.cores <= usable_cores():
            raise ArgumentError(
                f"limit cores={self.cores:g}: expected more than 0, up to the {usable_cores()} there are"
            )
        for name in ("disk_bytes_per_second", "network_bits_per_second"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"limit {name}={value}: expected 1 or more")

    def to_dict(self) -> dict[str, Any]:
        """Returns its fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        told = [
            "" if self.memory_bytes is None else f"memory {self.memory_bytes / 2**30:.3g} GiB",
            "" if self.cores is None else f"{self.cores:g} cores",
            "" if self.disk_bytes_per_second is None else f"disk {self.disk_bytes_per_second / 2**20:.4g} MiB/s",
            "" if self.network_bits_per_second is None else f"network {self.network_bits_per_second / 1e6:.4g} Mbit/s",
        ]
        return ", ".join(filter(None, told)) or "none"


def parse_limits(text: str | None) -> Limits:
    """Returns limits that a text says, such as `memory=2G,cores=1,disk=50M,network=100M`.

    Memory is in bytes, disk in bytes a second (K, M, G: of 1,024), network in bits a second (of 1,000).

    **Raises:** `ArgumentError` for a name or a number that is none, and as `Limits`.
    """
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        if name not in ("memory", "cores", "disk", "network") or name in found:
            raise ArgumentError(
                f"--limit {text}: {name!r} is no limit, or there twice; expected some of memory=2G,cores=1,disk=50M,"
                "network=100M"
            )
        found[name] = _number(text or "", value, {"cores": {"": 1.0}, "network": _BITS}.get(name, _UNITS))
    whole = {name: None if name not in found else int(found[name]) for name in ("memory", "disk", "network")}
    return Limits(whole["memory"], found.get("cores"), whole["disk"], whole["network"])


def _number(text: str, value: str, units: Mapping[str, float]) -> float:
    digits, unit = (value[:-1], value[-1].upper()) if value[-1:].upper() in units else (value, "")
    try:
        number = float(digits) * units[unit]
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentError(
            f"--limit {text}: {value!r} is no number above 0, such as {'1' if len(units) == 1 else '50M'}"
        )
    return number


@dataclass(frozen=True)
class Confinement:
    """What a process enters before it imports JAX. **Fields:** `groups`: files that take its number. `network`: a file
    that is a network namespace. `cores`: that it may run on."""

    groups: tuple[str, ...] = ()
    network: str | None = None
    cores: tuple[int, ...] = ()

    def enter(self) -> None:
        """Confines this process; its network is that of this thread, and of those that it starts from now on."""
        for path in self.groups:
            Path(path).write_text(str(os.getpid()))
        for thread in Path("/proc/self/task").iterdir() if self.cores else ():
            os.sched_setaffinity(int(thread.name), self.cores)
        if self.network is not None:
            with Path(self.network).open("rb") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), f"{self.network} cannot be entered")


@final
class Confined:
    """Makes what limits need, and takes it away again: a context manager.

    **Arguments:** `folder`: on the disk that is limited.

    **Raises:** `ArgumentError` for a limit that cannot be set here: why, and what would help.
    """

    def __init__(self, limits: Limits, folder: Path) -> None:
        self._groups: list[Group] = []
        self._network: Network | None = None
        cores: tuple[int, ...] = ()
        try:
            if limits.cores is not None and limits.cores == int(limits.cores):
                cores = tuple(sorted(os.sched_getaffinity(0)))[: int(limits.cores)]
            share = limits.cores if limits.cores is not None and not cores else None
            self._groups = make_groups(limits.memory_bytes, share, limits.disk_bytes_per_second, folder)
            if limits.network_bits_per_second is not None:
                self._network = make_network(limits.network_bits_per_second, _own_addresses())
        except BaseException:
            self.close()
            raise
        network = None if self._network is None else self._network.path
        self.confinement = Confinement(tuple(group.entry for group in self._groups), network, cores)

    def close(self) -> None:
        """Takes away what was made; what ran in it has to have ended. A second call does nothing."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.close()
        network, self._network = self._network, None
        if network is not None:
            network.close()

    def __enter__(self) -> "Confined":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own_addresses() -> list[str]:
    """Returns what the name of this host stands for: processes that are told its name find one another by it."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, family=socket.AF_INET)
    except OSError:
        return []
    return sorted({str(each[4][0]) for each in found if not str(each[4][0]).startswith("127.")})
