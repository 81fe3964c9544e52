"""The gradients of the sides of a product."""

from collections.abc import Collection, Sequence
from typing import Any

import jax

from .bodies import Equation, aval_of, bind


def product_in_order(
    equation: Equation, operands: Sequence[Any], ordered: Collection[int] = (), known: Any | None = None
) -> Any:
    """Returns the product of a `dot_general`, the gradients of some of whose operands are made in the order of these.

    It has no derivative forward. **Arguments:** `equation`: whose params fit the operands. `ordered`: those, by number.
    `known`: the product, if it was computed before.
    """

    @jax.custom_vjp
    def product(left: Any, right: Any) -> Any:
        return bind(equation, [left, right])[0]

    def forward(left: Any, right: Any) -> Any:
        return product(left, right) if known is None else known, (left, right)

    def backward(kept: Any, back: Any) -> Any:
        return tuple(gradient(kept, at, back) for at in range(2))

    def gradient(kept: Any, at: int, back: Any) -> Any:
        contracted, batched = (dims[at] for dims in equation.params["dimension_numbers"])
        if at in ordered and min({*range(kept[at].ndim)} - {*batched}, default=None) in contracted:
            return operand_gradient(equation, at, kept[1 - at], back)

        def of_operand(one: Any) -> Any:
            return bind(equation, [one if which == at else kept[which] for which in range(2)])[0]

        return jax.vjp(of_operand, kept[at])[1](back)[0]  # JAX' own rule makes first what an operand keeps

    product.defvjp(forward, backward)
    return product(*operands)


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
