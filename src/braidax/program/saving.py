"""Values that a remat keeps: those of some names, beside what it keeps already."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import name_p, remat_p

from .bodies import Path, equation_at, with_equation
from .trace import Program


def with_names_saved(program: Program, path: Path, names: Collection[str]) -> Program:
    """Returns a program that keeps some values for its backward pass, instead of computing them again.

    **Arguments:** `path`: of an equation; every remat around it keeps the values that
    `jax.ad_checkpoint.checkpoint_name` gives one of the `names`, also those that a rule makes later.
    """
    jaxpr = program.closed.jaxpr
    for end in range(1, len(path), 2):
        held = equation_at(jaxpr, path[:end])
        if held.primitive is remat_p:
            policy = _Saving(frozenset(names), held.params["policy"])
            jaxpr = with_equation(jaxpr, path[:end], held.replace(params=dict(held.params, policy=policy)))
    return Program(ClosedJaxpr(jaxpr, program.closed.consts), program.in_specs, program.out_specs)


@dataclass(frozen=True)
class _Saving:
    """A policy of `jax.checkpoint`: another one (None keeps nothing), and values of some names."""

    names: frozenset[str]
    policy: Any

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is name_p and params["name"] in self.names:
            return True
        return self.policy is not None and self.policy(primitive, *avals, **params)
