"""Runs a schedule: in C without the GIL where the transport does that, otherwise step by step here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives.opening import hear
from braidax.comm.collectives.schedule import OUT, OWN, SCRATCH, Kind, Part, Schedule, Step
from braidax.comm.group_messages import HEAD_BYTES, GroupMessages, Steps
from braidax.comm.messages import empty
from braidax.comm.transports.transport import Operation


@final
@dataclass(frozen=True)
class Runnable:
    """A schedule, and what it is run with.

    **Fields:** `schedule`. `compiled`: what the transport has made of it; None where it runs here. `reduction`: of two
    arrays of `dtype`.
    """

    schedule: Schedule
    compiled: Any
    reduction: np.ufunc
    dtype: np.dtype[Any]


def run(messages: GroupMessages, runnable: Runnable, own: NDArray[Any], out: NDArray[Any]) -> Steps[None]:
    """Runs a schedule. **Arguments:** `own`, `out`: contiguous; see `Schedule`."""
    if messages.unheard:
        yield from hear(messages.unheard)
    given = out
    if messages.progress.on_loss == "peer":  # what fails leaves messages under way
        own, out = own.copy(), np.empty_like(out)
    if runnable.compiled is not None:
        operation = messages.progress.run(messages.tag, runnable.compiled, messages.brings, own, out)
        if operation is not None:
            yield [operation]
            tell_float_errors(runnable.reduction, runnable.dtype, operation.num_bytes)
    else:
        yield from _run_here(messages, runnable, own, out)
    if out is not given:
        given[...] = out


def tell_float_errors(reduction: object, dtype: np.dtype[Any], errors: int) -> None:
    """Lets NumPy do what its user wants to be done about errors of a reduction (`numpy.errstate`).

    **Arguments:** `reduction`: a ufunc; anything else reduces nothing. `errors`: bits, see `Schedules.run`.
    """
    if errors and isinstance(reduction, np.ufunc):
        info = np.finfo(dtype)
        for bit, meets, one, other in (
            (1, reduction, info.max, info.max),
            (2, np.multiply, info.tiny, info.tiny),
            (4, np.add, np.inf, -np.inf),
        ):
            if errors & bit:
                meets(dtype.type(one), dtype.type(other))


def _run_here(messages: GroupMessages, runnable: Runnable, own: NDArray[Any], out: NDArray[Any]) -> Steps[None]:
    places = {OWN: _bytes(own), OUT: _bytes(out), SCRATCH: empty(runnable.schedule.scratch_bytes)}

    def memory(part: Part) -> NDArray[np.uint8]:
        return places[part.place][part.begin : part.begin + part.num_bytes]

    posted: list[tuple[Operation, Step]] = []
    for step in runnable.schedule.steps:
        match step.kind:
            case Kind.SEND:
                head = [] if step.room is None else [memoryview(messages.brings)]
                posted.append((messages.send(step.peer, *head, memory(step.to).data), step))
            case Kind.RECEIVE:
                posted.append((messages.receive(step.peer, memory(step.room or step.to).data), step))
            case Kind.WAIT:
                operation, message = posted[step.ticket]
                yield [operation]
                if message.kind is Kind.RECEIVE:
                    _check(messages, operation, message, memory)
            case Kind.REDUCE:
                first, second, to = (memory(part).view(runnable.dtype) for part in (step.first, step.second, step.to))
                runnable.reduction(first, second, out=to)
            case Kind.COPY:
                memory(step.to)[:] = memory(step.first)


def _check(
    messages: GroupMessages, operation: Operation, message: Step, memory: Callable[[Part], NDArray[np.uint8]]
) -> None:
    num_bytes = message.to.num_bytes
    if message.room is not None:
        messages.check_brings(operation, memory(message.room))
        num_bytes += HEAD_BYTES
    messages.check_length(operation, num_bytes)


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
