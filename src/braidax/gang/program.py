"""What `braidax launch` runs in every rank, and what a rank is told in its environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from braidax.errors import ArgumentError

DEVICES = "CUDA_VISIBLE_DEVICES"

SERVERS, SERVER = "BRAIDAX_SERVERS", "BRAIDAX_SERVER"
"""The variables that say how many servers a job has, and to a server which it is."""

REPLACES, IN_PLACE = "BRAIDAX_REPLACES", "BRAIDAX_IN_PLACE"
"""The variables that say that other servers are started in place of lost ones, and to a server that it is such a one.
"""

CALLED, COPIES = "launch/servers-called", "launch/copies"
"""Keys of the store: where servers and ranks meet (behind a slash, how often they have before), and on how many servers
lies whatever is on one."""

_SERVER_MODULE = "braidax.parallel.served.on_servers"  # of a higher floor: a process of its own imports it


@dataclass(frozen=True)
class Program:
    """A program as `python` would take it.

    **Arguments:** `target`: a path, or the name of a module. `arguments`: what it finds behind its name in `sys.argv`.
    `kind`: what `target` is. `initialize`: `"jax"` calls `jax.distributed.initialize` before the program's first line,
    `"nothing"` does not import JAX. `devices_per_process`: how many GPUs each process sees or, without GPUs, how many
    virtual CPU devices it has; None shares the GPUs of a host among its processes.
    """

    target: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module"] = "script"
    initialize: Literal["jax", "nothing"] = "jax"
    devices_per_process: int | None = None

    def __post_init__(self) -> None:
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise ArgumentError(f"devices_per_process={self.devices_per_process}: expected at least 1")

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of Python that run it as a rank; the environment says which."""
        options = (self.kind, self.initialize, str(self.devices_per_process or 0), self.target)
        return ("-P", "-m", "braidax.gang.runner", *options, *self.arguments)

    @staticmethod
    def parse(command: list[str]) -> "Program":
        """Returns the program of the arguments behind the runner's name in `command`."""
        kind, initialize, devices, target, *arguments = command
        return Program(
            target,
            tuple(arguments),
            "module" if kind == "module" else "script",
            "jax" if initialize == "jax" else "nothing",
            int(devices) or None,
        )


@dataclass(frozen=True)
class Seat:
    """A rank to be: where it sits and what it may see.

    **Fields:** `rank`, `size`: among all. `local_rank`, `local_size`: on its host. `devices`: the GPUs that it sees, in
    the words of `CUDA_VISIBLE_DEVICES`; None leaves that as it is.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    devices: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that say so."""
        told = {
            "BRAIDAX_RANK": str(self.rank),
            "BRAIDAX_SIZE": str(self.size),
            "BRAIDAX_LOCAL_RANK": str(self.local_rank),
            "BRAIDAX_LOCAL_SIZE": str(self.local_size),
        }
        return told if self.devices is None else {**told, DEVICES: self.devices}


@dataclass(frozen=True)
class ServerSeat:
    """A server to be. **Fields:** `number`, `size`: which of how many."""

    number: int
    size: int

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of Python that run it; the environment says which."""
        return ("-P", "-m", _SERVER_MODULE)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that say so. Servers compute on CPU, and leave accelerators to the ranks."""
        return {SERVERS: str(self.size), SERVER: str(self.number), "JAX_PLATFORMS": "cpu"}


def shares_of_gpus(environ: Mapping[str, str], found: list[str], num: int, each: int | None) -> list[str | None]:
    """Returns which GPUs each process of a host sees, or None for each where nothing is to be said.

    **Arguments:** `environ`: `CUDA_VISIBLE_DEVICES` says which of the GPUs there are to share, `JAX_PLATFORMS` whether
    any are used. `found`: the numbers of this host's GPUs. `num`: processes on this host. `each`: GPUs for a process.

    **Raises:** `ArgumentError` when they cannot be shared.
    """
    if DEVICES in environ:
        found = [text.strip() for text in environ[DEVICES].split(",") if text.strip()]
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    if not found or platforms[0] not in ("", "cuda", "gpu"):
        return [None] * num
    if each is None and len(found) % num:
        raise ArgumentError(
            f"{len(found)} GPUs cannot be shared by {num} processes; take a number that divides them, say how many "
            "each sees by devices_per_process=, or set JAX_PLATFORMS=cpu"
        )
    each = len(found) // num if each is None else each
    if each * num > len(found):
        raise ArgumentError(
            f"devices_per_process={each}: {num} processes need {each * num} GPUs, and there are {len(found)}; take "
            "fewer, or set JAX_PLATFORMS=cpu for virtual devices"
        )
    return [",".join(found[place * each : (place + 1) * each]) for place in range(num)]
