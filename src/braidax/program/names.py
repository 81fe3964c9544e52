"""Names of PyTree leaves, and the sentence that tells how two PyTrees differ."""

from collections.abc import Collection
from typing import Any

import jax


def named_leaves(tree: Any, root: str = "") -> list[tuple[str, Any]]:
    """Lists the leaves of a PyTree with their names.

    **Arguments:** `tree`: any PyTree. `root`: what every name starts with.

    **Returns:** pairs such as `("params/dense/kernel", leaf)`, in JAX's order of leaves.
    """
    leaves: list[tuple[Any, Any]] = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(join(root, jax.tree_util.keystr(path, simple=True, separator="/")), leaf) for path, leaf in leaves]


def join(root: str, path: str) -> str:
    """Joins two parts of a name; either may be empty."""
    return f"{root}/{path}" if root and path else root or path


def without_leaves(tree: Any, gone: Collection[str]) -> Any:
    """Returns the PyTree with None in place of the leaves of those names."""
    leaves = [None if name in gone else leaf for name, leaf in named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def with_leaves(tree: Any, whole: Any, gone: Collection[str]) -> Any:
    """Undoes `without_leaves`: takes the leaves of those names from `whole`."""
    leaves = iter(jax.tree.leaves(tree))
    filled = [leaf if name in gone else next(leaves) for name, leaf in named_leaves(whole)]
    return jax.tree.unflatten(jax.tree.structure(whole), filled)


def difference(expected: Any, got: Any, root: str) -> str | None:
    """Says where two PyTrees of arrays first differ in structure, shape or dtype.

    **Arguments:** `expected`, `got`: PyTrees of arrays or `jax.ShapeDtypeStruct`. `root`: their name in the sentence.

    **Returns:** one sentence, or None when they agree.
    """
    if _agree(expected, got):
        return None
    wanted, found = dict(named_leaves(expected, root)), dict(named_leaves(got, root))
    for path, leaf in wanted.items():
        if path not in found:
            return f"{path} is missing (expected {_form(leaf)})"
        if _form(found[path]) != _form(leaf):
            return f"{path} is {_form(found[path])}, expected {_form(leaf)}"
    for path, leaf in found.items():
        if path not in wanted:
            return f"{path} is unexpected ({_form(leaf)})"
    if jax.tree.structure(expected) != jax.tree.structure(got):
        return f"{root} is {jax.tree.structure(got)}, expected {jax.tree.structure(expected)}"
    return None


def _agree(expected: Any, got: Any) -> bool:
    """The same question without names: asked at every step, for every leaf."""
    wanted, wanted_tree = jax.tree.flatten(expected)
    found, found_tree = jax.tree.flatten(got)
    return wanted_tree == found_tree and all(
        one.shape == getattr(other, "shape", None) and one.dtype == getattr(other, "dtype", None)
        for one, other in zip(wanted, found, strict=True)
    )


def _form(leaf: Any) -> str:
    """`float32[4, 2]`."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"
