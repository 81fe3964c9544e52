"""From devices to host memory: what the leaves of a tree are, and a copy of them that nobody else can change.

A snapshot has two halves. `hold` runs on the caller's thread, before the caller can donate the arrays: from then on
the runtime keeps their content, because it never hands out memory that somebody still reads. `Held.copy` may run on
any thread, and gives host memory of our own.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
import jax.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from braidax.errors import CheckpointError

Kind = Literal["array", "key", "bool", "int", "float"]
Index = tuple[slice, ...]

# JAX leaves some of itself unannotated.
_jax: Any = jax


@dataclass(frozen=True)
class Leaf:
    """What one leaf of a tree is.

    **Arguments:** `path`: where it stands, such as `params/dense/kernel`. `kind`: an array of JAX or NumPy, an array of
    typed PRNG keys, or a Python number. `dtype`: its name; empty for a Python number. `shape`: the global one.
    """

    path: str
    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.dtype else f"a Python {self.kind}"


@dataclass(frozen=True)
class Owned:
    """One leaf on the host, owned by the snapshot.

    **Arguments:** `leaf`: what it is. `value`: a C-contiguous array, for PRNG keys that of their data; or the Python
    number. `key_impl`: for PRNG keys, the name of their implementation.
    """

    leaf: Leaf
    value: Any
    key_impl: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A tree on the host: `leaves` in the order of the tree, `num_bytes` in their arrays."""

    leaves: tuple[Owned, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by path."""
        return {owned.leaf.path: owned.value for owned in self.leaves if owned.leaf.dtype}


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, in the order of the tree.

    **Raises:** `CheckpointError` where two leaves have one path, or a path is one that files reserve.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in _jax.tree_util.tree_leaves_with_path(tree):
        name = _jax.tree_util.keystr(path, simple=True, separator="/") or "."
        if name in leaves or name == "__metadata__":
            reason = "taken by another leaf" if name in leaves else "reserved by safetensors"
            raise CheckpointError(
                f"leaf {name!r}: this path is {reason}; expected one of its own for every leaf; rename a key"
            )
        leaves[name] = leaf
    return leaves


def describe(path: str, leaf: Any) -> Leaf:
    """Returns what a leaf is; it may be abstract (`jax.ShapeDtypeStruct`).

    **Raises:** `CheckpointError` for what cannot be in a checkpoint.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise CheckpointError(
            f"leaf {path!r} is a tracer: expected a concrete array; call the checkpointer outside of jit and grad"
        )
    if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
        return Leaf(path, "bool" if isinstance(leaf, bool) else "int" if isinstance(leaf, int) else "float")
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        array: Any = cast(Any, leaf)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return Leaf(path, "key", str(array.dtype), tuple(array.shape))
        dtype = np.dtype(array.dtype)
        if dtype.isnative and (dtype.kind in "biufc" or getattr(ml_dtypes, dtype.name, None) is dtype.type):
            return Leaf(path, "array", dtype.name, tuple(array.shape))
        raise CheckpointError(
            f"leaf {path!r} has the dtype {dtype!r}: expected booleans or numbers in native byte order; "
            "convert it, or leave it out of the tree"
        )
    raise CheckpointError(
        f"leaf {path!r} is of type {type(leaf).__name__}: expected a jax.Array, a NumPy array or a Python number; "
        "convert it, or leave it out of the tree"
    )


class Held:
    """The leaves of a tree, kept from changing but not yet copied. Made by `hold`."""

    def __init__(self, leaves: list["_Pieces | Owned"]) -> None:
        self._leaves = leaves
        self.num_bytes = sum(
            leaf.num_bytes if isinstance(leaf, _Pieces) else getattr(leaf.value, "nbytes", 0) for leaf in leaves
        )

    def copy(self) -> Snapshot:
        """Copies everything to host memory of our own, and lets go of the tree, leaf by leaf; works once."""
        self._leaves.reverse()
        owned: list[Owned] = []
        while self._leaves:
            leaf = self._leaves.pop()
            owned.append(leaf.copy() if isinstance(leaf, _Pieces) else leaf)
        return Snapshot(tuple(owned))


def is_shared(tree: Any) -> bool:
    """Says whether a tree has arrays that other processes hold as well, so that one process is enough to save it."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(tree))


def hold(tree: Any) -> Held:
    """Keeps a tree from changing; to be called before any of its arrays can be donated.

    On CPU, where a device array can be read in place, it waits until the arrays are computed; elsewhere copies to
    pinned host memory are started and not waited for. NumPy arrays, which anybody may write to, are copied at once.

    **Arguments:** `tree`: a PyTree of `jax.Array`, NumPy arrays and Python numbers.

    **Returns:** the held tree. **Raises:** `CheckpointError` naming the leaf that cannot be in a checkpoint.
    """
    leaves = [(describe(path, leaf), leaf) for path, leaf in named_leaves(tree).items()]
    return Held([_hold_leaf(leaf, value) for leaf, value in leaves])


def _hold_leaf(leaf: Leaf, value: Any) -> "_Pieces | Owned":
    if not leaf.dtype:
        return Owned(leaf, value)
    if not isinstance(value, jax.Array):
        if isinstance(value, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"leaf {leaf.path!r} is a jax.ShapeDtypeStruct, which has no content: expected an array; "
                "save the state, not its description"
            )
        return Owned(leaf, np.array(value, order="C"))
    if value.is_deleted():
        raise CheckpointError(
            f"leaf {leaf.path!r} ({leaf}) is deleted, most likely donated to a jitted function: expected a live array; "
            "pass what that function returned"
        )
    if not value.is_fully_addressable and not value.is_fully_replicated:
        raise CheckpointError(
            f"leaf {leaf.path!r} ({leaf}) has shards on other processes: expected all of them on this one, or the same "
            "on all; replicate it, or checkpoint from a single process"
        )
    key_impl = ""
    if leaf.kind == "key":
        key_impl = str(jax.random.key_impl(value))
        value = jax.random.key_data(value)
    shards = [shard for shard in value.addressable_shards if shard.replica_id == 0]
    shards = shards if value.is_fully_addressable else value.addressable_shards[:1]  # each process has a replica
    views = _views([shard.data for shard in shards])
    pieces = [(shard.index, view) for shard, view in zip(shards, views, strict=True)]
    return _Pieces(leaf, key_impl, np.dtype(value.dtype), tuple(value.shape), pieces)


def _views(arrays: list[jax.Array]) -> list[Any]:
    # A view of a CPU array makes XLA copy instead of donate. No other device's memory can be read in place; there a
    # transfer that has been issued is ordered by the runtime before any later donation.
    if all(device.platform == "cpu" for array in arrays for device in array.devices()):
        return [np.asarray(array) for array in arrays]
    return _staged(arrays)


def _staged(arrays: list[jax.Array]) -> list[Any]:
    targets: list[jax.sharding.Sharding] = []
    for array in arrays:
        (device,) = array.devices()
        if array.sharding.memory_kind != device.default_memory().kind:
            return [np.array(array) for array in arrays]
        targets.append(jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
    return _jax.device_put(arrays, targets)


@dataclass
class _Pieces:
    leaf: Leaf
    key_impl: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: list[tuple[Index, Any]]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def copy(self) -> Owned:
        whole = np.empty(self.shape, self.dtype)
        for index, piece in self.pieces:
            np.copyto(_plain(whole)[(*index, ...)], _plain(np.asarray(piece)))
        return Owned(self.leaf, whole, self.key_impl)


def _plain(array: np.ndarray) -> np.ndarray:
    # NumPy copies its own dtypes without the GIL; those of ml_dtypes are foreign to it, and integers of their size do.
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize in (1, 2, 4, 8) else array
