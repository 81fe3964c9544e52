"""What keeps the messages of a rank moving: the callers that wait, and one thread when nobody does.

A caller that waits moves messages itself: that costs no switch between threads. Other callers sleep until it has ended
their operations or hands over. The thread moves messages when no caller does, listens to the watch all the time, and
sleeps otherwise. Nobody spins for longer than `spin_seconds`, and nobody sleeps with the GIL or the lock held.
"""

import contextlib
import itertools
import logging
import selectors
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, final

from braidax.comm.callbacks import Callbacks
from braidax.comm.condition import Condition
from braidax.comm.losing.losses import Losses
from braidax.comm.nap import Nap
from braidax.comm.transports.bell import Bell
from braidax.comm.transports.quick import quick_calls_of
from braidax.comm.transports.transport import Buffer, Operation, SmallValues, Transport
from braidax.comm.waiting import again, all_done, closed, late, left, words_of
from braidax.comm.watch import LEAVING, SECOND_WORD_SECONDS, Notice, OnLoss, Watch
from braidax.connections.world import World
from braidax.errors import CommError, PeerLost

_FOLLOW_SECONDS = 0.025  # how often the thread looks whether callers still move messages
_VERDICT_SECONDS = 0.5  # which the watch has to say who was lost first
_LEADER_SECONDS = 1.0  # which a caller that moves messages has to hear that they are closed
_LEFT_SECONDS = 1.0  # what a rank sent before it left may still be on its way
_logger = logging.getLogger(__name__)


@final
class Progress:
    """Moves the messages of one rank, until the first failure, which then is everybody's.

    **Arguments:** `transport`, `watch`: connected; this owns both from now on. `world`: what they connect.
    `spin_seconds`: how long a caller that waits keeps a core before it sleeps. `on_loss`: what a lost rank ends.

    **Fields:** `failure`: what ended the generation. `told`: whether a call raised that. `takes_arrays`, `schedules`:
    see `Transport`.
    `send_receive`: see `QuickCalls`; raises as `send_now`.
    `hurried`: whether a caller moved messages lately, and will again: the thread then leaves it to callers for a while.
    `number`: returns a number that this rank has given nothing else. `left`: the ranks that have closed theirs. `lost`:
    those that are lost one by one, with the error of each; none where the generation ends with them, as `on_loss` says.
    `losses`: what ends with those.
    """

    def __init__(
        self, transport: Transport, watch: Watch, world: World, *, spin_seconds: float, on_loss: OnLoss = "generation"
    ) -> None:
        self.failure: CommError | None = None
        self.told = False
        self.hurried = False
        self.world = world
        self._transport = transport
        self._begin_send, self._begin_receive, self._poll = transport.send, transport.receive, transport.poll
        self._quick = quick_calls_of(transport)
        self.schedules = transport.schedules
        self._begin_run: Any = None if transport.schedules is None else transport.schedules.run
        self._begin_again: Any = None if transport.schedules is None else transport.schedules.repeat
        self._watch = watch
        self.left: Collection[int] = watch.left
        self.on_loss: OnLoss = on_loss
        self.losses = Losses(world, transport.lose) if on_loss == "peer" else None
        self.lost: Mapping[int, CommError] = {} if self.losses is None else self.losses.lost
        self.takes_arrays = transport.takes_arrays
        self._spin_seconds = spin_seconds
        self._lock = threading.Lock()  # guards the transport, the watch and all below
        self._followers = Condition(self._lock)  # callers that wait while another one moves messages
        self._sleepers = self._followers.sleepers
        self._listeners = Condition(self._lock)  # those that wait for what the watch says, or for the end
        self._leader = 0  # the thread of the caller that moves messages, if one does
        self._sleeping = False  # whether that caller sleeps
        self._is_new = False  # whether that caller began to do so since the thread looked
        self._resting = False  # whether the thread sleeps until the caller has ended
        self._released = False  # whether the transport is closed
        self._callbacks = Callbacks()
        self.number = partial(next, itertools.count())
        self.send_receive = partial(self._now, self._quick.send_receive)
        self._send_receive_value = self._quick.send_receive_value
        self._left_at = 0.0  # when the latest rank left
        self._nap, self._wake_thread = Nap(transport.fileno()), Bell()
        self._thread = threading.Thread(target=self._run, name="braidax-comm", daemon=True)

    def start(self) -> None:
        """Starts the thread. It ends by `close`, which is due from now on."""
        self._thread.start()

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer]) -> Operation:
        """Begins to send. **Arguments, Returns:** see `Transport.send`. **Raises:** the failure, if there is one."""
        return self._begin(self._begin_send, peer, tag, buffers)

    def receive(self, peer: int, tag: int, buffer: Buffer) -> Operation:
        """Begins to receive. **Arguments, Returns:** see `Transport.receive`. **Raises:** the failure, if any."""
        return self._begin(self._begin_receive, peer, tag, buffer)

    def send_now(self, peer: int, tag: int, buffers: Sequence[Any]) -> Operation:
        """As `send`, but moves it along at once, for who has nothing else to do. **Raises:** as `QuickCalls`, too."""
        operation = Operation(peer)
        self._now(self._quick.send, peer, tag, buffers, operation)
        return operation

    def receive_now(self, peer: int, tag: int, buffer: Any) -> Operation:
        """As `receive`, but moves it along at once. **Raises:** as `send_now`."""
        operation = Operation(peer)
        self._now(self._quick.receive, peer, tag, buffer, operation)
        return operation

    def run(self, tag: int, compiled: object, head: bytes, own: Any, out: Any) -> Operation | None:
        """Begins to run a schedule. **Arguments, Returns, Raises:** see `Schedules.run`; the failure, if any."""
        return self._now(self._run_without_spinning, tag, compiled, head, own, out)

    def repeat(self, repeats: Any, name: str, key: Any, own: Any, out: Any, tag: int) -> Any:
        """Runs a collective again, and moves it along. **Arguments, Returns, Raises:** see `Schedules.repeat`."""
        with self._lock:  # as `_now`, whose way of passing arguments takes as long as all else
            if self.failure is not None:
                raise again(self.failure)
            try:
                spin_seconds = -1.0 if self._leader else self._spin_seconds
                begun = self._begin_again(repeats, name, key, own, out, tag, spin_seconds)
                self.hurried = True
                called = self._told() if self._callbacks.ready or self._sleepers or self._sleeping else ()
            except BaseException as error:
                self._refuse(error)
                raise
        if called:
            self._call(called)
        return begun

    def send_receive_value(
        self, peer: int, tag: int, kind: int, number: int, value: Any, receive_tag: int, place: Any, small: SmallValues
    ) -> Any:
        """See `QuickCalls`. **Raises:** as `send_now`."""
        with self._lock:
            if self.failure is not None:
                raise again(self.failure)
            try:
                spin_seconds = -1.0 if self._leader else self._spin_seconds
                begin = self._send_receive_value
                begun = begin(peer, tag, kind, number, value, receive_tag, place, small, spin_seconds)
                self.hurried = True
                called = self._told() if self._callbacks.ready or self._sleepers or self._sleeping else ()
            except BaseException as error:
                self._refuse(error)
                raise
        if called:
            self._call(called)
        return begun

    def _run_without_spinning(self, *arguments: Any) -> Operation | None:
        return self._begin_run(*arguments[:-1], -1.0)

    def wait(self, operations: Sequence[Operation], deadline: float) -> None:
        """Returns when all operations have ended. **Arguments:** `deadline`: `time.monotonic` seconds.

        **Raises:** the failure that ended the generation; the error of the first operation that has one; `WaitTimeout`
        naming the peers that were waited for.
        """
        if not all_done(operations):
            try:
                if self._takes_the_lead(operations, deadline):
                    self._lead(operations, deadline)
            except BaseException:
                self._step_down()
                raise
        for operation in operations:
            if operation.error is not None:
                raise self._judge(operation.error)

    def then(self, operations: Sequence[Operation], call: Callable[[], None]) -> None:
        """Calls a function once all operations have ended, on the thread of whoever notices."""
        with self._lock:
            self.check()
            missing = [operation for operation in operations if not operation.done]
            self._callbacks.add(missing, call)
            if missing and not self._leader:
                self._wake_thread.ring()
        if not missing:
            call()

    def end(self, operation: Operation, error: CommError | None = None) -> None:
        """Ends an operation that is none of the transport's, and wakes who waits for it."""
        with self._lock:
            operation.error = error
            operation.finish()
            self._followers.notify_all()
            if self._sleeping:
                self._nap.ring()

    def fail(self, notice: Notice) -> CommError:
        """Ends the generation for all ranks, unless it has ended. **Returns:** the failure."""
        with self._lock:
            return self._end_generation(notice)

    def fail_later(self, notice: Notice) -> None:
        """Lets the thread end the generation soon: for a finalizer, which may run while this thread has the lock."""
        self._watch.tell_later(notice)
        self._wake_thread.ring()

    def close(self, *, timeout_seconds: float) -> None:
        """Delivers what was sent, says goodbye, and ends the thread; later calls raise. A second call does nothing."""
        try:
            with self._lock:
                self._leave(timeout_seconds)
        except BaseException as error:
            self.fail(Notice("aborted", self.world.rank, f"close failed: {words_of(error)}"))
            raise
        finally:
            try:
                self._give_up()
            except BaseException:  # an interrupt: what is left takes no time
                self._give_up()
                raise

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise again(self.failure)

    def _begin(self, begin: Callable[..., None], peer: int, tag: int, data: Any) -> Operation:
        operation = Operation(peer)
        with self._lock:
            self.check()
            try:
                begin(peer, tag, data, operation)
            except BaseException as error:
                self._break(error)
                raise
            if self._sleeping and (self._callbacks.ready or not operation.done):
                self._nap.ring()
            elif self._callbacks.ready and not self._leader:
                self._wake_thread.ring()
        return operation

    def _now(self, begin: Callable[..., Any], *arguments: Any) -> Any:
        """Begins something, and moves messages along unless another caller does. **Arguments:** as of `QuickCalls`."""
        with self._lock:
            if self.failure is not None:
                raise again(self.failure)
            try:
                begun = begin(*arguments, -1.0 if self._leader else self._spin_seconds)
                self.hurried = True
                called = self._told() if self._callbacks.ready or self._sleepers or self._sleeping else ()
            except BaseException as error:
                self._refuse(error)
                raise
        if called:
            self._call(called)
        return begun

    def _told(self) -> Sequence[Callable[[], None]]:
        """Returns what is to be called after a call that has moved messages, and wakes who is to go on."""
        called = self._ended() if self._callbacks.ready or self._sleepers else ()
        if self._sleeping:
            self._nap.ring()
        return called

    def _refuse(self, error: BaseException) -> None:
        """Ends the generation for an error in the midst of a call, unless it is of memory that is not taken."""
        if not isinstance(error, TypeError | ValueError | BufferError):
            self._break(error)

    def _call(self, called: Sequence[Callable[[], None]]) -> None:
        """Calls what waited for operations that have ended; without the lock."""
        try:
            for call in called:
                call()
        except BaseException as error:
            with self._lock:
                self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """Ends the generation: the transport was interrupted amid a message, so that what it holds is not what was
        sent."""
        self._end_generation(Notice("aborted", self.world.rank, f"{words_of(error)}, in the middle of a message"))

    def _end_generation(self, notice: Notice) -> CommError:
        if self.failure is None:
            self._watch.tell(notice)  # first: an interrupt between the two may leave this rank to be told, not others
        self._wake_thread.ring()
        return self.failure or self._fail(notice)

    def _judge(self, error: CommError) -> CommError:
        """Returns what to raise for an operation that failed.

        A broken connection may be a consequence: the watch is given time to name the rank that was lost first.
        """
        if not isinstance(error, PeerLost) or error.rank in self._watch.left:
            return again(error)
        rank = error.rank
        is_first = self.losses is None or self.world.rank < rank
        self._listeners.wait_for(
            lambda: self.failure is not None or rank in self.lost or rank in self._watch.left,
            _VERDICT_SECONDS if is_first else SECOND_WORD_SECONDS,
        )
        if self.failure is not None or rank in self.lost:
            return again(self.failure or self.lost[rank])
        if rank in self._watch.left:
            return again(error)
        return again(self.fail(Notice("lost", rank, "its connection ended")))

    def _takes_the_lead(self, operations: Sequence[Operation], deadline: float) -> bool:
        """Sleeps while another caller moves messages. **Returns:** False when the operations have ended meanwhile."""
        with self._lock:
            if self.failure is None and not self._leader and not all_done(operations):
                self._leader, self._is_new = threading.get_ident(), True
                return True

        def ends() -> bool:
            if all_done(operations):
                if not self._leader:  # whoever led may have left it to this caller to go on
                    self._hand_over()
                return True
            self.check()
            if not self._leader:
                self._leader, self._is_new = threading.get_ident(), True
                return True
            if time.monotonic() >= deadline:
                raise late(self.world, operations)
            self._check_left(operations)
            self._callbacks.listen(operations)
            return False

        while not self._followers.wait_for(ends, min(deadline - time.monotonic(), _LEFT_SECONDS)):
            pass
        return self._leader == threading.get_ident()

    def _lead(self, operations: Sequence[Operation], deadline: float) -> None:
        while True:
            with self._lock:
                self.check()
                try:
                    self._poll(self._spin_seconds)
                    called = self._ended()
                    done = all_done(operations)
                    self._sleeping = not done and self._transport.arm() and not called
                except BaseException as error:
                    self._break(error)
                    raise
                if done:
                    self._leader, self.hurried = 0, True
                    self._hand_over()
                    break
                self._check_left(operations)
                self._callbacks.listen(operations)
            self._call(called)
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise late(self.world, operations)
            if self._sleeping:
                self._nap.sleep(min(seconds, self._transport.nap_seconds or seconds, _LEFT_SECONDS))
        self._call(called)

    def _step_down(self) -> None:
        """Leaves the lead, if this thread has it or was about to take it, to others."""
        with self._lock:
            if self._leader == threading.get_ident():
                self._leader, self._sleeping = 0, False
            if not self._leader:
                self._hand_over()

    def _hand_over(self) -> None:
        """Lets another caller, or else the thread, go on with what is left."""
        self._notify_all()
        if self._resting or (self._callbacks and not self._followers):
            self._resting = False
            self._wake_thread.ring()

    def _ended(self) -> list[Callable[[], None]]:
        """Returns what is to be called for operations that have ended; without the lock."""
        self._followers.notify_all()
        return self._callbacks.take()

    def _check_left(self, operations: Sequence[Operation]) -> None:
        gone = [operation.peer for operation in operations if operation.peer in self._watch.gone and not operation.done]
        if gone and time.monotonic() > self._left_at + _LEFT_SECONDS:
            raise left(self.world, gone[0])

    def _fail(self, notice: Notice) -> CommError:
        if self.losses is not None and (notice.kind == "failed" or notice.rank != self.world.rank):
            return self._lose(self.losses, notice)
        try:
            self._release(0.0)  # whoever hears of the failure may change what was being sent
        finally:
            self.failure = failure = notice.error(self.world)
            self._notify_all()
            self._nap.ring()
        return failure

    def _lose(self, losses: Losses, notice: Notice) -> CommError:
        try:
            error = losses.end(notice)
        except BaseException as interrupt:
            self._break(interrupt)
            raise
        self._notify_all()
        self._nap.ring()
        self._wake_thread.ring()
        return error

    def _notify_all(self) -> None:
        self._followers.notify_all()
        self._listeners.notify_all()

    def _leave(self, timeout_seconds: float) -> None:
        """Says goodbye, and closes the transport, unless the generation has ended."""
        if self.failure is None:
            self._watch.leave("leaving")
            self._release(timeout_seconds)
            self._watch.leave("left")
            self.failure = closed(self.world)

    def _give_up(self) -> None:
        """Ends the thread and what sleeps, and closes all that is still open."""
        with self._lock:
            self._notify_all()
            self._wake_thread.ring()
            self._nap.ring()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()
        self._listeners.wait_for(lambda: not self._leader, _LEADER_SECONDS)
        with self._lock:
            self._release(0.0)
            for owned in (self._watch, self._nap, self._wake_thread):
                owned.close()

    def _release(self, timeout_seconds: float) -> None:
        if not self._released:
            self._nap.forget()
            self._transport.close(timeout_seconds=timeout_seconds)
            self._released = True

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._serve_until_failure(selector)
        except Exception as error:  # a defect, of a plug-in perhaps: nobody may wait for what is gone
            _logger.exception("the thread that moves messages failed")
            self.fail(Notice("aborted", self.world.rank, f"its thread failed: {type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._release(0.0)

    def _serve_until_failure(self, selector: selectors.BaseSelector) -> None:
        """Listens to the watch, and moves messages while no caller does."""
        selector.register(self._wake_thread.fileno(), selectors.EVENT_READ)
        self._watch.register(selector)
        while True:
            with self._lock:
                self._hear(selector)
                if self.failure is not None:
                    return
                called, seconds = self._serve(selector)
            self._call(called)
            for key, _ in selector.select(seconds):
                if key.fd == self._wake_thread.fileno():
                    self._wake_thread.hush()

    def _hear(self, selector: selectors.BaseSelector) -> None:
        if self._released:
            return
        for notice in self._watch.look(selector):
            if notice.kind in LEAVING:
                self._left_at = time.monotonic()
                self._notify_all()
            elif self.failure is None:
                self._fail(notice)

    def _serve(self, selector: selectors.BaseSelector) -> tuple[list[Callable[[], None]], float]:
        """Moves messages if no caller does. **Returns:** what is to be called, and how long to sleep then."""
        if self._leader or (self.hurried and not self._callbacks):
            self.hurried = False
            self._resting, self._is_new = bool(self._leader) and not self._is_new, False
            with contextlib.suppress(KeyError):
                selector.unregister(self._transport.fileno())
            pause = self._watch.pause_seconds
            return [], pause if self._resting else min(pause, _FOLLOW_SECONDS)
        with contextlib.suppress(KeyError):  # it is registered
            selector.register(self._transport.fileno(), selectors.EVENT_READ)
        self._poll(0.0)
        called = self._ended()
        sleeps = self._transport.arm() and not called
        pause = self._watch.pause_seconds
        return called, min(pause, self._transport.nap_seconds or pause) if sleeps else 0.0
