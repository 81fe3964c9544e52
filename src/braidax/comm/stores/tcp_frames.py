"""What client and server of the TCP store say to each other once they have proved themselves, in frames of a `Channel`.

A request has the parts operation (a byte), key and value, an answer those of status (a byte) and value. A client sends
its next request when it has the whole answer.
"""

import struct
from typing import Final

from braidax.comm.stores.limits import MAX_KEY_BYTES, MAX_VALUE_BYTES

PURPOSE = b"store"

REQUEST_PARTS = 3
REQUEST_BYTES = 1 + MAX_KEY_BYTES + MAX_VALUE_BYTES
ANSWER_PARTS = 2
ANSWER_BYTES = 1 + MAX_VALUE_BYTES

AMOUNT = struct.Struct("!i")  # the value of ADD
TOTAL = struct.Struct("!q")  # the answer to it
SECONDS = struct.Struct("!d")  # the value of GET: how long the server may wait

SET: Final = b"\x01"
GET: Final = b"\x02"
ADD: Final = b"\x03"

OK: Final = b"\x01"
MISSING: Final = b"\x02"


def url(host: str, port: int) -> str:
    """Returns the URL of a TCP store."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
