"""What the TCP sockets of a process have sent, asked of the kernel."""

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

_TCP_INFO_BYTES = 256
_BYTES_SENT = 200  # where tcpi_bytes_sent stands in it


class _Socket(NamedTuple):
    own: tuple[str, int]
    peer: tuple[str, int]
    num_bytes: int


class Sent(NamedTuple):
    """Bytes that TCP sockets of this process have sent to other processes.

    **Fields:** `data`, and `words`: through JAX's coordination service, by socket.
    """

    data: dict[str, int]
    words: dict[str, int]

    @classmethod
    def now(cls, coordinator_port: int) -> "Sent":
        """Asks the kernel for every socket; those that both ends of are here are left out."""
        found: dict[str, _Socket] = {}
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                name = str(entry.readlink())
                if name.startswith("socket:") and (seen := _asked(int(entry.name))) is not None:
                    found[name] = seen
        here = {seen.own for seen in found.values()}
        sent = cls({}, {})
        for name, seen in found.items():
            if seen.peer not in here:
                part = sent.words if coordinator_port in (seen.own[1], seen.peer[1]) else sent.data
                part[name] = seen.num_bytes
        return sent

    def since(self, before: "Sent") -> tuple[int, int]:
        """Returns what was sent after an earlier count: `data`, `words`."""
        data, words = (
            sum(count - old.get(name, 0) for name, count in new.items()) for new, old in zip(self, before, strict=True)
        )
        return data, words


def _asked(descriptor: int) -> _Socket | None:
    """Returns a connected TCP socket, None for another one. **Raises:** `OSError` for one that is not connected."""
    with socket.socket(fileno=os.dup(descriptor)) as held:
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
            return None
        info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        num_bytes = int(struct.unpack_from("<Q", info, _BYTES_SENT)[0])
        return _Socket(_place(held.getsockname()), _place(held.getpeername()), num_bytes)


def _place(address: Any) -> tuple[str, int]:
    """Returns address and port, the same for a socket of IPv4 and one of IPv6 that speaks it."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
