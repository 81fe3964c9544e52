"""`ParameterServers`: all variables are on servers, and workers that each have a JAX of their own train them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from braidax.errors import ArgumentError
from braidax.parallel.rows import RowOptimizer
from braidax.parallel.rows.touched import Touched

from .layout import Axis, Layout
from .model import Model
from .placements import Placement, Replicated, Served, Wire
from .strategies import Hybrid
from .strategy import Choice, Strategy, shown


@dataclass(frozen=True, repr=False)
class ParameterServers:
    """Servers have every variable and move it; each worker pulls what its batch reads, and pushes its gradients.

    Workers are processes that each have a JAX of their own, with the devices along the axis; nothing is all-reduced
    among them. Tables that the loss reads by rows only lie on all servers by rows, any other variable whole on one.
    What servers take is the mean of the gradients that workers have of their batches.

    **Arguments:** `staleness`: 0, an update takes the gradients of all workers, and each waits for it (synchronous:
    equal to single-device training with as many microbatches). A number: the same, and a worker may read what lacks so
    many updates (bounded; stale synchronous parallel, Ho et al. 2013). None: a worker's gradients are an update by
    themselves, and nobody waits for anybody (asynchronous). `copies`, `wire`: as of `Served`. `spares`: how many
    servers have nothing until `WorkerStep.resize` wants them, or one is lost. `overrides`, `row_optimizers`, `touched`,
    `out_of_range`: as of `Hybrid`.
    """

    staleness: int | None = 0
    copies: int = 1
    overrides: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    row_optimizers: Mapping[str, RowOptimizer] = field(default_factory=dict[str, RowOptimizer])
    touched: Mapping[str, Touched] = field(default_factory=dict[str, Touched])
    out_of_range: Literal["as jax", "raise"] = "as jax"
    wire: Wire | None = None
    spares: int = 0

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise ArgumentError(
                f"staleness={self.staleness}: expected a number of updates, 0 or more, or None for no bound"
            )
        self.by_rows()  # checks all else

    def __repr__(self) -> str:
        return shown(self)

    @property
    def splits_batch(self) -> bool:
        """True."""
        return True

    def by_rows(self) -> Hybrid:
        """Returns the strategy that places tables alike, on servers, and knows how their rows move."""
        return Hybrid(
            overrides=self.overrides,
            row_optimizers=self.row_optimizers,
            touched=self.touched,
            out_of_range=self.out_of_range,
            tables=Served(copies=self.copies, wire=self.wire, spares=self.spares),
        )

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> dict[str, Choice]:
        """Chooses `Served` where that is less than a whole gradient; all else workers have whole while they compute.

        **Raises:** as `Hybrid.place`.
        """
        found = self.by_rows().place(model, axis, taken)
        return {path: _in_words(choice) for path, choice in found.items()}


def _in_words(choice: Choice) -> Choice:
    """Says of a variable that is replicated that a server has it."""
    if not isinstance(choice.placement, Replicated):
        return choice
    why = choice.why.removeprefix("hybrid: ").removesuffix(": gradient all-reduced")
    return replace(choice, why=f"parameter servers: {why}: whole on a server")


def over_rows(strategies: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """Returns strategies with `by_rows` in place of parameter servers, for who asks how rows move."""
    return {axis: one.by_rows() if isinstance(one, ParameterServers) else one for axis, one in strategies.items()}


def parameter_servers(strategies: Mapping[str, Strategy]) -> ParameterServers | None:
    """Returns the strategy by which all variables are on servers, if there is one.

    **Raises:** `ArgumentError` where another axis has a strategy besides.
    """
    found = [one for one in strategies.values() if isinstance(one, ParameterServers)]
    if found and len(strategies) > 1:
        raise ArgumentError(
            f"strategies has ParameterServers and {len(strategies) - 1} more: expected it alone, on a mesh with one "
            f"axis of a worker's own devices"
        )
    return found[0] if found else None
