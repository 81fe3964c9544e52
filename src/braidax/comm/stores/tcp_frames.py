"""What client and server of the TCP store say to each other once they have proved themselves.

A request is `operation u8 · length of key u16 · length of value u32 · key · value`, an answer `status u8 · length u32 ·
value`, integers big-endian. A client sends its next request when it has the whole answer.
"""

import struct
from typing import Final

PURPOSE = b"store"

REQUEST = struct.Struct("!BHI")
ANSWER = struct.Struct("!BI")
AMOUNT = struct.Struct("!i")  # the value of ADD
TOTAL = struct.Struct("!q")  # the answer to it
SECONDS = struct.Struct("!d")  # the value of GET: how long the server may wait

SET: Final = 1
GET: Final = 2
ADD: Final = 3

OK: Final = 1
MISSING: Final = 2


def url(host: str, port: int) -> str:
    """Returns the URL of a TCP store."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
