"""Programs that use an array which lies in blocks on the devices: it stays so, and what meets it comes to the blocks.

The partitioner would rather gather a large table than take samples from all devices to each block of it. So products
and lookups are told: what is made of the table is split as it is, what it is multiplied with is on every device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core.primitives import dot_general_p, gather_p
from jax.sharding import PartitionSpec

from .batch_dims import batch_dim_of_result, find_batch_dims
from .bodies import Equation, Path, bind, equations_of
from .rewrite import evaluate
from .trace import Program


def kept_in_blocks(program: Program, axes: Mapping[int, tuple[str, ...]]) -> Callable[..., Any]:
    """Returns a function of the same values, to be called under a mesh with automatic axes.

    **Arguments:** `axes`: of leaves of its first argument, which are split by blocks along dim 0, over which.
    """
    rules: dict[Path, Any] = {}
    meetings = (dot_general_p, gather_p)
    paths = [path for path, one in equations_of(program.closed.jaxpr) if one.primitive in meetings]
    num = len(jax.tree.leaves(program.in_specs[0]))
    for over in {*axes.values()}:
        rows = [0 if axes.get(at) == over else None for at in range(num)]
        found = find_batch_dims(program, paths, {0: rows})
        rules |= {path: partial(_met, dims, over) for path, dims in found.items() if any(d is not None for d in dims)}

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return run


def _met(dims: Sequence[int | None], axes: tuple[str, ...], equation: Equation, inputs: list[Any]) -> list[Any]:
    """Stands in place of a product or lookup. **Arguments:** `dims`: of its operands, those of what is in blocks."""
    placed = [_split(value, dim, axes) for value, dim in zip(inputs, dims, strict=True)]
    outputs = bind(equation, placed)
    found = {_free(equation, at, dim) for at, dim in enumerate(dims) if dim is not None} - {None}
    return [_split(outputs[0], found.pop(), axes) if len(found) == 1 else outputs[0]]


def _free(equation: Equation, operand: int, dim: int) -> int | None:
    return batch_dim_of_result(equation, operand, dim) if equation.primitive is dot_general_p else None


def _split(value: Any, dim: int | None, axes: tuple[str, ...]) -> Any:
    """Splits a value along a dim, or lays it on every device."""
    if dim is None:
        return jax.lax.with_sharding_constraint(value, PartitionSpec())
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(
        value, PartitionSpec(*(axes if at == dim else free for at in range(value.ndim)))
    )
