"""`Peers`: checkpoints on the hosts of a job themselves, each part of them on two."""

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, final

import jax

from braidax.checkpoint.background_job import BackgroundJob
from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import About, data_file, manifest_file
from braidax.checkpoint.format.writing import Checksums, checksums_of, write
from braidax.checkpoint.interval.spacing import Interval, Spacing, check_interval
from braidax.checkpoint.places import holdings as neighbors
from braidax.checkpoint.places.lockstep import Messages
from braidax.checkpoint.places.restoring import NothingValid
from braidax.checkpoint.places.retention import Retention
from braidax.checkpoint.processes import all_processes
from braidax.checkpoint.snapshot.copies import prepared
from braidax.checkpoint.snapshot.hold import Held, Memory, Snapshot, hold
from braidax.checkpoint.snapshot.leaves import put_outside, with_outside
from braidax.errors import ArgumentError, BraidaxError, CheckpointError, WaitTimeout
from braidax.spans import Trace, span

THREAD_NAME = "braidax-peers"
_NUM_COPIES = 2
_SLOT = re.compile(r"slot-(\d+)")
_logger = logging.getLogger(__name__)


@final
class Peers:
    """Saves a PyTree on the hosts of its job, without a disk that all see: each process's part there and on another.

    Each process writes its part into a folder of its host, in memory (`/dev/shm/…`) or on a local disk, and sends it to
    the next process on another host, which keeps it beside its own. So every part survives the end of all processes, as
    JAX ends them when one is lost, and the loss of a host. What is restored comes from the folder where it is there,
    and over the network where it is not.

    Snapshots, the wait for them and failures are as of `Checkpointer`. A checkpoint replaces the one before once
    all processes have both parts of it; until then there is room for two.

    **Fields:** `num_updates`: that the state has seen. `trace`: gets the spans `snapshot` and `persist`. `notes`: as of
    `Checkpointer`.

    **Arguments:** `path`: a folder of every host, made if missing. `interval`: when a checkpoint is due. `messages`:
    a communicator of all processes, whose ranks are those of JAX. It is used by nobody else until `close`, and closed
    by who made it. `prepare`: as of `Checkpointer`.

    **Raises:** `ArgumentError` when the ranks are others than JAX's, `CheckpointError` when `path` is no folder that
    a process may write to, or is another run's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        interval: Interval,
        messages: Messages,
        *,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        check_interval(interval)
        if (messages.rank, messages.size) != (jax.process_index(), jax.process_count()):
            raise ArgumentError(
                f"messages= has rank {messages.rank} of {messages.size}, but this is process {jax.process_index()} of "
                f"{jax.process_count()} of JAX: expected the same; call jax.distributed.initialize with them before"
            )
        self.path = Path(path).absolute()
        self.interval = interval
        self.num_updates = 0
        self.trace = Trace()
        self.notes: dict[str, str] = {}
        self._messages = messages
        self._prepare = prepare
        self._place = neighbors.place_of(messages.rank, messages.hosts)
        self._root = self.path / f"slot-{self._place.slot}"
        self._memory = Memory()
        self._retention = Retention(newest=1)
        self._saved: Path | None = None
        self._missed: list[tuple[int, str]] = []  # steps that all others began to save, and why this process did not
        self._job = BackgroundJob(THREAD_NAME)
        self._owned: Future[None] | None = None
        self._spacing: Spacing | None = None
        self._num_restored = 0
        self._is_closed = False
        self._processes = all_processes(messages.timeout_seconds)
        failure: CheckpointError | None = None
        locks: list[folders.Lock] = []
        try:
            locks.append(folders.occupy(self._root))
        except CheckpointError as error:
            failure = error
        try:
            self._agree(failure, "open its folder")
            num_found = self._holdings().num_found
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        (self._lock,) = locks
        self._is_mixed = num_found > 0  # with an earlier run's

    @property
    def timeout_seconds(self) -> float:
        """The limit of every wait, that of the communicator; may be set at any time."""
        return self._messages.timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self._messages.timeout_seconds = self._processes.timeout_seconds = seconds

    @property
    def spacing(self) -> Spacing:
        """What spaces the checkpoints since the last `restore`."""
        if self._spacing is None:
            announcements = self._processes.announcements(f"due-{self._num_restored}")
            self._spacing = self.interval.start(self.num_updates, announcements=announcements)
        return self._spacing

    def update(self, tree: Any, *, metric: Any = None) -> None:
        """As `Checkpointer.update`; `metric` has no meaning here."""
        self._check_open()
        spacing = self.spacing
        self.num_updates += 1
        failure = self._heard()
        if spacing.due(self.num_updates):
            begun = time.perf_counter()
            failure = self._make_room() or failure
            self._begin(tree)
            spacing.began()
            spacing.stalled(time.perf_counter() - begun)
        if failure is not None:
            raise failure

    def save(self, tree: Any, *, metric: Any = None) -> Path:
        """As `Checkpointer.save`. **Returns:** the folder of this process."""
        _raise(self._make_room())
        self._begin(tree)
        _raise(self._settle())
        assert self._saved is not None, "or there was a failure"
        return self._saved

    def wait(self) -> None:
        """As `Checkpointer.wait`."""
        self._check_open()
        if self._owned is not None:
            begun = time.perf_counter()
            try:
                self._owned.exception(self.timeout_seconds)  # which the job raises
            except TimeoutError as error:
                raise WaitTimeout(
                    f"{self.path}: copying this checkpoint took longer than timeout_seconds={self.timeout_seconds:g}: "
                    "expected it to end; raise the limit"
                ) from error
            self.spacing.stalled(time.perf_counter() - begun)
        _raise(self._heard())

    def restore(self, like: Any, *, only: Sequence[str] | None = None) -> Any:
        """As `Checkpointer.restore`, of the newest checkpoint of which all parts are somewhere."""
        _raise(self._settle())
        inside = with_outside(like)
        holdings = self._holdings()
        reasons: list[str] = []
        for whole in holdings.whole:
            where = self.path / f"step-{whole.step:08d}"
            trouble: dict[str, str] = {}
            for turn in range(_NUM_COPIES):
                tree, trouble = holdings.restore(whole, where, inside, only, turn)
                if "failure" in trouble:
                    raise CheckpointError(trouble["failure"])
                if not trouble:
                    self.go_on(whole.step)
                    return put_outside(like, tree)
                _logger.warning("copy %d of the checkpoint %s is not valid: %s", turn, where, trouble["reason"])
            reasons.append(trouble["reason"])
        if holdings.num_found:
            lacking = holdings.num_found - len(reasons)
            reasons += [f"of {lacking} some parts are nowhere"] if lacking else []
            raise NothingValid(
                f"{self.path}: none of {holdings.num_found} checkpoints is valid: {'; '.join(reasons)}; move them "
                "away to start anew"
            )
        self._is_mixed = False
        return like

    def newest(self) -> int | None:
        """As `Checkpointer.newest`, of those of which all parts are somewhere; -1 where there are only some parts."""
        _raise(self._settle())
        holdings = self._holdings()
        return holdings.whole[0].step if holdings.whole else -1 if holdings.num_found else None

    def go_on(self, num_updates: int) -> None:
        """As `Checkpointer.go_on`; the next checkpoint replaces all others."""
        self._check_open()
        self._num_restored += 1
        self._spacing = None
        self._is_mixed = False
        self.num_updates = num_updates

    def close(self) -> None:
        """Finishes the checkpoint under way, and leaves what is there. A second call does nothing.

        **Raises:** `CheckpointError` or `CommError` when it failed, `WaitTimeout` at the limit; it then still goes on.
        """
        self._is_closed = True
        failure = self._settle_closed()  # what still goes on keeps the lock
        self._lock.close()
        if failure is not None:
            raise failure

    def __enter__(self) -> "Peers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(f"{self.path}: these Peers are closed; make new ones")

    def _heard(self) -> Exception | None:
        """Returns what went wrong with a checkpoint that is over, once."""
        return self._settle() if self._job.is_over else None

    def _make_room(self) -> Exception | None:
        """Waits for the checkpoint under way before the next; where that takes too long, the others have to hear it."""
        try:
            return self._settle()
        except WaitTimeout as late:
            self._missed.append((self.num_updates, str(late)))
            raise

    def _settle(self) -> Exception | None:
        """Waits for the checkpoint under way, and returns what went wrong with it."""
        self._check_open()
        return self._settle_closed()

    def _settle_closed(self) -> Exception | None:
        if not self._job.is_busy:
            return None
        failure = self._job.settle(self.timeout_seconds)
        self._owned = None
        self.spacing.ended()
        return failure

    def _holdings(self) -> neighbors.Holdings:
        return neighbors.Holdings(self._messages, [self._root, *self._abandoned()])

    def _abandoned(self) -> list[Path]:
        """Returns the folders of processes that this host had and has no more, for one of its processes."""
        if self._place.slot:
            return []
        slots = {int(name[1]): path for path in self.path.iterdir() if (name := _SLOT.fullmatch(path.name))}
        has_had = {slot: path for slot, path in slots.items() if (path / folders.LOCK_FILE).is_file()}
        return [path for slot, path in sorted(has_had.items()) if slot >= self._place.num_slots]

    def _begin(self, tree: Any) -> None:
        if self._is_mixed:
            raise CheckpointError(
                f"{self.path}: has checkpoints of an earlier run, which a new one would replace; call restore(like) "
                "first to go on from them, or give another path"
            )
        step, owned = self.num_updates, Future[None]()
        held: list[Held] = []
        options: dict[str, Any] = {"num_processes": self._messages.size, "notes": self.notes}
        rank, prepare = self._messages.rank, self._prepare
        failure = _failure_of(lambda: held.append(hold(prepared(tree, prepare), self._memory, process=rank, **options)))
        self._owned, missed, self._missed = owned, self._missed, []

        def job() -> None:
            for number, words in missed:
                with contextlib.suppress(CheckpointError):  # which it is for all
                    self._agree(WaitTimeout(words), "copy its part", step=number)
            self._save(step, held, failure, owned)

        self._job.begin(f"{self.path}: saving step {step}", job)

    def _save(self, step: int, held: list[Held], failure: Exception | None, owned: "Future[None]") -> None:
        """Saves a checkpoint together with all processes, on a thread of its own."""
        copied: list[Snapshot] = []
        num_bytes = sum(each.num_bytes for each in held)
        with self.trace.active(), span("checkpoint", "snapshot", num_bytes=num_bytes):
            failure = failure or _failure_of(lambda: copied.append(held.pop().copy()))
        owned.set_result(None)
        digest, token = "" if failure is not None else copied[0].digest, secrets.token_hex(8)
        said = self._agree(failure, "copy its part", step=step, digest=digest, token=token)
        for process, each in enumerate(said):
            if each["step"] != step:
                raise CheckpointError(
                    f"{self.path}: process {process} saves step {each['step']} and process {self._messages.rank} step "
                    f"{step}: expected all processes to call `update` after the same steps. Earlier checkpoints are "
                    "untouched"
                )
            if each["digest"] != said[0]["digest"]:
                raise CheckpointError(
                    f"{self.path}: process {process} saves another tree than process 0: expected the same paths, "
                    "shapes, dtypes and shardings on all; give every process the same tree. Earlier checkpoints are "
                    "untouched"
                )
        about = About(step, said[0]["token"], self._messages.size, None, importlib.metadata.version("braidax"))
        staged: list[Path] = []
        try:
            with self.trace.active(), span("checkpoint", "persist", num_bytes=num_bytes):
                self._share(copied[0], about, staged)
        except BaseException:
            for folder in staged:
                folders.discard(folder)
            raise
        final: list[Path] = []
        failure = _failure_of(lambda: final.append(folders.finish(staged[0], step)))
        try:
            self._agree(failure, "finish its part")
        except CheckpointError:  # which all know of; where a process is lost, others may count on this one's part
            for folder in (*staged, *final):
                folders.discard(folder)
            raise
        self._saved = final[0]
        listed = folders.checkpoints(self._root)
        self._retention.apply(self._root, [found.path for found in listed if found.path != final[0]])
        for path in self._abandoned():
            self._retention.give_up(path)

    def _share(self, snapshot: Snapshot, about: About, staged: list[Path]) -> None:
        """Writes the part of this process and that of its neighbor; when this returns all processes have done so."""

        def store() -> None:
            staged.append(folders.begin(self._root, about.step))
            checksums: Future[Checksums] = Future()
            checksums.set_result(checksums_of(snapshot))
            write(staged[0], snapshot, checksums, about, process=rank)

        rank, place = self._messages.rank, self._place
        failure = _failure_of(store)
        paths = [] if failure is not None else [staged[0] / name(rank) for name in (data_file, manifest_file)]
        said = self._agree(failure, "write its part", sizes=[path.stat().st_size for path in paths])
        if place.dest != rank:
            failure = neighbors.pass_on(self._messages, place, staged[0], [tuple(each["sizes"]) for each in said])
        self._agree(failure, "keep its neighbor's part")

    def _agree(self, failure: Exception | None, doing: str, **more: Any) -> list[dict[str, Any]]:
        """Tells the others how it went, and more. **Returns:** what all tell. **Raises:** `CheckpointError`."""
        words = "" if failure is None else str(failure) if isinstance(failure, BraidaxError) else repr(failure)
        heard = self._messages.all_gather(json.dumps({**more, "failure": words}).encode())
        said = [json.loads(bytes(each)) for each in heard]
        for process, each in enumerate(said):
            if each["failure"]:
                raise CheckpointError(
                    f"{self.path}: process {process} could not {doing}: {each['failure']}. Earlier checkpoints are "
                    "untouched"
                ) from failure
        return said


def _failure_of(act: Callable[[], Any]) -> Exception | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
        return error
    return None


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
