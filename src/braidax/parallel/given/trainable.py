"""Which variables are trained: all, or those that the user names."""

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.errors import ArgumentError
from braidax.program import named_leaves

Trainable = str | Sequence[str] | Any | None
"""A pattern of variables' paths (`fnmatch`), several, or a PyTree of bools like the parameters; None: all."""


def frozen_by(trainable: Trainable, params: Any) -> frozenset[str]:
    """Returns the paths of the variables that are not trained.

    **Arguments:** `params`: PyTree of specs.

    **Raises:** `ArgumentError` where `trainable` names nothing, or is neither patterns nor a mask.
    """
    paths = [path for path, _ in named_leaves(params, "params")]
    if trainable is None:
        return frozenset()
    if isinstance(trainable, str):
        trainable = [trainable]
    if isinstance(trainable, list | tuple) and all(isinstance(one, str) for one in trainable):  # pyright: ignore[reportUnknownVariableType]
        return frozenset(paths) - _named(list[str](trainable), paths)  # pyright: ignore[reportUnknownArgumentType]
    return frozenset(paths) - _masked(trainable, params, paths)


def check_trainable(params: Any, frozen: frozenset[str]) -> None:
    """Raises `ArgumentError` naming a variable that is trained and cannot be."""
    for path, leaf in named_leaves(params, "params"):
        if path not in frozen and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ArgumentError(
                f"{path} is {leaf.dtype}, expected floating point, since it has no gradient otherwise: move it to "
                f"`variables` (flax: nnx.split(model, nnx.Param, ...); equinox: eqx.partition), or leave it out of "
                f"trainable="
            )


def _named(patterns: Sequence[str], paths: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = {path for path in paths if fnmatch.fnmatchcase(path, pattern)}
        if not matched:
            raise ArgumentError(f"trainable={pattern!r} names no variable: expected a pattern of paths {_shown(paths)}")
        found |= matched
    if not found:
        raise ArgumentError(f"trainable={[*patterns]!r} names no variable: expected patterns of paths {_shown(paths)}")
    return found


def _masked(mask: Any, params: Any, paths: Sequence[str]) -> set[str]:
    if jax.tree.structure(mask) != jax.tree.structure(params):
        raise ArgumentError(
            f"trainable is {mask!r}, expected a pattern such as 'params/lora*', several, or a PyTree of bools like the "
            f"parameters that init returns: {jax.tree.structure(params)}"
        )
    for path, leaf in named_leaves(mask, "trainable"):
        if not isinstance(leaf, bool | np.bool_):
            raise ArgumentError(f"{path} is {leaf!r}, expected True (trained) or False (frozen)")
    found = {path for path, leaf in zip(paths, jax.tree.leaves(mask), strict=True) if leaf}
    if not found:
        raise ArgumentError(f"trainable names no variable: expected True for some of {_shown(paths)}")
    return found


def _shown(paths: Sequence[str]) -> str:
    most = 5
    return ", ".join(paths[:most]) + (f", and {len(paths) - most} more" if len(paths) > most else "")
