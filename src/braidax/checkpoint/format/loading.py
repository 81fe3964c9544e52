"""From files back to devices: a checkpoint in the structure, dtypes and shardings of a tree that is there."""

import glob
import logging
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from braidax.checkpoint.format.manifest import Entry
from braidax.checkpoint.format.padding import Conversion, conversion
from braidax.checkpoint.format.placing import from_row, lengthened, on_devices, shard_of, sharding_of, weakly_typed
from braidax.checkpoint.format.reading import Content, OpenFile, Reader
from braidax.checkpoint.format.replanned import Way, way_from
from braidax.checkpoint.snapshot.boxes import Box, whole
from braidax.checkpoint.snapshot.leaves import (
    HostShard,
    Part,
    describe,
    leaves_of,
    padded_rows,
    parts_of,
    saved_leaves,
    true_shapes,
)
from braidax.errors import ArgumentError, CheckpointError

# JAX leaves some of itself unannotated.
_jax: Any = jax
_MAX_NAMED = 100
_logger = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class Mismatch(CheckpointError):
    """A valid checkpoint has another tree than is wanted; to callers it is a `CheckpointError` like others."""


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
        if _is_list(values[path]) and (leaf.dtype, leaf.shape[1:]) == (entry.leaf.dtype, entry.leaf.shape[1:]):
            leaf = entry.leaf  # of as many rows as there are
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
            "only=(pattern, ...); or give a new run another folder"
        )
    return wants


def spoken_of(like: Any, process: int) -> Literal["all", "shards"]:
    """Says whether a process restores a tree, or only its own parts of host arrays, beside others that do."""
    leaves = saved_leaves(like).values()
    return "shards" if process and leaves and all(isinstance(leaf, HostShard) for leaf in leaves) else "all"


def planned(
    content: Content, like: Any, only: Sequence[str] | None = None, *, of: Literal["all", "shards"] = "all"
) -> tuple[Way, dict[str, Want]]:
    """Returns the form in which a tree was saved, and what to restore of that, as `match` does.

    **Arguments:** `of`: as `spoken_of` says; leaves of the checkpoint that are not in `like` are then others'.

    **Raises:** as `match`; `CheckpointError` in one line where a plan has changed and there is no way back.
    """
    only = (only,) if isinstance(only, str) else only
    if of == "shards":
        own = saved_leaves(like)
        only = [glob.escape(path) for path in own if only is None or any(fnmatchcase(path, each) for each in only)]
        missing = [path for path in own if glob.escape(path) in only and path not in content.entries]
        if missing:
            raise Mismatch(
                f"{content.folder}: leaf {missing[0]!r} ({describe(missing[0], own[missing[0]])}) is in `like`, but "
                "not in the checkpoint: restore with the tree of the run that saved it"
            )
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


def _is_list(value: Any) -> bool:
    return isinstance(value, HostShard) and value.share is not None


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
    read = read if like.shape == true_shape or _is_list(like) else lengthened(read, (*true_shape, *of_key), dtype)
    if isinstance(like, np.ndarray):
        return read(whole(shape))
    if isinstance(like, HostShard):
        return shard_of(read, like if like.share is None else like.of_list(entry.leaf.shape[0]))
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
