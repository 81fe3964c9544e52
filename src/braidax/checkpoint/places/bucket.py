"""`Bucket`: checkpoints of a folder that are also kept in an object store."""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from braidax.checkpoint.background_job import BackgroundJob
from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import manifest_file
from braidax.checkpoint.format.reading import read_manifest
from braidax.checkpoint.places.fetching import fetch
from braidax.checkpoint.places.folder import OpenFolder
from braidax.checkpoint.places.object_store import Kept, ObjectStore
from braidax.checkpoint.places.place import NothingValid, OpenPlace, Order, Part, Returned, Skipped, check_every
from braidax.checkpoint.processes import Processes
from braidax.errors import ArgumentError, CheckpointError, WaitTimeout
from braidax.spans import span

THREAD_NAME = "braidax-upload"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bucket:
    """A folder in an object store, for checkpoints of the `Folder` that stands before it.

    They are uploaded from its files, behind the steps, once they are durable there, and exist in the store once their
    last object does. One upload is under way at a time: when the next is due before that, `update` waits. Of several
    processes each uploads a part of the files. The folder in the store is one run's at a time: nothing there can be
    locked.

    **Arguments:** `url`: `s3://bucket/folder` or `gs://bucket/folder`. `every`: of the checkpoints that are due it
    takes one in so many, a multiple of the folder's. `keep`: how many of the newest stay in the store, at least 1.
    `client`: what obstore's `S3Store` or `GCSStore` takes, such as `{"endpoint": …, "region": …}`; without it
    credentials and endpoint are found in the environment.
    """

    url: str
    every: int = 1
    keep: int = 3
    client: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_every(self.every)
        if self.keep < 1:
            raise ArgumentError(
                f"keep={self.keep!r}: expected a whole number >= 1; the newest checkpoint is always kept"
            )

    def open(self, processes: Processes, before: Sequence[OpenPlace]) -> "OpenBucket":
        """As of `Place`.

        **Raises:** `ArgumentError` for another URL, and where no folder stands before it that takes what it takes;
        `CheckpointError` when the store does not let us list the folder.
        """
        found = [place for place in before if isinstance(place, OpenFolder)]
        if not found:
            raise ArgumentError(
                f"places= have {self.url!r} and no Folder before it, from whose files it is uploaded: expected one, "
                'such as [Folder("runs/a"), Bucket(url)]'
            )
        if self.every % found[-1].every:
            raise ArgumentError(
                f"every={self.every!r} of {self.url!r}: expected a multiple of every={found[-1].every!r} of the folder "
                f"{found[-1].where} before it, from whose files it is uploaded"
            )
        return OpenBucket(self, found[-1], processes)


@final
class OpenBucket:
    """The running side of `Bucket`.

    **Arguments:** as of `Place.open`; `given`: the options. `folder`: what is uploaded, and where it comes back to.
    **Fields:** as of `OpenPlace`.
    """

    def __init__(self, given: Bucket, folder: OpenFolder, processes: Processes) -> None:
        self.skipped: list[Skipped] = []
        self.job: BackgroundJob | None = BackgroundJob(THREAD_NAME)
        self._folder = folder
        self._keep = given.keep
        self._store = ObjectStore(given.url, given.client or {}, timeout_seconds=processes.timeout_seconds)
        self.where = self._store.url
        self._processes = processes
        self._staged: Future[_Staged | None] = Future()  # of the upload under way
        self._name = ""
        self._num_met = 0
        self._obsolete: frozenset[str] = frozenset()
        kept = self._kept()
        self._earlier = kept[0].name if kept else ""

    @property
    def earlier(self) -> str:
        """As of `OpenPlace`."""
        return self._earlier

    def begin(self, order: Order) -> None:
        """As of `OpenPlace`: the upload begins to wait for the folder."""
        assert self.job is not None
        self._name, self._staged = order.name, Future()
        work = _Upload(order, self._staged, self._keep, self._obsolete, self._store, self._folder, self._processes)
        self.job.begin(f"{self.where}: uploading a checkpoint", work.run)

    def persist(self, part: Part, order: Order) -> Path | None:
        """Keeps what is now in the folder for the upload, which goes on behind.

        **Returns:** the folder of the checkpoint on the disk, None where it is not there.
        """
        path = self._folder.saved.get(order.name)
        try:
            is_first = self._processes.index == 0
            self._staged.set_result(_linked(path, order.step) if path is not None and is_first else None)
        except Exception as error:  # noqa: BLE001 - whoever uploads raises it on all processes
            self._staged.set_exception(error)
        return path

    def withdraw(self, name: str, step: int, reason: str) -> None:
        """As of `OpenPlace`; the upload under way is meant as well."""
        assert self.job is not None
        if self.job.is_busy and self._name != name:
            self._processes.withdraw(self._name, reason)
        self._processes.withdraw(name, reason)

    def newest(self) -> int | None:
        """As of `OpenPlace`."""
        return max((kept.step for kept in self._kept()), default=None)

    def restore(self, like: Any, only: Sequence[str] | None, above: int) -> Returned | None:
        """As of `OpenPlace`: it comes to the folder before, and is then one of its checkpoints.

        **Raises:** as that, and `CheckpointError` when the store cannot be read or the disk not be written.
        """
        reasons: list[str] = []
        for kept in self._kept():
            if kept.step <= above:
                break
            reason = fetch(kept, self._store, self._folder.path, self._processes, self._met("fetch"))
            if not reason:
                _logger.info("fetched %s/%s to %s", self.where, kept.name, self._folder.path)
                return self._folder.restore(like, only, above)
            reasons.append(reason)
            _logger.warning("skipped the checkpoint %s/%s: %s", self.where, kept.name, reason)
        if reasons and above < 0:
            raise NothingValid(
                f"{self.where}: none of its {len(reasons)} checkpoints is valid: {'; '.join(reasons)}; mend them, or "
                "remove them to start anew"
            )
        return None

    def go_on(self, num_updates: int) -> None:
        """As of `OpenPlace`."""
        self._earlier = ""
        self._obsolete = frozenset(kept.name for kept in self._kept() if kept.step > num_updates)

    def limit(self, timeout_seconds: float) -> None:
        """As of `OpenPlace`; a request keeps the limit that it had."""
        self._processes.timeout_seconds = timeout_seconds

    def close(self) -> None:
        """Does nothing: nothing is open but while it is used."""

    def _met(self, what: str) -> str:
        """Returns a name for messages, the same on all processes and used once."""
        self._num_met += 1
        return f"{what}-{self._num_met}"

    def _kept(self) -> list[Kept]:
        """Returns the checkpoints in the store, newest first, on all processes."""
        listed = self._processes.lead(self._met("list"), lambda: json.dumps(self._store.checkpoints()))
        return [Kept(*kept) for kept in json.loads(listed)]


