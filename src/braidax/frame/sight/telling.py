"""What ranks tell of a plan while they compute it: to whoever watches, and only as long as that costs nothing.

Datagrams go one way, and each says all that it is about: one that is lost, late or comes twice changes nothing, and a
watcher that is slow, or gone, is not waited for.
"""

import contextlib
import hashlib
import hmac
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from braidax.frame.polars import msgpack
from braidax.frame.sight.measuring import UNMEASURED, Meter, State, Unmeasured

EVERY_SECONDS = 0.2
"""Between what a rank tells."""

MAX_BYTES = 1200
"""Of a datagram: a network carries that in one piece."""

_STATES = 8  # in a datagram: each has at most 140 bytes
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Watcher:
    """Who watches a plan. **Fields:** `addresses`: hosts and ports that reach it. `secret`: of this plan alone."""

    addresses: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)


class News(NamedTuple):
    """What a rank tells. **Fields:** `number`: of a later one it is larger."""

    rank: int
    number: int
    states: list[State]


@contextlib.contextmanager
def metered(watcher: Watcher | None, rank: int) -> Generator[Unmeasured]:
    """Yields what measures a plan for a watcher, and tells it; where there is none, nothing is measured."""
    if watcher is None:
        yield UNMEASURED
        return
    meter = Meter()
    with telling(meter, watcher, rank):
        yield meter


@contextlib.contextmanager
def telling(meter: Meter, watcher: Watcher | None, rank: int) -> Generator[None]:
    """Tells a watcher, inside the block, what a rank measures. **Arguments:** `watcher`: None is nobody."""
    if watcher is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        targets: list[tuple[socket.socket, tuple[str, int]]] = []
        for host, port in watcher.addresses:
            with contextlib.suppress(OSError):  # an address that this host cannot reach: another one may do
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                connection = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                connection.setblocking(False)
                targets.append((connection, (host, port)))
        ended, numbers = threading.Event(), count()

        def tell() -> None:
            for data in packed(watcher.secret, rank, next(numbers), meter.states()):
                for connection, address in targets:
                    with contextlib.suppress(OSError):  # it is full, or nobody is there
                        connection.sendto(data, address)

        def tell_all() -> None:
            while not ended.wait(EVERY_SECONDS):
                tell()
            tell()

        thread = threading.Thread(target=tell_all, name="braidax-telling", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def packed(secret: bytes, rank: int, number: int, states: Sequence[State]) -> Iterator[bytes]:
    """Yields the datagrams that tell of operations. **Arguments:** as the fields of `News`."""
    for begin in range(0, len(states), _STATES):
        data: bytes = msgpack.encode(News(rank, number, list(states[begin : begin + _STATES])))
        yield hmac.digest(secret, data, "sha256") + data


def unpacked(secret: bytes, data: bytes, *, size: int) -> News | None:
    """Returns what a datagram tells, which anybody may have sent; None for one that no rank did.

    **Arguments:** `size`: of the ranks.
    """
    digest, told = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if len(data) > MAX_BYTES or not hmac.compare_digest(digest, hmac.digest(secret, told, "sha256")):
        return None
    try:
        news = msgpack.decode(told, type=News)
    except ValueError:  # what msgspec raises is one
        return None
    numbers = [number for state in news.states for number in (state.operation, state.num_rows or 0, *state[4:])]
    return news if 0 <= news.rank < size and min(numbers, default=0) >= 0 else None
