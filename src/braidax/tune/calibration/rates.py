"""The rates of a machine: frozen, printable, JSON."""

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from braidax.errors import ArgumentError
from braidax.parallel import Machine
from braidax.parallel.plan.costs.machine import scaled
from braidax.tune.calibration.identity import Identity

VERSION = 1
_HEADER = {"braidax": "calibration", "version": VERSION}


@dataclass(frozen=True)
class Copies:
    """Bytes a second of copies of one device or one thread, each large.

    **Arguments:** `to_host`: from a device, as snapshots of checkpoints are made. `to_device`: from host memory, as
    batches are sent. `in_memory`: from host memory to host memory.

    **Raises:** `ArgumentError` for what is no positive number.
    """

    to_host: float
    to_device: float
    in_memory: float

    def __post_init__(self) -> None:
        _check_rates(self)


@dataclass(frozen=True)
class Disk:
    """What the disk of a folder reads and writes in a second.

    **Arguments:** `write`: bytes that are durable. `read`: bytes of a file that is not in memory, in order. `cached`:
    bytes of one that is. `small_reads`: by how many are in flight, reads of 4 KiB anywhere in the file. `past_cache`:
    whether `read` and `small_reads` went to the disk: `"direct"`, by `O_DIRECT`; `"dropped"`, the system was asked to
    forget the file; `"no"`, the filesystem is memory, or the system has no way.

    **Raises:** `ArgumentError` for what is no positive number.
    """

    write: float
    read: float
    cached: float
    small_reads: tuple[tuple[int, float], ...]
    past_cache: str

    def __post_init__(self) -> None:
        _check_rates(self)
        _check_pairs("small_reads", self.small_reads)
        if self.past_cache not in ("direct", "dropped", "no"):
            raise ArgumentError(f'past_cache={self.past_cache!r}: expected "direct", "dropped" or "no"')


@dataclass(frozen=True)
class Cores:
    """How threads share the cores of the host.

    **Arguments:** `decode`: bytes a second that one thread makes of compressed ones (zlib, which drops the GIL).
    `speedups`: by the number of threads that do so at once, how many times as many.

    **Raises:** `ArgumentError` for what is no positive number.
    """

    decode: float
    speedups: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        _check_rates(self)
        _check_pairs("speedups", self.speedups)


@dataclass(frozen=True)
class Calibration:
    """What a machine can do; `print` shows it.

    **Arguments:** `identity`: of which machine it is. `machine`: products, and links by mesh axis. `copies`, `disk`,
    `cores`: of this process's host.
    """

    identity: Identity
    machine: Machine
    copies: Copies
    disk: Disk
    cores: Cores

    def to_json(self) -> str:
        """Returns it as one JSON object."""
        tree = {name: asdict(getattr(self, name)) for name in ("identity", "copies", "disk", "cores")}
        return json.dumps({**_HEADER, **tree, "machine": json.loads(self.machine.to_json())})

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """Returns what `to_json` has written.

        **Raises:** `ArgumentError` when `text` is none, or of another version.
        """
        try:
            tree: dict[str, Any] = json.loads(text)
            if tree.get("braidax") == _HEADER["braidax"] and tree.get("version") != VERSION:
                raise ArgumentError(f"text is of version {tree.get('version')!r}: expected {VERSION}")
            disk: dict[str, Any] = {**tree["disk"], "small_reads": _pairs(tree["disk"]["small_reads"])}
            cores: dict[str, Any] = {**tree["cores"], "speedups": _pairs(tree["cores"]["speedups"])}
            return cls(
                Identity.from_tree(tree["identity"]),
                Machine.from_json(json.dumps(tree["machine"])),
                Copies(**tree["copies"]),
                Disk(**disk),
                Cores(**cores),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                f"text is no calibration ({error!r}): expected what Calibration.to_json returns"
            ) from error

    def __str__(self) -> str:
        """A line for each rate."""
        copies, disk, cores = self.copies, self.disk, self.cores
        how = {"direct": "past the cache", "dropped": "dropped from the cache before", "no": "from memory"}
        small = ", ".join(f"{scaled(rate, '/s')} with {count}" for count, rate in disk.small_reads)
        speedups = ", ".join(f"{speedup:.2f} × with {count}" for count, speedup in cores.speedups)
        on = self.identity.filesystem or "of an unknown kind"
        rows = {
            "host": f"{self.identity.devices.num_cores} cores, {self.identity.processor}",
            "copies": f"{scaled(copies.to_host, 'B/s')} from a device, {scaled(copies.to_device, 'B/s')} to one, "
            f"{scaled(copies.in_memory, 'B/s')} in memory",
            "disk": f"{scaled(disk.write, 'B/s')} written and durable, {scaled(disk.read, 'B/s')} read "
            f"({how[disk.past_cache]}), {scaled(disk.cached, 'B/s')} again ({on})",
            "small reads": f"of 4 KiB: {small} in flight",
            "decoding": f"{scaled(cores.decode, 'B/s')} a thread (zlib); {speedups} threads",
        }
        return "\n".join([str(self.machine), *(f"{name:<13} {told}" for name, told in rows.items())])


def _pairs(given: Any) -> tuple[tuple[int, float], ...]:
    return tuple((count, rate) for count, rate in given)


def _check_rates(rates: Any) -> None:
    for one in fields(rates):
        if one.type is float:
            _check_rate(one.name, getattr(rates, one.name))


def _check_pairs(name: str, pairs: tuple[tuple[object, object], ...]) -> None:
    if not pairs:
        raise ArgumentError(f"{name} is empty: expected numbers, each with its rate")
    for count, rate in pairs:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ArgumentError(f"{name} has {count!r}: expected a positive whole number")
        _check_rate(name, rate)


def _check_rate(name: str, rate: object) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ArgumentError(f"{name}={rate!r}: expected a positive number")
