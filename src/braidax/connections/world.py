"""`World`: who connects to whom, and what proves it."""

from collections.abc import Callable, Sequence
from typing import final


@final
class World:
    """The ranks that connect to one another.

    **Arguments:** `rank`: of this process. `addresses`: of each rank, by rank. `hosts`: the name of each rank's host.
    `secret`: 32 bytes that only the ranks of this generation of this job know; peers prove that they know it. `check`:
    what a `connect` that waits calls now and then, from any thread: raises when another rank has given up.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[bytes],
        hosts: Sequence[str],
        secret: bytes,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.addresses = tuple(addresses)
        self.hosts = tuple(hosts)
        self.secret = secret
        self.check = check

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.addresses)

    def describe(self, peer: int) -> str:
        """Returns a rank in words, as errors name it: `rank 2 (host b)`."""
        return f"rank {peer} (host {self.hosts[peer]})"
