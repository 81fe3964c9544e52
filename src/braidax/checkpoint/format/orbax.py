"""Orbax both ways: what it can restore, and what it has saved."""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.checkpoint.format import folders
from braidax.checkpoint.format.loading import Want, load, match, planned
from braidax.checkpoint.format.manifest import Entry, manifest_file
from braidax.checkpoint.format.placing import placed, sharding_of
from braidax.checkpoint.format.reading import Content, read_content
from braidax.checkpoint.places.restoring import restore
from braidax.checkpoint.snapshot.boxes import Box, whole, within
from braidax.checkpoint.snapshot.leaves import (
    Leaf,
    describe,
    key_data_spec,
    leaves_of,
    named_leaves,
    parts_of,
    saved_leaves,
    true_shapes,
)
from braidax.errors import ArgumentError, CheckpointError, import_extra

# JAX leaves some of itself unannotated.
_jax: Any = jax
_METADATA = "_METADATA"  # the file by which Orbax knows its checkpoints


def export_orbax(path: str | os.PathLike[str], target: str | os.PathLike[str], *, like: Any = None) -> int:
    """Writes a checkpoint as one of Orbax, which `StandardCheckpointer().restore(target, like)` reads.

    In a job of several processes of JAX all of them call this.

    **Arguments:** `path`: the folder of a run, of which the newest checkpoint that verifies is taken, or that of one
    checkpoint. `target`: a folder, which is made. `like`: the tree that it will be restored with, as
    `Checkpointer.restore` takes it. Without it there are nested dicts of NumPy arrays, and tables by rows are whole.

    **Returns:** how many updates the tree has seen. **Raises:** `CheckpointError` naming all that Orbax cannot hold,
    or as `restore`; `ArgumentError` when `target` exists; `MissingExtra`.
    """
    ocp: Any = import_extra("orbax.checkpoint", "orbax", purpose="export_orbax")
    source, destination = Path(path).absolute(), Path(target).absolute()
    _check_target(destination)
    if like is None and jax.process_count() > 1:
        raise ArgumentError(
            f"like=None: expected the tree to restore with, as there are {jax.process_count()} processes; give it, or "
            "export in a program of one process"
        )
    one = (source / manifest_file(0)).is_file()
    like = _nested(_any_content(source, one).entries.values()) if like is None else like
    if one:
        content = read_content(source)
        way, wants = planned(content, like)
        tree, step = way.back(load(content, way.like, wants)), content.step
    else:
        found = restore(source, like)
        tree, step = found.tree, found.step
    _check_holdable(source, tree)
    with _blaming(f"{destination}: Orbax cannot write it"), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(destination, tree)
        checkpointer.wait_until_finished()
    return step


def restore_orbax(path: str | os.PathLike[str], like: Any, *, only: Sequence[str] | None = None) -> Any:
    """Reads a checkpoint that Orbax has saved, with OCDBT or without; nothing is cast, left out or made up.

    Where the arrays of `like` span several processes of JAX, all of them call this.

    **Arguments:** `path`: its folder, which has a file `_METADATA`. `like`, `only`: as `Checkpointer.restore` takes
    them. A table by rows, padded, may be whole there. Where `like` has `uint32`, typed PRNG keys give their data.

    **Returns:** a tree like `like`. **Raises:** `CheckpointError` when there is no such checkpoint, Orbax cannot read
    it, or it does not match `like`; `MissingExtra`.
    """
    ocp: Any = import_extra("orbax.checkpoint", "orbax", purpose="restore_orbax")
    folder = Path(path).absolute()
    _check_source(folder)
    blame = f"{folder}: Orbax cannot read it"
    handler = ocp.PyTreeCheckpointHandler()
    with contextlib.closing(ocp.Checkpointer(handler)) as checkpointer:
        with _blaming(blame):  # the checkpointer would swallow why
            metadata = handler.metadata(folder).tree
        saved = named_leaves(metadata)
        leaves_in = _leaves_in(saved, like)
        values = leaves_in(like)
        shapes = true_shapes(like)
        entries = {name: _entry(ocp, name, found, values.get(name), shapes.get(name)) for name, found in saved.items()}
        wants = match(Content(folder, (), entries), like, only, leaves_in)
        direct = {name for name, want in wants.items() if _is_direct(want, saved[name])}
        how = [
            _restore_args(ocp, wants[name], found, name in direct) if name in wants else ocp.RestoreArgs()
            for name, found in saved.items()
        ]
        items = [found if name in wants else ocp.PLACEHOLDER for name, found in saved.items()]
        with _blaming(blame):
            structure = _jax.tree.structure(metadata)
            trees = {"item": structure.unflatten(items), "restore_args": structure.unflatten(how)}
            tree = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(**trees))
    found = dict(zip(saved, structure.flatten_up_to(tree), strict=True))
    _check_keys(folder, found, wants)
    for name in sorted(direct):
        _check_padding(folder, found[name], wants[name], tuple(saved[name].shape))
    leaves: list[Any] = []
    for name, value in values.items():
        if name not in wants:
            leaves += leaves_of(value)
        else:
            leaves += [found[name]] if name in direct else _finished(folder, found[name], wants[name])
    return _jax.tree.unflatten(_jax.tree.structure(like), leaves)


