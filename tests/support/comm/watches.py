"""The watches of two ranks, connected."""

import threading

from braidax.comm.watch import Watch
from braidax.connections.world import World

LIMIT_SECONDS = 30.0


def two_watches() -> list[Watch]:
    """Returns those of ranks on hosts of their own."""
    watches = [Watch(peer_timeout_seconds=60) for _ in range(2)]
    addresses = [watch.address for watch in watches]
    threads = [
        threading.Thread(
            target=watch.connect,
            args=(World(rank, addresses, ("a", "b"), b"0123456789abcdef"),),
            kwargs={"timeout_seconds": 20},
        )
        for rank, watch in enumerate(watches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return watches
