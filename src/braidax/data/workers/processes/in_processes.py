"""A source whose windows are read by worker processes: for code that holds the GIL."""

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Generator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from braidax.cores import usable_cores
from braidax.data.source import Source, is_varying, source_at, stamp_of
from braidax.data.workers.processes.memory import window_bytes, window_leaves
from braidax.data.workers.processes.pickling import pack
from braidax.data.workers.processes.worker import Birth, Worker, WorkerClosed, WorkerDied, end_all
from braidax.errors import ArgumentError, BraidaxError, RecordError, WaitTimeout

_MAX_DEATHS = 3  # in a row, over one window


def in_processes(source: Source, *, num_workers: int | None = None, timeout_seconds: float = 300.0) -> "InProcesses":
    """Returns a source that is read by worker processes, each with its own interpreter and GIL.

    **Arguments:** `source`: anything that can be pickled; functions and classes of `__main__` and of notebooks can.
    `num_workers`: processes; by default one for each usable core. `timeout_seconds`: the longest that one window may
    take.

    **Raises:** `ArgumentError` for a source that cannot be pickled, naming the part that is to blame.
    """
    if num_workers is not None and num_workers < 1:
        raise ArgumentError(f"num_workers={num_workers!r} is not a positive integer; None takes one for each core")
    if not 0 < timeout_seconds < math.inf:
        raise ArgumentError(f"timeout_seconds={timeout_seconds!r} is not a finite, positive number of seconds")
    return InProcesses(source, _Pool(source, num_workers or usable_cores(), timeout_seconds))


class InProcesses(Source):
    """A source that is read by worker processes. They start at the first read, and again after `close`.

    Each thread that reads takes a free worker, waits without the GIL until the worker has filled memory that both
    share, and copies it into place. A worker that dies is replaced, and its window read again. Nothing is fetched ahead
    (`prepare`): what one process fetched, no other would find, and remote bytes would come twice.

    **Arguments:** `source`: what the workers read. `pool`: the workers. `at`: seed and epoch of the reads.
    """

    def __init__(self, source: Source, pool: "_Pool", at: tuple[int | None, int] | None = None) -> None:
        self.source = source
        self._pool = pool
        self._at = at

    @property
    def sample_spec(self) -> Any:
        return self.source.sample_spec

    @property
    def num_workers(self) -> int:
        """The number of worker processes; so many threads can read at once."""
        return self._pool.num_workers

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: Int64[np.ndarray, " n"], out: Any) -> None:
        deaths: list[WorkerDied] = []
        while len(deaths) < _MAX_DEATHS:
            try:
                with self._pool.worker() as worker:
                    self._read_by(worker, indices, out)
                return
            except WorkerDied as died:
                deaths.append(died)
        raise RecordError(
            f"source={type(self.source).__name__}: reading the records {_listed(indices)} ended {len(deaths)} worker "
            f"processes one after the other; the last one {deaths[-1]}; read these records with workers='threads' "
            "to see why, mend the code that crashes on them, or leave them out"
        ) from deaths[-1].__cause__

    def _read_by(self, worker: Worker, indices: NDArray[np.int64], out: Any) -> None:
        limit = self._pool.timeout_seconds
        specs, treedef = jax.tree.flatten(self.source.sample_spec)
        targets = treedef.flatten_up_to(out)
        memory = worker.memory.array(window_bytes(specs, len(indices)))
        try:
            varying = iter(worker.read(self._at, indices, timeout_seconds=limit))
        except TimeoutError as error:
            if isinstance(error, BraidaxError):  # the source's own
                raise
            raise WaitTimeout(
                f"{worker.name} did not read the records {_listed(indices)} within timeout_seconds={limit:g} and was "
                "killed; the source may hang, or be slower than that: raise timeout_seconds="
            ) from error
        for target, spec, leaf in zip(targets, specs, window_leaves(memory, specs, len(indices)), strict=True):
            np.copyto(target, next(varying) if is_varying(spec) else leaf)  # numbers without the GIL

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "workers": f"{self.num_workers} processes"}

    def at(self, seed: int | None, epoch: int) -> "InProcesses":
        """Returns the source as it is in an epoch, read by the same workers."""
        return InProcesses(source_at(self.source, seed, epoch), self._pool, (seed, epoch))

    @property
    def stamp(self) -> str | None:
        """That of the source that the workers read."""
        return stamp_of(self.source)

    def close(self) -> None:
        """Ends the workers within a few seconds; a read under way raises. May be called twice."""
        self._pool.close()

    def __reduce__(self) -> Any:  # a worker needs no workers of its own
        return _unchanged, (self.source,)