def _leaves_in(saved: Collection[str], like: Any) -> Callable[[Any], dict[str, Any]]:
    """Returns what lists the leaves of a tree as they were saved: the rows of an array as leaves, or the array."""
    apart = named_leaves(like).keys() - saved_leaves(like).keys()
    return saved_leaves if apart.isdisjoint(saved) else named_leaves


def _check_target(target: Path) -> None:
    """Makes the folder above; Orbax would fail on a thread that does not end."""
    if target.exists():
        raise ArgumentError(f"target={str(target)!r}: exists: expected a folder that is to be made; give another path")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(f"{target.parent} is read-only")
    except OSError as error:
        raise ArgumentError(
            f"target={str(target)!r}: expected a folder that this process may make, got: {error}; give another path"
        ) from error


def _any_content(source: Path, one: bool) -> Content:
    """Returns what is in a checkpoint, or in the newest of a run whose manifests are whole."""
    if one:
        return read_content(source)
    reasons: list[str] = []
    try:
        for found in folders.checkpoints(source):
            try:
                return read_content(found.path)
            except CheckpointError as error:
                reasons.append(f"; {error}")
    except OSError as error:
        reasons.append(f": {error}")
    raise CheckpointError(f"{source}: has no valid checkpoint{''.join(reasons)}; give the folder of a run")


def _nested(entries: Iterable[Entry]) -> Any:
    """Returns a tree for a checkpoint whose own is not known: dicts by the parts of the paths."""
    root: dict[str, Any] = {}
    for entry in entries:
        *parents, name = entry.leaf.path.split("/")
        node: Any = root
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name in node:
            raise CheckpointError(
                f"leaf {entry.leaf.path!r}: another leaf has the path of one of its parents, which nested dicts cannot "
                "hold; give the tree in like="
            )
        node[name] = _abstract(entry)
    return root


def _abstract(entry: Entry) -> Any:
    if not entry.leaf.dtype:
        return entry.number
    if entry.key_impl:
        return jax.ShapeDtypeStruct(entry.leaf.shape, jax.random.key(0, impl=entry.key_impl).dtype)
    shape = entry.shape if entry.padded_rows is None else (entry.padded_rows, *entry.shape[2:])
    return np.broadcast_to(np.zeros((), np.dtype(entry.dtype)), shape)


def _check_holdable(source: Path, tree: Any) -> None:
    """Checks what Orbax would refuse on a thread of its own, or lose. **Raises:** `CheckpointError` naming all."""
    tensorstore: Any = import_extra("tensorstore", "orbax", purpose="export_orbax")
    leaves = _jax.tree_util.tree_leaves_with_path(tree)
    troubles = [] if leaves and leaves[0][0] else ["the tree has no leaves, or is one leaf: put it into a dict"]
    owners: dict[str, str] = {}
    for path, value in leaves:
        name = _jax.tree_util.keystr(path, simple=True, separator="/") or "."
        stored = _jax.tree_util.keystr(path, simple=True, separator=".")  # where Orbax puts it
        if stored in owners:
            troubles.append(f"leaf {name!r} would overwrite leaf {owners[stored]!r}, as both become {stored!r}")
        owners.setdefault(stored, name)
        leaf = describe(name, value)
        if leaf.kind == "int" and not -(2**63) <= value < 2**63:
            troubles.append(f"leaf {name!r} is {value}, which has more than 64 bits")
        elif leaf.kind == "array" and 0 in leaf.shape:
            troubles.append(f"leaf {name!r} ({leaf}) has no elements")
        elif leaf.kind == "array":
            try:
                tensorstore.dtype(leaf.dtype)
            except ValueError:
                troubles.append(f"leaf {name!r} ({leaf}) is of a dtype that TensorStore does not know")
    if troubles:
        raise CheckpointError(
            f"{source}: Orbax cannot hold {len(troubles)} of {len(leaves)} leaves:\n  " + "\n  ".join(troubles) + "\n"
            "rename, convert or leave them out, and save the tree that is left with Orbax"
        )


def _check_source(folder: Path) -> None:
    if (folder / _METADATA).is_file():
        return
    inner = [found.parent for depth in ("*", "*/*") for found in folder.glob(f"{depth}/{_METADATA}")]
    hint = f"give that of one item, such as {max(inner)}" if inner else "give the folder that Orbax has saved to"
    raise CheckpointError(f"{folder}: has no file {_METADATA}, so it is no checkpoint of Orbax; {hint}")


