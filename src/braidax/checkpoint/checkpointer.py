"""`Checkpointer`: checkpoints of a PyTree behind the training step."""

import logging
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax

from braidax.checkpoint import persist, restore
from braidax.checkpoint.interval import Interval
from braidax.checkpoint.snapshot import Held, Snapshot, hold, is_shared
from braidax.errors import ArgumentError, CheckpointError, WaitTimeout
from braidax.spans import Trace, span

THREAD_NAME = "braidax-checkpoint"
_logger = logging.getLogger(__name__)


class Skipped(NamedTuple):
    """A checkpoint that was not restored: its `path`, and the `reason`."""

    path: Path
    reason: str


class Checkpointer:
    """Saves a PyTree every so often, behind the step, and restores the newest checkpoint that is whole.

    A checkpoint that is due is a *snapshot* (a copy on the host, made in the background while the next gradients run)
    and then a *persist* (written, made durable, and only then given its name, behind the next steps). One checkpoint is
    under way at a time: when the next is due before that, `update` waits. What fails in the background is raised by
    the next call of any method.

    There is a thread only while a checkpoint is under way. A program that ends without `close` still finishes it.

    In a job of several processes of JAX, all of them call the same methods, with one folder that all see. Process 0
    alone writes a tree with arrays that all of them hold, each whole; the others return at once.

    **Arguments:** `path`: the folder of the checkpoints of one run; made if missing. `interval`: when one is due, such
    as `Every(100)`. `keep`: how many are kept, at least 1; the oldest goes when a newer one is durable.
    `timeout_seconds`: the limit of every wait.

    **Raises:** `CheckpointError` when `path` is no folder that this process may write to.
    """

    def __init__(
        self, path: str | os.PathLike[str], interval: Interval, *, keep: int = 3, timeout_seconds: float = 600.0
    ) -> None:
        if keep < 1:
            raise ArgumentError(f"keep={keep!r}: expected a whole number >= 1; the newest checkpoint is always kept")
        if not timeout_seconds > 0:
            raise ArgumentError(f"timeout_seconds={timeout_seconds!r}: expected seconds > 0")
        self.path = Path(path).absolute()
        self.interval = interval
        self.keep = keep
        self.timeout_seconds = timeout_seconds
        self.trace = Trace()
        self.skipped: list[Skipped] = []
        self.num_updates = 0
        self._pending: _Pending | None = None
        self._continues = False
        self._closed = False
        persist.prepare(self.path)

    def update(self, tree: Any) -> None:
        """Counts an update of the state, and takes a checkpoint if one is due; called once after every step.

        After this the arrays may be donated at once; where a snapshot is still being copied, the runtime then copies
        instead. To spare that memory, let the next step call `wait` before it donates.

        **Arguments:** `tree`: a PyTree of `jax.Array`, typed PRNG keys, NumPy arrays and Python numbers.

        **Raises:** `CheckpointError` when an earlier checkpoint failed, a leaf cannot be saved, or the folder has
        checkpoints of a run that was not restored. `WaitTimeout` when the previous one takes too long.
        """
        self._check()
        self.num_updates += 1
        if self.interval.due(self.num_updates) and _writes(tree):
            self._settle()
            self._begin(tree)

    def save(self, tree: Any) -> Path:
        """Takes a checkpoint now, whether or not one is due; it is durable when this returns.

        **Arguments:** `tree`: as for `update`.

        **Returns:** the folder of the checkpoint, which process 0 writes. **Raises:** as `update`.
        """
        self._check()
        self._settle()
        if not _writes(tree):
            return self._folder
        pending = self._begin(tree)
        self._settle()
        return pending.committed.result()

    def wait(self) -> None:
        """Returns when the snapshot under way, if there is one, no longer needs the tree; for `before_apply=`.

        **Raises:** `CheckpointError` when it failed, `WaitTimeout` at the limit.
        """
        if self._pending is not None:
            if self._outcome(self._pending.owned, "copying") is not None:
                self._settle()
            self._check()

    def restore(self, like: Any) -> Any:
        """Restores the newest checkpoint that verifies, and goes on counting updates where it stood.

        Invalid ones are skipped, logged as warnings and listed in `skipped`; the next durable checkpoint replaces them.

        **Arguments:** `like`: a PyTree with the structure, shapes, dtypes and shardings to restore to; its arrays may
        be `jax.ShapeDtypeStruct` with a sharding, on any mesh.

        **Returns:** a tree like `like`, or `like` itself when there is no checkpoint. **Raises:** `CheckpointError`
        when the newest valid one does not match `like`, or when there are checkpoints and none is valid.
        """
        self._check()
        self._settle()
        self.skipped = []
        for found in persist.checkpoints(self.path):
            try:
                manifest = persist.read_manifest(found.path)
            except CheckpointError as error:
                self._skip(found.path, error)
                continue
            restore.match(found.path, manifest, like)
            try:
                tree = restore.load(found.path, manifest, like)
            except CheckpointError as error:
                self._skip(found.path, error)
                continue
            self.num_updates = manifest.step
            self._continues = True
            return tree
        if self.skipped:
            reasons = "; ".join(skipped.reason for skipped in self.skipped)
            raise CheckpointError(
                f"{self.path}: none of its {len(self.skipped)} checkpoints is valid: {reasons}; "
                "mend them, or move them away to start anew"
            )
        self._continues = True
        return like

    def close(self) -> None:
        """Finishes the checkpoint under way; the checkpointer cannot be used afterwards. A second call does nothing.

        **Raises:** `CheckpointError` when it failed, `WaitTimeout` at the limit; it then still goes on.
        """
        self._closed = True
        self._settle()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self.path}: this Checkpointer is closed; make a new one")
        if self._pending is not None and self._pending.committed.done():
            self._settle()

    def _begin(self, tree: Any) -> "_Pending":
        if not self._continues and (found := persist.checkpoints(self.path)):
            raise CheckpointError(
                f"{self.path}: has checkpoints of an earlier run, the newest {found[0].path.name}, "
                "which a new one would mix with; call restore(like) first to go on from it, or give another path"
            )
        self._continues = True
        held = hold(tree)
        trace, step = self.trace, self.num_updates
        executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
        owned = executor.submit(_take, held, trace)
        obsolete = [skipped.path for skipped in self.skipped]
        committed = executor.submit(_persist, owned, trace, self.path, step, self.keep, obsolete)
        executor.shutdown(wait=False)
        self._pending = _Pending(self._folder, executor, owned, committed)
        return self._pending

    @property
    def _folder(self) -> Path:
        return self.path / f"step-{self.num_updates:08d}"

    def _settle(self) -> None:
        pending = self._pending
        if pending is None:
            return
        error = self._outcome(pending.committed, "writing")
        pending.executor.shutdown()
        self._pending = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"{pending.folder}: the checkpoint failed: {error!r}; expected arrays whose computation "
                "succeeded, and memory for a copy of them on the host. Earlier checkpoints are untouched"
            ) from error

    def _outcome(self, future: "Future[Any]", doing: str) -> BaseException | None:
        assert self._pending is not None
        try:
            return future.exception(self.timeout_seconds)
        except TimeoutError as error:
            raise WaitTimeout(
                f"{self._pending.folder}: {doing} this checkpoint took longer than timeout_seconds="
                f"{self.timeout_seconds:g}: expected it to end; look at the disk, or raise the limit"
            ) from error

    def _skip(self, path: Path, error: CheckpointError) -> None:
        self.skipped.append(Skipped(path, str(error)))
        _logger.warning("skipped the checkpoint %s: %s", path, error)


def _writes(tree: Any) -> bool:
    """Says whether a tree is this process's to save."""
    return not is_shared(tree) or jax.process_index() == 0


@dataclass(frozen=True)
class _Pending:
    folder: Path
    executor: ThreadPoolExecutor
    owned: "Future[Snapshot]"
    committed: "Future[Path]"


def _take(held: Held, trace: Trace) -> Snapshot:
    with trace.active(), span("checkpoint", "snapshot", num_bytes=held.num_bytes):
        return held.copy()


def _persist(
    owned: "Future[Snapshot]", trace: Trace, root: Path, step: int, keep: int, obsolete: Collection[Path]
) -> Path:
    snapshot = owned.result()
    with trace.active(), span("checkpoint", "persist", num_bytes=snapshot.num_bytes):
        path = persist.commit(root, snapshot, step)
        persist.retain(root, keep, obsolete)
        return path
