"""The strategies that a command is told, by axis."""

from collections.abc import Callable, Mapping
from functools import partial

import typer
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.parallel import DataParallel, FullySharded, Hybrid, RotatedTensorParallel, Strategy, TensorParallel

STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "data": DataParallel,
    "data_parallel": DataParallel,
    "fully_sharded": FullySharded,
    "hybrid": Hybrid,
    "rotated": RotatedTensorParallel,
    "servers": partial(Hybrid, tables="servers"),
    "tensor": TensorParallel,
}
"""What `--strategy` may name."""


def parse_strategies(text: str) -> dict[str, Strategy]:
    """Returns for each axis the strategy that `--strategy` says as `data=hybrid,model=fully_sharded`.

    **Raises:** `typer.BadParameter` for anything else.
    """
    found: dict[str, Strategy] = {}
    for part in text.split(","):
        axis, _, name = (word.strip() for word in part.partition("="))
        if not axis.isidentifier() or name not in STRATEGIES or axis in found:
            raise typer.BadParameter(
                f"{text!r}: expected different axes with a strategy each, such as data=hybrid; strategies are "
                f"{', '.join(STRATEGIES)}",
                param_hint="--strategy",
            )
        found[axis] = STRATEGIES[name]()
    return found


def has_servers(strategies: Mapping[str, Strategy] | None) -> bool:
    """Returns whether tables are on servers."""
    found = {} if strategies is None else strategies
    return any(isinstance(one, Hybrid) and one.tables != "rows" for one in found.values())


def check_axes(strategies: Mapping[str, Strategy], mesh: Mesh) -> None:
    """Raises `ArgumentError` when a strategy is for an axis that the mesh has not."""
    for axis in strategies:
        if axis not in mesh.axis_names:
            raise ArgumentError(
                f"--strategy names the axis {axis!r}, and the mesh has {', '.join(mesh.axis_names)}: use one of these, "
                f"or give --mesh an axis {axis!r}"
            )