class _Pool:
    """Workers, started when they are needed, and who may ask which."""

    def __init__(self, source: Source, num_workers: int, timeout_seconds: float) -> None:
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        descriptor = pack(source)
        self._birth = Birth.of(descriptor)
        self._workers: list[Worker] = []
        self._free = dict[int, Worker | None].fromkeys(reversed(range(num_workers)))  # the last one is taken first
        self._changed = threading.Condition()
        self._given_back = time.monotonic()
        self._closed = 0  # how many times
        weakref.finalize(self, _end, self._workers, descriptor)

    @contextlib.contextmanager
    def worker(self) -> Generator[Worker, None, None]:
        """Gives the caller a living worker of its own inside the `with` block, started if need be.

        **Raises:** `WorkerDied` from the block or the start; `BraidaxError` when the source was closed meanwhile.
        """
        number, worker, closed = self._take()
        try:
            if worker is None or not worker.is_alive:
                self._end(worker)
                worker = self._start(number, closed)
            yield worker
        except WorkerClosed as error:
            raise BraidaxError(
                "the source was closed while it was read; end the loop over its DataLoader before close()"
            ) from error
        finally:
            if worker is not None and not worker.is_alive:
                self._end(worker)
                worker = None
            self._give_back(number, worker)

    def close(self) -> None:
        with self._changed:
            self._closed += 1
            ending = list(self._workers)
            self._workers.clear()
        end_all(ending)

    def _take(self) -> tuple[int, Worker | None, int]:
        with self._changed:
            while not self._free:
                # Each worker answers or is killed within its limit, so this one is for what nobody foresaw.
                quiet = time.monotonic() - self._given_back
                if not self._changed.wait(max(0.0, 2 * self.timeout_seconds - quiet)) and not self._free:
                    raise WaitTimeout(
                        f"none of {self.num_workers} worker processes became free within twice timeout_seconds="
                        f"{self.timeout_seconds:g}; the source may hang, or be slower than that: raise it"
                    )
            number, worker = self._free.popitem()
            return number, worker, self._closed

    def _give_back(self, number: int, worker: Worker | None) -> None:
        with self._changed:
            self._given_back = time.monotonic()
            self._free[number] = worker
            self._changed.notify()

    def _start(self, number: int, closed: int) -> Worker:
        try:
            worker = Worker(number, self._birth)
        except OSError as error:
            raise BraidaxError(
                f"worker process {number} cannot be started ({error}); free memory or processes of this user, or take "
                "fewer workers: num_workers="
            ) from error
        with self._changed:
            self._workers.append(worker)
            if self._closed != closed:
                worker.ask_to_end()
        try:
            worker.wait_until_ready()
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: Worker | None) -> None:
        if worker is not None:
            worker.end(deadline=0.0)
            with self._changed, contextlib.suppress(ValueError):  # close() may have taken it out
                self._workers.remove(worker)


def _end(workers: list[Worker], descriptor: int) -> None:
    end_all(workers)
    os.close(descriptor)


def _unchanged(source: Source) -> Source:
    return source


def _listed(indices: NDArray[np.int64]) -> str:
    more = f"… ({len(indices)} in all)" if len(indices) > 8 else ""
    return f"{indices[:8].tolist()}{more}"
