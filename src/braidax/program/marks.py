"""Marks: identities that stay visible in a jaxpr and say where gradients come from."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params, subjaxprs
from jax.extend.core.primitives import name_p

GRADIENT = "braidax.value_and_grad"


def mark_gradient(tree: Any) -> Any:
    """Marks every array of a PyTree as the outcome of a gradient computation; the values stay as they are."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, GRADIENT) if isinstance(leaf, jax.Array) else leaf, tree)


def is_marked(equation: JaxprEqn) -> bool:
    """Whether an equation is a mark, or holds one at any depth."""
    if equation.primitive is name_p and equation.params["name"] == GRADIENT:
        return True
    return any(_holds_mark(jaxpr) for jaxpr in jaxprs_in_params(equation.params))


def _holds_mark(jaxpr: Jaxpr) -> bool:
    own = any(equation.primitive is name_p and equation.params["name"] == GRADIENT for equation in jaxpr.eqns)
    return own or any(_holds_mark(inner) for inner in subjaxprs(jaxpr))
