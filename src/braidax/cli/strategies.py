"""The strategies that a command is told, by axis."""

from collections.abc import Callable, Mapping
from functools import partial

import typer
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.gang.program import SERVERS
from braidax.parallel import (
    DataParallel,
    FullySharded,
    Hybrid,
    ParameterServers,
    RotatedTensorParallel,
    Strategy,
    TensorParallel,
)

STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "data": DataParallel,
    "data_parallel": DataParallel,
    "fully_sharded": FullySharded,
    "hybrid": Hybrid,
    "parameter_servers": ParameterServers,
    "parameter_servers_async": partial(ParameterServers, staleness=None),
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
    """Returns whether tables, or all variables, are on servers."""
    found = {} if strategies is None else strategies
    return has_workers(found) or any(isinstance(one, Hybrid) and one.tables != "rows" for one in found.values())


def has_workers(strategies: Mapping[str, Strategy] | None) -> bool:
    """Returns whether all variables are on servers, for workers that each have a JAX of their own."""
    return any(isinstance(one, ParameterServers) for one in (strategies or {}).values())


def check_servers(
    strategies: Mapping[str, Strategy] | None, num_servers: int | None, processes: int, environ: Mapping[str, str]
) -> None:
    """Checks strategies against the servers and the processes that `braidax launch` has started, if it has.

    **Arguments:** `num_servers`, `processes`: what `--servers` and `--processes` of this command say.

    **Raises:** `ArgumentError` for what does not go together.
    """
    launched, size = int(environ.get(SERVERS, "0")), max(processes, int(environ.get("BRAIDAX_SIZE", "1")))
    if launched and not has_servers(strategies):
        raise ArgumentError(
            f"braidax launch has started {launched} servers, and --strategy has nothing on servers: give --strategy "
            f"data=servers, or start without its --servers"
        )
    if launched and num_servers not in (None, launched):
        raise ArgumentError(
            f"--servers {num_servers} of braidax train, and braidax launch has started {launched}: say it there alone"
        )
    if has_workers(strategies) and size > 1 and (processes > 1 or not launched):
        raise ArgumentError(
            f"--strategy parameter_servers in {size} processes, whose servers nobody has started: expected braidax "
            f"launch --processes {size} --servers 1 --initialize nothing -- braidax train …, without --processes there"
        )


def check_axes(strategies: Mapping[str, Strategy], mesh: Mesh) -> None:
    """Raises `ArgumentError` when a strategy is for an axis that the mesh has not."""
    for axis in strategies:
        if axis not in mesh.axis_names:
            raise ArgumentError(
                f"--strategy names the axis {axis!r}, and the mesh has {', '.join(mesh.axis_names)}: use one of these, "
                f"or give --mesh an axis {axis!r}"
            )
