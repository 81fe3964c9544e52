"""The words of waits that end without what was waited for."""

from collections.abc import Sequence
from typing import final

from braidax.comm.transports.transport import Operation
from braidax.connections.world import World
from braidax.errors import CommError, PeerLost, WaitTimeout


@final
class AnyOf(tuple[Operation, ...]):
    """Operations of which one is enough: who waits for them goes on when any has ended; at least one."""


def all_done(operations: Sequence[Operation]) -> bool:
    """Returns whether all operations have ended, or one of `AnyOf`."""
    for operation in operations:  # twice as quick as all(), and asked several times a message
        if not operation.done:
            return isinstance(operations, AnyOf) and any(other.done for other in operations)
    return True


def late(world: World, operations: Sequence[Operation]) -> WaitTimeout:
    """Returns the error of operations that have not ended in time."""
    peers = sorted({operation.peer for operation in operations if not operation.done})
    listed = ", ".join(world.describe(peer) for peer in peers[:8]) + ("…" if len(peers) > 8 else "")
    return WaitTimeout(
        f"{world.describe(world.rank)} waited for {listed} up to the limit; expected it to take part in the same "
        "operation: do all ranks call the same ones in the same order? If it is only slow, raise timeout_seconds="
    )


def left(world: World, rank: int) -> PeerLost:
    """Returns the error of a wait for a rank that has closed its communicator."""
    return PeerLost(
        f"{world.describe(rank)} is lost: it closed its communicator while this rank waited for it; close "
        "communicators only when all ranks are done, such as behind a barrier()",
        rank,
        world.hosts[rank],
    )


def closed(world: World) -> CommError:
    """Returns the error of calls behind `close`."""
    return CommError(
        f"{world.describe(world.rank)}: this communicator is closed; connect again, as the next generation"
    )


def again(error: CommError) -> CommError:
    """Returns an error to raise once more, with a traceback of its own."""
    return type(error)(*error.args)


def words_of(error: BaseException) -> str:
    """Returns what others are told of an error that is none of ours."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
