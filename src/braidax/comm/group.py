"""What a rank can do in a group, as algorithms that have been checked and not yet begun."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Literal, cast, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives import exchanges, reductions, trees, values
from braidax.comm.collectives.opening import Opening
from braidax.comm.collectives.running import Runnable, run
from braidax.comm.collectives.schedule import OPENING_BYTES, Kind, Schedule
from braidax.comm.group_messages import (
    BUFFER,
    COLLECTIVE,
    MAX_NUMBER,
    POINT_TO_POINT,
    GroupMessages,
    Steps,
    head_of,
    tag_of,
)
from braidax.comm.messages import Value
from braidax.comm.progress import Progress
from braidax.comm.waiting import words_of
from braidax.comm.watch import Notice
from braidax.errors import ArgumentError, CommError, PeerLost, WaitTimeout

_MAX_SCHEDULES = 256  # that a group remembers
_What = tuple[str, int, np.dtype[Any], np.ufunc, int]
"""Which schedule: collective, bytes of the operand, dtype, operation and root; the last two where there are some."""
_BETWEEN_TWO = ("send", "recv", "send_buffer", "recv_buffer")


@final
class Group:
    """Some ranks of a world, seen from one of them. Its methods are those of `Communicator`.

    **Arguments:** `progress`: moves the messages. `number`: of the group in the world. `ranks`: of the members in the
    world, by rank in the group. `rank`: in the group. `hosts`: a number for each member's host.

    **Fields:** `unheard`: what the member before brought to collectives in which this rank only sent.
    """

    def __init__(
        self, progress: Progress, *, number: int, ranks: Sequence[int], rank: int, hosts: Sequence[int]
    ) -> None:
        self.progress = progress
        self.number = number
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.hosts = hosts
        self.unheard: deque[Opening] = deque()
        self._num_collectives = 0
        self._runnable = lru_cache(_MAX_SCHEDULES)(self._made)
        self._under = lru_cache(256)(partial(GroupMessages, progress, ranks, rank, hosts=hosts))  # a tag

    def send(self, value: Value, dest: int, tag: int) -> Steps[None]:
        """Returns the algorithm of `Communicator.send`."""
        return values.send(self._point(dest, "dest", tag), dest, value)

    def recv(self, source: int, tag: int) -> Steps[Value]:
        """Returns the algorithm of `Communicator.recv`."""
        return values.receive(self._point(source, "source", tag), source)

    def barrier(self) -> Steps[None]:
        """Returns the algorithm of `Communicator.barrier`."""
        nothing = np.empty(0, np.uint8)
        yield from self._run(self._next(_head("barrier")), ("barrier", 0, nothing.dtype, np.add, 0), nothing, nothing)

    def broadcast(self, value: Value, root: int) -> Steps[Value]:
        """Returns the algorithm of `Communicator.broadcast`."""
        self.check_rank(root, "root")
        return values.broadcast(self._next(_head(f"broadcast from root {root}")), value, root)

    def gather(self, value: Value, root: int) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.gather`."""
        self.check_rank(root, "root")
        return values.gather(self._next(_head(f"gather to root {root}")), value, root)

    def all_gather(self, value: Value) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.all_gather`."""
        return values.all_gather(self._next(_head("all_gather")), value)

    def reduce(self, array: Any, operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.reduce`."""
        self.check_rank(root, "root")
        own = _operand(array)
        messages = self._next(_head_of_reduction(f"reduce to root {root}", operation, own.dtype, own.shape))
        if self.size > 1 and own.nbytes <= OPENING_BYTES:
            return trees.reduce_small(messages, own, operation, root)
        out = np.empty_like(own) if self.rank == root else np.empty(0, own.dtype)
        return self._run(messages, ("reduce", own.nbytes, own.dtype, operation, root), own, out)

    def all_reduce(self, array: Any, operation: np.ufunc, out: Any) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.all_reduce`."""
        own = _operand(array)
        head = _head_of_reduction("all_reduce", operation, own.dtype, own.shape)
        out = np.empty_like(own) if out is None else checked_out(out, own, own.shape, own.dtype)
        return self._run(self._next(head), ("all_reduce", own.nbytes, own.dtype, operation, 0), own, out)

    def reduce_scatter(self, array: Any, operation: np.ufunc, out: Any) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.reduce_scatter`."""
        own = _operand(array)
        head = _head_of_reduction("reduce_scatter", operation, own.dtype, own.shape)
        shape = (self._block_length(own), *own.shape[1:])
        out = np.empty(shape, own.dtype) if out is None else checked_out(out, own, shape, own.dtype)
        return self._run(self._next(head), ("reduce_scatter", own.nbytes, own.dtype, operation, 0), own, out)

    def all_to_all_into(self, array: Any, out: Any) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.all_to_all_into`."""
        own = _moved(array)
        self._block_length(own)
        out = checked_out(out, own, own.shape, own.dtype, in_place="never")
        head = _head(f"all_to_all_into of {own.dtype}{list(own.shape)}")
        return self._run(self._next(head), ("all_to_all", own.nbytes, own.dtype, np.add, 0), own, out)

    def all_gather_into(self, array: Any, out: Any) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.all_gather_into`."""
        own = _moved(array)
        out = checked_out(out, own, (self.size, *own.shape), own.dtype, in_place="never")
        head = _head(f"all_gather_into of {own.dtype}{list(own.shape)}")
        return self._run(self._next(head), ("all_gather", own.nbytes, own.dtype, np.add, 0), own, out)

    def all_to_all(self, parts: Sequence[Value]) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.all_to_all`."""
        if len(parts) != self.size:
            raise ArgumentError(f"parts= has {len(parts)} values: expected one for each of the {self.size} ranks")
        return values.all_to_all(self._next(_head("all_to_all")), parts)

    def failed(self, name: str, error: BaseException, timeout_seconds: float) -> None:
        """Ends the epoch, unless what an operation failed of harms nobody else.

        Others wait for whoever leaves a collective, and would take its next one for this one. An interrupt leaves
        messages half sent, or received by nobody.

        **Arguments:** `name`: of the operation. `timeout_seconds`: its limit.
        """
        if self.progress.failure is not None:
            self.progress.told = True
            return
        if isinstance(error, ArgumentError | CommError) and (name in _BETWEEN_TWO or self.size == 1):
            return
        if isinstance(error, PeerLost) and error.rank not in self.progress.left:
            return  # whoever waits for it judges who was lost first
        if isinstance(error, WaitTimeout):
            how = f"took longer than {timeout_seconds:g} s: {error}"
        elif isinstance(error, ArgumentError | CommError):
            how = f"failed: {error}"
        else:
            how = f"failed: {words_of(error)}"
        self.progress.fail(Notice("aborted", self.progress.world.rank, f"{name} {how}"))
        self.progress.told = True

    def check_rank(self, peer: Any, name: str) -> None:
        """Raises `ArgumentError` for what is no rank of the group. **Arguments:** `name`: of the parameter."""
        if not isinstance(peer, int | np.integer) or not 0 <= peer < self.size:
            raise ArgumentError(f"{name}={peer!r}: expected a rank from 0 to {self.size - 1}")

    def buffer_tag(self, tag: int) -> int:
        """Returns the tag of `send_buffer`. **Raises:** `ArgumentError` for a `tag` that is out of range."""
        return self._tag(BUFFER, tag)

    def _tag(self, kind: int, tag: Any) -> int:
        if not isinstance(tag, int | np.integer) or not 0 <= tag <= MAX_NUMBER:
            raise ArgumentError(f"tag={tag!r}: expected a whole number from 0 to {MAX_NUMBER:,}")
        return tag_of(self.number, kind, int(tag))

    def _point(self, peer: int, name: str, tag: int) -> GroupMessages:
        self.check_rank(peer, name)
        return self._under(self._tag(POINT_TO_POINT, tag))

    def _block_length(self, own: NDArray[Any]) -> int:
        """Returns the length of dim 0 of a member's block. **Raises:** `ArgumentError` where members share unequally."""
        if not own.ndim or len(own) % self.size:
            raise ArgumentError(
                f"array= has shape {own.shape}: expected dim 0 to be a multiple of the {self.size} ranks; pad it"
            )
        return len(own) // self.size

    def _run(
        self, messages: GroupMessages, what: "_What", own: NDArray[Any], out: NDArray[Any]
    ) -> Steps[NDArray[Any]]:
        yield from run(messages, self._runnable(what), own, out)
        return out

    def _made(self, what: "_What") -> Runnable:
        """Returns a schedule of this member, as what the transport runs if it can."""
        name, num_bytes, dtype, operation, root = what
        schedule = _schedule(name, self.rank, tuple(self.hosts), num_bytes, dtype.itemsize, root)
        compiled = None
        if self.progress.schedules is not None:
            reduces = any(step.kind is Kind.REDUCE for step in schedule.steps)
            is_native = not reduces or dtype.isnative
            sizes = num_bytes, _out_bytes(name, num_bytes, self.size, self.rank == root), schedule.scratch_bytes
            compiled = is_native and self.progress.schedules.compile(
                schedule.rows(self.ranks).tobytes(),
                sizes,
                schedule.num_tickets,
                operation.__name__ if reduces else "",
                f"{dtype.kind}{dtype.itemsize}",
            )
        return Runnable(schedule, compiled or None, operation, dtype)

    def _next(self, head: bytes) -> GroupMessages:
        """Returns the messages of the next collective. **Arguments:** `head`: what this rank brings to it."""
        self._num_collectives = (self._num_collectives + 1) & MAX_NUMBER
        tag = tag_of(self.number, COLLECTIVE, self._num_collectives)
        return GroupMessages(self.progress, self.ranks, self.rank, tag, self.hosts, head, self.unheard)


def _operand(array: Any) -> NDArray[Any]:
    try:
        return np.require(array, requirements="CA")
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"array= is a {type(array).__name__} of which NumPy makes no array: {error}; expected numbers"
        ) from error


def _moved(array: Any) -> NDArray[Any]:
    own = _operand(array)
    if own.dtype.hasobject:
        raise ArgumentError(f"array= has dtype={own.dtype}: expected numbers or bytes; Python objects do not travel")
    return own


def checked_out(
    out: Any,
    own: NDArray[Any],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    in_place: Literal["whole", "never"] = "whole",
) -> NDArray[Any]:
    """Returns the array that a collective fills. **Arguments:** `in_place`: whether it may be the operand itself.

    **Raises:** `ArgumentError` for one of another shape or dtype, that is not writable and contiguous, or whose memory
    is in part the operand's.
    """
    if not isinstance(out, np.ndarray):
        raise ArgumentError(f"out= is a {type(out).__name__}: expected a NumPy array of dtype={dtype}, shape={shape}")
    array = cast("NDArray[Any]", out)
    flags = array.flags
    if array.shape != shape or array.dtype != dtype or not (flags.c_contiguous and flags.writeable and flags.aligned):
        raise ArgumentError(
            f"out= has dtype={array.dtype}, shape={array.shape}: expected dtype={dtype}, shape={shape}, writable and "
            "contiguous, such as numpy.empty makes it"
        )
    if np.may_share_memory(array, own):
        is_whole = array.ctypes.data == own.ctypes.data and array.nbytes == own.nbytes
        if in_place == "never" or not is_whole:
            expected = "memory of its own" if in_place == "never" else "memory of its own, or array= itself"
            raise ArgumentError(f"out= shares memory with array=: expected {expected}")
    return array


_head = lru_cache(1024)(head_of)


@lru_cache(1024)
def _head_of_reduction(name: str, operation: np.ufunc, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Returns what a rank brings. **Raises:** `ArgumentError` for an operation or a dtype that cannot be reduced."""
    if operation.nin != 2 or operation.nout != 1:
        raise ArgumentError(
            f"operation={operation.__name__}: expected a ufunc of two operands and one result, such as numpy.add"
        )
    if dtype.hasobject:
        raise ArgumentError(f"array= has dtype={dtype}: expected numbers; Python objects do not travel")
    try:
        result = operation.resolve_dtypes((dtype, dtype, None))[2]
    except TypeError as error:
        raise ArgumentError(
            f"array= has dtype={dtype}: expected one that operation={operation.__name__} takes ({error})"
        ) from error
    if not np.can_cast(result, dtype, "safe"):
        raise ArgumentError(
            f"array= has dtype={dtype}, of which operation={operation.__name__} makes {result}: expected one that it "
            "makes the same of; convert the array first"
        )
    return head_of(f"{name}({operation.__name__}) of {dtype}{list(shape)}")


def _schedule(
    name: str, rank: int, hosts: tuple[int, ...], num_bytes: int, element_bytes: int, root: int
) -> Schedule:
    size, element_bytes = len(hosts), max(1, element_bytes)
    match name:
        case "all_reduce":
            return reductions.all_reduce(rank, hosts, num_bytes, element_bytes)
        case "reduce_scatter":
            return reductions.reduce_scatter(rank, size, num_bytes, element_bytes)
        case "reduce":
            return reductions.reduce(rank, size, num_bytes, element_bytes, root)
        case "all_to_all":
            return exchanges.all_to_all(rank, size, num_bytes // size)
        case "all_gather":
            return exchanges.all_gather(rank, size, num_bytes)
        case _:
            return exchanges.barrier(rank, size)


def _out_bytes(name: str, num_bytes: int, size: int, is_root: bool) -> int:
    match name:
        case "reduce_scatter":
            return num_bytes // size
        case "reduce":
            return num_bytes if is_root else 0
        case "all_gather":
            return num_bytes * size
        case _:
            return num_bytes
