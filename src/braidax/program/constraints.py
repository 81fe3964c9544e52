"""Constraints on how values lie, `with_sharding_constraint`, which a traced function has: on which mesh they are."""

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from braidax.errors import SpecError

from .bodies import every_equation
from .trace import Program, trace


def automatic(mesh: Mesh) -> AbstractMesh:
    """Returns a mesh of the same axes and the same kind of devices, all axes automatic."""
    kinds, device = (AxisType.Auto,) * len(mesh.axis_names), mesh.abstract_mesh.abstract_device
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds, abstract_device=device)


def trace_constrained(fn: Callable[..., Any], *args: Any, mesh: Mesh | None, told: str) -> Program:
    """Traces a function that may say how its values lie on a mesh.

    **Arguments:** `fn`, `args`: as of `trace`. `mesh`: on which it will run, where that is known. `told`: the function,
    in words.

    **Raises:** `SpecError` when it constrains a value along an axis that the mesh has not.
    """
    try:
        program = trace(fn, *args)
    except RuntimeError as error:
        if mesh is None or "with_sharding_constraint" not in str(error):
            raise
        try:
            program = trace(fn, *args, mesh=automatic(mesh))
        except ValueError as unknown:
            if "is not found in mesh" not in str(unknown):
                raise
            raise SpecError(f"{told} has a with_sharding_constraint: {unknown} Use these") from unknown
    for sharding in _constraints(program.closed.jaxpr):
        if mesh is not None and dict(sharding.mesh.shape) != dict(mesh.shape):
            raise SpecError(
                f"{told} has a with_sharding_constraint on a mesh {dict(sharding.mesh.shape)}, and the "
                f"mesh is {dict(mesh.shape)}: name axes of it in a PartitionSpec, or leave it out"
            )
    return program


def _constraints(jaxpr: Jaxpr) -> Iterator[NamedSharding]:
    for equation in every_equation(jaxpr):
        if equation.primitive.name == "sharding_constraint" and isinstance(equation.params["sharding"], NamedSharding):
            yield equation.params["sharding"]
