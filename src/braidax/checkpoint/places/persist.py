"""A checkpoint of several processes: every one writes its part, and it exists once all parts are durable.

Process 0 makes an unfinished folder and tells its name; every process writes its part there, makes it durable, and says
so; when all have, process 0 gives the folder its name, and tells what came of it.
"""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import About
from braidax.checkpoint.format.writing import write
from braidax.checkpoint.places.place import Order, Part
from braidax.checkpoint.places.same_tree import Said, check_same
from braidax.checkpoint.processes import Processes, said_of
from braidax.connections.raised import Raised
from braidax.errors import ArgumentError, CheckpointError, WaitTimeout

_FINE = "fine "
_Result = TypeVar("_Result")


def number_of(metric: Any) -> Callable[[], float | None]:
    """Returns how to get the number that a metric is, later and on another thread."""
    if metric is None:
        return lambda: None
    if np.ndim(metric) or not isinstance(metric, int | float | np.generic | np.ndarray | jax.Array):
        raise ArgumentError(
            f"metric={type(metric).__name__} of shape {np.shape(metric)}: expected a number or a scalar array, lower "
            "is better; give its mean, or the negative of what is to be high"
        )
    if isinstance(metric, jax.Array) and not metric.is_fully_addressable:
        metric = metric.addressable_data(0)  # a replica
    return lambda: float(metric)


def occupy(root: Path, processes: Processes) -> tuple[folders.Lock | None, str]:
    """Takes a folder for this run, on all processes.

    **Returns:** the lock, on process 0, and the name of the newest checkpoint, empty without one.

    **Raises:** `CheckpointError` when it is no folder that all may write to, or is another run's.
    """
    locks: list[folders.Lock] = []
    failure: CheckpointError | None = None

    def start() -> str:
        locks.append(folders.occupy(root))
        earlier = [found.path.name for found in folders.checkpoints(root)]
        return json.dumps({"token": locks[0].token, "earlier": earlier[0] if earlier else ""})

    def judge(said: Any) -> str:
        for process, words in said.items():
            if words:
                raise CheckpointError(f"process {process}: {words}")
        return ""

    try:
        told = json.loads(processes.lead("open", start))
        if processes.index:
            try:
                folders.check_occupied(root, told["token"])
            except CheckpointError as error:
                failure = error
        processes.conclude("opened", "" if failure is None else str(failure), judge)
    except BaseException:
        for lock in locks:
            lock.close()
        if failure is not None:
            raise failure from None
        raise
    return locks[0] if locks else None, told["earlier"]


def commit(root: Path, order: Order, part: Part, processes: Processes) -> Path:
    """Writes a checkpoint together with all processes; when this returns it is durable.

    **Arguments:** `root`: the folder of the run. `order`: the same on all. `part`: what this process writes.

    **Returns:** the folder of the checkpoint.

    **Raises:** `CheckpointError` naming the process that failed, `WaitTimeout` naming one that says nothing; then
    nothing of it is left.
    """
    work = _Work(root, order, part, processes)
    return work.follow() if processes.index else work.lead()


class _Work(NamedTuple):
    """What `commit` does. **Fields:** as its arguments."""

    root: Path
    order: Order
    part: Part
    processes: Processes

    @property
    def folder(self) -> Path:
        """What the checkpoint is called, if it is the first one of this step."""
        return self.root / f"step-{self.order.step:08d}"

    def lead(self) -> Path:
        """Does it on process 0."""
        order, processes = self.order, self.processes
        unfinished: list[Path] = []

        def start() -> str:
            unfinished.append(self._named(lambda: folders.begin(self.root, order.step)))
            return unfinished[0].name

        def end() -> str:
            said, mine = self._say(unfinished[0])
            self._judge(processes.hear(order.name, said), mine)
            processes.check(order.name)
            return self._named(lambda: folders.finish(unfinished[0], order.step)).name

        try:
            processes.lead(f"{order.name}/begin", start)
            return self.root / processes.lead(order.name, end)
        except BaseException:
            if unfinished:
                folders.discard(unfinished[0])
            raise

    def follow(self) -> Path:
        """Does it on the others."""
        order, processes = self.order, self.processes
        unfinished = self.root / processes.follow(f"{order.name}/begin")
        said, error = self._say(unfinished)
        processes.say(order.name, said)
        if error is not None:
            raise error
        return self.root / processes.follow(order.name)

    def _say(self, unfinished: Path) -> tuple[str, BaseException | None]:
        """Writes this process's part. **Returns:** what it says of that, and the error if there was one."""
        order, part, processes = self.order, self.part, self.processes
        try:
            snapshot = part.owned.result()
            metric = None if processes.index else order.metric()
            token = folders.token_of(unfinished)
            about = About(order.step, token, processes.count, metric, importlib.metadata.version("braidax"))
            limit = order.limit_bytes_per_second

            def act() -> None:
                process = processes.index
                write(unfinished, snapshot, part.checksums, about, process=process, limit_bytes_per_second=limit)

            self._named(act)
        except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
            return said_of(error).to_text(), error
        return _FINE + json.dumps(Said.of(snapshot, processes.index)), None

    def _judge(self, said: dict[int, str], mine: BaseException | None) -> None:
        if mine is not None:
            raise mine
        for process, words in said.items():
            if not words.startswith(_FINE):
                raised = Raised.from_text(words)
                message = f"{self.folder}: process {process} could not save its part: {raised.words}"
                raise CheckpointError(message) from raised.error(f"process {process}: {raised.words}", process)
        check_same(
            str(self.folder),
            {process: Said.from_json(json.loads(words.removeprefix(_FINE))) for process, words in said.items()},
        )

    def _named(self, act: Callable[[], _Result]) -> _Result:
        try:
            return act()
        except OSError as error:
            if isinstance(error, WaitTimeout):
                raise
            who = f" by process {self.processes.index}" if self.processes.count > 1 else ""
            raise CheckpointError(
                f"{self.folder}: the checkpoint could not be written{who}: {error}; make room or mend the disk. "
                "Earlier checkpoints are untouched"
            ) from error
