"""Moves messages over TCP in C: the frames are those of `tcp_link.py`."""

from collections.abc import Callable, Sequence
from typing import Any

from braidax.comm.transports.transport import Buffer, Operation, SmallValues

def know_arrays(array: Any, address: int, dtype: Any, /) -> bool:
    """Finds bytes of arrays in their memory from now on, if this one of shape `[3, 2]` lies as is expected."""

class Repeats:
    """What collectives are run with when they come again. `empty`: makes an array of a shape and dtype."""

    def __init__(self, empty: Callable[..., Any], /) -> None: ...
    def __len__(self) -> int: ...
    def remember(
        self,
        name: str,
        key: Any,
        shape: tuple[int, ...],
        dtype: Any,
        out_shape: tuple[int, ...],
        out_dtype: Any,
        compiled: Schedule,
        head: bytes,
        /,
    ) -> None: ...

class Schedule:
    """A schedule that a worker can run. Raises `LookupError` for a reduction that has no loop here."""

    def __init__(
        self, rows: bytes, sizes: tuple[int, int, int], num_tickets: int, operation: str, dtype: str, /
    ) -> None: ...

class Worker:
    """The links of a rank. Raises `OSError`; one caller at a time."""

    def connect(
        self,
        rank: int,
        descriptors: tuple[int, ...],
        failed: Callable[[Operation, int, str, int, int], None],
        disagreed: Callable[[Operation, int, bytes, bytes, int, int], None],
        operation_type: type[Operation],
        is_crowded: bool,
        lanes: tuple[tuple[int, int] | None, ...] = ...,
        bell: int = -1,
        /,
    ) -> None:
        """Begins. `descriptors`: of sockets that do not block and outlive the worker, by rank, -1 for this one.

        `failed` is called with operation, peer, how that was lost (empty for a message that is too long), and the
        lengths of message and buffer; `disagreed` with operation, peer, the heads of its message and of ours, and the
        lengths of both. `is_crowded`: whether this host has more ranks than cores. `lanes`: for each rank the memory
        that is shared with it, and the descriptor that rings it, which outlives the worker; None for a rank without.
        `bell`: an `eventfd` by which this rank is rung.
        """

    def send(
        self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation, spin_seconds: float = -1.0, /
    ) -> None: ...
    def receive(
        self, peer: int, tag: int, buffer: Buffer, operation: Operation, spin_seconds: float = -1.0, /
    ) -> None: ...
    def send_receive(
        self,
        peer: int,
        tag: int,
        buffers: tuple[Any, ...],
        receive_tag: int,
        place: Any,
        spin_seconds: float,
        /,
    ) -> bytearray | Operation: ...
    def send_receive_value(
        self,
        peer: int,
        tag: int,
        kind: int,
        number: int,
        value: Any,
        receive_tag: int,
        place: Any,
        small: SmallValues,
        spin_seconds: float,
        /,
    ) -> tuple[int, int, Any] | bytearray | Operation | None: ...
    def run(
        self,
        tag: int,
        compiled: Schedule,
        head: bytes,
        own: Any,
        out: Any,
        spin_seconds: float,
        /,
    ) -> Operation | None: ...
    def repeat(
        self,
        repeats: Repeats,
        name: str,
        key: Any,
        own: Any,
        out: Any,
        tag: int,
        spin_seconds: float,
        /,
    ) -> Any: ...
    def poll(self, spin_seconds: float, /) -> None: ...
    def arm(self) -> bool: ...
    def fileno(self) -> int: ...
    def lose(self, peer: int, /) -> None: ...
    def kept_bytes(self, peer: int, /) -> int: ...
    def close(self, timeout_seconds: float, /) -> list[int]:
        """Delivers what was sent, and lets go of all buffers. Returns the peers that are not lost."""
