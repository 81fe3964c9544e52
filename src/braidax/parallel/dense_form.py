"""A state with tables by rows as single-device training has it, and back.

An optimizer of one array has a state of leaves like the array, and of scalars. In the state of a whole tree of
parameters the former stand at the path of the leaf followed by that of the parameter, the latter at the same path.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from braidax.program import join, named_leaves

from .packing import Table
from .rows import RowState

Form = list[tuple[str, bool]]
"""The leaves of the state that an optimizer has of one array: path, and whether it is like the array."""


def form_of(optimizer: optax.GradientTransformation) -> Form:
    """Returns the form of an elementwise optimizer's state."""
    state = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((3, 5), jnp.float32))
    return [(path, bool(leaf.shape)) for path, leaf in named_leaves(state)]


def joined_state(
    form: Form, whole: Any, dense: Any, states: Mapping[str, RowState], tables: Mapping[str, Table]
) -> Any:
    """Puts what is kept of tables into the state of the dense variables.

    **Arguments:** `whole`: the PyTree of specs that the optimizer's `init` gives for all parameters. `dense`: its state
    of those that are no tables. `states`: of the tables, none of whose rows lags behind. `tables`: by name.

    **Returns:** a PyTree like `whole`.
    """
    leaves = dict(named_leaves(dense))
    for name, table in tables.items():
        alike = [leaf for leaf in jax.tree.leaves(states[name].rows) if leaf.ndim > 2]
        paths = [join(path, name) for path, is_array in form if is_array]
        leaves |= {path: table.whole(leaf) for path, leaf in zip(paths, alike, strict=True)}
    return jax.tree.unflatten(jax.tree.structure(whole), [leaves[path] for path, _ in named_leaves(whole)])


def parted_state(form: Form, whole: Any, dense: Any, tables: Mapping[str, Table]) -> tuple[Any, dict[str, RowState]]:
    """Undoes `joined_state`. **Arguments:** `whole`: the state. `dense`: specs of that of the dense variables."""
    leaves = dict(named_leaves(whole))
    states: dict[str, RowState] = {}
    scalars = tuple(leaves[path] for path, is_array in form if not is_array)
    for name, table in tables.items():
        going_on: Callable[..., RowState] | None = table.optimizer.going_on
        assert going_on is not None, "checked before"
        arrays = tuple(table.stored(leaves[join(path, name)]) for path, is_array in form if is_array)
        states[name] = going_on(arrays, scalars)
    return jax.tree.unflatten(jax.tree.structure(dense), [leaves[path] for path, _ in named_leaves(dense)]), states