def _entry(ocp: Any, name: str, saved: Any, value: Any, true_shape: tuple[int, ...] | None) -> Entry:
    """Returns what a leaf of Orbax is, as a leaf of ours; of scalars and PRNG keys it tells less than `value` wants.

    **Arguments:** `true_shape`: of `value`, if that is padded; in Orbax it may be, too, and `_finished` cuts it.
    """
    if isinstance(saved, ocp.metadata.StringMetadata):
        return Entry(Leaf(name, "array", "str"), "str")
    dtype, shape = np.dtype(saved.dtype), tuple(saved.shape)
    wanted = None if value is None else describe(name, value)
    if isinstance(saved, ocp.metadata.ScalarMetadata) and (wanted is None or not wanted.dtype):
        for kind in ("bool", "int", "float"):
            if dtype == np.dtype(kind):
                return Entry(Leaf(name, kind))
    if wanted is not None and wanted.kind == "key" and (dtype, shape) == key_data_spec(value):
        return Entry(wanted, dtype.name, shape)
    if value is not None and true_shape is not None and shape == value.shape:
        shape = true_shape
    return Entry(Leaf(name, "array", dtype.name, shape), dtype.name, shape)


def _restore_args(ocp: Any, want: Want, saved: Any, is_direct: bool) -> Any:
    if not want.entry.leaf.dtype:
        return ocp.RestoreArgs()
    if want.entry.leaf.kind == "key":
        sharding = sharding_of(want.like) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return ocp.ArrayRestoreArgs(sharding=sharding)
    if is_direct:
        shape = tuple(want.like.shape)
        padded = {} if tuple(saved.shape) == shape else {"global_shape": shape, "strict": False}
        return ocp.ArrayRestoreArgs(sharding=want.like.sharding, **padded)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _is_direct(want: Want, saved: Any) -> bool:
    """Says whether Orbax can put an array where it is to be, each process what its devices need; it can pad, too.

    What is padded alike in Orbax is put there with its padding.
    """
    if want.how is not None or not isinstance(want.like, jax.Array | jax.ShapeDtypeStruct):
        return False
    if want.entry.leaf.kind != "array" or tuple(saved.shape) not in (want.shape, want.like.shape):
        return False
    # Orbax would make typed PRNG keys of uint32, and nothing has a weak type.
    return want.entry.dtype != "uint32" and not want.like.weak_type and sharding_of(want.like) is not None


def _check_keys(folder: Path, found: dict[str, Any], wants: dict[str, Want]) -> None:
    """Checks what only reading can tell: whether keys are keys, and of which kind."""
    troubles = [
        f"leaf {name!r} is {found[name].dtype}{list(found[name].shape)}, but {want.entry.leaf} in `like`"
        for name, want in wants.items()
        if want.entry.leaf.kind == "key" and found[name].dtype != want.like.dtype
    ]
    if troubles:
        raise CheckpointError(
            f"{folder}: does not match `like`, and nothing is cast:\n  " + "\n  ".join(troubles) + "\n"
            "give keys of that implementation in `like`; of keys that were saved as their data, give an array of "
            "uint32 in `like`, and pass what is restored to jax.random.wrap_key_data"
        )


def _finished(folder: Path, found: Any, want: Want) -> list[Any]:
    """Returns the leaves that are made of what Orbax gives."""
    if not want.entry.leaf.dtype:
        return [found]
    if want.entry.leaf.kind == "key":
        if sharding_of(want.like) is not None:
            return [found]
        data = np.asarray(jax.random.key_data(found))
        return [jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(found))]
    array = _cut(folder, np.asarray(found), want.entry)

    def read(box: Box) -> np.ndarray:
        return array[(*within(box, whole(array.shape)), ...)]

    return [placed(read, part, want.how) for part in parts_of(want.like, want.shape)]


def _cut(folder: Path, array: np.ndarray, entry: Entry) -> np.ndarray:
    """Returns an array without the padding that it has in Orbax, if any. **Raises:** `CheckpointError` for other."""
    found = array[(*map(slice, entry.shape), ...)]
    if np.count_nonzero(found) != np.count_nonzero(array):
        raise _no_padding(folder, array.shape, entry)
    return found


def _check_padding(folder: Path, found: jax.Array, want: Want, saved: tuple[int, ...]) -> None:
    """Checks, where it lies, what was put there with the padding that it has in Orbax.

    **Raises:** `CheckpointError` where that is no padding, on all processes.
    """
    if saved == want.shape:
        return

    def is_padded(array: jax.Array) -> jax.Array:
        behind = [jax.lax.broadcasted_iota(int, array.shape, dim) >= size for dim, size in enumerate(want.shape)]
        return ~((array != 0) & functools.reduce(jnp.logical_or, behind)).any()

    if not _jax.jit(is_padded)(found):
        raise _no_padding(folder, saved, want.entry)


def _no_padding(folder: Path, saved: Sequence[int], entry: Entry) -> CheckpointError:
    return CheckpointError(
        f"{folder}: leaf {entry.leaf.path!r} is {list(saved)}, and {list(entry.shape)} without the padding that "
        "`like` has, but not all behind that is 0: it is of another model; give the tree that was saved"
    )


@contextlib.contextmanager
def _blaming(what: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
