"""`State`: everything that an update changes."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that an update changes; a PyTree.

    `step`: int32 scalar, updates done. `params`, `opt_state`: PyTrees. `variables`: what the loss changes besides
    (BatchNorm statistics), `{}` when it asks for none. `key`: the PRNG key that the keys of all steps come from.
    """

    step: Any
    params: Any
    opt_state: Any
    variables: Any
    key: Any
