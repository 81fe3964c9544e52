"""This process's client of JAX's coordination service, which JAX keeps to itself."""

import contextlib
from functools import lru_cache

from jax._src.distributed import global_state

from braidax.connections.coordination import Coordination, CoordinationClient
from braidax.errors import CommError

_BUSY = "busy"


def coordination() -> Coordination | None:
    """Returns the service, the same object as long as it runs; None in a process without `jax.distributed`."""
    client: CoordinationClient | None = global_state.client
    return None if client is None else _coordination_of(client, global_state.process_id)


def say_busy(words: str) -> None:
    """Lets the other processes of the job know that this one is at work, though it does not come to where they wait."""
    service = coordination()
    if service is not None:
        with contextlib.suppress(CommError):  # a service that has ended is told of by those who need it
            service.under(_BUSY).set(str(service.process), words.encode(), known="replace")


def busy(service: Coordination) -> dict[int, bytes]:
    """Returns what each process said last of its work; what a process is at has moved on where that has changed.

    **Arguments:** `service`: as of `coordination`.
    """
    return {int(process): words for process, words in service.below(_BUSY).items()}


_coordination_of = lru_cache(1)(Coordination)  # whose numbers begin anew with each service
