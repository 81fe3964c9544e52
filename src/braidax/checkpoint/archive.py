"""`Archive`: checkpoints that are also kept in an object store."""

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, final

from braidax.checkpoint.background_job import BackgroundJob
from braidax.checkpoint.checkpointer import Checkpointer
from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import manifest_file
from braidax.checkpoint.format.reading import read_manifest
from braidax.checkpoint.interval.spacing import Interval, Spacing, check_interval
from braidax.checkpoint.places.fetching import fetch
from braidax.checkpoint.places.object_store import Bucket, Kept
from braidax.checkpoint.places.restoring import NothingValid
from braidax.checkpoint.processes import all_processes
from braidax.errors import ArgumentError, CheckpointError, WaitTimeout
from braidax.spans import span

THREAD_NAME = "braidax-archive"
_ATTEMPTS = 4  # to find a checkpoint that is not removed while it is linked
_logger = logging.getLogger(__name__)


@final
class Archive:
    """A `Checkpointer` some of whose checkpoints are also kept in an object store, and come back from there.

    What is due is uploaded behind the steps: the checkpoint that `of` has under way, or else its newest, from its
    files, once it is durable there. It exists in the store once its last object does. One upload is under way at a
    time: when the next is due before that, `update` waits. What fails in the background is raised by the next call of
    any method; `of` goes on saving.

    In a job of several processes of JAX all of them make one and call the same methods; each uploads a part of the
    files. The folder in the store is one run's at a time: nothing there can be locked.

    **Arguments:** `of`: saves on a disk; the archive owns it from now on and closes it; its `trace` also gets the span
    `upload`. `url`: `s3://bucket/folder` or `gs://bucket/folder`. `interval`: when an upload is due. `keep`: how many
    of the newest stay in the store, at least 1. `client`: what obstore's `S3Store` or `GCSStore` takes, such as
    `{"endpoint": …, "region": …}`; without it credentials and endpoint are found in the environment.

    **Raises:** `ArgumentError` for another URL, `CheckpointError` when the store does not let us list the folder.
    """

    def __init__(
        self,
        of: Checkpointer,
        url: str,
        interval: Interval,
        *,
        keep: int = 3,
        client: Mapping[str, Any] | None = None,
    ) -> None:
        check_interval(interval)
        if keep < 1:
            raise ArgumentError(f"keep={keep!r}: expected a whole number >= 1; the newest checkpoint is always kept")
        self.of = of
        self.interval = interval
        self._keep = keep
        self._bucket = Bucket(url, client or {}, timeout_seconds=of.timeout_seconds)
        self._processes = all_processes(of.timeout_seconds)
        self._job = BackgroundJob(THREAD_NAME)
        self._spacing: Spacing | None = None
        self._is_closed = False
        self._num_agreed = self._num_renewed = 0
        self._name = ""  # of the messages about the upload under way
        self._obsolete: frozenset[str] = frozenset()
        archived = self._archived()
        self._earlier = archived[0].name if archived else ""

    @property
    def path(self) -> Path:
        """The folder of the checkpoints on the disk."""
        return self.of.path

    @property
    def num_updates(self) -> int:
        """How many updates the state has seen."""
        return self.of.num_updates

    @property
    def notes(self) -> dict[str, str]:
        """Texts that are kept with every checkpoint, as of `Checkpointer`."""
        return self.of.notes

    @notes.setter
    def notes(self, notes: dict[str, str]) -> None:
        self.of.notes = notes

    @property
    def timeout_seconds(self) -> float:
        """The limit of every wait; may be set at any time."""
        return self.of.timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self.of.timeout_seconds = self._processes.timeout_seconds = seconds

    @property
    def spacing(self) -> Spacing:
        """What spaces the uploads since the last `restore`."""
        if self._spacing is None:
            announcements = self._processes.announcements(f"due-{self._num_renewed}")
            self._spacing = self.interval.start(self.num_updates, announcements=announcements)
        return self._spacing

    def update(self, tree: Any, *, metric: Any = None) -> None:
        """As `Checkpointer.update`, and begins an upload if one is due.

        **Raises:** as that, and `CheckpointError` when an upload failed.
        """
        self._check_open()
        spacing = self.spacing
        failure = self._heard()
        try:
            self.of.update(tree, metric=metric)
        except (CheckpointError, WaitTimeout) as error:
            failure = failure or error
        if spacing.due(self.num_updates):
            begun = time.perf_counter()
            failure = self._make_room() or failure
            self._begin(self.of.under_way)
            spacing.began()
            spacing.stalled(time.perf_counter() - begun)
        if failure is not None:
            raise failure

    def save(self, tree: Any, *, metric: Any = None) -> Path:
        """As `Checkpointer.save`, and begins an upload, for which `close` waits. **Raises:** as `update`."""
        self._check_open()
        path = self.of.save(tree, metric=metric)
        failure = self._make_room()
        if failure is not None:
            self._processes.withdraw(self._agreed("upload"), str(failure))
            raise failure
        saved: Future[Path] = Future()
        saved.set_result(path)
        self._begin(saved)
        return path

    def wait(self) -> None:
        """As `Checkpointer.wait`. **Raises:** as that, and `CheckpointError` when an upload failed."""
        self.of.wait()
        failure = self._heard()
        if failure is not None:
            raise failure

    def restore(self, like: Any, *, only: Sequence[str] | None = None) -> Any:
        """As `Checkpointer.restore`; a checkpoint that is newer in the store comes to the disk before.

        **Raises:** as that, and `CheckpointError` when the store cannot be read.
        """
        failure = self._settle()
        if failure is not None:
            raise failure
        archived = self._archived()
        candidates, on_disk = list(archived), self.of.newest()
        reasons: list[str] = []
        is_fetched = self._fetch(candidates, -1 if on_disk is None else on_disk, reasons)
        if archived and on_disk is None and not is_fetched:
            raise NothingValid(
                f"{self._bucket.url}: none of its {len(archived)} checkpoints is valid: {'; '.join(reasons)}; mend "
                "them, or remove them to start anew"
            )
        try:
            tree = self.of.restore(like, only=only)
        except NothingValid:
            if not self._fetch(candidates, -1, reasons):
                raise
            tree = self.of.restore(like, only=only)
        else:
            if self._fetch(candidates, self.num_updates, reasons):
                tree = self.of.restore(like, only=only)
        self._renew()
        return tree

    def newest(self) -> int | None:
        """As `Checkpointer.newest`, of the disk and the store. **Raises:** as `restore`."""
        failure = self._settle()
        if failure is not None:
            raise failure
        archived = [kept.step for kept in self._archived()]
        on_disk = self.of.newest()
        return max(archived if on_disk is None else [*archived, on_disk], default=None)

    def go_on(self, num_updates: int) -> None:
        """As `Checkpointer.go_on`."""
        self.of.go_on(num_updates)
        self._renew()

    def close(self) -> None:
        """Finishes the upload under way and closes `of`. A second call does nothing.

        **Raises:** `CheckpointError` when one failed, `WaitTimeout` at the limit; it then still goes on.
        """
        self._is_closed = True
        try:
            failure = self._settle()
        finally:
            self.of.close()
        if failure is not None:
            raise failure

    def __enter__(self) -> "Archive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(f"{self.path}: this Archive is closed; make a new one")

    def _agreed(self, what: str) -> str:
        """Returns a name for messages, the same on all processes and used once."""
        self._num_agreed += 1
        return f"{what}-{self._num_agreed}"

    def _archived(self) -> list[Kept]:
        listed = self._processes.lead(self._agreed("list"), lambda: json.dumps(self._bucket.checkpoints()))
        return [Kept(*kept) for kept in json.loads(listed)]

    def _renew(self) -> None:
        """Starts to space anew. Newer checkpoints in the store were not valid, and go when the next is there."""
        self._num_renewed += 1
        self._spacing = None
        self._earlier = ""
        self._obsolete = frozenset(kept.name for kept in self._archived() if kept.step > self.num_updates)

    def _heard(self) -> Exception | None:
        """Returns what went wrong with an upload that is over, once."""
        return self._settle() if self._job.is_over else None

    def _settle(self) -> Exception | None:
        """Waits for the upload under way, and returns what went wrong with it."""
        if not self._job.is_busy:
            return None
        failure = self._job.settle(self.timeout_seconds)
        self.spacing.ended()
        return failure

    def _make_room(self) -> Exception | None:
        """As of `Checkpointer`: where this process waits no longer, no other waits for it."""
        try:
            return self._settle()
        except WaitTimeout as late:
            with contextlib.suppress(CheckpointError):  # where nobody can be told, nobody waits
                for name in (self._name, self._agreed("upload")):
                    self._processes.withdraw(name, str(late))
            raise

    def _begin(self, wanted: "Future[Path] | None") -> None:
        if self._earlier:
            raise CheckpointError(
                f"{self._bucket.url}: has checkpoints of an earlier run, the newest {self._earlier}, which a new one "
                "would mix with; call restore(like) first to go on from it, or give another URL"
            )
        self._name = self._agreed("upload")
        work = _Work(self._name, wanted, frozenset(each.path for each in self.of.skipped))
        self._job.begin(f"{self._bucket.url}: uploading a checkpoint", lambda: self._upload(work))

    def _upload(self, work: "_Work") -> None:
        processes, staged = self._processes, list[Path]()

        def begin() -> str:
            kept = self._stage(work, staged)
            return json.dumps(kept and [kept, staged[0].name])

        def end(said: Mapping[int, str]) -> str:
            for process, words in said.items():
                if words:
                    raise CheckpointError(f"{words} (said by process {process})" if process else words)
            self._bucket.upload(kept, folder / manifest_file(0))
            self._bucket.retain(self._keep, self._obsolete)
            return ""

        try:
            told = json.loads(processes.lead(f"{work.name}/begin", begin))
            if told is None:
                return
            kept, folder = Kept(*told[0]), self.path / told[1]
            said = ""
            try:
                files = sorted(path for path in folder.iterdir() if path.name != manifest_file(0))
                mine = files[processes.index :: processes.count]
                num_bytes = sum(path.stat().st_size for path in mine)
                with self.of.trace.active(), span("checkpoint", "upload", num_bytes=num_bytes):
                    for path in mine:
                        self._bucket.upload(kept, path)
            except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
                said = str(error) if isinstance(error, CheckpointError) else f"{self._bucket.url}: {error!r}"
            processes.conclude(work.name, said, end)
        finally:
            for path in staged:
                folders.discard(path)

    def _stage(self, work: "_Work", staged: list[Path]) -> Kept | None:
        """Links the files of a checkpoint, which may else be removed; None if it is in the store already."""
        if work.wanted is not None:
            try:
                work.wanted.exception(self.timeout_seconds)  # which `of` raises
            except TimeoutError:
                raise WaitTimeout(
                    f"{self.path}: the checkpoint that is to be uploaded is not durable after timeout_seconds="
                    f"{self.timeout_seconds:g}: expected it to end; look at the disk, or raise the limit"
                ) from None
        wanted = None if work.wanted is None or work.wanted.exception() else work.wanted.result()
        archived, invalid, num_gone = self._bucket.checkpoints(), set(work.invalid), 0
        while num_gone < _ATTEMPTS:
            found = [each for each in folders.checkpoints(self.path) if each.path not in invalid]
            if not found:
                return None
            step, revision, path = next((each for each in found if each.path == wanted), found[0])
            try:
                about = read_manifest(path).about
                if folders.misnamed(path, about.step):
                    invalid.add(path)
                    continue
                kept = Kept(step, revision, f"{path.name}.{about.token}")
                if kept in archived:
                    return None
                staged.append(folders.begin(self.path, step))
                for name in folders.files_in(path):
                    (staged[-1] / name).hardlink_to(path / name)
            except (OSError, CheckpointError) as error:
                if path.exists():
                    raise CheckpointError(
                        f"{path}: cannot be kept for its upload: {error}; expected a file system with hard links"
                    ) from error
                num_gone += 1
                while staged:
                    folders.discard(staged.pop())
            else:
                return kept
        raise CheckpointError(
            f"{self.path}: {_ATTEMPTS} checkpoints were removed before they could be uploaded; let `of` keep more"
        )

    def _fetch(self, candidates: list[Kept], above: int, reasons: list[str]) -> bool:
        """Brings the newest checkpoint that is valid and above a step to the disk, and says whether there was one.

        **Arguments:** `candidates`: newest first; those that were tried are taken away. `reasons`: gets why not.
        """
        while candidates and candidates[0].step > above:
            kept = candidates.pop(0)
            reason = fetch(kept, self._bucket, self.path, self._processes, self._agreed("fetch"))
            if not reason:
                _logger.info("fetched %s/%s to %s", self._bucket.url, kept.name, self.path)
                return True
            reasons.append(reason)
            _logger.warning("skipped the checkpoint %s/%s: %s", self._bucket.url, kept.name, reason)
        return False


class _Work(NamedTuple):
    """An upload.

    **Fields:** `name`: of its messages. `wanted`: the checkpoint, once it is durable; the newest where that failed or
    is gone, and by default. `invalid`: what it cannot be.
    """

    name: str
    wanted: "Future[Path] | None"
    invalid: frozenset[Path]
