"""This host, as others see it: whether two processes are on the same one, and the addresses that reach it."""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

from braidax.errors import ArgumentError

ADDRESS = "BRAIDAX_ADDRESS"
"""The environment variable that names addresses of this host, separated by commas."""

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915
_IPV6 = "/proc/net/if_inet6"
_GLOBAL_SCOPE = "00"


def host_id() -> str:
    """Returns what is the same for two processes that reach each other through loopback: machine and network."""
    with contextlib.suppress(OSError):
        network = Path("/proc/self/ns/net").readlink()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{network}"
    return socket.gethostname()


def host_addresses() -> list[str]:
    """Returns the addresses of this host that others may reach: those of the environment, or else IPv4 before IPv6.

    **Raises:** `ArgumentError` for a `BRAIDAX_ADDRESS` that is empty.
    """
    named = os.environ.get(ADDRESS)
    if named is not None:
        addresses = [address.strip() for address in named.split(",") if address.strip()]
        if not addresses:
            raise ArgumentError("BRAIDAX_ADDRESS is empty; expected addresses of this host, separated by commas")
        return addresses
    found: list[str] = []
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, interface in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
                    found.append(socket.inet_ntoa(answer[20:24]))
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path(_IPV6).read_text().splitlines()]
            found += [str(ipaddress.IPv6Address(bytes.fromhex(line[0]))) for line in lines if line[3] == _GLOBAL_SCOPE]
    else:
        with contextlib.suppress(OSError):
            found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    return [address for address in dict.fromkeys(found) if _is_outside(address)] or [LOOPBACK]


def _is_outside(address: str) -> bool:
    """Says whether others may reach an address without being told through which of their interfaces."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not parsed.is_loopback and not (parsed.version == 6 and parsed.is_link_local)
