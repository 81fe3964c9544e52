"""Functions that run on the states of a step: `Wrapped`, and of a decorated one `WrappedCall`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .state import State


@dataclass(frozen=True)
class Wrapped:
    """A function of a state and a batch, compiled for the states of a step; `Step.wrap` makes it.

    **Fields:** `batch_shardings`, `out_shardings`: PyTrees of shardings, of what goes in and comes out.
    """

    run: Callable[[State, Any], Any]
    lowered: Callable[[], jax.stages.Lowered]
    batch_shardings: Any
    out_shardings: Any

    def __call__(self, state: State, batch: Any) -> Any:
        """Computes what the function returns; the state is neither changed nor given up. Returns at once.

        **Arguments:** `batch`: PyTree as `wrap` was told, of global arrays or of host arrays that are copied.

        **Raises:** `ArgumentError` when state or batch are not like the ones it was made for. `DataError` as `update`.
        """
        return self.run(state, batch)

    def lower(self) -> jax.stages.Lowered:
        """Lowers the function for inspection or export, from shapes alone; its program gives what is checked, too."""
        return self.lowered()


@dataclass(frozen=True)
class WrappedCall:
    """A function that reads the state of a decorated step; `TrainStep.wrap` makes it."""

    run: Callable[..., Any]
    lowered: Callable[..., jax.stages.Lowered]

    def __call__(self, *args: Any) -> Any:
        """Computes what the function returns; the state is neither changed nor given up. Returns at once.

        **Arguments:** `args`: as of the function: states as the step gives them, samples global or on the host. Each
        form of them is traced and compiled once.

        **Raises:** `ArgumentError`, `SpecError` or `StateError` naming what does not fit. `DataError` as `update`.
        """
        return self.run(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function for inspection or export; its program takes flat lists, and gives what is checked, too.

        **Arguments:** `args`: as of a call, or `jax.ShapeDtypeStruct` in place of arrays.
        """
        return self.lowered(*args)
