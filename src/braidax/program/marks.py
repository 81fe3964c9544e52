"""Marks: identities that stay visible in a jaxpr and say where gradients come from."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Primitive, jaxprs_in_params
from jax.extend.core.primitives import name_p

from .bodies import every_equation

GRADIENT = "braidax.value_and_grad"

kept_p = Primitive("kept_value_and_grad")
kept_p.multiple_results = True
"""A gradient that is kept (`kept.py`): one equation, which counts as a mark."""


def mark_gradient(tree: Any) -> Any:
    """Marks every array of a PyTree as the outcome of a gradient computation; the values stay as they are."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, GRADIENT) if isinstance(leaf, jax.Array) else leaf, tree)


def is_marked(equation: JaxprEqn) -> bool:
    """Whether an equation is a mark, or holds one at any depth."""
    inner = (one for jaxpr in jaxprs_in_params(equation.params) for one in every_equation(jaxpr))
    return _is_mark(equation) or any(map(_is_mark, inner))


def _is_mark(equation: JaxprEqn) -> bool:
    named = equation.primitive is name_p and equation.params["name"] == GRADIENT
    return named or equation.primitive is kept_p
