"""`Neighbors`: checkpoints on the hosts of a job themselves, each part of them on two."""

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from braidax.checkpoint.background_job import BackgroundJob
from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import About, data_file, manifest_file
from braidax.checkpoint.format.writing import write
from braidax.checkpoint.messages import Messages
from braidax.checkpoint.places import passing
from braidax.checkpoint.places.holdings import Holdings
from braidax.checkpoint.places.place import NothingValid, OpenPlace, Order, Part, Returned, Skipped, check_every
from braidax.checkpoint.places.retention import Retention
from braidax.checkpoint.places.same_tree import Said, check_same
from braidax.checkpoint.processes import Processes
from braidax.checkpoint.snapshot.hold import Snapshot
from braidax.errors import ArgumentError, BraidaxError, CheckpointError

THREAD_NAME = "braidax-neighbors"
_NUM_COPIES = 2
_SLOT = re.compile(r"slot-(\d+)")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Neighbors:
    """The hosts of the job, without a disk that all see: each process's part of a checkpoint there and on another.

    Each process writes its part into a folder of its host, in memory (`/dev/shm/…`) or on a local disk, and sends it to
    the next process on another host, which keeps it beside its own. So every part survives the end of all processes, as
    JAX ends them when one is lost, and the loss of a host. What is restored comes from the folder where it is there,
    and over the network where it is not. A checkpoint replaces the one before once all processes have both parts of it;
    until then there is room for two.

    **Arguments:** `path`: a folder of every host, made if missing. `messages`: a communicator of all processes that
    save together, by their ranks. It is used by nobody else until the checkpointer is closed, and closed by who made
    it. `every`: of the checkpoints that are due it takes one in so many.
    """

    path: str | os.PathLike[str]
    messages: Messages
    every: int = 1

    def __post_init__(self) -> None:
        check_every(self.every)

    def open(self, processes: Processes, before: Sequence[OpenPlace]) -> "OpenNeighbors":
        """As of `Place`.

        **Raises:** `ArgumentError` when the ranks are others than those of the processes that save together.
        """
        rank, size = self.messages.rank, self.messages.size
        if (rank, size) != (processes.index, processes.count):
            raise ArgumentError(
                f"messages= has rank {rank} of {size}, but this is process {processes.index} of {processes.count} that "
                "save together: expected the same; call jax.distributed.initialize with them before"
            )
        return OpenNeighbors(self)


