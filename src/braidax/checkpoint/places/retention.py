"""Which checkpoints stay, and which of the others may be removed.

Names alone prove nothing: others call their folders `step-00000100` too, and a copy of a checkpoint is its maker's.
"""

import contextlib
import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import About, OtherFormat, is_own_header, part_of_manifest
from braidax.checkpoint.format.reading import read_manifest
from braidax.errors import CheckpointError

_HEADER_BYTES = 64
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Decides which checkpoints of a run stay.

    What is not the checkpoint that its name says neither counts nor goes, and the log says so once.

    **Arguments:** `newest`: how many of the newest, at least 1. `every`: those of steps that are multiples of it stay
    as well. `best`: how many of those with the lowest metrics.
    """

    newest: int
    every: int | None = None
    best: int = 0
    _known: dict[Path, About | None] = field(default_factory=dict[Path, "About | None"], init=False)
    _told: set[Path] = field(default_factory=set[Path], init=False)

    def apply(self, root: Path, obsolete: Collection[Path] = ()) -> None:
        """Removes what does not stay; only to be called once the newest is durable.

        Of each step the newest revision counts.

        **Arguments:** `root`: the folder of all checkpoints. `obsolete`: those that are removed in any case, if they
        are our own.

        **Raises:** `CheckpointError` naming what cannot be removed.
        """
        listed = folders.checkpoints(root)
        for path in self._known.keys() - {found.path for found in listed}:
            del self._known[path]  # another one may come to have its name
        counted: dict[int, folders.Found] = {}
        for found in listed:
            if found.path not in obsolete and self._about(found) is not None:
                counted.setdefault(found.step, found)
        staying = set(list(counted.values())[: self.newest])
        staying |= {found for found in counted.values() if self.every is not None and found.step % self.every == 0}
        if self.best:
            rated = [(self._metric(found), -found.step, found) for found in counted.values()]
            staying |= {found for metric, _, found in sorted(rated)[: self.best] if metric < math.inf}
        for found in listed:
            if found not in staying:
                self._remove(found, is_known=found.path in obsolete or self._about(found) is not None)

    def give_up(self, root: Path) -> None:
        """Removes the folder of a run that is over, with all that is our own in it; not one that somebody occupies."""
        try:
            lock = folders.occupy(root)
        except CheckpointError as error:
            _logger.warning("%s is not removed: %s", root, error)
            return
        with contextlib.closing(lock):
            self.apply(root, [found.path for found in folders.checkpoints(root)])
            if [path.name for path in root.iterdir()] == [folders.LOCK_FILE]:
                (root / folders.LOCK_FILE).unlink()
                root.rmdir()

    def _remove(self, found: folders.Found, *, is_known: bool) -> None:
        try:
            reason = why_not_own(found) or ("" if is_known else "its manifest cannot be read")
        except FileNotFoundError:
            return  # somebody else has removed it
        except OSError as error:
            reason = str(error)
        if not reason:
            folders.remove(found)
        elif found.path not in self._told:
            self._told.add(found.path)
            _logger.warning("%s is not removed: %s", found.path, reason)

    def _about(self, found: folders.Found) -> About | None:
        """Returns what the manifest says of a checkpoint, None where there is none, or it is another one's."""
        if found.path not in self._known:
            about = next((about for about in _manifests(found.path) if isinstance(about, About)), None)
            self._known[found.path] = None if about is None or folders.misnamed(found.path, about.step) else about
        return self._known[found.path]

    def _metric(self, found: folders.Found) -> float:
        """Returns the metric of a checkpoint; infinity where it has none, or none that can be compared."""
        about = self._about(found)
        metric = None if about is None else about.metric
        return math.inf if metric is None or math.isnan(metric) else metric


def why_not_own(found: folders.Found) -> str:
    """Returns why a folder is not known to be the checkpoint that its name says, empty if it is.

    It is where all in it are files of a checkpoint, and a manifest that verifies is of that step; where none verifies,
    because the checkpoint is damaged, where we have written the arrays.

    **Raises:** `OSError` when it cannot be read.
    """
    if found.path.is_symlink():
        return "it is a link, which no checkpointer makes"
    strangers = folders.strangers_in(found.path)
    if strangers:
        return f"it has {strangers[0]!r} in it, which no checkpointer has written"
    for about in _manifests(found.path):
        return str(about) if isinstance(about, OtherFormat) else folders.misnamed(found.path, about.step)
    for path in sorted(found.path.glob("arrays-*")):
        with path.open("rb") as file:
            if is_own_header(file.read(_HEADER_BYTES)):
                return ""
    return "nothing in it shows that a checkpointer has written it"


def _manifests(folder: Path) -> Iterator[About | OtherFormat]:
    """Gives what the manifests in a folder say that verify, or that they are of another format."""
    try:
        parts = sorted(part for path in folder.iterdir() if (part := part_of_manifest(path.name)) is not None)
    except OSError:
        return
    for part in parts:
        try:
            yield read_manifest(folder, part).about
        except OtherFormat as error:
            yield error
        except CheckpointError:
            continue
