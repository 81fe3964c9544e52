"""How many bytes this process has sent and received over TCP: the kernel counts them for each connection."""

import os
import socket
import struct
from pathlib import Path

_COUNTS = struct.Struct("QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_OFFSET = 120


def moved_bytes() -> int:
    """Returns the bytes of all connections that are open."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += sum(_COUNTS.unpack_from(told, _OFFSET)) if len(told) >= _OFFSET + _COUNTS.size else 0
        except OSError:  # no socket, or closed meanwhile
            continue
    return total
