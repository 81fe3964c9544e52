"""The systems that save: ours in two modes, Orbax behind the step with and without OCDBT, and two that block.

All save the same tree and keep two checkpoints. All fsync what they write: TensorStore does so with the files of arrays
that Orbax writes, and with their folders, but nobody does it with Orbax's own small files and the last renames;
`save_now` does that for it. (Behind a loop it is left out, in Orbax's favor.)
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast, final

import jax
import numpy as np
from numpy.typing import NDArray

import braidax as bx

OURS, UNGUARDED = "ours", "ours, without wait"
ORBAX, ZARR = "Orbax async, OCDBT", "Orbax async, no OCDBT"
PLAIN_ORBAX, PLAIN_ZARR = f"{ORBAX}, uncompressed", f"{ZARR}, uncompressed"
RAW, SYNC = "blocking, raw files", "blocking, Orbax"
ASYNC_ORBAX = (ORBAX, ZARR, PLAIN_ORBAX, PLAIN_ZARR)
PEERS = (*ASYNC_ORBAX, RAW, SYNC)
NEEDS: Mapping[str, str] = dict.fromkeys((*ASYNC_ORBAX, SYNC), "orbax")
"""What a system imports, of those that need more than the core."""
_KEEP = 2


class System(Protocol):
    """Saves the state of a run, and restores it. **Arguments:** `path`: a folder of its own, made if missing."""

    def save(self, tree: Any) -> None:
        """Begins a checkpoint; what it waits for, the loop waits for."""
        ...

    def before_apply(self) -> None:
        """Is called when the gradients of a step are dispatched, before the state is given up."""
        ...

    @property
    def newest(self) -> Path:
        """What appears when the checkpoint that was begun last has got its name."""
        ...

    def save_now(self, tree: Any) -> None:
        """Takes a checkpoint; it is durable when this returns, the names of its files included."""
        ...

    def restore(self, like: Any) -> Any:
        """Returns the newest checkpoint, in the form of `like`."""
        ...

    def close(self) -> None:
        """Finishes what runs behind."""
        ...


@final
class Ours:
    """`bx.Checkpointer`.

    **Arguments:** `path`: as of `System`. `guarded`: whether the step lets the snapshot be copied before it gives the
    state up; otherwise XLA finds it held, and takes other memory.
    """

    def __init__(self, path: Path, *, guarded: bool) -> None:
        self._saver = bx.Checkpointer(path, bx.Every(1), keep=_KEEP)
        self._guarded = guarded

    def save(self, tree: Any) -> None:
        """As of `System`."""
        self._saver.update(tree)

    def before_apply(self) -> None:
        """As of `System`."""
        if self._guarded:
            self._saver.wait()

    @property
    def newest(self) -> Path:
        """As of `System`."""
        return self._saver.path / f"step-{self._saver.num_updates:08d}"

    def save_now(self, tree: Any) -> None:
        """As of `System`."""
        self._saver.num_updates += 1
        self._saver.save(tree)

    def restore(self, like: Any) -> Any:
        """As of `System`."""
        return self._saver.restore(like)

    def close(self) -> None:
        """As of `System`."""
        self._saver.close()


@final
class Orbax:
    """Orbax's `CheckpointManager`.

    **Arguments:** `path`: as of `System`. `ocdbt`, `compressed`: how it writes. `behind`: the step, or blocking.
    """

    def __init__(self, path: Path, *, ocdbt: bool, compressed: bool = True, behind: bool = True) -> None:
        import orbax.checkpoint as ocp

        self._ocp: Any = ocp
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEEP, enable_async_checkpointing=behind, cleanup_tmp_directories=True
        )
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_compression=compressed)
        self._manager: Any = ocp.CheckpointManager(path.absolute(), options=options, item_handlers=handler)
        self._path = path
        self._num_saved: int = self._manager.latest_step() or 0

    def save(self, tree: Any) -> None:
        """As of `System`."""
        self._num_saved += 1
        if not self._manager.save(self._num_saved, args=self._ocp.args.PyTreeSave(tree)):
            raise RuntimeError(f"{self._path}: Orbax did not save checkpoint {self._num_saved}")

    def before_apply(self) -> None:
        """Nothing to wait for: `save` returns when every array is on the host."""

    @property
    def newest(self) -> Path:
        """As of `System`."""
        return self._path / str(self._num_saved)

    def save_now(self, tree: Any) -> None:
        """As of `System`."""
        self.save(tree)
        self._manager.wait_until_finished()
        _sync_all(self.newest)
        sync(self._path)

    def restore(self, like: Any) -> Any:
        """As of `System`."""
        restore_args = self._ocp.checkpoint_utils.construct_restore_args(like)
        arguments = self._ocp.args.PyTreeRestore(like, restore_args=restore_args)
        return self._manager.restore(None, args=arguments)

    def close(self) -> None:
        """As of `System`."""
        self._manager.close()


@final
class Raw:
    """What `numpy.save` and `torch.save` do at best: the bytes of every array written to a file, while the loop waits.

    Nothing else: no checksums, and the form of the tree has to be known.

    **Arguments:** `path`: as of `System`.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._num_saved = max((int(file.name) for file in path.iterdir() if file.name.isdigit()), default=0)

    def save(self, tree: Any) -> None:
        """As of `System`."""
        self._num_saved += 1
        unfinished = self._path / f"{self._num_saved}.unfinished"
        with unfinished.open("wb", buffering=0) as file:
            for leaf in jax.tree.leaves(tree):
                content = memoryview(cast(Any, bytes_of(leaf)))
                while content:
                    content = content[file.write(content) :]
            os.fsync(file.fileno())
        unfinished.rename(self.newest)
        sync(self._path)
        (self._path / str(self._num_saved - _KEEP)).unlink(missing_ok=True)

    def before_apply(self) -> None:
        """Nothing to wait for."""

    @property
    def newest(self) -> Path:
        """As of `System`."""
        return self._path / str(self._num_saved)

    def save_now(self, tree: Any) -> None:
        """As of `System`."""
        self.save(tree)

    def restore(self, like: Any) -> Any:
        """As of `System`."""
        leaves: list[jax.Array] = []
        with self.newest.open("rb", buffering=0) as file:
            for leaf in jax.tree.leaves(like):
                array = np.fromfile(file, leaf.dtype, leaf.size).reshape(leaf.shape)
                leaves.append(jax.device_put(array, leaf.sharding))
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        """As of `System`."""


SYSTEMS: Mapping[str, Callable[[Path], System]] = {
    OURS: functools.partial(Ours, guarded=True),
    UNGUARDED: functools.partial(Ours, guarded=False),
    ORBAX: functools.partial(Orbax, ocdbt=True),
    ZARR: functools.partial(Orbax, ocdbt=False),
    PLAIN_ORBAX: functools.partial(Orbax, ocdbt=True, compressed=False),
    PLAIN_ZARR: functools.partial(Orbax, ocdbt=False, compressed=False),
    RAW: Raw,
    SYNC: functools.partial(Orbax, ocdbt=True, behind=False),
}
"""By name."""


def bytes_of(leaf: jax.Array) -> NDArray[np.uint8]:
    """Returns the bytes of an array on one CPU device, in place; while they are held it cannot be donated."""
    # Of the shard: what NumPy makes of the array itself, JAX keeps as long as the array.
    return np.asarray(leaf.addressable_shards[0].data).reshape(-1).view(np.uint8)


def _sync_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
