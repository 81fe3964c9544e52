"""`Checkpointer`: checkpoints of a PyTree behind the training step, in one place or several."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from braidax.checkpoint.interval.spacing import Every, Interval, Spacing, check_interval
from braidax.checkpoint.places.open_places import OpenPlaces, first_of, given_places, withdraw
from braidax.checkpoint.places.persist import number_of
from braidax.checkpoint.places.place import OpenPlace, Order, Place, Skipped
from braidax.checkpoint.processes import Processes, all_processes
from braidax.checkpoint.snapshot.hold import Memory, hold
from braidax.checkpoint.snapshot.leaves import put_outside, saved_leaves, with_outside
from braidax.checkpoint.snapshot.staging import prepared
from braidax.checkpoint.under_way import UnderWay
from braidax.errors import ArgumentError, CheckpointError, CommError, PeerLost, WaitTimeout
from braidax.spans import Trace

if TYPE_CHECKING:
    from braidax.checkpoint.messages import Messages


class Checkpointer:
    """Saves a PyTree every so often, behind the step, and restores the newest checkpoint that is whole.

    A checkpoint that is due is a *snapshot* (a copy on the host, made in the background while the next gradients run)
    and then a *persist* in each place that takes it (written, made durable, and only then given its name, behind the
    next steps). One checkpoint is under way at a time: when the next is due before that, `update` waits. What fails in
    the background is raised by the next call of any method; a place that fails does not keep the others from theirs.

    A place takes one in `every` of the checkpoints that are due, and the first one after each start or `restore` in any
    case; with `Every(n)`, those at multiples of `n · every` updates, so that an interruption moves none.

    There is a thread only while a checkpoint is under way. A program that ends without `close` still finishes it.

    In a job of several processes of JAX all of them make one, and call the same methods of it with the same trees.
    Each writes what it owns; a checkpoint exists once all have, and fails on all if one fails. NumPy arrays and Python
    numbers are those of process 0; of a `HostShard` each process writes what it has. With `processes` others than
    JAX's take part as well, servers say: their trees have nothing but their `HostShard`s.

    **Arguments:** `places`: the path of a folder, or from the quickest to the most lasting `Neighbors`, `Folder`s and
    `Bucket`s, one of which takes all. `interval`: when a checkpoint is due, such as `Every(100)` or `Adaptive()`.
    `keep`, `keep_every`, `keep_best`: as of `Folder`, for a path alone; 3 are kept by default. `timeout_seconds`: the
    limit of every wait. `prepare`: makes, of a tree whose checkpoint is due, the one that is read, if the devices have
    memory for it: `copied`, for a step that is one jitted function. `processes`: a communicator of all that save
    together, in place of JAX's own service; the first ranks are JAX's processes, by their indices, and its
    `timeout_seconds` limit the waits for others.

    `notes` are texts that every checkpoint from then on keeps, by name; `fit` notes the plan. `while_waiting`, if set,
    is called every few seconds of a wait, and when a checkpoint has failed; it may raise `PeerLost`, as a step's
    `check_processes` does. A `with` block that this error ends waits for no other process.

    **Raises:** `CheckpointError` when a place is none that this process may write to, or is another run's.
    """

    def __init__(
        self,
        places: str | os.PathLike[str] | Place | Sequence[Place],
        interval: Interval,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: int = 0,
        timeout_seconds: float = 600.0,
        prepare: Callable[[Any], Any] | None = None,
        processes: "Messages | None" = None,
    ) -> None:
        check_interval(interval)
        given = given_places(places, keep, keep_every, keep_best)
        if not timeout_seconds > 0:
            raise ArgumentError(f"timeout_seconds={timeout_seconds!r}: expected seconds > 0")
        self.interval = interval
        self._limit_bytes_per_second: float | None = None
        self.trace = Trace()
        self.notes: dict[str, str] = {}
        self.while_waiting: Callable[[], object] | None = None
        self.num_updates = 0
        self._prepare = prepare
        self._memory = Memory()
        self._pending: UnderWay | None = None
        self._spacing: Spacing | None = None
        self._closed = False
        self._num_restored = self._num_listed = 0
        self._num_due = 0  # where that can be said, those before the last restore included
        self._is_first = True  # since the last restore
        self._num_attempts: Counter[int] = Counter()  # to save a step, since the last restore
        self._processes = _processes_of(processes, timeout_seconds)
        self._places = OpenPlaces(given, self._processes)

    @property
    def path(self) -> Path:
        """The folder of the checkpoints, of several places that of the first."""
        return self._places.path

    @property
    def skipped(self) -> list[Skipped]:
        """The checkpoints that the last `restore` found invalid."""
        return self._places.skipped

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is being taken, and is not durable yet."""
        return self._pending is not None and not self._pending.committed.done()

    @property
    def limit_bytes_per_second(self) -> float | None:
        """How fast each process writes to a folder at most, None for as fast as it can; may be set at any time."""
        return self._limit_bytes_per_second

    @limit_bytes_per_second.setter
    def limit_bytes_per_second(self, limit: float | None) -> None:
        if limit is not None and not limit > 0:
            raise ArgumentError(f"limit_bytes_per_second={limit!r}: expected bytes > 0, or None")
        self._limit_bytes_per_second = limit

    @property
    def timeout_seconds(self) -> float:
        """The limit of every wait; may be set at any time."""
        return self._processes.timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self._processes.timeout_seconds = seconds
        self._places.limit(seconds)

    @property
    def spacing(self) -> Spacing:
        """What spaces the checkpoints since the last `restore`: says how far apart and why, can be paused and set."""
        if self._spacing is None:
            announcements = self._processes.announcements(f"due-{self._num_restored}")
            self._spacing = self.interval.start(self.num_updates, announcements=announcements)
            self._num_due = self.num_updates // self.interval.num_updates if isinstance(self.interval, Every) else 0
        return self._spacing

    def update(self, tree: Any, *, metric: Any = None) -> None:
        """Counts an update of the state, and takes a checkpoint if one is due; called once after every step.

        After this the arrays may be donated at once; where a snapshot is still being copied, the runtime then copies
        instead. To spare that memory, let the next step call `wait` before it donates.

        **Arguments:** `tree`: a PyTree of `jax.Array`, typed PRNG keys, NumPy arrays and Python numbers. `metric`: how
        good it is, lower is better, a number or a scalar array, which nobody waits for here; for `keep_best`.

        **Raises:** `CheckpointError` when an earlier checkpoint failed (one that is due is begun nevertheless), a leaf
        cannot be saved, or a place has checkpoints of a run that was not restored. `WaitTimeout` when the previous
        one takes too long; of several processes no other waits for this one then, and both fail on all.
        """
        self._check_open()
        spacing = self.spacing
        self.num_updates += 1
        failure = self._heard()
        if spacing.due(self.num_updates):
            self._num_due += 1
            places = self._places.taking(self._num_due, is_first=self._is_first)
            self._is_first = False  # whatever becomes of it: the same on all processes
            begun = time.perf_counter()
            failure = self._make_room(places) or failure
            self._begin(tree, metric, places)
            spacing.began()
            spacing.stalled(time.perf_counter() - begun)
        if failure is not None:
            raise failure

    def save(self, tree: Any, *, metric: Any = None) -> Path:
        """Takes a checkpoint now, whether or not one is due, in all places; it is durable when this returns.

        For its upload to a `Bucket`, `close` waits.

        **Arguments:** as of `update`.

        **Returns:** the folder of the checkpoint, in the last place. **Raises:** as `update`.
        """
        self._check_open()
        self._is_first = False
        failure = self._make_room(self._places.all)
        if failure is not None:
            withdraw(self._places.all, self._next_name(), self.num_updates, str(failure))
            raise failure
        pending = self._begin(tree, metric, self._places.all)
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
                failed = self._pending.copied(self.timeout_seconds, self.while_waiting)
            except WaitTimeout as late:
                self._withdraw(self._pending, str(late))
                raise
            if failed is not None:
                failure = self._settle()
            self.spacing.stalled(time.perf_counter() - begun)
        failure = failure or self._heard()
        if failure is not None:
            raise failure

    def restore(self, like: Any, *, only: Sequence[str] | None = None) -> Any:
        """Restores the newest checkpoint that verifies, of all places, and goes on counting updates where it stood.

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
        with self._processes.agreeing(f"{name}/like"):
            inside = with_outside(like)  # which gets back what is restored last, and that need not be what is found
            saved_leaves(inside)  # what it says of itself has to be true, else no checkpoint would seem valid
        found = self._places.restore(inside, only)
        if found is None:
            return like
        self.num_updates = found.step
        return put_outside(like, found.tree)

    def newest(self) -> int | None:
        """Returns how many updates the newest checkpoint here has seen, whether or not it verifies; None without one.

        **Raises:** as `close`, on all processes when on one.
        """
        self._num_listed += 1
        self._meet(f"newest-{self._num_listed}")
        return self._places.newest()

    def close(self) -> None:
        """Finishes the checkpoint under way; the checkpointer cannot be used afterwards. A second call does nothing.

        **Raises:** `CheckpointError` when it failed, `WaitTimeout` at the limit; it then still goes on.
        """
        self._closed = True
        failure = self._settle()  # what still goes on keeps its places
        failure = first_of([failure, self._places.close(self._settle_jobs)])
        if failure is not None:
            raise failure

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, PeerLost):
            self.close()
            return
        self._processes.leave(error)
        self.while_waiting = None
        with contextlib.suppress(CheckpointError, CommError, WaitTimeout):
            self.close()

    def _renew(self) -> int:
        """Starts to count and to space anew. **Returns:** how often it did."""
        self._num_restored += 1
        self._is_first = True
        self._num_attempts.clear()
        self._spacing = None
        return self._num_restored

    def _meet(self, name: str) -> None:
        """Waits for what is under way; what goes wrong with that on one process is raised on all at once."""
        with self._processes.agreeing(f"{name}/begun"):
            self._check_open()
            failure = first_of([self._settle(), self._settle_jobs(self._places.all)])
            if failure is not None:
                raise failure

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self.path}: this Checkpointer is closed; make a new one")

    def _begin(self, tree: Any, metric: Any, places: tuple[OpenPlace, ...]) -> UnderWay:
        self._places.check_restored()
        name, processes = self._next_name(), self._processes
        try:
            order = Order(self.num_updates, name, number_of(metric), self.limit_bytes_per_second, self.trace)
            tree = prepared(tree, self._prepare)
            held = hold(tree, self._memory, process=processes.index, num_processes=processes.count, notes=self.notes)
        except BaseException as error:
            withdraw(places, name, self.num_updates, f"{type(error).__name__}: {error}")
            raise
        self._pending = UnderWay(order, held, places)
        return self._pending

    def _heard(self) -> Exception | None:
        """Returns what went wrong with what is over, once."""
        is_over = self._pending is not None and self._pending.committed.done()
        over = [place for place in self._places.all if place.job is not None and place.job.is_over]
        return first_of([self._settle() if is_over else None, self._settle_jobs(over)])

    def _next_name(self) -> str:
        """Returns the name of the messages about the next checkpoint, the same on all processes and used once."""
        self._num_attempts[self.num_updates] += 1
        return f"save-{self._num_restored}-{self.num_updates}-{self._num_attempts[self.num_updates]}"

    def _make_room(self, places: Iterable[OpenPlace]) -> Exception | None:
        """Waits for what is under way before the next, and returns what went wrong with it.

        Where that takes too long, neither of them keeps other processes waiting for this one.
        """
        pending = self._pending
        try:
            return first_of([self._settle(), self._settle_jobs(places)])
        except WaitTimeout as late:
            if pending is not None:
                self._withdraw(pending, str(late))
            withdraw(places, self._next_name(), self.num_updates, str(late))
            raise

    def _withdraw(self, pending: UnderWay, reason: str) -> None:
        withdraw(pending.places, pending.order.name, pending.order.step, reason)

    def _settle(self) -> Exception | None:
        """Waits for the checkpoint under way, and returns what went wrong with it."""
        if self._pending is None:
            return None
        failure = self._pending.settle(self.timeout_seconds, self.while_waiting)
        self._pending = None
        if self._spacing is not None:
            self._spacing.ended()
        return failure

    def _settle_jobs(self, places: Iterable[OpenPlace]) -> Exception | None:
        """Waits for what goes on when places have persisted, and returns what went wrong with it."""
        jobs = [place.job for place in places if place.job is not None]
        return first_of([job.settle(self.timeout_seconds, self.while_waiting) for job in jobs])


def _processes_of(messages: "Messages | None", timeout_seconds: float) -> Processes:
    if messages is None:
        return all_processes(timeout_seconds)
    from braidax.checkpoint.messages import processes_of

    return processes_of(messages, timeout_seconds)


@runtime_checkable
class Saver(Protocol):
    """What a training loop needs to save its state; `Checkpointer` is one.

    **Fields:** `notes`: as of `Checkpointer`.
    """

    notes: dict[str, str]

    @property
    def num_updates(self) -> int:
        """How many updates the state has seen."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """The limit of every wait; it may be set."""
        ...

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None: ...

    def update(self, tree: Any, *, metric: Any = None) -> None:
        """As `Checkpointer.update`."""
        ...

    def save(self, tree: Any, *, metric: Any = None) -> Path:
        """As `Checkpointer.save`."""
        ...

    def wait(self) -> None:
        """As `Checkpointer.wait`."""
        ...

    def restore(self, like: Any, *, only: Sequence[str] | None = None) -> Any:
        """As `Checkpointer.restore`."""
        ...

    def close(self) -> None:
        """As `Checkpointer.close`."""
        ...
