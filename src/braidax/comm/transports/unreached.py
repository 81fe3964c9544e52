"""The errors of ranks that did not come, or that do not fit, when transports without connections of their own meet."""

from collections.abc import Sequence

from braidax.connections.world import World
from braidax.errors import HandshakeError, WaitTimeout


def unreached(world: World, ranks: Sequence[int], seconds: float) -> WaitTimeout:
    """Returns the error of ranks that did not connect within a limit."""
    places = {rank: world.addresses[rank].decode("utf-8", "replace") for rank in ranks}
    listed = ", ".join(f"{world.describe(rank)} at {place!r}" for rank, place in places.items())
    return WaitTimeout(
        f"{listed} did not connect to {world.describe(world.rank)} within {seconds:g} s; expected every rank to "
        "connect at about the same time: is it running?"
    )


def other_world(world: World, rank: int, size: int) -> HandshakeError:
    """Returns the error of a peer that was given another world."""
    return HandshakeError(
        f"{world.describe(rank)} is in a world of {size} ranks, {world.describe(world.rank)} in one of {world.size}, "
        "or their addresses differ; give all ranks the same store, job and number of ranks"
    )


def other_secret(world: World, rank: int) -> HandshakeError:
    """Returns the error of a peer that does not know the secret."""
    return HandshakeError(
        f"{world.describe(rank)} does not know the secret of {world.describe(world.rank)}; expected ranks of the same "
        "generation of the same job: do all use the same store and job?"
    )
