"""What the leaves of a tree are, which of them have rows or ends that are padding, and which are one array."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from braidax.errors import CheckpointError
from braidax.host_shard import HostShard

Kind = Literal["array", "key", "bool", "int", "float"]

# JAX leaves some of itself unannotated.
_jax: Any = jax


@runtime_checkable
class PaddedRows(Protocol):
    """A node of a tree, below which there are tables that are stored by rows, padded.

    Such a leaf has the shape `[ceil(V / N), N, ...]`. Its bytes, in row-major order, are the V rows of a table
    `[V, ...]` and then padding; row `id` stands at `[id // N, id % N]`. N may differ from run to run: such a leaf
    restores into one of another N, and from and into `[V, ...]`; rows beyond V are then zero.
    """

    @property
    def padded_rows(self) -> Mapping[str, int]:
        """V by the path of the leaf below this node, such as `{"params/embedding/table": 793_470}`."""
        ...


@runtime_checkable
class TrueShapes(Protocol):
    """A node of a tree, below which there are arrays in another form than they truly have.

    Some have zeros behind the ends of their dims. A checkpoint holds such a leaf without them; restored, it has those
    of its `like`, which may be more or fewer. Of others the rows are several leaves, one behind the other in a tuple
    or list. A checkpoint holds the one array, under the path of the tuple; it restores into any other number of leaves,
    wherever each begins, or into one. Nobody holds the whole of it for that. Such leaves may be padded as well.
    """

    @property
    def true_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The true shape by the path of the leaf or tuple below this node, such as `{"params/layers": (24, 512)}`."""
        ...


@runtime_checkable
class Outside(Protocol):
    """State that lives elsewhere, in the memory of a server say: an object in the tree that stands for it.

    It is saved in the same checkpoint as the tree, with its paths below the object's, and restored with it.
    """

    def checkpoint_state(self) -> Any:
        """Returns the state as a PyTree of what a tree may hold; called by `update` when a checkpoint is due."""
        ...

    def restored(self, state: Any) -> Any:
        """Takes a state back, like that of `checkpoint_state`. **Returns:** what stands in the tree from then on."""
        ...


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


class Part(NamedTuple):
    """Rows of an array that are a leaf. **Fields:** `value`: the leaf. `shape`: without padding. `first`: its row."""

    value: Any
    shape: tuple[int, ...]
    first: int = 0


@dataclass(frozen=True, eq=False)
class Divided:
    """An array whose rows are several leaves, in their order. **Arguments:** `shape`, `dtype`: of all of it."""

    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    dtype: Any


def parts_of(value: Any, shape: Sequence[int]) -> tuple[Part, ...]:
    """Returns the leaves that an array is. **Arguments:** `value`: as of `saved_leaves`. `shape`: without padding."""
    return value.parts if isinstance(value, Divided) else (Part(value, tuple(shape)),)


def leaves_of(value: Any) -> list[Any]:
    """Returns the leaves of a tree that one of `saved_leaves` is."""
    return [part.value for part in value.parts] if isinstance(value, Divided) else [value]


