"""The newest checkpoint of a folder that verifies, on all processes."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from braidax.checkpoint.format import folders
from braidax.checkpoint.format.loading import Mismatch, load, planned, spoken_of
from braidax.checkpoint.format.manifest import OtherFormat
from braidax.checkpoint.format.reading import Content, read_content
from braidax.checkpoint.places.place import NothingValid, Skipped
from braidax.checkpoint.processes import Processes, all_processes, alone
from braidax.checkpoint.snapshot.leaves import (
    put_outside,
    saved_leaves,
    with_outside,
)
from braidax.errors import CheckpointError

# JAX leaves some of itself unannotated.
_jax: Any = jax
_ATTEMPTS = 4  # to find a checkpoint that is not removed while it is read
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What was restored.

    **Arguments:** `tree`: in the form that was asked for. `step`: how many updates it had seen. `path`: the folder of
    the checkpoint. `skipped`: newer ones that are not valid. `notes`: texts that were kept with it.
    """

    tree: Any
    step: int
    path: Path
    skipped: tuple[Skipped, ...]
    notes: Mapping[str, str]


def restore(
    path: str | os.PathLike[str], like: Any, *, only: Sequence[str] | None = None, timeout_seconds: float = 600.0
) -> Restored:
    """Reads the newest checkpoint that verifies from a folder, which another run may be writing to; nothing is locked.

    Where the arrays of `like` span several processes of JAX, all of them call this.

    **Arguments:** `path`: the folder of the checkpoints of a run. `like`, `only`: as `Checkpointer.restore` takes them.
    `timeout_seconds`: the limit of every wait for other processes.

    **Raises:** `CheckpointError` when there is none, none is valid, or the newest valid one does not match `like`.
    """
    root = Path(path).absolute()
    spans = any(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and _is_far(leaf) for leaf in jax.tree.leaves(like))
    processes = all_processes(timeout_seconds) if spans else alone(timeout_seconds)
    found, skipped = newest(root, like, only, processes, "restore")
    if found is None and skipped:
        raise nothing_valid(root, [each.reason for each in skipped])
    if found is None:
        raise CheckpointError(f"{root}: has no checkpoint; give the folder of a run")
    return found


def newest(
    root: Path, like: Any, only: Sequence[str] | None, processes: Processes, name: str, above: int = -1
) -> tuple[Restored | None, list[Skipped]]:
    """Restores the newest checkpoint that verifies on all processes, and lists newer ones that do not.

    **Arguments:** `root`: the folder of the run. `like`, `only`: as `Checkpointer.restore` takes them. `name`: of the
    messages about it, the same on all processes, used once. `above`: only those count that have seen more updates.

    **Returns:** what was restored, None when there is nothing valid; and what was skipped.

    **Raises:** `CheckpointError` when the newest valid one does not match `like`.
    """
    skipped: list[Skipped] = []
    with processes.agreeing(f"{name}/like"):
        inside = with_outside(like)
        saved_leaves(inside)  # what it says of itself has to be true, else no checkpoint would seem valid
    for attempt in range(_ATTEMPTS):
        listed = processes.lead(
            f"{name}/{attempt}",
            lambda: json.dumps([each.path.name for each in listed_in(root) if each.step > above]),
        )
        paths = [root / path for path in json.loads(listed)]
        known = {each.path for each in skipped}
        for number, path in enumerate(path for path in paths if path not in known):
            found, verdict = _attempt(path, inside, only, processes, f"{name}/{attempt}/{number}")
            if verdict.get("gone"):
                break  # removed while it was read, so there are newer ones
            if "reason" not in verdict:
                assert found is not None
                tree, content, back = found
                restored = put_outside(like, back(tree))
                return Restored(restored, content.step, path, tuple(skipped), content.manifests[0].notes), skipped
            skipped.append(Skipped(path, verdict["reason"]))
            _logger.warning("skipped the checkpoint %s, and look for an older one: %s", path, verdict["reason"])
        else:
            return None, skipped
    raise CheckpointError(
        f"{root}: {_ATTEMPTS} checkpoints were removed while they were read: its run replaces them faster than they "
        "can be read; let it keep more of them"
    )


