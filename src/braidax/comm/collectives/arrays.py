"""The collectives of arrays: what they take is checked, and the schedules that run them are made once."""

import contextlib
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives import broadcasts, exchanges, reductions, trees
from braidax.comm.collectives.calls import Calls
from braidax.comm.collectives.running import Runnable, run
from braidax.comm.collectives.schedule import OPENING_BYTES, Schedule
from braidax.comm.group_messages import GroupMessages, Steps, head_of
from braidax.errors import ArgumentError

T = TypeVar("T")

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_MAX_SCHEDULES = 256  # that a group remembers
NOTHING = np.empty(0, np.uint8)
"""What a barrier takes and fills."""


class What(NamedTuple):
    """Which schedule is meant.

    **Fields:** `name`: of the collective. `num_bytes`, `dtype`: of the operand; of what is broadcast. `reduction`,
    `root`: where it has some.
    """

    name: str
    num_bytes: int
    dtype: np.dtype[Any]
    reduction: np.ufunc = np.add
    root: int = 0


@final
class Arrays:
    """The collectives of arrays of a group. Its methods are those of `Communicator`.

    **Arguments:** `calls`: of the group.

    **Fields:** `repeats`: what collectives that have come before are run with, known by their reduction, or root; None
    where the transport does not run schedules on arrays as they are.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._size = len(calls.ranks)
        self._runnable = lru_cache(_MAX_SCHEDULES)(self._made)
        schedules, on_loss = calls.progress.schedules, calls.progress.on_loss
        self.repeats = None if schedules is None or on_loss == "peer" else schedules.repeats()

    def barrier(self) -> Steps[None]:
        """Returns the algorithm of `Communicator.barrier`."""
        yield from self._run(What("barrier", 0, NOTHING.dtype), None, NOTHING, NOTHING, "barrier")

    def meet(self, messages: GroupMessages) -> Steps[None]:
        """Returns the algorithm that ends when all members have come to what these messages belong to."""
        return run(messages, self._runnable(What("barrier", 0, NOTHING.dtype)), NOTHING, NOTHING)

    def reduce(self, array: Any, operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.reduce`."""
        own = _operand(array)
        head = _head_of_reduction(f"reduce to root {root}", operation, own.dtype, own.shape)
        if self._size > 1 and own.nbytes <= OPENING_BYTES:
            return trees.reduce_small(self._calls.next(head), own, operation, root)
        out = np.empty_like(own) if self._calls.rank == root else np.empty(0, own.dtype)
        what = What("reduce", own.nbytes, own.dtype, operation, root)
        return _returning(out, run(self._calls.next(head), self._runnable(what), own, out))

    def all_reduce(self, array: Any, operation: np.ufunc, out: Any) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.all_reduce`."""
        own = _operand(array)
        head = _head_of_reduction("all_reduce", operation, own.dtype, own.shape)
        out = np.empty_like(own) if out is None else _checked(out, own, own.shape)
        return self._run(What("all_reduce", own.nbytes, own.dtype, operation), operation, own, out, head)

    def reduce_scatter(self, array: Any, operation: np.ufunc, out: Any) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.reduce_scatter`."""
        own = _operand(array)
        head = _head_of_reduction("reduce_scatter", operation, own.dtype, own.shape)
        shape = (self._block_length(own), *own.shape[1:])
        out = np.empty(shape, own.dtype) if out is None else _checked(out, own, shape, in_place="never")
        return self._run(What("reduce_scatter", own.nbytes, own.dtype, operation), operation, own, out, head)

    def all_to_all_into(self, array: Any, out: Any) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.all_to_all_into`."""
        own = _moved(array)
        self._block_length(own)
        out = _checked(out, own, own.shape, in_place="never")
        head = f"all_to_all_into of {own.dtype}{list(own.shape)}"
        return self._run(What("all_to_all_into", own.nbytes, own.dtype), None, own, out, head)

    def all_gather_into(self, array: Any, out: Any) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.all_gather_into`."""
        own = _moved(array)
        out = _checked(out, own, (self._size, *own.shape), in_place="never")
        head = f"all_gather_into of {own.dtype}{list(own.shape)}"
        return self._run(What("all_gather_into", own.nbytes, own.dtype), None, own, out, head)

    def broadcast_into(self, array: Any, root: int) -> Steps[Any]:
        """Returns the algorithm of `Communicator.broadcast_into`."""
        whole = _moved(array) if self._calls.rank == root else _filled(array)
        own, out = (whole, NOTHING) if self._calls.rank == root else (NOTHING, whole)
        head = f"broadcast_into from root {root} of {whole.dtype}{list(whole.shape)}"
        what = What("broadcast_into", whole.nbytes, whole.dtype, root=root)
        return _returning(array, self._run(what, int(root), own, out, head))

    def places(self, array: Any, root: Any) -> tuple[Any, Any]:
        """Returns what this member has and fills in a broadcast."""
        return (array, NOTHING) if type(root) is int and root == self._calls.rank else (NOTHING, array)

    def _run(
        self, what: What, key: Any, own: NDArray[Any], out: NDArray[Any], head: bytes | str
    ) -> Steps[NDArray[Any]]:
        """Runs a collective. **Arguments:** `key`: tells it, with its name and arrays, when it comes again."""
        head = _head(head) if isinstance(head, str) else head
        runnable = self._runnable(what)
        if self.repeats is not None and runnable.compiled is not None:
            with contextlib.suppress(ValueError):  # it has more dims than is usual
                self.repeats.remember(
                    what.name, key, own.shape, own.dtype, out.shape, out.dtype, runnable.compiled, head
                )
        return _returning(out, run(self._calls.next(head), runnable, own, out))

    def _made(self, what: What) -> Runnable:
        """Returns a schedule of this member, as what the transport runs if it can."""
        schedule = _schedule(what, self._calls.rank, self._calls.hosts)
        schedules, compiled = self._calls.progress.schedules, None
        reduces = what.name in _REDUCTIONS
        if schedules is not None and self._size > 1 and (what.dtype.isnative or not reduces):
            compiled = schedules.compile(
                schedule.rows(self._calls.ranks).tobytes(),
                (*_place_bytes(what, self._calls.rank, self._size), schedule.scratch_bytes),
                schedule.num_tickets,
                what.reduction.__name__ if reduces else "",
                f"{what.dtype.kind}{what.dtype.itemsize}",
            )
        return Runnable(schedule, compiled, what.reduction, what.dtype)

    def _block_length(self, own: NDArray[Any]) -> int:
        """Returns the length of dim 0 of a member's block. **Raises:** `ArgumentError` where blocks are not equal."""
        if not own.ndim or len(own) % self._size:
            raise ArgumentError(
                f"array= has shape {own.shape}: expected dim 0 to be a multiple of the {self._size} ranks; pad it"
            )
        return len(own) // self._size


def _returning(out: T, steps: Steps[Any]) -> Steps[T]:
    yield from steps
    return out


def _operand(array: Any) -> NDArray[Any]:
    try:
        return np.require(array, requirements=["C", "A", "E"])
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"array= is a {type(array).__name__} of which NumPy makes no array: {error}; expected numbers"
        ) from error


def _moved(array: Any) -> NDArray[Any]:
    own = _operand(array)
    if own.dtype.hasobject:
        raise ArgumentError(f"array= has dtype={own.dtype}: expected numbers or bytes; Python objects do not travel")
    return own


def _filled(array: Any) -> NDArray[Any]:
    """Returns an array that is filled. **Raises:** `ArgumentError` for what cannot be."""
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"array= is a {type(array).__name__}: expected a NumPy array, which the root's fills")
    filled = cast("NDArray[Any]", array)
    flags = filled.flags
    if not (flags.c_contiguous and flags.writeable and flags.aligned):
        raise ArgumentError(
            f"array= has dtype={filled.dtype}, shape={filled.shape}, and cannot be filled: expected a writable and "
            "contiguous one, such as numpy.empty makes it"
        )
    return _moved(filled)


def _checked(
    out: Any, own: NDArray[Any], shape: tuple[int, ...], *, in_place: Literal["whole", "never"] = "whole"
) -> NDArray[Any]:
    """Returns the array that a collective fills. **Arguments:** `in_place`: whether it may be the operand itself.

    **Raises:** `ArgumentError` for one of another shape or dtype than the operand's, that is not writable and
    contiguous, or whose memory is in part the operand's.
    """
    dtype = own.dtype
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


def _schedule(what: What, rank: int, hosts: tuple[int, ...]) -> Schedule:
    size, element_bytes = len(hosts), max(1, what.dtype.itemsize)
    match what.name:
        case "all_reduce":
            return reductions.all_reduce(rank, hosts, what.num_bytes, element_bytes)
        case "reduce_scatter":
            return reductions.reduce_scatter(rank, size, what.num_bytes, element_bytes)
        case "reduce":
            return reductions.reduce(rank, size, what.num_bytes, element_bytes, what.root)
        case "all_to_all_into":
            return exchanges.all_to_all(rank, size, what.num_bytes // size)
        case "all_gather_into":
            return exchanges.all_gather(rank, size, what.num_bytes)
        case "broadcast_into":
            return broadcasts.broadcast(rank, size, what.num_bytes, what.root)
        case _:
            return exchanges.barrier(rank, size)


def _place_bytes(what: What, rank: int, size: int) -> tuple[int, int]:
    """Returns the bytes of what a member has, and of what it fills."""
    num_bytes = what.num_bytes
    match what.name:
        case "reduce_scatter":
            return num_bytes, num_bytes // size
        case "reduce":
            return num_bytes, num_bytes if rank == what.root else 0
        case "all_gather_into":
            return num_bytes, num_bytes * size
        case "broadcast_into":
            return (num_bytes, 0) if rank == what.root else (0, num_bytes)
        case _:
            return num_bytes, num_bytes
