"""`Communicator`: messages between the ranks of a job, on the host."""

import hmac
import os
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.calling import Calling, num_bytes_of
from braidax.comm.collectives.arrays import NOTHING
from braidax.comm.collectives.opening import hear
from braidax.comm.collectives.splitting import Counters, split
from braidax.comm.group import Group
from braidax.comm.losing.unfinished import quick_ways
from braidax.comm.messages import Value, flat_bytes
from braidax.comm.request import run
from braidax.comm.starting import Starting
from braidax.comm.watch import Notice, OnLoss
from braidax.errors import CommError, PeerLost, WaitTimeout
from braidax.spans import Trace

if TYPE_CHECKING:
    from braidax.comm.exchange.stream import Exchange
    from braidax.comm.serving.server import Handler, Requests, Server

_CLOSE_SECONDS = 10.0
_SETTLE_SECONDS = 1.0


@final
class Communicator:
    """Sends values between ranks, and combines those of all; made by `connect`, or by `split` of another.

    A value is a NumPy array, a buffer (`bytes`, `memoryview`, `pyarrow.Buffer` …), or a list of buffers, of any size.
    It arrives as what it was: an array of the same dtype and shape, a `memoryview`, a list of them. All ranks of a
    group call the same collectives in the same order, and what they bring is compared: a collective does not return
    before the rank before this one has come to the same. A rank that only sends, such as the root of a `broadcast`, may
    be 16 ahead. Any thread may call; collectives of a group come from one at a time.

    Every wait has the limit `timeout_seconds`. A rank that dies, freezes or is cut off, whatever a collective raises,
    an `abort`, Ctrl-C in a call, or a limit that passes end the *generation*: every call on every rank then raises,
    naming the rank. Go on by connecting again, as the next generation. With `on_loss="peer"` less ends: see `connect`.

    **Fields:** `rank`, `size`: of this rank in the group, and the number of its ranks. `hosts`: the host's name of each
    rank. `on_loss`: as of `connect`. `timeout_seconds`: may be changed. `trace`: gets a span for each call, on the lane
    `comm`. `start`: the same operations, begun and not waited for: `request = comm.start.all_reduce(x)`, later
    `request.wait()`.
    """

    def __init__(self, group: Group, *, counters: Counters, timeout_seconds: float) -> None:
        self.rank = group.rank
        self.size = group.size
        self.hosts = tuple(group.progress.world.hosts[rank] for rank in group.ranks)
        self.timeout_seconds = timeout_seconds
        self._calling = Calling(group, lambda: self.timeout_seconds)
        self.start = Starting(group, lambda: self.timeout_seconds)
        self._group = group
        self._first_tag, self._peers = group.buffer_tag(0), dict(enumerate(group.ranks))
        self._takes_arrays = group.progress.takes_arrays
        self._send_now, self._receive_now = quick_ways(group.progress, lambda: self.timeout_seconds)
        self._progress = group.progress
        self.on_loss: OnLoss = group.progress.on_loss
        self._requests: Requests | None = None
        self._making = threading.Lock()  # of those
        self._counters = counters
        counters.groups.append(group)

    @property
    def lost(self) -> frozenset[int]:
        """The ranks of the group that were lost, or aborted, and without which others go on: `on_loss="peer"`."""
        return frozenset(rank for rank, peer in self._peers.items() if peer in self._progress.lost)

    @property
    def trace(self) -> Trace:
        """Gets a span for each call; another one may be set."""
        return self._calling.trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._calling.trace = trace

    @property
    def failure(self) -> CommError | None:
        """What has ended the generation: `PeerLost`, `Aborted`, or that this was closed; None while it goes on."""
        return self._progress.failure

    def send(self, value: Value, dest: int, *, tag: int = 0) -> None:
        """Sends a value to a rank; returns when the value may be changed, which may be before it is received.

        **Arguments:** `dest`: a rank. `tag`: 0 to 2³⁰ - 1; messages of one tag arrive in the order of their sends.

        **Raises:** `ArgumentError` for what is no value, rank or tag; `PeerLost`, `Aborted`, `WaitTimeout`.
        """
        self._calling.send(value, dest, tag)

    def recv(self, source: int, *, tag: int = 0) -> Value:
        """Receives the next value that a rank sent under a tag. **Arguments, Raises:** as `send`."""
        return self._calling.recv(source, tag)

    def send_buffer(self, buffer: Any, dest: int, *, tag: int = 0) -> None:
        """Sends bytes as they are, for a `recv_buffer` that knows how many come at most; the quickest way.

        `recv` does not see them, nor `recv_buffer` what `send` sends.

        **Arguments:** `buffer`: a contiguous array or buffer. The others, and **Raises:** as `send`.
        """
        peer = self._peers.get(dest)  # a tenth of a microsecond counts here
        if peer is None or tag:
            peer, number = self._group.buffer_way(dest, "dest", tag)
        else:
            number = self._first_tag
        try:
            try:
                data = buffer if self._takes_arrays else memoryview(buffer).cast("B")
                operation = self._send_now(peer, number, (data,))
            except (TypeError, ValueError, BufferError):
                operation = self._send_now(peer, number, (flat_bytes(buffer),))
            if not operation.done or operation.error is not None:
                self._calling.wait(operation)
        except BaseException as error:
            self._group.failed("send_buffer", error, self.timeout_seconds)
            raise

    def recv_buffer(self, buffer: Any, source: int, *, tag: int = 0) -> int:
        """Receives bytes of `send_buffer` into their place.

        **Returns:** how many came. **Arguments, Raises:** as `send`; `CommError` for a message that is too long.
        """
        peer = self._peers.get(source)
        if peer is None or tag:
            peer, number = self._group.buffer_way(source, "source", tag)
        else:
            number = self._first_tag
        try:
            try:
                operation = self._receive_now(
                    peer, number, buffer if self._takes_arrays else memoryview(buffer).cast("B")
                )
            except (TypeError, ValueError, BufferError):
                operation = self._receive_now(peer, number, flat_bytes(buffer))
            if not operation.done or operation.error is not None:
                self._calling.wait(operation)
        except BaseException as error:
            self._group.failed("recv_buffer", error, self.timeout_seconds)
            raise
        return operation.num_bytes

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        found = self._calling.again("barrier", None, NOTHING, NOTHING)
        if found is None:
            self._calling.run("barrier", self._group.arrays.barrier)

    def broadcast(self, value: Value = b"", *, root: int = 0) -> Value:
        """Returns the root's value on every rank; what others give is not looked at."""
        return self._calling.run("broadcast", self._group.broadcast, value, root)

    def broadcast_into(self, array: Any, *, root: int = 0) -> Any:
        """Fills an array on every rank with the root's.

        **Arguments:** `array`: the same shape and dtype on all ranks; the root's is only read, and may be anything of
        which `np.asarray` makes such a one.

        **Returns:** `array`. **Raises:** as `reduce`.
        """
        if self._calling.again("broadcast_into", root, *self._group.arrays.places(array, root)) is None:
            num_bytes = num_bytes_of(array)
            return self._calling.run("broadcast_into", self._group.broadcast_into, array, root, num_bytes=num_bytes)
        return array

    def gather(self, value: Value, *, root: int = 0) -> list[Value]:
        """Returns the values of all ranks in their order on the root, an empty list elsewhere."""
        return self._calling.run("gather", self._group.gather, value, root, num_bytes=num_bytes_of(value))

    def all_gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks in their order; they may differ in kind and size."""
        return self._calling.run("all_gather", self._group.all_gather, value, num_bytes=num_bytes_of(value))

    def reduce(self, array: Any, operation: np.ufunc = np.add, *, root: int = 0) -> NDArray[Any]:
        """Returns the reduction of all ranks' arrays on the root, an empty array elsewhere.

        **Arguments:** `array`: the same shape and dtype on all ranks; what is no array is made one by `np.asarray`.
        `operation`: a ufunc of two operands that is associative and commutative, such as `np.add`, `np.maximum`.

        **Raises:** `ArgumentError` for what cannot be reduced; `CommError` or `Aborted` naming both, on all ranks, when
        two of them do not bring the same; `PeerLost`, `WaitTimeout`.
        """
        return self._calling.run("reduce", self._group.reduce, array, operation, root, num_bytes=num_bytes_of(array))

    def all_reduce(self, array: Any, operation: np.ufunc = np.add, *, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Returns the reduction of all ranks' arrays, the same bits on every rank.

        **Arguments:** as `reduce`. `out`: is filled and returned, an array of the same shape and dtype, or `array`
        itself; a new one by default, whose pages cost about as much as their transfer.
        """
        result = self._calling.again("all_reduce", operation, array, out)
        if result is None:
            begin = self._group.arrays.all_reduce
            return self._calling.run("all_reduce", begin, array, operation, out, num_bytes=num_bytes_of(array))
        return result

    def reduce_scatter(
        self, array: Any, operation: np.ufunc = np.add, *, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Returns this rank's block of the reduction of all ranks' arrays.

        **Arguments:** `array`: `[size · n, …]`; the block is `[n, …]`. The others as for `all_reduce`.
        """
        result = self._calling.again("reduce_scatter", operation, array, out)
        if result is None:
            begin = self._group.arrays.reduce_scatter
            return self._calling.run("reduce_scatter", begin, array, operation, out, num_bytes=num_bytes_of(array))
        return result

    def all_to_all_into(self, array: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        """Gives each rank its block of an array, and fills another one with what the others have for this one.

        **Arguments:** `array`: `[size · n, …]`, of which rank `i` gets block `i`; the same shape and dtype on all
        ranks. `out`: of the same shape and dtype, with memory of its own; block `i` is what came from rank `i`.

        **Returns:** `out`. **Raises:** as `reduce`.
        """
        result = self._calling.again("all_to_all_into", None, array, out)
        if result is None:
            begin = self._group.arrays.all_to_all_into
            return self._calling.run("all_to_all_into", begin, array, out, num_bytes=num_bytes_of(array))
        return result

    def all_gather_into(self, array: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        """Fills an array with the arrays of all ranks, in their order.

        **Arguments:** `array`: the same shape and dtype on all ranks. `out`: `[size, *array.shape]`, of the same dtype.

        **Returns:** `out`. **Raises:** as `reduce`.
        """
        result = self._calling.again("all_gather_into", None, array, out)
        if result is None:
            begin = self._group.arrays.all_gather_into
            return self._calling.run("all_gather_into", begin, array, out, num_bytes=num_bytes_of(array))
        return result

    def all_to_all(self, parts: Sequence[Value]) -> list[Value]:
        """Returns what every rank has for this one, in their order; parts may differ in kind and size.

        **Arguments:** `parts`: one value for each rank.
        """
        return self._calling.run("all_to_all", self._group.all_to_all, parts, num_bytes=num_bytes_of(parts))

    def exchange(
        self,
        parts: Iterable[tuple[int, Sequence[Any]]],
        *,
        chunk_bytes: int = 1 << 20,
        window_bytes: int = 64 << 20,
        spill: str | os.PathLike[str] | None = None,
    ) -> "Exchange":
        """Streams lists of buffers between all ranks, in bounded memory: an iterator over what comes.

        Called by all ranks; each iterates to the end, which comes when all have ended and have what was sent to them.
        What comes from one rank is in the order in which that sent it. Nothing moves but while the next item is asked
        for, and a little ahead of that.

        An item's buffers begin at multiples of 64 bytes. They are valid until the next item is asked for; what was
        made of them without a copy (`np.frombuffer`, `pyarrow.py_buffer`) stays valid, and takes a part of the window
        as long as it lives.

        **Arguments:** `parts`: pairs of a rank and the buffers for it, drawn as far as there is room for them; they
        must not be changed before the stream has ended. `chunk_bytes`, `window_bytes`: of a message, and of all that
        this rank keeps in memory for the stream; the same on all ranks. An item must fit in what the window has for a
        pair of ranks, its `size`-th part less a sixteenth. `spill`: a folder of a local disk, where what there is no
        room for waits in a file without a name, so that `parts` can go on; without it, `parts` wait.

        **Raises:** while iterating, whatever `parts` raise; `ArgumentError` for an item that is too large;
        `WaitTimeout` naming a rank that does not ask for its items; `CommError` for a disk that is full; `PeerLost`,
        `Aborted`. All of these, and an iteration that is left before its end, end the generation.
        """
        from braidax.comm.exchange.stream import Exchange, Window  # most programs stream nothing

        window = Window(chunk_bytes, window_bytes, spill)
        return Exchange(self._group, parts, window, limit=lambda: self.timeout_seconds, trace=self.trace)

    def ask(self, rank: int, value: Value, *, timeout_seconds: float | None = None) -> Value:
        """Returns what a rank answers, which serves: see `serve`. Any thread may ask, several at a time.

        **Arguments:** `rank`: another one. `value`: as for `send`. `timeout_seconds`: the limit; that of the
        communicator by default.

        **Raises:** `CallFailed` with the traceback of the handler when that raises; `WaitTimeout` when no answer comes,
        which does not end the generation: the answer is dropped when it comes; `ArgumentError`; `PeerLost`, `Aborted`.
        """
        return self._calling.ask(rank, value, self.timeout_seconds if timeout_seconds is None else timeout_seconds)

    def end_asking(self, rank: int) -> None:
        """Tells a rank, which serves and waits, that this one asks it no more; it hears that once. Closing tells all.

        **Arguments, Raises:** as `ask`.
        """
        self._calling.asking.end(rank)

    def serve(self, handler: "Handler") -> "Server":
        """Answers what other ranks `ask`, inside a `with` block, on a thread of its own.

        `with comm.serve(handler) as server: server.wait()` does nothing else, until all others ask no more.

        **Arguments:** `handler`: called with the rank that asks and the value, returns the answer. It is called for one
        request at a time, those of one rank in their order, all ranks in turn. What it raises is raised by who asks.
        It may return a `concurrent.futures.Future` of the answer: others are answered until that is done.

        **Raises:** `CommError` where this rank serves already.
        """
        from braidax.comm.serving.server import Requests, Server

        with self._making:
            self._requests = self._requests or Requests(self._group)
        return Server(self._requests, handler, lambda: self.timeout_seconds)

    def split(self, color: int, *, key: int = 0) -> "Communicator":
        """Returns the group of the ranks that gave the same color, ordered by key and then by rank.

        Called by all ranks. Groups share the connections and the fate of the whole: closing or aborting one ends all.
        With `on_loss="peer"` the collectives of a group end with its first member that is lost, and no other's.

        **Raises:** `CommError` when too many groups have been made.
        """
        try:
            group = split(self._group, self._counters, self.all_gather, color, key)
            return Communicator(group, counters=self._counters, timeout_seconds=self.timeout_seconds)
        except BaseException as error:
            if not isinstance(error, CommError):  # all ranks have that
                self._group.failed("split", error, self.timeout_seconds)
            raise

    def derive_secret(self, purpose: str) -> bytes:
        """Returns 32 bytes that only the ranks of this generation can know, the same on all; nothing of it is sent."""
        return hmac.digest(self._progress.world.secret, b"derived " + purpose.encode(), "sha256")

    def abort(self, reason: str) -> None:
        """Ends the generation: whatever any rank calls or waits for raises `Aborted` with the reason.

        With `on_loss="peer"` it ends this rank's part of it: that which others do with this one.
        """
        self._progress.fail(Notice("aborted", self._progress.world.rank, reason))

    def settle(self) -> None:
        """Compares what others brought to collectives in which this rank only sent, as far as that comes in a second.

        What comes later is compared by the next collective. `close` does this, too.

        **Raises:** `CommError` naming both when another rank did not bring the same; what ended the generation, unless
        a call has raised that.
        """
        deadline = time.monotonic() + min(self.timeout_seconds, _SETTLE_SECONDS)
        for group in self._counters.groups:
            if not group.unheard or self._progress.told or (group.domain.failure and not self._progress.failure):
                continue
            try:
                run(group.domain, hear(group.unheard), deadline)
            except WaitTimeout:  # whoever waits for it judges that
                continue
            except BaseException as error:
                if isinstance(error, PeerLost) and error.rank in self._progress.left:
                    continue
                group.failed("settle", error, self.timeout_seconds)
                raise

    def close(self) -> None:
        """Delivers what was sent, and closes the connections. A second call does nothing.

        A rank that still waits for this one then raises `PeerLost`: close when all are done, such as behind `barrier`.

        **Raises:** as `settle`.
        """
        try:
            self.settle()
        finally:
            seconds = min(self.timeout_seconds, _CLOSE_SECONDS)
            for group in self._counters.groups:
                group.unheard.clear()
                if group.domain.failure:  # what is left of its collectives nobody takes
                    seconds = min(seconds, _SETTLE_SECONDS)
            self._progress.close(timeout_seconds=seconds)

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._progress.told = True  # what was raised goes on as it is
                self.abort(f"{type(error).__name__}: {error}")
        finally:
            self.close()
