"""`Calling`: runs the operations of a group on the caller's thread, and notes how long they took."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives.running import tell_float_errors
from braidax.comm.group import BETWEEN_TWO, Group
from braidax.comm.group_messages import Steps
from braidax.comm.messages import FIRST_BYTES, Value
from braidax.comm.request import run
from braidax.comm.small import decoded, encoded
from braidax.comm.transports.transport import Operation
from braidax.errors import CallFailed, WaitTimeout
from braidax.spans import Trace

if TYPE_CHECKING:
    from braidax.comm.serving.asking import Asking

T = TypeVar("T")
_Array: type = np.ndarray  # found quicker than an attribute of NumPy


@final
class Calling:
    """Runs operations and waits for them. What they raise ends the generation, where others would wait in vain.

    **Arguments:** `group`: of the communicator. `limit`: returns its `timeout_seconds`.

    **Fields:** `trace`: gets a span for each call.
    """

    def __init__(self, group: Group, limit: Callable[[], float]) -> None:
        self.trace = Trace()
        self._group = group
        self._limit = limit
        self._progress, self._domain = group.progress, group.domain
        self._asking: Asking | None = None
        self._making = threading.Lock()  # of that
        self._places: list[NDArray[np.uint8]] = []  # for the first messages of values, to be used again
        self._unheard = group.unheard
        self._is_quick = (
            group.progress.on_loss == "generation"
        )  # what a limit leaves under way ends with the generation
        self._calls, self._repeats, self._repeat = group.calls, group.arrays.repeats, group.progress.repeat

    def run(self, name: str, begin: Callable[..., Steps[T]], *arguments: Any, num_bytes: int = 0) -> T:
        """Runs an algorithm. **Arguments:** `begin`: returns it, given the arguments. `num_bytes`: for the span."""
        try:
            with self.trace.timed("comm", name, num_bytes=num_bytes):
                progress = self._progress if name in BETWEEN_TWO else self._domain
                return run(progress, begin(*arguments), time.monotonic() + self._limit())
        except BaseException as error:
            self._group.failed(name, error, self._limit())
            raise

    def again(self, name: str, key: Any, array: Any, out: Any) -> Any:
        """Runs a collective that has come before with such arrays, in the fewest steps.

        **Arguments:** `key`: its reduction, or root. `out`: None for a new array.

        **Returns:** its result; None, and nothing has begun, where no such one has come or something has to be checked.
        """
        start = time.perf_counter()
        if self._repeats is None or self._unheard:
            return None
        calls = self._calls
        try:
            try:
                found = self._repeat(self._repeats, name, key, array, out, calls.next_tag)
            except (TypeError, ValueError, BufferError):  # of memory that is not as it should be
                return None
            if found is None:
                return None
            calls.begin()
            if type(found) is tuple:
                operation, found = found
                self.wait(operation)
                tell_float_errors(key, found.dtype, operation.num_bytes)
            self.trace.note("comm", name, start, array.nbytes)
        except BaseException as error:
            self._group.failed(name, error, self._limit())
            raise
        return found

    def send(self, value: Value, dest: int, tag: int) -> None:
        """Sends a value, a small one in the fewest steps. **Arguments, Raises:** as of `Communicator.send`."""
        start = time.perf_counter()
        first = encoded(value) if self._is_quick and self._progress.takes_arrays else None
        if first is None:
            return self.run("send", self._group.send, value, dest, tag, num_bytes=num_bytes_of(value))
        peer, number = self._group.value_way(dest, "dest", tag)
        try:
            try:
                operation = self._progress.send_now(peer, number, first)
            except (TypeError, ValueError, BufferError):  # it is not contiguous
                operation = None
            if operation is None:
                run(self._progress, self._group.send(value, dest, tag), time.monotonic() + self._limit())
            elif not operation.done or operation.error is not None:
                self.wait(operation)
            self.trace.note("comm", "send", start, num_bytes_of(value))
        except BaseException as error:
            self._group.failed("send", error, self._limit())
            raise

    def recv(self, source: int, tag: int) -> Value:
        """Receives a value, a small one in the fewest steps. **Arguments, Raises:** as of `Communicator.recv`."""
        if not self._is_quick:
            return self.run("recv", self._group.recv, source, tag)
        start = time.perf_counter()
        peer, number = self._group.value_way(source, "source", tag)
        try:
            place = self._places.pop() if self._places else np.empty(FIRST_BYTES, np.uint8)
            operation = self._progress.receive_now(peer, number, place.data)
            if not operation.done or operation.error is not None:
                self.wait(operation)
            found = decoded(bytearray(place.data[: operation.num_bytes]))
            if found is None:
                steps = self._group.recv_rest(source, tag, place[: operation.num_bytes])
                value = run(self._progress, steps, time.monotonic() + self._limit())
            else:
                value = found[0]
                self._places.append(place)
            self.trace.note("comm", "recv", start, 0)
        except BaseException as error:
            self._group.failed("recv", error, self._limit())
            raise
        return value

    @property
    def asking(self) -> "Asking":
        """What asks other ranks; made when it is first needed, since most programs ask nobody."""
        if self._asking is None:
            from braidax.comm.serving.asking import Asking

            with self._making:
                self._asking = self._asking or Asking(self._group)
        return self._asking

    def ask(self, rank: int, value: Value, limit: float) -> Value:
        """Asks a rank; what harms nobody else does not end the generation. **Arguments:** as of `Asking.ask`."""
        start = time.perf_counter()
        try:
            answer = (self._asking or self.asking).ask(rank, value, limit)
            num_bytes = value.nbytes if type(value) is _Array else num_bytes_of(value)
            self.trace.note("comm", "ask", start, num_bytes)
        except (CallFailed, WaitTimeout):
            raise
        except BaseException as error:
            self._group.failed("ask", error, self._limit())
            raise
        return answer

    def wait(self, operation: Operation) -> None:
        """Waits for an operation up to the limit. **Raises:** as `Progress.wait`."""
        self._progress.wait((operation,), time.monotonic() + self._limit())


def num_bytes_of(value: Value) -> int:
    """Returns the bytes of a value, for its span; what is no value raises elsewhere."""
    if type(value) is _Array:
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(num_bytes_of(part) for part in cast("Sequence[Any]", value))
    return int(getattr(value, "nbytes", 0)) or (len(value) if isinstance(value, bytes | bytearray) else 0)