@final
class OpenNeighbors:
    """The running side of `Neighbors`. **Arguments:** `given`: the options. **Fields:** as of `OpenPlace`."""

    def __init__(self, given: Neighbors) -> None:
        self.skipped: list[Skipped] = []
        self.job: BackgroundJob | None = BackgroundJob(THREAD_NAME)
        self._path = Path(given.path).absolute()
        self.where = str(self._path)
        self._messages = given.messages
        self._position = passing.position_of(given.messages.rank, given.messages.hosts)
        self._root = self._path / f"slot-{self._position.slot}"
        self._retention = Retention(newest=1)
        self._begun = ""
        self._turn = threading.Lock()  # to send messages
        self._missed: list[tuple[int, str]] = []  # steps that all others began to save, and why this process did not
        self._is_telling = False
        self._told = threading.Lock()  # for these two
        failure: CheckpointError | None = None
        locks: list[folders.Lock] = []
        try:
            locks.append(folders.occupy(self._root))
        except CheckpointError as error:
            failure = error
        try:
            self._agree(failure, "open its folder")
            found = self._holdings()
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        (self._lock,) = locks
        self._earlier = f"step-{found.whole[0].step:08d}" if found.whole else "not whole" if found.num_found else ""

    @property
    def earlier(self) -> str:
        """As of `OpenPlace`."""
        return self._earlier

    def begin(self, order: Order) -> None:
        """As of `OpenPlace`."""
        self._begun = order.name

    def persist(self, part: Part, order: Order) -> Path:
        """As of `OpenPlace`."""
        with self._turn:
            self._tell_missed()
            return self._persist(part, order)

    def withdraw(self, name: str, step: int, reason: str) -> None:
        """As of `OpenPlace`; one that has begun goes on, as nobody can leave others alone in its messages."""
        if name == self._begun:
            return
        assert self.job is not None
        with self._told:
            self._missed.append((step, reason))
            if self._is_telling:
                return
            self._is_telling = True
        self.job.settle(self._messages.timeout_seconds)
        self.job.begin(f"{self.where}: telling the others that step {step} is not saved", self._tell_later)

    def newest(self) -> int | None:
        """As of `OpenPlace`."""
        with self._turn:
            holdings = self._holdings()
        return holdings.whole[0].step if holdings.whole else -1 if holdings.num_found else None

    def restore(self, like: Any, only: Sequence[str] | None, above: int) -> Returned | None:
        """As of `OpenPlace`, of checkpoints of which all parts are somewhere."""
        with self._turn:
            return self._restore(like, only, above)

    def go_on(self, num_updates: int) -> None:
        """As of `OpenPlace`: the next checkpoint replaces all others."""
        self._earlier = ""

    def limit(self, timeout_seconds: float) -> None:
        """As of `OpenPlace`: that of the communicator."""
        self._messages.timeout_seconds = timeout_seconds

    def close(self) -> None:
        """As of `OpenPlace`; what is there stays."""
        self._lock.close()

    def _holdings(self) -> Holdings:
        return Holdings(self._messages, [self._root, *self._abandoned()])

    def _abandoned(self) -> list[Path]:
        """Returns the folders of processes that this host had and has no more, for one of its processes."""
        if self._position.slot:
            return []
        slots = {int(name[1]): path for path in self._path.iterdir() if (name := _SLOT.fullmatch(path.name))}
        has_had = {slot: path for slot, path in slots.items() if (path / folders.LOCK_FILE).is_file()}
        return [path for slot, path in sorted(has_had.items()) if slot >= self._position.num_slots]

    def _restore(self, like: Any, only: Sequence[str] | None, above: int) -> Returned | None:
        holdings = self._holdings()
        reasons: list[str] = []
        for whole in holdings.whole:
            if whole.step <= above:
                return None
            where = self._path / f"step-{whole.step:08d}"
            trouble: dict[str, str] = {}
            for turn in range(_NUM_COPIES):
                tree, trouble = holdings.restore(whole, where, like, only, turn)
                if "failure" in trouble:
                    raise CheckpointError(trouble["failure"])
                if not trouble:
                    return Returned(tree, whole.step, where)
                _logger.warning("copy %d of the checkpoint %s is not valid: %s", turn, where, trouble["reason"])
            reasons.append(trouble["reason"])
        if holdings.num_found and above < 0:
            lacking = holdings.num_found - len(reasons)
            reasons += [f"of {lacking} some parts are nowhere"] if lacking else []
            raise NothingValid(
                f"{self.where}: none of {holdings.num_found} checkpoints is valid: {'; '.join(reasons)}; move them "
                "away to start anew"
            )
        return None

    def _tell_later(self) -> None:
        with self._turn:
            self._tell_missed()

    def _tell_missed(self) -> None:
        """Tells the others, who have come to them, of steps that this process does not save."""
        while True:
            with self._told:
                if not self._missed:
                    self._is_telling = False
                    return
                step, reason = self._missed.pop(0)
            with contextlib.suppress(CheckpointError):  # which it is for all
                self._agree(CheckpointError(reason), "copy its part", step=step)

    def _persist(self, part: Part, order: Order) -> Path:
        """Saves a checkpoint together with all processes."""
        step, copied = order.step, list[Snapshot]()
        failure = _failure_of(lambda: copied.append(part.owned.result()))
        own = None if failure is not None else Said.of(copied[0], self._messages.rank)
        said = self._agree(failure, "copy its part", step=step, tree=own, token=secrets.token_hex(8))
        for process, each in enumerate(said):
            if each["step"] != step:
                raise CheckpointError(
                    f"{self.where}: process {process} saves step {each['step']} and process {self._messages.rank} step "
                    f"{step}: expected all processes to call `update` after the same steps. Earlier checkpoints are "
                    "untouched"
                )
        trees = {process: Said.from_json(each["tree"]) for process, each in enumerate(said)}
        check_same(f"{self.where}/step-{step:08d}", trees)
        about = About(step, said[0]["token"], self._messages.size, None, importlib.metadata.version("braidax"))
        staged: list[Path] = []
        try:
            self._share(part, about, staged)
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
        listed = folders.checkpoints(self._root)
        self._retention.apply(self._root, [found.path for found in listed if found.path != final[0]])
        for path in self._abandoned():
            self._retention.give_up(path)
        return final[0]

    def _share(self, part: Part, about: About, staged: list[Path]) -> None:
        """Writes the part of this process and that of its neighbor; when this returns all processes have done so."""

        def store() -> None:
            staged.append(folders.begin(self._root, about.step))
            write(staged[0], part.owned.result(), part.checksums, about, process=rank)

        rank, position = self._messages.rank, self._position
        failure = _failure_of(store)
        paths = [] if failure is not None else [staged[0] / name(rank) for name in (data_file, manifest_file)]
        said = self._agree(failure, "write its part", sizes=[path.stat().st_size for path in paths])
        if position.dest != rank:
            failure = passing.pass_on(self._messages, position, staged[0], [tuple(each["sizes"]) for each in said])
        self._agree(failure, "keep its neighbor's part")

    def _agree(self, failure: Exception | None, doing: str, **more: Any) -> list[dict[str, Any]]:
        """Tells the others how it went, and more. **Returns:** what all tell. **Raises:** `CheckpointError`."""
        words = "" if failure is None else str(failure) if isinstance(failure, BraidaxError) else repr(failure)
        heard = self._messages.all_gather(json.dumps({**more, "failure": words}).encode())
        said = [json.loads(bytes(each)) for each in heard]
        for process, each in enumerate(said):
            if each["failure"]:
                raise CheckpointError(
                    f"{self.where}: process {process} could not {doing}: {each['failure']}. Earlier checkpoints are "
                    "untouched"
                ) from failure
        return said


def _failure_of(act: Callable[[], Any]) -> Exception | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
        return error
    return None
