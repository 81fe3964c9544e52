"""A network of its own for the processes that train, whose messages take as long as on a link of some bandwidth."""

import contextlib
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from braidax.errors import ArgumentError

_NAMES = Path("/var/run/netns")
_PREFIX = "braidax-study-"
_LIMIT_SECONDS = 30.0
_PACKET_BYTES = 65_536  # of the loopback device


@dataclass(frozen=True)
class Network:
    """A network namespace. **Fields:** `name`."""

    name: str

    @property
    def path(self) -> str:
        """The file that stands for it."""
        return str(_NAMES / self.name)

    def close(self) -> None:
        """Removes it."""
        with contextlib.suppress(ArgumentError):
            _run("ip", "netns", "del", self.name)


def make_network(bits_per_second: int, addresses: Sequence[str]) -> Network:
    """Makes a namespace whose loopback device sends no faster, by a hierarchical token bucket.

    **Arguments:** `addresses`: that are its own besides 127.0.0.1.

    **Raises:** `ArgumentError` where that cannot be: it needs root, Linux and iproute2. Nothing is left behind then.
    """
    _remove_left()
    network = Network(f"{_PREFIX}{os.getpid()}")
    _run("ip", "netns", "add", network.name)
    try:
        _run("ip", "-n", network.name, "link", "set", "lo", "up")
        for address in addresses:
            _run("ip", "-n", network.name, "address", "add", f"{address}/32", "dev", "lo")
        tc = ("tc", "-n", network.name)
        _run(*tc, "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "10")
        burst = max(
            2 * _PACKET_BYTES, bits_per_second // 8 // 200
        )  # what goes out between two ticks of a clock of 250 Hz
        rate = ("htb", "rate", f"{bits_per_second}bit", "burst", str(burst), "cburst", str(burst), "quantum", "60000")
        _run(*tc, "class", "add", "dev", "lo", "parent", "1:", "classid", "1:10", *rate)
    except BaseException:
        network.close()
        raise
    return network


def _remove_left() -> None:
    """Removes namespaces of studies that were killed, in which nothing runs."""
    with contextlib.suppress(OSError):
        for path in _NAMES.iterdir():
            found = re.fullmatch(rf"{_PREFIX}(\d+)", path.name)
            if found and not Path(f"/proc/{found[1]}").exists():
                with contextlib.suppress(ArgumentError):
                    if not _run("ip", "netns", "pids", path.name).strip():
                        _run("ip", "netns", "del", path.name)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refused(f"{command[0]}: {error}") from error
    if done.returncode:
        raise _refused(f"{' '.join(command[:5])}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _refused(why: str) -> ArgumentError:
    return ArgumentError(
        f"limit network cannot be set ({why}); run it as root on Linux with iproute2, or leave this limit out"
    )
