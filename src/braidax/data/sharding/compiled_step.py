"""Shardings taken from a compiled step: the argument that looks like a batch says how batches are to be made."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError, SpecError


def specs_like(like: Any, sample_spec: Any, *, lead: int) -> tuple[Any, int]:
    """Returns the shardings of a batch, or of a microbatch, in a compiled step, like `sample_spec`; and the batch size.

    **Arguments:** `like`: what `jax.jit(step).lower(…).compile()` returned. `sample_spec`: of the source. `lead`: 1
    where batches are stacks of microbatches.

    **Raises:** `ArgumentError` when it is no compiled step, or when none or several of its arguments look like a batch;
    `SpecError` for a sharding that is no `NamedSharding`.
    """
    if not isinstance(like, jax.stages.Compiled):
        raise ArgumentError(
            f"like={type(like).__name__}: expected a compiled step: jax.jit(step).lower(state, batch).compile()"
        )
    found = list(_batches(like.args_info, like.input_shardings, sample_spec, lead))
    wanted = jax.tree.structure(sample_spec)
    if len(found) != 1:
        dtypes = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(sample_spec)]
        what = "no argument" if not found else f"{len(found)} arguments"
        raise ArgumentError(
            f"like=: {what} of the compiled step look like a batch of samples {wanted} of {dtypes}; expected one: give "
            "mesh and specs instead, or map the samples to what the step takes"
        )
    shardings, sizes = found[0]
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            raise SpecError(
                f"like=: the step takes the leaf {jax.tree_util.keystr(path)} of the batch as {sharding}; expected a "
                "NamedSharding: compile the step with in_shardings, or with arguments that have them"
            )

    def unstacked(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[lead:]), memory_kind=sharding.memory_kind)

    return jax.tree.map(unstacked, shardings), sizes


def devices_of(mesh: Mesh | None, specs: Any, like: Any) -> list[Any]:
    """Returns the devices that a loader's arguments speak of, in any order."""
    given = [*jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, NamedSharding))]
    if isinstance(like, jax.stages.Compiled):
        given += jax.tree.leaves(like.input_shardings)
    meshes = [mesh, *(sharding.mesh for sharding in given if isinstance(sharding, NamedSharding))]
    return list({device for one in meshes if isinstance(one, Mesh) for device in one.devices.flat})


def _batches(infos: Any, shardings: Any, sample_spec: Any, lead: int) -> Iterator[tuple[Any, int]]:
    """Yields the shardings and the batch size of each part of the arguments that is a batch of such samples."""
    size = _batch_size(infos, sample_spec, lead)
    if size is not None:
        yield shardings, size
        return
    children = _children(infos)
    if children is not None:
        for info, sharding in zip(children, _children(shardings) or (), strict=True):
            yield from _batches(info, sharding, sample_spec, lead)


def _children(tree: Any) -> list[Any] | None:
    """Returns the children of the root of a PyTree, None for a leaf."""
    children, structure = jax.tree_util.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    return None if jax.tree_util.treedef_is_leaf(structure) else children


def _batch_size(infos: Any, sample_spec: Any, lead: int) -> int | None:
    if jax.tree.structure(infos) != jax.tree.structure(sample_spec):
        return None
    sizes: set[tuple[int, ...]] = set()
    for info, leaf in zip(jax.tree.leaves(infos), jax.tree.leaves(sample_spec), strict=True):
        if info.shape[lead + 1 :] != leaf.shape or info.dtype != leaf.dtype or len(info.shape) < lead + 1:
            return None
        sizes.add(tuple(info.shape[: lead + 1]))
    return math.prod(sizes.pop()) if len(sizes) == 1 else None
