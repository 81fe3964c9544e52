"""The threads of a loader: closed by their owner within a limit, or else when the interpreter exits."""

import contextlib
import itertools
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from braidax.errors import WaitTimeout

_EXIT_SECONDS = 10.0  # a thread that is sending to a device when the interpreter dies would abort the process

_MOMENT_SECONDS = 3e-3  # what a consumer that got its batch may still need a core for before it computes

_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))  # not on Windows

_Call = tuple[Callable[..., None], tuple[Any, ...]]


class Threads:
    """Threads that work off one queue.

    They are daemons, so that a read that hangs cannot keep the interpreter from exiting; at exit the others are waited
    for. `concurrent.futures` has no such limit.

    **Arguments:** `num_threads`, `name`: of the threads; the name is a prefix.

    **Fields:** `num_threads`: those of the queue; for reading only.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._work = _Work()
        self._awaited = _Awaited()
        self._name = name
        self._names = itertools.count()
        self._threads: list[threading.Thread] = []
        self.num_threads = 0
        self._at_exit = weakref.finalize(self, _stop_and_join, self._work, self._threads, _EXIT_SECONDS)
        self.resize(num_threads)

    def resize(self, num_threads: int) -> None:
        """Starts threads, or lets some end when they have worked off what is queued before."""
        for _ in range(self.num_threads, num_threads):
            self._start(_work_off, self._work, self._awaited)
        for _ in range(num_threads, self.num_threads):
            self._work.end_one()
        self.num_threads = num_threads

    def run_apart(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs a call on a thread of its own, for when those of the queue may all hang."""
        self._start(work, *arguments)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads[:] = [thread for thread in self._threads if thread.is_alive() or thread.ident is None]
        name = f"{self._name}-{next(self._names)}"
        thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        self._threads.append(thread)  # before it starts, so that no interrupt can keep it from being ended
        thread.start()

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Queues a call that raises nothing and returns nothing."""
        self._work.put((work, arguments))

    def run_first(self, work: Callable[..., None], *arguments: Any) -> None:
        """Queues such a call in front of those of `run`: for what is quick, and lets others ask for what they need."""
        self._work.put_first((work, arguments))

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Queues a call and returns the future of its result."""
        future: Future[Any] = Future()
        self.run(_fulfill, future, work, arguments)
        return future

    @contextlib.contextmanager
    def awaited(self) -> Generator[None, None, None]:
        """Lets the caller, who waits for a result inside the `with` block, have a core as soon as the result is there.

        Threads that compute without system calls keep their cores for whole ticks (4 ms) where the kernel does not
        preempt. So while somebody waits, and for a moment after, they yield behind each call. Yielding always would
        starve them beside a step that computes on the same cores.
        """
        self._awaited.until = math.inf
        try:
            yield
        finally:
            self._awaited.until = time.monotonic() + _MOMENT_SECONDS

    def abandon(self) -> None:
        """Drops what is queued, without waiting for what runs. May be called twice."""
        if self._at_exit.detach():
            _stop(self._work, len(self._threads))

    def close(self, *, timeout_seconds: float) -> None:
        """Drops what is queued and waits for what runs, unless that was done or abandoned before.

        **Raises:** `WaitTimeout` if a thread does not end in time.
        """
        if not self._at_exit.detach():
            return
        alive = _stop_and_join(self._work, self._threads, timeout_seconds)
        if alive is not None:
            raise WaitTimeout(
                f"thread {alive.name!r} did not end within timeout_seconds={timeout_seconds:g} after the loader was "
                f"closed; the source's read hangs"
            )


class _Work:
    """Calls that are queued, in two orders, and when threads are to end."""

    def __init__(self) -> None:
        self._first, self._others = deque[_Call](), deque[_Call]()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()  # each for one call, which was queued before it

    def put(self, call: _Call) -> None:
        """Queues a call behind all others."""
        self._others.append(call)
        self._tokens.put(True)

    def put_first(self, call: _Call) -> None:
        """Queues a call behind those that were queued so, and in front of all others."""
        self._first.append(call)
        self._tokens.put(True)

    def end_one(self) -> None:
        """Lets one thread end behind what is queued."""
        self._tokens.put(False)

    def get(self) -> _Call | None:
        """Waits for a call and returns it; None: the thread is to end."""
        return self._taken() if self._tokens.get() else None

    def drop(self) -> None:
        """Drops what is queued."""
        with contextlib.suppress(queue.Empty):
            while True:
                if self._tokens.get_nowait():
                    self._taken()

    def _taken(self) -> _Call:
        try:
            return self._first.popleft()
        except IndexError:
            return self._others.popleft()


class _Awaited:
    """Until when, in `time.monotonic` seconds, somebody waits; shared with threads that must not hold their owner."""

    until = 0.0


def _work_off(work: _Work, awaited: "_Awaited") -> None:
    while (item := work.get()) is not None:
        item[0](*item[1])
        del item  # or its arguments would live until the next call comes
        if time.monotonic() < awaited.until:
            _let_others_run()


def _fulfill(future: "Future[Any]", work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        future.set_result(work(*arguments))
    except BaseException as raised:  # noqa: BLE001 (it is raised again where the result is asked for)
        future.set_exception(raised)


def _stop(work: _Work, num_threads: int) -> None:
    work.drop()
    for _ in range(num_threads):
        work.end_one()


def _stop_and_join(work: _Work, threads: list[threading.Thread], seconds: float) -> threading.Thread | None:
    """Returns a thread that is still alive after that long, if there is one."""
    _stop(work, len(threads))
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return thread
    return None


def result_within(future: "Future[Any]", *, timeout_seconds: float, what: str) -> Any:
    """Returns a future's result. **Raises:** what it raised, or `WaitTimeout` that says `what` did not come."""
    try:
        return future.result(timeout=timeout_seconds)
    except TimeoutError as error:
        if future.done():
            raise
        raise timed_out(what, timeout_seconds) from error


def timed_out(what: str, timeout_seconds: float) -> WaitTimeout:
    """Returns the error that says `what` did not come within a limit."""
    return WaitTimeout(
        f"{what} did not come within timeout_seconds={timeout_seconds:g}; the source may hang, or be slower than that: "
        "raise Knobs(timeout_seconds=...)"
    )
