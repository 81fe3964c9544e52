"""Strategies beside what the names of dims ask for, that model libraries keep with their parameters."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from .given.dim_names import Rules, asked_axes, dim_names, unruled
from .plan.named import Named
from .plan.strategy import Strategy


def named_strategies(
    strategies: Mapping[str, Strategy], tree: Any, rules: Rules | None, mesh: Mesh, *, prefix: str = "params"
) -> Mapping[str, Strategy]:
    """Returns strategies that honor the names of dims like overrides.

    **Arguments:** `tree`: of specs or arrays, whose paths begin with `prefix`. `rules`: as of `parallelize`.

    **Raises:** as `asked_axes`.
    """
    names = dim_names(tree, prefix)
    asked = asked_axes(names, rules, mesh)
    if not names:
        return strategies
    notes = {path: ", ".join(map(repr, unruled(dims, rules, mesh))) for path, dims in names.items()}
    notes = {path: f"no rule says where {told} goes" for path, told in notes.items() if told}
    found: dict[str, Strategy] = {}
    for number, axis in enumerate(mesh.axis_names):
        dims = {path: axes[axis] for path, axes in asked.items() if axis in axes}
        found[axis] = Named(strategies.get(axis), dims, {} if number else notes)
    return found
