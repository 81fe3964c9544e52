"""From disk back to devices: a checkpoint in the structure, dtypes and shardings of a tree that is already there."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.checkpoint import persist
from braidax.checkpoint.manifest import Entry, Manifest
from braidax.checkpoint.snapshot import describe, named_leaves
from braidax.errors import CheckpointError

# JAX leaves some of itself unannotated.
_jax: Any = jax
_MAX_NAMED = 4


def match(folder: Path, manifest: Manifest, like: Any) -> None:
    """Checks that a checkpoint has the leaves, shapes and dtypes of `like`: nothing is ever cast, left out or made up.

    **Raises:** `CheckpointError` naming the leaf, what is saved, what `like` has, and the remedy.
    """
    saved = {entry.leaf.path: entry.leaf for entry in manifest.entries}
    wanted = {path: (describe(path, leaf), leaf) for path, leaf in named_leaves(like).items()}
    for paths, where, remedy in (
        ([path for path in wanted if path not in saved], "in `like`, but not in the checkpoint", "leave it out of"),
        ([path for path in saved if path not in wanted], "in the checkpoint, but not in `like`", "add it to"),
    ):
        if paths:
            more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
            names = ", ".join(repr(path) for path in paths[:_MAX_NAMED])
            raise CheckpointError(
                f"{folder}: leaf {names}{more} is {where} ({len(saved)} leaves, `like` has {len(wanted)}): "
                f"expected the saved structure; {remedy} `like`, or restore with the tree of the run that saved it"
            )
    for path, (leaf, value) in wanted.items():
        if leaf != saved[path]:
            raise CheckpointError(
                f"{folder}: leaf {path!r} is {saved[path]} in the checkpoint, but {leaf} in `like`: expected "
                "them to be equal, for nothing is cast; restore with a `like` as saved, and convert afterwards"
            )
        if leaf.kind == "array" and isinstance(value, jax.Array | jax.ShapeDtypeStruct):
            available = jax.dtypes.canonicalize_dtype(leaf.dtype)
            if available != np.dtype(leaf.dtype):
                raise CheckpointError(
                    f"{folder}: leaf {path!r} is {leaf}, which JAX would make {available}: expected 64 bit "
                    'types; call jax.config.update("jax_enable_x64", True), or give a NumPy array in `like`'
                )


def load(folder: Path, manifest: Manifest, like: Any) -> Any:
    """Reads and verifies a checkpoint that matches `like`, leaf by leaf, each straight onto its devices.

    **Returns:** the tree. **Raises:** `CheckpointError` when a file is not what was written.
    """
    entries = {entry.leaf.path: entry for entry in manifest.entries}
    with persist.reader(folder, manifest) as reader:
        leaves = [_load_leaf(reader, entries[path], leaf) for path, leaf in named_leaves(like).items()]
    return _jax.tree.unflatten(_jax.tree.structure(like), leaves)


def _load_leaf(reader: persist.Reader, entry: Entry, like: Any) -> Any:
    if entry.tensor is None:
        return entry.number
    array = reader.read(entry, entry.tensor)
    if isinstance(like, np.ndarray):
        return array
    if isinstance(like, np.generic):
        return array[()]
    # An array that was not committed to its device must not become so: it could no longer meet arrays on a mesh.
    sharding = None if isinstance(like, jax.Array) and not like.committed else like.sharding
    if sharding is not None and not sharding.is_fully_addressable:
        return _load_shared(array, entry, sharding)
    if entry.key_impl:
        return _jax.device_put(_jax.random.wrap_key_data(array, impl=entry.key_impl), sharding)
    return _jax.device_put(_weak(array) if like.weak_type else array, sharding)


def _load_shared(array: np.ndarray, entry: Entry, sharding: Any) -> Any:
    """Makes an array that other processes hold as well; each takes what its own devices need."""
    placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return _jax.random.wrap_key_data(placed, impl=entry.key_impl) if entry.key_impl else placed


def _weak(array: np.ndarray) -> Any:
    # The type stays as weak as it was, or the step would be compiled again, and its dtypes could come out wider.
    zero = array.dtype.type(0).item()
    return jnp.full(array.shape, zero).at[...].set(array) if jnp.result_type(zero) == array.dtype else array
