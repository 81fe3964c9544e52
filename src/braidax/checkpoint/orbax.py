"""Orbax both ways: what it can restore, and what it has saved."""

import contextlib
import os
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.checkpoint import folders
from braidax.checkpoint.leaves import describe, key_data_spec, named_leaves
from braidax.checkpoint.leaves import Leaf
from braidax.checkpoint.manifest import Entry, manifest_file
from braidax.checkpoint.padding import Conversion
from braidax.checkpoint.placing import placed, sharding_of
from braidax.checkpoint.reading import Content, read_content
from braidax.checkpoint.restoring import Want, load, match, restore
from braidax.errors import ArgumentError, CheckpointError, import_extra

# JAX leaves some of itself unannotated.
_jax: Any = jax
_METADATA = "_METADATA"
_SCALARS = {"bool": "bool", "int64": "int", "float64": "float"}
_INT64 = np.iinfo(np.int64)


def export_orbax(path: str | os.PathLike[str], target: str | os.PathLike[str], *, like: Any = None) -> int:
    """Writes a checkpoint as one that Orbax restores: `StandardCheckpointer().restore(target, like)`.

    In a job of several processes of JAX all of them call this.

    **Arguments:** `path`: the folder of a run, of which the newest checkpoint that verifies is taken, or that of one
    checkpoint. `target`: a folder on a local or shared disk, which is made. `like`: the tree to restore with there, as
    `Checkpointer.restore` takes it. Without it the checkpoint is one of nested dicts of NumPy arrays, tables by rows
    without padding: Orbax restores such a one without a tree, or into nested dicts.

    **Returns:** how many updates the tree has seen. **Raises:** `CheckpointError` naming what Orbax cannot hold, or as
    `restore`; `ArgumentError` when `target` exists; `MissingExtra`.
    """
    source, destination = Path(path).absolute(), Path(target).absolute()
    ocp = _orbax("export_orbax")
    if destination.exists():
        raise ArgumentError(f"target={str(target)!r}: exists already: expected a folder to be made; give another path")
    if like is None and jax.process_count() > 1:
        raise ArgumentError(
            f"like=None: expected the tree to restore with, because {jax.process_count()} processes export together; "
            "give it, or export from a program of one process"
        )
    if like is None:
        like = _nested(_newest(source).entries.values())
    if _is_checkpoint(source):
        content = read_content(source)
        tree, step = load(content, like, match(content, like)), content.step
    else:
        found = restore(source, like)
        tree, step = found.tree, found.step
    _check_holdable(source, tree)
    with _blaming(f"{destination}: Orbax cannot write this checkpoint"), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(destination, tree)
        checkpointer.wait_until_finished()
    return step


def restore_orbax(path: str | os.PathLike[str], like: Any, *, only: Sequence[str] | None = None) -> Any:
    """Reads a checkpoint that Orbax has written, with OCDBT or without.

    Nothing is cast, padded, left out or made up. Where the arrays of `like` span several processes of JAX, all of
    them call this; arrays that are committed to devices are read by Orbax, each process what its devices need.

    **Arguments:** `path`: the folder that holds a file `_METADATA`. `like`, `only`: as `Checkpointer.restore` takes
    them. A table by rows, padded, may be whole there.

    **Returns:** a tree like `like`. **Raises:** `CheckpointError` when there is no such checkpoint, it cannot be read,
    or does not match `like`; `MissingExtra`.
    """
    ocp = _orbax("restore_orbax")
    folder = Path(path).absolute()
    _check_source(folder)
    with (
        _blaming(f"{folder}: Orbax cannot read this checkpoint"),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        saved = checkpointer.metadata(folder).item_metadata.tree
        values = named_leaves(like)
        entries = {name: _entry(ocp, name, found, values.get(name)) for name, found in named_leaves(saved).items()}
        wants = match(Content(folder, (), entries), like, only)
        leaves = [ocp.RestoreArgs() if name not in wants else _how(ocp, wants[name]) for name in entries]
        items = [found if name in wants else ocp.PLACEHOLDER for name, found in named_leaves(saved).items()]
        structure = _jax.tree.structure(saved)
        arguments = ocp.args.PyTreeRestore(
            item=structure.unflatten(items), restore_args=structure.unflatten(leaves)
        )
        restored = named_leaves_or_placeholders(checkpointer.restore(folder, args=arguments))
    return restored


def _orbax(purpose: str) -> Any:
    return import_extra("orbax.checkpoint", "orbax", purpose=purpose)
