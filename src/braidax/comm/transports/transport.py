"""The contract of transports: what moves messages between ranks, with nothing known of collectives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from braidax.connections.world import World
from braidax.errors import CommError

Buffer = memoryview
"""Contiguous bytes: format `B`, one dim."""

SmallValues = tuple[
    Callable[..., Any], Callable[..., bytes | None], Callable[[int], bytes | None], Callable[[bytes], tuple[Any, ...]]
]
"""What small values are known by: what makes an array of a shape and dtype; what an array of a dtype and shape begins
with; what bytes of a length begin with, both None for no small one; the bytes, shape and dtype (None of bytes) of what
begins so."""

MAX_TAG = (1 << 44) - 1
MAX_JOINED = 8
"""Buffers of which `QuickCalls.send_receive` sends a copy."""


@final
class Operation:
    """A send or a receive under way. A transport ends it once, by `finish` or `fail`, and then lets go of its buffers.

    **Fields:** `done`: whether it has ended. `error`: what it failed of. `num_bytes`: the length of the message, once
    received. `ready`: where an ended operation that somebody wants to hear of puts itself.
    """

    done = False  # of the class, since making one is a good part of the time of a small message
    error: CommError | None = None
    num_bytes = 0
    ready: "list[Operation] | None" = None

    def __init__(self, peer: int) -> None:
        self.peer = peer

    def finish(self, num_bytes: int = 0) -> None:
        """Ends the operation: the buffers of a send may be changed, those of a receive hold the message."""
        self.num_bytes = num_bytes
        self.done = True
        if self.ready is not None:
            self.ready.append(self)

    def fail(self, error: CommError) -> None:
        """Ends the operation with an error."""
        self.error = error
        self.finish()


@runtime_checkable
class Repeats(Protocol):
    """What collectives of a group are run with when they come again with such arrays. Too many are forgotten."""

    def __len__(self) -> int:
        """The number of them."""
        ...

    def remember(
        self,
        name: str,
        key: Any,
        shape: tuple[int, ...],
        dtype: Any,
        out_shape: tuple[int, ...],
        out_dtype: Any,
        compiled: object,
        head: bytes,
        /,
    ) -> None:
        """Remembers one. **Arguments:** `key`: what tells it besides: a ufunc, a rank. The others as of `Schedules`.

        **Raises:** `ValueError` for a shape of too many dims.
        """
        ...


class Schedules(Protocol):
    """Runs schedules of collectives (`braidax.comm.collectives.schedule`) without the GIL."""

    repeat: Callable[..., Any]
    """`(repeats, name, key, own, out, tag, spin_seconds)` begins what has come before with such arrays, as `run`.

    **Arguments:** `out`: None for a new array. **Returns:** `out` when it has ended well, otherwise the operation that
    ends with it, and `out`; None where no such one has come, nothing having begun. **Raises:** as `run`.
    """

    def repeats(self) -> Repeats:
        """Returns what remembers collectives for `repeat`."""
        ...

    def compile(
        self, rows: bytes, sizes: tuple[int, int, int], num_tickets: int, operation: str, dtype: str
    ) -> object | None:
        """Returns what `run` takes in place of a schedule; None for an operation or a dtype that it does not know.

        **Arguments:** `rows`: see `Schedule.rows`. `sizes`: bytes of the three places. `operation`: the name of a
        ufunc, empty for none. `dtype`: as NumPy writes it, such as `f4`.
        """
        ...

    def run(self, tag: int, compiled: object, head: bytes, own: Any, out: Any, spin_seconds: float) -> Operation | None:
        """Begins to run a schedule.

        **Arguments:** `tag`: of all messages. `head`: what this rank brings. `own`, `out`: its arrays, which must not
        change until the end. `spin_seconds`: moves it along at once, for up to so long; -1 for not at all.

        **Returns:** None when it has ended well, otherwise the operation that ends with it. Its `peer` is whoever is
        waited for; its `num_bytes` are bits, in the end: 1 for an overflow, 2 for an underflow, 4 for an invalid value.

        **Raises:** `ValueError`, `TypeError`, `BufferError` for arrays that are not those of the schedule:
        nothing has begun then.
        """
        ...


@final
@dataclass(frozen=True)
class QuickCalls:
    """Calls that begin a message and move it along at once: of a rank that waits for it, and has nothing else to do.

    All take the seconds to spin last, for what they begin and has not ended: -1 for not at all, else as of
    `Transport.poll`.
    They raise `TypeError`, `ValueError`, `BufferError` for buffers that the transport does not take, nothing having
    begun.

    **Fields:** `send`: `(peer, tag, buffers, operation, spin_seconds)`, see `Transport.send`. `receive`: `(peer, tag,
    buffer, operation, spin_seconds)`. `send_receive`: `(peer, tag, buffers, receive_tag, place, spin_seconds)` sends a
    copy of at most 8 buffers, and returns what comes back, or else the operation that receives it into the place; that
    fails where the message cannot be sent.
    `send_receive_value`: `(peer, tag, kind, number, value, receive_tag, place, small, spin_seconds)` does so with a
    word (`braidax.comm.small.HEADER`) and a small value behind it, and returns kind, number and value where such come
    back at once; None for a value that is not small, nothing having begun.
    """

    send: Callable[[int, int, Any, Operation, float], None]
    receive: Callable[[int, int, Any, Operation, float], None]
    send_receive: Callable[[int, int, tuple[Any, ...], int, Any, float], bytearray | Operation]
    send_receive_value: Callable[
        [int, int, int, int, Any, int, Any, SmallValues, float], tuple[int, int, Any] | bytearray | Operation | None
    ]


class Transport(ABC):
    """Moves messages between the ranks of one world.

    Messages of one (sender, receiver, tag) arrive in the order in which they were sent, and are received in the order
    in which receives were posted; nothing else is promised. A send may end before it is received, or only then. A rank
    may send to itself.

    Nothing here is thread-safe, and nothing waits: the owner calls one method at a time, under its lock, and sleeps on
    `fileno` without it. The exception is `connect`, which waits up to its limit.

    A transport tells of a lost peer what it happens to see (`fail` of the peer's operations, with `PeerLost`); peers
    that freeze or are cut off are the business of the owner, who then calls `close`, or `lose` for this peer alone.
    """

    name: str
    """What users call it, such as `tcp`."""

    takes_arrays: bool = False
    """Whether `send` and `receive` take any C-contiguous buffer as it is, which saves the making of a view."""

    can_lose: bool = False
    """Whether it has `lose`: without it, no world of `on_loss="peer"` can be."""

    schedules: "Schedules | None" = None
    """What runs whole schedules without the GIL, where the transport has that."""

    quick: QuickCalls | None = None
    """What saves calls of small messages, where the transport has that."""

    nap_seconds: float | None = None
    """Events that do not show at `fileno` are looked for after so long; None where all of them show."""

    @property
    @abstractmethod
    def address(self) -> bytes:
        """What peers need in order to reach this rank; of any length. There from construction on."""

    @abstractmethod
    def connect(self, world: World, *, timeout_seconds: float) -> None:
        """Connects to all peers; called once, by all ranks at about the same time.

        **Raises:** `HandshakeError` for a peer that does not fit, `WaitTimeout` naming the ranks that were not reached,
        their hosts and addresses.
        """

    @abstractmethod
    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        """Begins to send one message that is the concatenation of the buffers, which must not change until the end.

        **Arguments:** `peer`: a rank. `tag`: 0 to `MAX_TAG`. `buffers`: any number of any length, 0 and > 2 GiB
        included. `operation`: what to end when the buffers may be changed; this may happen before the call returns.
        """

    @abstractmethod
    def receive(self, peer: int, tag: int, buffer: Buffer, operation: Operation) -> None:
        """Begins to receive one message into a buffer that is at least as long as the message.

        **Arguments:** as for `send`. `operation`: is finished with the length of the message. A message that is longer
        than the buffer fails it with `CommError` (see `too_long`); later messages are not touched by that.
        """

    @abstractmethod
    def poll(self, spin_seconds: float) -> None:
        """Moves what can be moved now, and ends what has ended.

        **Arguments:** `spin_seconds`: when nothing has ended, try again for up to that long, with the GIL released
        where the transport can. 0 tries once.
        """

    @abstractmethod
    def arm(self) -> bool:
        """Gets ready to sleep: True when the next event makes `fileno` readable, False when `poll` must come first.

        It need not look for what is there already: that makes `fileno` readable until `poll` takes it. So who wakes
        polls before arming again; arming alone would not let it sleep any more.
        """

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has something to do, valid until `close`.

        It may become readable without need.
        """

    def lose(self, peer: int, error: CommError) -> None:
        """Gives up one peer, and leaves the others as they are; a second call for the same one does nothing.

        All operations with the peer that have not ended fail with the error, and so do all later ones, even where a
        message had come before. Nothing is written any more into the buffers of those that waited.

        **Arguments:** `peer`: another rank. `error`: what its operations fail with.
        """
        raise CommError(f"the transport {self.name!r} cannot lose rank {peer} alone; expected one with can_lose=True")

    @abstractmethod
    def close(self, *, timeout_seconds: float) -> None:
        """Delivers what was sent, for up to `timeout_seconds` (0: drops it), and gives up all descriptors and memory.

        Operations that have not ended never end; their buffers are let go of only when nothing can write into them
        any more. A second call does nothing.
        """


def too_long(world: World, peer: int, num_bytes: int, capacity: int) -> CommError:
    """Returns the error of a message that is longer than the buffer it was to be received into."""
    return CommError(
        f"{world.describe(peer)} sent {num_bytes:,} bytes where at most {capacity:,} were expected; "
        "do all ranks call the same operations in the same order, with the same shapes and dtypes?"
    )


def of_another_length(world: World, peer: int, num_bytes: int, expected_bytes: int) -> CommError:
    """Returns the error of a message that does not fill the memory it was to be received into."""
    return CommError(
        f"{world.describe(peer)} sent {num_bytes:,} bytes where {expected_bytes:,} were expected; do all ranks call "
        "the same operations in the same order, with the same shapes and dtypes?"
    )


def disagreeing(world: World, peer: int, theirs: bytes, ours: bytes) -> CommError:
    """Returns the error of a collective to which a peer brings something else. **Arguments:** the heads of both."""
    return CommError(
        f"{world.describe(peer)} brings {_words(theirs)} to a collective, {world.describe(world.rank)} {_words(ours)}; "
        "expected the same of all ranks: call the same operations in the same order, with the same shapes and dtypes"
    )


def _words(head: bytes) -> str:
    return head.rstrip(b"\0").decode("utf-8", "replace") or "nothing"
