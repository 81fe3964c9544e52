"""Convolutions by groups of channels, whose kernels' gradients XLA's partitioner sums too often.

It makes of such a gradient a convolution by groups of samples. Where these are divided among some of the devices, and
others have the same, it adds up what all devices have: on a mesh of 2 by 4, of which 2 divide the samples, the gradient
is four times what it should be. So each device computes its own part, and the parts are summed by name.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.program import (
    Equation,
    Program,
    aval_of,
    batch_dim_of_result,
    bind,
    evaluate,
    find_batch_dims,
    grouped_convolutions,
    psum,
    trace,
)


def grouped(
    program: Program,
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
    divided: Mapping[int, Sequence[int | None] | int],
) -> Program:
    """Returns a program whose convolutions by groups have right gradients. **Arguments:** as of `gathered`."""
    paths = grouped_convolutions(program.closed.jaxpr)
    if not paths or all(axis in batch_axes for axis, size in mesh.shape.items() if size > 1):
        return program
    dims = find_batch_dims(program, {*paths}, divided)
    rules = {path: partial(_convolved, mesh, batch_axes, dims[path][0]) for path in paths}

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs, mesh=mesh)


def _convolved(
    mesh: AbstractMesh, batch_axes: tuple[str, ...], dim: int | None, equation: Equation, inputs: list[Any]
) -> list[Any]:
    back_dim, parts = batch_dim_of_result(equation, 0, dim), 1
    for axis in batch_axes:
        parts *= mesh.shape[axis]
    axes = batch_axes if dim is not None and aval_of(equation.invars[0]).shape[dim] % parts == 0 else ()

    def apply(image: Any, kernel: Any) -> Any:
        return bind(equation, [image, kernel])[0]

    def of_kernel(image: Any, back: Any, kernel: Any) -> Any:
        (part,) = jax.vjp(partial(apply, image), kernel)[1](back)
        return psum(part, axes) if axes else part

    specs = tuple(PartitionSpec(*[None] * (at or 0), axes) if axes else PartitionSpec() for at in (dim, back_dim))
    summed: Any = jax.shard_map(
        of_kernel,
        in_specs=(*specs, PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names={*mesh.axis_names},
        check_vma=False,
    )

    @jax.custom_vjp
    def convolved(image: Any, kernel: Any) -> Any:
        return apply(image, kernel)

    def forward(image: Any, kernel: Any) -> Any:
        return apply(image, kernel), (image, kernel)

    def backward(kept: Any, back: Any) -> Any:
        image, kernel = kept
        (of_image,) = jax.vjp(lambda image: apply(image, kernel), image)[1](back)
        return of_image, summed(image, back, kernel)

    convolved.defvjp(forward, backward)
    return [convolved(*inputs)]
