"""`Checkpointer`: checkpoints of a PyTree behind the training step."""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from braidax.checkpoint.background_job import outcome
from braidax.checkpoint.format import folders
from braidax.checkpoint.format.writing import checksums_of
from braidax.checkpoint.interval.spacing import Interval, Spacing, check_interval
from braidax.checkpoint.places import persist, restoring
from braidax.checkpoint.places.persist import Order, Part, number_of
from braidax.checkpoint.places.restoring import Skipped
from braidax.checkpoint.places.retention import Retention
from braidax.checkpoint.processes import Processes, all_processes
from braidax.checkpoint.snapshot.copies import prepared
from braidax.checkpoint.snapshot.hold import Held, Memory, Snapshot, hold
from braidax.errors import ArgumentError, CheckpointError, ProcessFailed, WaitTimeout
from braidax.spans import Trace, span

THREAD_NAME = "braidax-checkpoint"


class Checkpointer:
    """Saves a PyTree every so often, behind the step, and restores the newest checkpoint that is whole.

    A checkpoint that is due is a *snapshot* (a copy on the host, made in the background while the next gradients run)
    and then a *persist* (written, made durable, and only then given its name, behind the next steps). One checkpoint is
    under way at a time: when the next is due before that, `update` waits. What fails in the background is raised by
    the next call of any method.

    There is a thread only while a checkpoint is under way. A program that ends without `close` still finishes it.

    In a job of several processes of JAX all of them make one, and call the same methods of it with the same trees; the
    folder is one that all see. Each writes what it owns; a checkpoint exists once all have, and fails on all if one
    fails. NumPy arrays and Python numbers are those of process 0.

    **Arguments:** `path`: the folder of the checkpoints of one run, made if missing and locked until `close`.
    `interval`: when one is due, such as `Every(100)` or `Adaptive()`. `keep`: how many of the newest stay, at least 1;
    an older one goes when a newer one is durable. `keep_every`: those of steps that are multiples of it stay as well.
    `keep_best`: how many of those with the lowest `metric` stay as well. `limit_bytes_per_second`: how fast each
    process writes at most; may be set at any time. `timeout_seconds`: the limit of every wait. `prepare`: makes, of a
    tree whose checkpoint is due, the one that is read, if the devices have memory for it: `copied`, for a step that is
    one jitted function.

    `notes` are texts that every checkpoint from then on keeps, by name; `fit` notes the plan. `while_waiting`, if set,
    is called every few seconds of a wait, and when a checkpoint has failed; it may raise `ProcessFailed`, as a step's
    `check_processes` does. A `with` block that this error ends waits for no other process.

    **Raises:** `CheckpointError` when `path` is no folder that this process may write to, or is another run's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        interval: Interval,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: int = 0,
        limit_bytes_per_second: float | None = None,
        timeout_seconds: float = 600.0,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        check_interval(interval)
        if keep < 1:
            raise ArgumentError(f"keep={keep!r}: expected a whole number >= 1; the newest checkpoint is always kept")
        if keep_every is not None and keep_every < 1:
            raise ArgumentError(f"keep_every={keep_every!r}: expected a whole number >= 1, or None")
        if keep_best < 0:
            raise ArgumentError(f"keep_best={keep_best!r}: expected a whole number >= 0")
        if limit_bytes_per_second is not None and not limit_bytes_per_second > 0:
            raise ArgumentError(f"limit_bytes_per_second={limit_bytes_per_second!r}: expected bytes > 0, or None")
        if not timeout_seconds > 0:
            raise ArgumentError(f"timeout_seconds={timeout_seconds!r}: expected seconds > 0")
        self.path = Path(path).absolute()
        self.interval = interval
        self.limit_bytes_per_second = limit_bytes_per_second
        self.trace = Trace()
        self.notes: dict[str, str] = {}
        self.while_waiting: Callable[[], object] | None = None
        self.skipped: list[Skipped] = []
        self.num_updates = 0
        self._prepare = prepare
        self._retention = Retention(keep, keep_every, keep_best)
        self._memory = Memory()
        self._pending: _Pending | None = None
        self._spacing: Spacing | None = None
        self._closed = False
        self._num_restored = self._num_listed = 0
        self._num_attempts: Counter[int] = Counter()  # to save a step, since the last restore
        self._processes = all_processes(timeout_seconds)
        self._lock, self._earlier = persist.occupy(self.path, self._processes)

    @property
    def timeout_seconds(self) -> float:
        """The limit of every wait; may be set at any time."""
        return self._processes.timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self._processes.timeout_seconds = seconds

    @property
    def spacing(self) -> Spacing:
        """What spaces the checkpoints since the last `restore`: says how far apart and why, can be paused and set."""
        if self._spacing is None:
            announcements = self._processes.announcements(f"due-{self._num_restored}")
            self._spacing = self.interval.start(self.num_updates, announcements=announcements)
        return self._spacing

    def update(self, tree: Any, *, metric: Any = None) -> None:
        """Counts an update of the state, and takes a checkpoint if one is due; called once after every step.

        After this the arrays may be donated at once; where a snapshot is still being copied, the runtime then copies
        instead. To spare that memory, let the next step call `wait` before it donates.

        **Arguments:** `tree`: a PyTree of `jax.Array`, typed PRNG keys, NumPy arrays and Python numbers. `metric`: how
        good it is, lower is better, a number or a scalar array, which nobody waits for here; for `keep_best`.

        **Raises:** `CheckpointError` when an earlier checkpoint failed (one that is due is begun nevertheless), a leaf
        cannot be saved, or the folder has checkpoints of a run that was not restored. `WaitTimeout` when the previous
        one takes too long; of several processes no other waits for this one then, and both fail on all.
        """
        self._check_open()
        spacing = self.spacing
        self.num_updates += 1
        failure = self._failure()
        if spacing.due(self.num_updates):
            begun = time.perf_counter()
            failure = self._make_room() or failure
            self._begin(tree, metric)
            spacing.began()
            spacing.stalled(time.perf_counter() - begun)
        if failure is not None:
            raise failure

    def save(self, tree: Any, *, metric: Any = None) -> Path:
        """Takes a checkpoint now, whether or not one is due; it is durable when this returns.

        **Arguments:** as of `update`.

        **Returns:** the folder of the checkpoint. **Raises:** as `update`.
        """
        self._check_open()
        failure = self._make_room()
        if failure is not None:
            self._processes.withdraw(self._next_name(), str(failure))
            raise failure
        pending = self._begin(tree, metric)
        failure = self._settle()
        if failure is not None:
            raise failure
        return pending.committed.result()

    def wait(self) -> None:
        """Returns when the snapshot under way, if there is one, no longer needs the tree; for `before_apply=`.

        **Raises:** `CheckpointError` when it failed, `WaitTimeout` at the limit.
        """
        self._check_open()
        failure = None
        if self._pending is not None:
            begun = time.perf_counter()
            try:
                failed = self._outcome(self._pending.owned, "copying")
            except WaitTimeout as late:
                self._withdraw(self._pending.name, late)
                raise
            if failed is not None:
                failure = self._settle()
            self.spacing.stalled(time.perf_counter() - begun)
        failure = failure or self._failure()
        if failure is not None:
            raise failure

    def restore(self, like: Any, *, only: Sequence[str] | None = None) -> Any:
        """Restores the newest checkpoint that verifies, and goes on counting updates where it stood.

        Invalid ones are skipped, logged as warnings and listed in `skipped`; the next durable checkpoint replaces them.
        A copy under the name of another step is skipped, too, and stays.

        **Arguments:** `like`: a PyTree with the structure, shapes, dtypes and shardings to restore to; its arrays may
        be `jax.ShapeDtypeStruct` with a sharding, on any mesh. `only`: patterns of the paths to restore, such as
        `("params/*",)`, or one alone; `*` stands for anything; other leaves stay those of `like`. All by default.

        **Returns:** a tree like `like`, or `like` itself when there is no checkpoint. **Raises:** `CheckpointError`
        when the newest valid one does not match `like`, or when none is valid; as `close`; on all when on one.
        """
        name = f"restore-{self._renew()}"
        self._meet(name)
        found, self.skipped = restoring.newest(self.path, like, only, self._processes, name)
        if found is None and self.skipped:
            raise restoring.nothing_valid(self.path, [skipped.reason for skipped in self.skipped])
        self._earlier = ""
        if found is None:
            return like
        self.num_updates = found.step
        return found.tree

    def newest(self) -> int | None:
        """Returns how many updates the newest checkpoint here has seen, whether or not it verifies; None without one.

        **Raises:** as `close`, on all processes when on one.
        """
        self._num_listed += 1
        name = f"newest-{self._num_listed}"
        self._meet(name)
        steps = self._processes.lead(name, lambda: json.dumps([each.step for each in restoring.listed_in(self.path)]))
        return max(json.loads(steps), default=None)

    def go_on(self, num_updates: int) -> None:
        """Goes on counting updates from a state that was restored from elsewhere, because it is newer.

        Checkpoints here that say that they are newer still are taken for invalid: the next durable one replaces them.
        """
        self._check_open()
        self._renew()
        known = {skipped.path for skipped in self.skipped}
        newer = [found.path for found in restoring.listed_in(self.path) if found.step > num_updates]
        self.skipped += [Skipped(path, "a state from elsewhere was newer") for path in newer if path not in known]
        self._earlier = ""
        self.num_updates = num_updates

    @property
    def under_way(self) -> "Future[Path] | None":
        """The folder of the checkpoint under way, to be had once it is durable; None while there is none."""
        return None if self._pending is None else self._pending.committed

    def close(self) -> None:
        """Finishes the checkpoint under way; the checkpointer cannot be used afterwards. A second call does nothing.

        **Raises:** `CheckpointError` when it failed, `WaitTimeout` at the limit; it then still goes on.
        """
        self._closed = True
        failure = self._settle()
        if self._lock is not None:
            self._lock.close()
        if failure is not None:
            raise failure

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, ProcessFailed):
            self.close()
            return
        self._processes.leave(str(error))
        self.while_waiting = None
        with contextlib.suppress(CheckpointError, WaitTimeout):
            self.close()

    def _renew(self) -> int:
        """Starts to count and to space anew. **Returns:** how often it did."""
        self._num_restored += 1
        self._num_attempts.clear()
        self._spacing = None
        return self._num_restored

    def _meet(self, name: str) -> None:
        """Waits for the checkpoint under way; what goes wrong with that on one process is raised on all at once."""
        with self._processes.agreeing(f"{name}/begun"):
            self._check_open()
            if (failure := self._settle()) is not None:
                raise failure

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self.path}: this Checkpointer is closed; make a new one")

    def _begin(self, tree: Any, metric: Any) -> "_Pending":
        if self._earlier:
            raise CheckpointError(
                f"{self.path}: has checkpoints of an earlier run, the newest {self._earlier}, "
                "which a new one would mix with; call restore(like) first to go on from it, or give another path"
            )
        name = self._next_name()
        processes, retention = self._processes, self._retention
        order = Order(self.path, self.num_updates, name, number_of(metric), self.limit_bytes_per_second)
        try:
            tree = prepared(tree, self._prepare)
            held = hold(tree, self._memory, process=processes.index, num_processes=processes.count, notes=self.notes)
        except BaseException as error:
            processes.withdraw(name, f"{type(error).__name__}: {error}")
            raise
        obsolete = [skipped.path for skipped in self.skipped]
        executor = ThreadPoolExecutor(2, thread_name_prefix=THREAD_NAME)
        owned = executor.submit(_take, held, self.trace)
        # While a program ends, nothing more can be submitted.
        part = Part(owned, executor.submit(lambda: checksums_of(owned.result())))
        work = _Work(order, processes, retention, obsolete, self._lock)
        committed = executor.submit(_persist, part, self.trace, work)
        executor.shutdown(wait=False)
        self._pending = _Pending(name, order.folder, executor, owned, committed)
        return self._pending

    def _failure(self) -> Exception | None:
        """Returns what went wrong with a checkpoint that is over, once."""
        return self._settle() if self._pending is not None and self._pending.committed.done() else None

    def _next_name(self) -> str:
        """Returns the name of the messages about the next checkpoint, the same on all processes and used once."""
        self._num_attempts[self.num_updates] += 1
        return f"save-{self._num_restored}-{self.num_updates}-{self._num_attempts[self.num_updates]}"

    def _make_room(self) -> Exception | None:
        """Waits for the checkpoint under way before the next, and returns what went wrong with it.

        Where that takes too long, neither of them keeps other processes waiting for this one.
        """
        pending = self._pending
        try:
            return self._settle()
        except WaitTimeout as late:
            assert pending is not None
            for name in (pending.name, self._next_name()):
                self._withdraw(name, late)
            raise

    def _withdraw(self, name: str, late: WaitTimeout) -> None:
        with contextlib.suppress(CheckpointError):  # where nobody can be told, nobody waits
            self._processes.withdraw(name, str(late))

    def _settle(self) -> Exception | None:
        """Waits for the checkpoint under way, and returns what went wrong with it."""
        pending = self._pending
        if pending is None:
            return None
        error = self._outcome(pending.committed, "writing")
        pending.executor.shutdown()
        self._pending = None
        if self._spacing is not None:
            self._spacing.ended()
        if error is None or isinstance(error, CheckpointError | WaitTimeout):
            return error
        failure = CheckpointError(
            f"{pending.folder}: the checkpoint failed: {error!r}; expected arrays whose computation "
            "succeeded, and memory for a copy of them on the host. Earlier checkpoints are untouched"
        )
        failure.__cause__ = error
        return failure

    def _outcome(self, future: "Future[Any]", doing: str) -> BaseException | None:
        assert self._pending is not None
        try:
            return outcome(future, self.timeout_seconds, self.while_waiting)
        except TimeoutError as error:
            raise WaitTimeout(
                f"{self._pending.folder}: {doing} this checkpoint took longer than timeout_seconds="
                f"{self.timeout_seconds:g}: expected it to end; look at the disk, or raise the limit"
            ) from error


@dataclass(frozen=True)
class _Pending:
    name: str  # of the messages about it
    folder: Path
    executor: ThreadPoolExecutor
    owned: "Future[Snapshot]"
    committed: "Future[Path]"


@dataclass(frozen=True)
class _Work:
    order: Order
    processes: Processes
    retention: Retention
    obsolete: Collection[Path]
    lock: folders.Lock | None  # which lasts as long as somebody writes


def _take(held: Held, trace: Trace) -> Snapshot:
    with trace.active(), span("checkpoint", "snapshot", num_bytes=held.num_bytes):
        return held.copy()


def _persist(part: Part, trace: Trace, work: _Work) -> Path:
    num_bytes = 0 if part.owned.exception() is not None else part.owned.result().num_bytes
    with trace.active(), span("checkpoint", "persist", num_bytes=num_bytes):
        path = persist.commit(work.order, part, work.processes)
        if work.processes.index == 0:
            work.retention.apply(work.order.root, work.obsolete)
        return path
