"""From disk back to devices: a checkpoint in the structure, dtypes and shardings of a tree that is already there."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from braidax.checkpoint import folders
from braidax.checkpoint.boxes import Box, whole
from braidax.checkpoint.leaves import (
    Part,
    describe,
    leaves_of,
    padded_rows,
    parts_of,
    put_outside,
    saved_leaves,
    true_shapes,
    with_outside,
)
from braidax.checkpoint.manifest import Entry, OtherFormat
from braidax.checkpoint.padding import Conversion, conversion
from braidax.checkpoint.placing import from_row, lengthened, on_devices, sharding_of, weakly_typed
from braidax.checkpoint.processes import Processes, all_processes, alone
from braidax.checkpoint.reading import Content, OpenFile, Reader, read_content
from braidax.checkpoint.replanned import Way, way_from
from braidax.errors import ArgumentError, CheckpointError

# JAX leaves some of itself unannotated.
_jax: Any = jax
_MAX_NAMED = 100
_ATTEMPTS = 4  # to find a checkpoint that is not removed while it is read
_logger = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class Skipped(NamedTuple):
    """A checkpoint that was not restored: its `path`, and the `reason`."""

    path: Path
    reason: str


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
    root: Path, like: Any, only: Sequence[str] | None, processes: Processes, name: str
) -> tuple[Restored | None, list[Skipped]]:
    """Restores the newest checkpoint that verifies on all processes, and lists newer ones that do not.

    **Arguments:** `root`: the folder of the run. `like`, `only`: as `Checkpointer.restore` takes them. `name`: of the
    messages about it, the same on all processes, used once.

    **Returns:** what was restored, None when there is nothing valid; and what was skipped.

    **Raises:** `CheckpointError` when the newest valid one does not match `like`.
    """
    skipped: list[Skipped] = []
    with processes.agreeing(f"{name}/like"):
        inside = with_outside(like)
        saved_leaves(inside)  # what it says of itself has to be true, else no checkpoint would seem valid
    for attempt in range(_ATTEMPTS):
        listed = processes.lead(f"{name}/{attempt}", lambda: json.dumps([each.path.name for each in listed_in(root)]))
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
        way, wants = planned(content, like, only)
        found = load(content, way.like, wants), content, way.back
    except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
        gone = not path.exists()
        if isinstance(error, CheckpointError) and not isinstance(error, OtherFormat | Mismatch):
            said = {"reason": str(error), "gone": gone}
            if not gone and _is_out_of_reach(error.__cause__):
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


def _is_out_of_reach(error: BaseException | None) -> bool:
    """Says whether a file may be fine, though it cannot be read now: rights, descriptors, a disk, a network."""
    lost = FileNotFoundError | NotADirectoryError | IsADirectoryError
    return isinstance(error, OSError) and not isinstance(error, lost)


class Mismatch(CheckpointError):
    """A valid checkpoint has another tree than is wanted; to callers it is a `CheckpointError` like others."""


class NothingValid(CheckpointError):
    """There are checkpoints, and none verifies; to callers it is a `CheckpointError` like others."""


def nothing_valid(root: Path | str, reasons: Sequence[str]) -> NothingValid:
    """Returns the error for a folder none of whose checkpoints verifies, `reasons` why."""
    return NothingValid(
        f"{root}: none of its {len(reasons)} checkpoints is valid: {'; '.join(reasons)}; nothing of them is removed. "
        f"To go on, put a whole one back from a copy, or restore with only=(pattern, ...) the leaves that `braidax "
        f"inspect {root}` shows to be whole; to start anew, move them away or give another path"
    )


class Want(NamedTuple):
    """A leaf to restore.

    **Fields:** `entry`: of the checkpoint. `like`: what it is to be, as of `saved_leaves`. `how`: if its rows move.
    `shape`: of `like`, without padding.
    """

    entry: Entry
    like: Any
    how: Conversion | None
    shape: tuple[int, ...]


def match(
    content: Content,
    like: Any,
    only: Sequence[str] | None = None,
    leaves_in: Callable[[Any], dict[str, Any]] = saved_leaves,
) -> dict[str, Want]:
    """Checks that a checkpoint has the leaves, shapes and dtypes of `like`: nothing is cast, left out or made up.

    **Arguments:** `only`: patterns of the paths that matter; one may come alone. `leaves_in`: lists those of a tree.

    **Returns:** what to restore, by path. **Raises:** `CheckpointError` naming all leaves that differ, what is saved,
    what `like` has, and the remedy.
    """
    values = matching(leaves_in(like), only, "in `like`")
    entries = matching(content.entries, only, "in the checkpoint")
    num_rows, shapes = padded_rows(like), true_shapes(like)
    wants: dict[str, Want] = {}
    troubles = [
        f"leaf {path!r} ({describe(path, value, true_shape=shapes.get(path))}) is in `like`, but not in the checkpoint"
        for path, value in values.items()
        if path not in entries
    ]
    troubles += [
        f"leaf {path!r} ({entry.leaf}) is in the checkpoint, but not in `like`"
        for path, entry in entries.items()
        if path not in values
    ]
    for path in [path for path in values if path in entries]:
        entry, leaf = entries[path], describe(path, values[path], true_shape=shapes.get(path))
        wants[path] = Want(entry, values[path], None, leaf.shape)
        differs = entry.padded_rows is not None and num_rows.get(path, entry.padded_rows) != entry.padded_rows
        if leaf != entry.leaf or differs:
            same = (leaf.kind, leaf.dtype) == (entry.leaf.kind, entry.leaf.dtype) == ("array", entry.dtype)
            how = conversion(entry, leaf.shape, num_rows.get(path)) if same else None
            wants[path] = Want(entry, values[path], how, leaf.shape)
            if how is None:
                troubles.append(
                    f"leaf {path!r} is {entry.leaf}{_rows(entry.padded_rows)} in the checkpoint, but {leaf}"
                    f"{_rows(num_rows.get(path))} in `like`"
                )
        troubles += _narrowed(path, leaves_of(values[path])[0], leaf.dtype) if leaf.kind == "array" else []
    if troubles:
        more = f"\n  and {len(troubles) - _MAX_NAMED} more" if len(troubles) > _MAX_NAMED else ""
        raise Mismatch(
            f"{content.folder}: does not match `like` in {len(troubles)} of {len(values.keys() | entries.keys())} "
            "leaves, and nothing is cast, left out or made up:\n  " + "\n  ".join(troubles[:_MAX_NAMED]) + more + "\n"
            "restore with the tree of the run that saved it and convert afterwards, or a part of it with "
            "only=(pattern, ...)"
        )
    return wants


def planned(content: Content, like: Any, only: Sequence[str] | None = None) -> tuple[Way, dict[str, Want]]:
    """Returns the form in which a tree was saved, and what to restore of that, as `match` does.

    **Raises:** as `match`; `CheckpointError` in one line where a plan has changed and there is no way back.
    """
    only = (only,) if isinstance(only, str) else only
    matching(saved_leaves(like), only, "in `like`")
    way = way_from(content.entries, content.manifests[0].notes, like, only)
    if isinstance(way, str):
        raise Mismatch(f"{content.folder}: {way}")
    try:
        wants = match(content, way.like, way.only)
    except Mismatch as error:
        raise (Mismatch(f"{content.folder}: {way.said}, and more has: {error}") if way.said else error) from None
    if way.said:
        _logger.info("%s: %s; it is restored by way of the form that it was saved in", content.folder, way.said)
    return way, wants


def load(content: Content, like: Any, wants: Mapping[str, Want], open_file: OpenFile | None = None) -> Any:
    """Reads and verifies what `match` found, leaf by leaf, each straight onto its devices.

    **Arguments:** `open_file`: as `Reader` takes it.

    **Returns:** the tree; leaves that are not wanted are those of `like`. **Raises:** `CheckpointError` when a file is
    not what was written.
    """
    with Reader(content, open_file) as reader:
        leaves: list[Any] = []
        for path, value in saved_leaves(like).items():
            if path in wants:
                want = wants[path]
                leaves += [_load_leaf(reader, want, part) for part in parts_of(value, want.shape)]
            else:
                leaves += leaves_of(value)
    return _jax.tree.unflatten(_jax.tree.structure(like), leaves)


def _load_leaf(reader: Reader, want: Want, part: Part) -> Any:
    entry, how, like, true_shape = want.entry, want.how, part.value, part.shape
    if not entry.leaf.dtype:
        return entry.number
    of_key = entry.shape[len(entry.leaf.shape) :]
    shape = (*like.shape, *of_key)

    def stored(box: Box) -> np.ndarray:
        return reader.read(entry, box) if how is None else reader.read_rows(entry, how, box)

    dtype = np.dtype(entry.dtype)
    read = from_row(stored, part.first)
    read = read if like.shape == true_shape else lengthened(read, (*true_shape, *of_key), dtype)
    if isinstance(like, np.ndarray):
        return read(whole(shape))
    if isinstance(like, np.generic):
        return read(whole(shape))[()]
    sharding = sharding_of(like)
    is_far = sharding is not None and not sharding.is_fully_addressable
    if sharding is not None and (is_far or not (entry.key_impl or like.weak_type)):
        placed = on_devices(read, shape, dtype, sharding)
        return _jax.random.wrap_key_data(placed, impl=entry.key_impl) if entry.key_impl else placed
    array = read(whole(shape))
    if entry.key_impl:
        return _jax.device_put(_jax.random.wrap_key_data(array, impl=entry.key_impl), sharding)
    return _jax.device_put(weakly_typed(array) if like.weak_type else array, sharding)


def matching(leaves: Mapping[str, _Value], only: Sequence[str] | None, where: str) -> dict[str, _Value]:
    """Returns the leaves whose path one of the patterns matches. **Raises:** `ArgumentError` where one matches none."""
    only = (only,) if isinstance(only, str) else only
    if only is None:
        return dict(leaves)
    for pattern in only:
        if not any(fnmatchcase(path, pattern) for path in leaves):
            shown = ", ".join(map(repr, list(leaves)[:_MAX_NAMED])) or "no leaves"
            raise ArgumentError(
                f"only={tuple(only)!r}: {pattern!r} matches no path {where}, which has {shown}; expected patterns such "
                "as 'params/*'"
            )
    return {path: leaf for path, leaf in leaves.items() if any(fnmatchcase(path, pattern) for pattern in only)}


def _narrowed(path: str, value: Any, dtype: str) -> list[str]:
    """Says that JAX would make something narrower of a dtype, if so."""
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return []
    available = jax.dtypes.canonicalize_dtype(dtype)
    if available == np.dtype(dtype):
        return []
    return [
        f"leaf {path!r} is {dtype}, which JAX would make {available}: expected 64 bit types; call "
        'jax.config.update("jax_enable_x64", True), or give a NumPy array in `like`'
    ]


def _rows(num_rows: int | None) -> str:
    return "" if num_rows is None else f" of {num_rows} rows"


def listed_in(root: Path) -> list[folders.Found]:
    """Returns the checkpoints in a folder, newest first. **Raises:** `CheckpointError` when it cannot be read."""
    try:
        return folders.checkpoints(root)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error}; give the folder of a run") from error


def _is_far(leaf: Any) -> bool:
    return getattr(leaf, "sharding", None) is not None and not leaf.sharding.is_fully_addressable
