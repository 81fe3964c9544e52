"""The gradient of one side of a product."""

from typing import Any

import jax

from .bodies import Equation, aval_of


def operand_gradient(equation: Equation, at: int, other: Any, back: Any) -> Any:
    """Returns the gradient of an operand of a `dot_general`, made in the order of that operand's dims where it can be.

    JAX' own rule makes it in the order of what comes back. A compiler that turns what it multiplies, as that for CPUs,
    then turns the larger factor or the result: a head's logits, or its table.

    **Arguments:** `at`: which operand. `other`: the value of the other one. `back`: the gradient of the result. Where
    both are a part of the program's own, along a dim that one of them keeps, so is the gradient.
    """
    params, wanted = equation.params, aval_of(equation.invars[at])
    contracted, batched = params["dimension_numbers"]
    mine, others = (*zip(contracted[at], contracted[1 - at], strict=True),), (*contracted[1 - at], *batched[1 - at])
    summed = [dim for dim in range(other.ndim) if dim not in others]
    kept = [dim for dim in range(wanted.ndim) if dim not in (*contracted[at], *batched[at])]
    num_batched = len(batched[at])
    first = num_batched + (len(kept) if at == 0 else 0)
    numbers = (summed, range(first, first + len(summed))), (batched[1 - at], range(num_batched))
    found = jax.lax.dot_general(
        other, back, numbers, precision=params["precision"], preferred_element_type=params["preferred_element_type"]
    )
    # Its dims: those of the batch, those that the product sums over in the order of the other operand, those it keeps.
    dims = (*batched[at], *(dim for dim, _ in sorted(mine, key=lambda pair: pair[1])), *kept)
    return jax.lax.transpose(found, [dims.index(dim) for dim in range(len(dims))]).astype(wanted.dtype)
