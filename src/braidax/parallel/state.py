"""`State`: everything that an update changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that an update changes; a PyTree.

    `step`: int32 scalar, updates done. `params`, `opt_state`: PyTrees. `variables`: what the loss changes besides
    (BatchNorm statistics), `{}` when it asks for none. `key`: the PRNG key that the keys of all steps come from.
    `tables`: of the leaves that are stored by rows, `[ceil(V / N), N, ...]`, the path and V.
    """

    step: Any
    params: Any
    opt_state: Any
    variables: Any
    key: Any
    tables: tuple[tuple[str, int], ...] = field(default=(), metadata={"static": True})

    @property
    def padded_rows(self) -> Mapping[str, int]:
        """`tables` as a checkpoint asks for them, so that they can be restored to another N."""
        return dict(self.tables)