def _attempt(
    path: Path, like: Any, only: Sequence[str] | None, processes: Processes, name: str
) -> tuple["tuple[Any, Content, Callable[[Any], Any]] | None", dict[str, Any]]:
    """Loads one checkpoint on all processes.

    **Returns:** tree, manifests and what makes the tree that is wanted of it; and why it is skipped, if it is.
    """
    found: tuple[Any, Content, Callable[[Any], Any]] | None = None
    failure: Exception | None = None
    said: dict[str, Any] = {}
    try:
        content = read_content(path)
        if words := folders.misnamed(path, content.step):
            raise CheckpointError(words)
        way, wants = planned(content, like, only, of=spoken_of(like, processes.index))
        found = load(content, way.like, wants), content, way.back
    except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
        gone = not path.exists()
        if isinstance(error, CheckpointError) and not isinstance(error, OtherFormat | Mismatch):
            said = {"reason": str(error), "gone": gone}
            if not gone and is_out_of_reach(error.__cause__):
                said = {
                    "failure": f"{error}; that does not show that it is damaged: mend it, and start again, or move "
                    f"{path} away to go on from an older checkpoint"
                }
        else:
            failure, said = error, {"failure": str(error)}
    except BaseException as error:  # such as Ctrl-C
        words = f"{type(error).__name__}: {error}"
        processes.withdraw(name, json.dumps({"failure": words}) if processes.index else words)
        raise

    def judge(words: Mapping[int, str]) -> str:
        answers = {process: json.loads(word) for process, word in words.items()}
        for kind in ("failure", "reason"):
            for process, answer in answers.items():
                if kind in answer:
                    who = f"process {process}: " if process else ""
                    return json.dumps(answer | {kind: who + answer[kind]})
        return "{}"

    verdict = json.loads(processes.conclude(name, json.dumps(said), judge))
    if failure is not None and not isinstance(failure, CheckpointError):
        raise failure
    if "failure" in verdict:
        raise CheckpointError(verdict["failure"]) from failure
    return found, verdict


def is_out_of_reach(error: BaseException | None) -> bool:
    """Says whether a file may be fine, though it cannot be read now: rights, descriptors, a disk, a network."""
    lost = FileNotFoundError | NotADirectoryError | IsADirectoryError
    return isinstance(error, OSError) and not isinstance(error, lost)


def nothing_valid(root: Path | str, reasons: Sequence[str]) -> NothingValid:
    """Returns the error for a folder none of whose checkpoints verifies, `reasons` why."""
    return NothingValid(
        f"{root}: none of its {len(reasons)} checkpoints is valid: {'; '.join(reasons)}; nothing of them is removed. "
        f"To go on, put a whole one back from a copy, or restore with only=(pattern, ...) the leaves that `braidax "
        f"inspect {root}` shows to be whole; to start anew, move them away or give another path"
    )


def listed_in(root: Path) -> list[folders.Found]:
    """Returns the checkpoints in a folder, newest first. **Raises:** `CheckpointError` when it cannot be read."""
    try:
        return folders.checkpoints(root)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error}; give the folder of a run") from error


def newest_step(root: Path, processes: Processes, name: str) -> int | None:
    """Returns how many updates the newest checkpoint has seen, whether or not it verifies; None without one.

    **Arguments:** as of `newest`.
    """
    steps = processes.lead(name, lambda: json.dumps([each.step for each in listed_in(root)]))
    return max(json.loads(steps), default=None)


def _is_far(leaf: Any) -> bool:
    return getattr(leaf, "sharding", None) is not None and not leaf.sharding.is_fully_addressable
