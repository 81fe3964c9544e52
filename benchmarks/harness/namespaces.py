"""Hosts that are network namespaces of this machine, on one switch: links can go down, and have a bandwidth.

Needs Linux, root and iproute2. Nothing of this machine's own network is touched.
"""

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import final

_TIMEOUT_SECONDS = 30.0
_OWN_FILES = Path("/etc/netns")  # files of `/etc`, by namespace, as iproute2 shows them to what runs there


@final
class Network:
    """Some hosts and the switch between them; `close` takes all away, and ends what still runs there.

    **Arguments:** `num_hosts`: each has one interface, `eth0`, with an address of its own.
    """

    def __init__(self, num_hosts: int) -> None:
        name = f"braidax-{os.getpid()}-{secrets.token_hex(3)}"
        self._switch = f"{name}-switch"
        self.hosts = [f"{name}-{host}" for host in range(num_hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(num_hosts)]
        self._made: list[str] = []
        self._folders: list[Path] = []
        try:
            self._make(self._switch)
            self._ip(self._switch, "link", "add", "switch", "type", "bridge")
            self._ip(self._switch, "link", "set", "switch", "up")
            for host, address in zip(self.hosts, self.addresses, strict=True):
                self._make(host)
                port = self._port(host)
                self._ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
                self._ip(self._switch, "link", "set", port, "master", "switch", "up")
                self._ip(host, "address", "add", f"{address}/24", "dev", "eth0")
                self._ip(host, "link", "set", "lo", "up")
                self._ip(host, "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def prefix(self, host: int) -> list[str]:
        """Returns what to put before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self.hosts[host]]

    def cut(self, host: int) -> None:
        """Pulls the cable of a host out of the switch."""
        self._ip(self._switch, "link", "set", self._port(self.hosts[host]), "down")

    def mend(self, host: int) -> None:
        """Plugs it in again."""
        self._ip(self._switch, "link", "set", self._port(self.hosts[host]), "up")

    def name_hosts(self) -> None:
        """Lets programs that ask for the address of their host's name, as gloo does, find that of `eth0`."""
        for host, address in zip(self.hosts, self.addresses, strict=True):
            folder = _OWN_FILES / host
            folder.mkdir(parents=True)
            self._folders.append(folder)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

    def sent(self, host: int) -> int:
        """Returns the bytes that a host has sent, as the kernel counts them."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_run([*self.prefix(host), "cat", path]))

    def limit(self, host: int, bits_per_second: int) -> None:
        """Lets a host send no quicker."""
        burst = max(256_000, bits_per_second // 8 // 200)  # what may go out between two ticks of a clock of 250 Hz
        rate = ["rate", f"{bits_per_second}bit", "burst", f"{burst}b", "latency", "100ms"]
        _run(["tc", "-n", self.hosts[host], "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate])

    def swallow(self, host: int, other: int) -> None:
        """Loses what a host sends to another without a word, as many firewalls do."""
        self._ip(self.hosts[host], "route", "add", "blackhole", f"{self.addresses[other]}/32")

    def close(self) -> None:
        """Takes the hosts and the switch away."""
        for name in self._made:
            for pid in _run(["ip", "netns", "pids", name]).split():
                _run(["kill", "-9", pid])
            _run(["ip", "netns", "del", name])
        for folder in self._folders:
            shutil.rmtree(folder)
        self._made, self._folders = [], []

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, name: str) -> None:
        _run(["ip", "netns", "add", name])
        self._made.append(name)

    def _ip(self, name: str, *arguments: str) -> None:
        _run(["ip", "-n", name, *arguments])

    def _port(self, host: str) -> str:
        return f"port{self.hosts.index(host)}"


def reason_against() -> str:
    """Returns why there can be no such network here, or nothing."""
    try:
        name = f"braidax-{os.getpid()}-probe"
        _run(["ip", "netns", "add", name])
        _run(["ip", "netns", "del", name])
        _run(["tc", "-V"])
    except (OSError, AssertionError) as error:
        return f"network namespaces need Linux, root and iproute2: {error}"
    return ""


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout
