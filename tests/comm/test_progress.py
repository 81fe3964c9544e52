"""Who waits is woken at once, whichever thread's call ends what it waits for."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from braidax.comm import progress as progress_module
from braidax.comm.progress import Progress
from braidax.comm.transports.bell import Bell
from braidax.comm.transports.transport import Buffer, Operation, Transport
from braidax.comm.watch import Notice, Watch
from braidax.connections.world import World
from braidax.errors import CommError, PeerLost
from tests.support.comm.watches import two_watches

LIMIT_SECONDS = 30.0
LAG_SECONDS = 0.4  # of a wakeup, some milliseconds on a quiet machine; who is not woken looks after a second or more


class ByHand(Transport):
    """A transport that ends operations when the test says so: at the next poll, or inside the next receive."""

    name = "by-hand"

    def __init__(self) -> None:
        self.bell = Bell()
        self.at_poll: list[Operation] = []
        self.at_receive: list[Operation] = []
        self.is_closed = False

    @property
    def address(self) -> bytes:
        return b""

    def connect(self, world: World, *, timeout_seconds: float) -> None: ...

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None: ...

    def receive(self, peer: int, tag: int, buffer: Buffer, operation: Operation) -> None:
        if self.at_receive:
            operation.finish()
        while self.at_receive:
            self.at_receive.pop().finish()

    def poll(self, spin_seconds: float) -> None:
        self.bell.hush()
        while self.at_poll:
            self.at_poll.pop().finish()

    def arm(self) -> bool:
        return not self.at_poll

    def fileno(self) -> int:
        return self.bell.fileno()

    def close(self, *, timeout_seconds: float) -> None:
        self.is_closed = True
        self.bell.close()

    def end(self, *operations: Operation) -> None:
        self.at_poll += operations
        self.bell.ring()


@pytest.fixture
def transport() -> ByHand:
    return ByHand()


@pytest.fixture
def progress(transport: ByHand) -> Iterator[Progress]:
    watch = Watch(peer_timeout_seconds=15)
    world = World(0, (b"",), ("host",), b"")
    watch.connect(World(0, (watch.address,), ("host",), b"x"), timeout_seconds=5)
    progress = Progress(transport, watch, world, spin_seconds=0)
    progress.start()
    yield progress
    progress.close(timeout_seconds=0)


def test_a_rank_that_closes_delivers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had said that it left, and a message that took longer than a second was given up, though it still came."""
    monkeypatch.setattr(progress_module, "_LEFT_SECONDS", 0.05)
    delivering, delivered = threading.Event(), threading.Event()

    class Slow(ByHand):
        def close(self, *, timeout_seconds: float) -> None:
            if timeout_seconds:
                delivering.set()
                assert delivered.wait(LIMIT_SECONDS)
            super().close(timeout_seconds=timeout_seconds)

    transport, watches = ByHand(), two_watches()
    receiver, sender = (
        Progress(each, watch, World(rank, (b"", b""), ("a", "b"), b""), spin_seconds=0)
        for rank, (each, watch) in enumerate(zip((transport, Slow()), watches, strict=True))
    )
    receiver.start()
    sender.start()
    errors = list[Exception]()
    operation, never = (receiver.receive(1, 0, memoryview(bytearray())) for _ in range(2))

    def wait() -> None:
        try:
            receiver.wait([operation], time.monotonic() + LIMIT_SECONDS)
        except CommError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    closing = threading.Thread(target=sender.close, kwargs={"timeout_seconds": LIMIT_SECONDS})
    closing.start()
    assert delivering.wait(LIMIT_SECONDS)
    until(lambda: 1 in receiver.left)
    thread.join(0.3)
    assert not errors
    transport.end(operation)
    thread.join(LIMIT_SECONDS)
    assert not errors
    delivered.set()
    closing.join(LIMIT_SECONDS)
    with pytest.raises(PeerLost, match="it closed its communicator while this rank waited"):
        receiver.wait([never], time.monotonic() + LIMIT_SECONDS)
    receiver.close(timeout_seconds=0)


def waiting(progress: Progress, operation: Operation) -> threading.Thread:
    """Begins to wait for an operation, in a thread."""
    thread = threading.Thread(target=progress.wait, args=([operation], time.monotonic() + LIMIT_SECONDS))
    thread.start()
    return thread


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def begun(progress: Progress) -> Operation:
    return progress.receive(0, 0, memoryview(bytearray()))


def test_callers_that_end_together_leave_what_is_left_to_the_thread(transport: ByHand, progress: Progress) -> None:
    """One had led and told the other one, which had nothing to wait for any more; nobody told the thread."""
    first, second, left = (begun(progress) for _ in range(3))
    ended = threading.Event()
    progress.then([left], ended.set)
    threads = [waiting(progress, operation) for operation in (first, second)]
    until(lambda: len(progress._followers) == 1 and progress._sleeping)
    time.sleep(0.35)  # the thread looks less and less often while callers move messages
    transport.end(first, second)
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    began = time.monotonic()
    transport.end(left)
    assert ended.wait(LIMIT_SECONDS)
    assert time.monotonic() - began < LAG_SECONDS


def test_the_thread_sleeps_through_a_long_wait_and_its_end_wakes_it(
    transport: ByHand, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked twenty times a second whether the wait was over."""
    looks, look = list[float](), progress._watch.look

    def counted(selector: Any = None) -> Any:
        looks.append(time.monotonic())
        return look(selector)

    monkeypatch.setattr(progress._watch, "look", counted)
    operation = progress.receive(0, 0, memoryview(bytearray()))
    thread = waiting(progress, operation)
    until(lambda: progress._resting)
    time.sleep(0.1)  # the thread is on its way to sleep
    num_looks = len(looks)
    time.sleep(0.5)
    assert len(looks) == num_looks
    transport.end(operation)
    thread.join(LIMIT_SECONDS)
    ended = time.monotonic()
    until(lambda: len(looks) > num_looks)
    assert looks[num_looks] < ended + 1  # the watch alone would have it sleep for longer


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_what_a_call_of_another_thread_ends_wakes_who_waits_for_it(
    transport: ByHand, progress: Progress, num_waiting: int
) -> None:
    operations = [begun(progress) for _ in range(num_waiting)]
    threads = [waiting(progress, operation) for operation in operations]
    until(lambda: len(progress._followers) == num_waiting - 1 and progress._sleeping)
    transport.at_receive += operations
    began = time.monotonic()
    assert begun(progress).done
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert time.monotonic() - began < LAG_SECONDS


def test_what_a_call_ends_is_told_though_nobody_waits(transport: ByHand, progress: Progress) -> None:
    operation, ended = begun(progress), threading.Event()
    progress.then([operation], ended.set)
    until(lambda: not transport.bell._poll.poll(0))
    time.sleep(0.05)  # the thread has gone to sleep
    transport.at_receive.append(operation)
    began = time.monotonic()
    assert begun(progress).done
    assert ended.wait(LIMIT_SECONDS)
    assert time.monotonic() - began < LAG_SECONDS


def test_what_was_being_sent_is_given_up_before_the_failure_is_told(transport: ByHand, progress: Progress) -> None:
    begun(progress)
    told = list[tuple[bool, CommError | None]]()
    close = transport.close

    def closing(*, timeout_seconds: float) -> None:
        told.append((transport.is_closed, progress.failure))
        close(timeout_seconds=timeout_seconds)

    transport.close = closing
    progress.fail(Notice("aborted", 0, "a test"))
    assert transport.is_closed
    assert told == [(False, None)]


def test_an_interrupted_wait_leaves_the_lead_to_others(
    transport: ByHand, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a caller sleeps: it moved messages for others too."""
    first, second = begun(progress), begun(progress)
    nap, raised = progress._nap.sleep, threading.Event()

    def interrupted(seconds: float) -> None:
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt
        nap(seconds)

    monkeypatch.setattr(progress._nap, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        progress.wait([first], time.monotonic() + LIMIT_SECONDS)
    thread = waiting(progress, second)
    until(lambda: progress._sleeping)
    transport.end(second)
    thread.join(LIMIT_SECONDS)
    assert second.done