def saved_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree as a checkpoint has them: by path, in order, those that are one array as `Divided`.

    **Raises:** `CheckpointError` as `named_leaves`, and where `true_shapes` name a path that is neither a leaf nor the
    rows of one array.
    """
    leaves, shapes = named_leaves(tree), true_shapes(tree)
    owners: dict[str, str] = {}
    arrays: dict[str, Divided] = {}
    for path in [path for path in shapes if path not in leaves]:
        names = list(itertools.takewhile(leaves.__contains__, (f"{path}/{number}" for number in itertools.count())))
        owners |= dict.fromkeys(names, path)
        arrays[path] = _divided(path, shapes, {name: leaves[name] for name in names})
    found: dict[str, Any] = {}
    for path, leaf in leaves.items():
        owner = owners.get(path, path)
        found[owner] = arrays.get(owner, leaf)
    return found


def _divided(path: str, shapes: Mapping[str, tuple[int, ...]], leaves: Mapping[str, Any]) -> Divided:
    parts: list[Part] = []
    for name, leaf in leaves.items():
        _check_undivided(name, leaf)
    described = [describe(name, leaf, true_shape=shapes.get(name)) for name, leaf in leaves.items()]
    first = 0
    for leaf, value in zip(described, leaves.values(), strict=True):
        parts.append(Part(value, leaf.shape, first))
        first += leaf.shape[0] if leaf.shape else 0
    kinds = {(leaf.kind, leaf.dtype, (first, *leaf.shape[1:]) if leaf.shape else ()) for leaf in described}
    if [(kind, shape) for kind, _, shape in kinds] != [("array", tuple(shapes[path]))]:
        told = f"its rows are {', '.join(map(str, described))}" if leaves else "it is no leaf of this tree"
        raise CheckpointError(
            f"true_shapes says that leaf {path!r} is {list(shapes[path])}, but {told}: expected a leaf, or a tuple or "
            "list of arrays of one dtype that are its rows, one behind the other; correct the `true_shapes` of the "
            "node above it"
        )
    return Divided(tuple(parts), shapes[path], parts[0].value.dtype)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, in the order of the tree.

    **Raises:** `CheckpointError` where two leaves have one path, or a path is one that files reserve.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in _jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path) or "."
        if name in leaves or name == "__metadata__":
            reason = "taken by another leaf" if name in leaves else "reserved by safetensors"
            raise CheckpointError(
                f"leaf {name!r}: this path is {reason}; expected one of its own for every leaf; rename a key"
            )
        leaves[name] = leaf
    return leaves


def with_outside(tree: Any) -> Any:
    """Returns a tree with the state of every `Outside` in its place; called once for each save or restore."""
    return _jax.tree.map(lambda leaf: leaf.checkpoint_state() if isinstance(leaf, Outside) else leaf, tree)


def put_outside(like: Any, tree: Any) -> Any:
    """Undoes `with_outside` for a tree that was restored: hands every `Outside` of `like` its state."""
    leaves, structure = _jax.tree.flatten(like)
    states = structure.flatten_up_to(tree)
    return structure.unflatten(
        [
            leaf.restored(state) if isinstance(leaf, Outside) else state
            for leaf, state in zip(leaves, states, strict=True)
        ]
    )


def padded_rows(tree: Any) -> dict[str, int]:
    """Returns the V of each leaf that has padded rows, by its path in the tree."""
    return _told(tree, "padded_rows")


def true_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array that is stored in another form, by its path in the tree."""
    return _told(tree, "true_shapes")


def _told(tree: Any, attribute: str) -> dict[str, Any]:
    """Returns what nodes that have an attribute say of what is below them, by its path in the tree."""
    found: dict[str, Any] = {}

    def visit(node: Any, above: str) -> None:
        if hasattr(node, attribute):  # a protocol says as much, ten times as slowly
            found.update({f"{above}{path}": told for path, told in getattr(node, attribute).items()})
        below = _jax.tree_util.tree_leaves_with_path(
            node, is_leaf=lambda inner: inner is not node and hasattr(inner, attribute)
        )
        for path, inner in below:
            if path and hasattr(inner, attribute):
                visit(inner, f"{above}{_name(path)}/")

    visit(tree, "")
    return found


def describe(path: str, leaf: Any, *, true_shape: tuple[int, ...] | None = None) -> Leaf:
    """Returns what a leaf is; it may be abstract (`jax.ShapeDtypeStruct`).

    **Arguments:** `true_shape`: of a leaf whose dims are padded, without that.

    **Raises:** `CheckpointError` for what cannot be in a checkpoint.
    """
    if true_shape is not None:
        found = describe(path, leaf)
        _check_undivided(path, leaf)
        if found.kind != "array" or not _is_within(true_shape, found.shape):
            raise CheckpointError(
                f"true_shapes says that leaf {path!r} is {list(true_shape)} without padding, but it is {found}: "
                "expected an array with as many dims, none of them shorter; correct the `true_shapes` of the node "
                "above it"
            )
        return replace(found, shape=tuple(true_shape))
    if isinstance(leaf, jax.core.Tracer):
        raise CheckpointError(
            f"leaf {path!r} is a tracer: expected a concrete array; call the checkpointer outside of jit and grad"
        )
    if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
        return Leaf(path, "bool" if isinstance(leaf, bool) else "int" if isinstance(leaf, int) else "float")
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | HostShard | Divided):
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


def _check_undivided(path: str, leaf: Any) -> None:
    if isinstance(leaf, HostShard):
        raise CheckpointError(
            f"true_shapes speaks of leaf {path!r}, a HostShard: expected an array; its own shape is the true one"
        )


def key_data_spec(keys: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns dtype and shape of the data of an array of typed PRNG keys, which is what is stored of it."""
    abstract = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    spec = _jax.eval_shape(_jax.random.key_data, abstract)
    return np.dtype(spec.dtype), tuple(spec.shape)


def _is_within(inner: tuple[int, ...], outer: tuple[int, ...]) -> bool:
    return len(inner) == len(outer) and all(0 <= size <= most for size, most in zip(inner, outer, strict=True))


def _name(path: Any) -> str:
    return _jax.tree_util.keystr(path, simple=True, separator="/")
