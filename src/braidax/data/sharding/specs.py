"""From what a user writes about sharding to one checked `NamedSharding` per leaf of the batch."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from braidax.errors import SpecError


def completed(mesh: Mesh | None, specs: Any) -> tuple[Mesh | None, Any]:
    """Returns the mesh and the specs that are meant where one or both are left out.

    Without a mesh it is that of `jax.set_mesh` or, where there is none, one device. Without specs, dim 0 of every leaf
    is split over all axes of the mesh.

    **Raises:** `SpecError` when several processes would each take a device of their own.
    """
    if specs is not None and (mesh is not None or _has_meshes(specs)):
        return mesh, specs
    if mesh is None and not (current := jax.sharding.get_mesh()).empty:
        mesh = current
    if mesh is None and specs is None:
        if jax.process_count() > 1:
            raise SpecError(
                f"mesh=None, specs=None in a job of {jax.process_count()} processes: give the mesh of the batches, or "
                "set it by jax.set_mesh(mesh)"
            )
        mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.local_devices()[:1])
    return mesh, PartitionSpec(tuple(mesh.axis_names)) if specs is None and mesh is not None else specs


def _has_meshes(specs: Any) -> bool:
    return all(isinstance(spec, NamedSharding) for spec in jax.tree.leaves(specs, is_leaf=_is_spec))


def resolve_shardings(batch_spec: Any, mesh: Mesh | None, specs: Any) -> list[NamedSharding]:
    """Returns one sharding per leaf of the batch, in PyTree order, each known to fit its leaf.

    **Arguments:** `batch_spec`: a PyTree of `jax.ShapeDtypeStruct`. `mesh`: what `PartitionSpec`s refer to. `specs`: a
    PyTree of `PartitionSpec` or `NamedSharding` like the batch, or a prefix of one (one spec holds for all leaves).

    **Raises:** `SpecError` naming the leaf, the spec, the values and the remedy.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch_spec)
    try:
        full = jax.tree.leaves(jax.tree.broadcast(specs, batch_spec, is_leaf=_is_spec), is_leaf=_is_spec)
    except (ValueError, TypeError) as error:
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        raise SpecError(
            f"specs={specs!r} does not fit the batch, whose leaves are {names}: {_first_line(error)}; give one "
            f"PartitionSpec or NamedSharding for all, or a tree with the same keys"
        ) from error
    return [
        _resolve(jax.tree_util.keystr(path), leaf, mesh, spec) for (path, leaf), spec in zip(leaves, full, strict=True)
    ]


def batch_parts(spec: Any, mesh: Mesh | AbstractMesh | None) -> int:
    """Returns into how many parts a `PartitionSpec` or `NamedSharding` splits dim 0."""
    if isinstance(spec, NamedSharding):
        return batch_parts(spec.spec, spec.mesh)
    if mesh is None or not isinstance(spec, PartitionSpec) or len(spec) == 0:
        return 1
    return math.prod(mesh.shape.get(axis, 1) for axis in _axes(spec[0]))


def shared_batch_parts(mesh: Mesh | None, specs: Any) -> int:
    """Returns the smallest number that every leaf's split of dim 0 divides: batch sizes must be multiples of it."""
    return math.lcm(1, *(batch_parts(spec, mesh) for spec in jax.tree.leaves(specs, is_leaf=_is_spec)))


def stacked(batch_spec: Any, specs: Any, microbatches: int) -> tuple[Any, Any]:
    """Returns the spec of a batch, and shardings, with a dim of microbatches before the others.

    **Raises:** `SpecError` for a batch that cannot be split into so many.
    """

    def split(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if leaf.shape[0] % microbatches:
            raise SpecError(
                f"batch_size={leaf.shape[0]} is not divisible by microbatches={microbatches}; use a multiple of it"
            )
        return jax.ShapeDtypeStruct((microbatches, leaf.shape[0] // microbatches, *leaf.shape[1:]), leaf.dtype)

    def moved(spec: Any) -> Any:
        if isinstance(spec, NamedSharding):
            return NamedSharding(spec.mesh, PartitionSpec(None, *spec.spec), memory_kind=spec.memory_kind)
        return PartitionSpec(None, *spec) if isinstance(spec, PartitionSpec) else spec

    return jax.tree.map(split, batch_spec), jax.tree.map(moved, specs, is_leaf=_is_spec)


def _is_spec(value: Any) -> bool:
    return isinstance(value, (PartitionSpec, NamedSharding)) or value is None


def _resolve(path: str, leaf: Any, mesh: Mesh | None, spec: Any) -> NamedSharding:
    if isinstance(spec, NamedSharding):
        if not isinstance(spec.mesh, Mesh):
            raise SpecError(f"specs{path}={spec} is on an abstract mesh; give a NamedSharding on a mesh of devices")
        _check_axes(path, spec.spec, spec.mesh)
        sharding = spec
    elif isinstance(spec, PartitionSpec):
        if mesh is None:
            raise SpecError(f"specs{path}={spec} is a PartitionSpec, but mesh=None; give a mesh, or a NamedSharding")
        _check_axes(path, spec, mesh)
        sharding = NamedSharding(mesh, spec)
    else:
        raise SpecError(f"specs{path}={spec!r} is neither a PartitionSpec nor a NamedSharding; P() replicates")
    _check_shape(path, leaf, sharding)
    return sharding


def _check_axes(path: str, spec: PartitionSpec, mesh: Mesh) -> None:
    seen: set[str] = set()
    if spec.unreduced or spec.reduced:
        raise SpecError(f"specs{path}={spec} is unreduced or reduced, but a batch holds whole values; leave that out")
    for dim, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise SpecError(f"specs{path}={spec} leaves dim {dim} unconstrained; name its axes, or None for none")
        for axis in _axes(entry):
            if axis in seen:
                raise SpecError(f"specs{path}={spec} names the axis {axis!r} twice; an axis can split one dim only")
            seen.add(axis)
            if axis not in mesh.shape:
                raise SpecError(
                    f"specs{path}={spec} names the axis {axis!r} for dim {dim}, but mesh has the axes "
                    f"{list(mesh.shape)}; use one of these or make the mesh with it"
                )


def _check_shape(path: str, leaf: Any, sharding: NamedSharding) -> None:
    spec, sizes = sharding.spec, sharding.mesh.shape
    if len(spec) > len(leaf.shape):
        raise SpecError(
            f"specs{path}={spec} has {len(spec)} entries, but the leaf has the {len(leaf.shape)} dims "
            f"{list(leaf.shape)}, batch included; leave out the last entries"
        )
    for dim, entry in enumerate(spec):
        parts = math.prod(sizes[axis] for axis in _axes(entry))
        if leaf.shape[dim] % parts:
            below = leaf.shape[dim] // parts * parts
            what = (
                f"batch_size={leaf.shape[0]}" if dim == 0 else f"dim {dim} of leaf {path}, of size {leaf.shape[dim]},"
            )
            sizes_that_fit = f"{below} or {below + parts}" if below else f"{parts}"
            remedy = f"use {sizes_that_fit}" if dim == 0 else "split another dim, or pad it"
            axes = " x ".join(f"{axis}={sizes[axis]}" for axis in _axes(entry))
            raise SpecError(f"{what} is not divisible by {parts}, as specs{path}={spec} needs ({axes}); {remedy}")


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