class _Staged(NamedTuple):
    """Files that are kept for their upload. **Fields:** `kept`: the checkpoint in the store. `path`: of their links."""

    kept: Kept
    path: Path


@dataclass(frozen=True)
class _Upload:
    """An upload, on a thread of its own.

    **Arguments:** `order`: whose checkpoint it is. `staged`: its files, on process 0, once they are there; None where
    they are not to come. `keep`: how many stay in the store. `obsolete`: those that go in any case.
    """

    order: Order
    staged: "Future[_Staged | None]"
    keep: int
    obsolete: frozenset[str]
    store: ObjectStore
    folder: OpenFolder
    processes: Processes

    def run(self) -> None:
        """Uploads the checkpoint together with all processes. **Raises:** `CheckpointError` on all."""
        processes, name = self.processes, self.order.name
        try:
            told = json.loads(processes.lead(f"{name}/begin", self._begin))
            if told is None:
                return
            kept, unfinished = Kept(*told[0]), self.folder.path / told[1]
            said = self._upload(kept, unfinished)

            def end(words: Mapping[int, str]) -> str:
                for process, each in words.items():
                    if each:
                        raise CheckpointError(f"{each} (said by process {process})" if process else each)
                self.store.upload(kept, unfinished / manifest_file(0))
                self.store.retain(self.keep, self.obsolete)
                return ""

            processes.conclude(name, said, end)
        finally:
            if self.staged.done() and self.staged.exception() is None and (found := self.staged.result()) is not None:
                folders.discard(found.path)

    def _begin(self) -> str:
        """Returns what is uploaded, and from where; on process 0."""
        limit = self.processes.timeout_seconds
        try:
            found = self.staged.result(limit)
        except TimeoutError:
            raise WaitTimeout(
                f"{self.folder.where}: the checkpoint that is to be uploaded is not durable after timeout_seconds="
                f"{limit:g}: expected it to end; look at the disk, or raise the limit"
            ) from None
        return json.dumps(found and [found.kept, found.path.name])

    def _upload(self, kept: Kept, unfinished: Path) -> str:
        """Uploads this process's share. **Returns:** what went wrong."""
        try:
            files = sorted(path for path in unfinished.iterdir() if path.name != manifest_file(0))
            mine = files[self.processes.index :: self.processes.count]
            num_bytes = sum(path.stat().st_size for path in mine)
            with self.order.trace.active(), span("checkpoint", "upload", num_bytes=num_bytes):
                for path in mine:
                    self.store.upload(kept, path)
        except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
            return str(error) if isinstance(error, CheckpointError) else f"{self.store.url}: {error!r}"
        return ""


def _linked(path: Path, step: int) -> _Staged:
    """Links the files of a checkpoint, which may else be removed before they are uploaded."""
    unfinished: list[Path] = []
    found = folders.found_at(path)
    assert found is not None
    try:
        unfinished.append(folders.begin(path.parent, step))
        for name in folders.files_in(path):
            (unfinished[0] / name).hardlink_to(path / name)
        token = read_manifest(unfinished[0]).about.token
    except (OSError, CheckpointError) as error:
        for each in unfinished:
            folders.discard(each)
        raise CheckpointError(
            f"{path}: cannot be kept for its upload: {error}; expected a file system with hard links"
        ) from error
    return _Staged(Kept(step, found.revision, f"{path.name}.{token}"), unfinished[0])
