"""A job behind the loop: one at a time, and the loop hears of its failure."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from braidax.errors import BraidaxError, CheckpointError, WaitTimeout

_LOOK_SECONDS = 3.0


def outcome(
    future: "Future[Any]", timeout_seconds: float, while_waiting: Callable[[], object] | None
) -> BaseException | None:
    """Waits until something is over, and returns what went wrong with it.

    **Arguments:** `while_waiting`: is called every few seconds, and when something went wrong.

    **Raises:** `TimeoutError` at the limit; what `while_waiting` raises.
    """
    deadline = time.monotonic() + timeout_seconds
    while not wait([future], min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))).done:
        if while_waiting is not None:
            while_waiting()
        if time.monotonic() >= deadline:
            raise TimeoutError
    error = future.exception()
    if error is not None and while_waiting is not None:
        while_waiting()
    return error


@dataclass(frozen=True)
class _Job:
    what: str
    executor: ThreadPoolExecutor
    done: "Future[None]"


class BackgroundJob:
    """Runs one job at a time on a thread of its own, which lives as long as the job.

    **Arguments:** `name`: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._job: _Job | None = None

    def begin(self, what: str, job: Callable[[], None]) -> None:
        """Begins a job, when there is none. **Arguments:** `what`: it does and to what, for errors."""
        assert self._job is None
        executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._job = _Job(what, executor, executor.submit(job))
        executor.shutdown(wait=False)

    @property
    def is_busy(self) -> bool:
        """Whether there is a job, or one of which nobody has heard how it went."""
        return self._job is not None

    @property
    def is_over(self) -> bool:
        """Whether there is a job that is over, and nobody has heard how it went."""
        return self._job is not None and self._job.done.done()

    def settle(self, timeout_seconds: float, while_waiting: Callable[[], object] | None = None) -> Exception | None:
        """Waits until the job is over, and returns what went wrong with it.

        **Arguments:** `while_waiting`: as of `outcome`.

        **Raises:** `WaitTimeout`; what `while_waiting` raises.
        """
        job = self._job
        if job is None:
            return None
        try:
            error = outcome(job.done, timeout_seconds, while_waiting)
        except TimeoutError as late:
            raise WaitTimeout(
                f"{job.what} took longer than timeout_seconds={timeout_seconds:g}: expected it to end; it still goes "
                "on: look at what it is written to, or raise the limit"
            ) from late
        job.executor.shutdown()
        self._job = None
        if error is None or isinstance(error, BraidaxError):
            return error
        failure = CheckpointError(f"{job.what} failed: {error!r}. Earlier checkpoints are untouched")
        failure.__cause__ = error
        return failure
