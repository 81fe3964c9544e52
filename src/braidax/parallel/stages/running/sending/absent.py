"""Arrays that lie with other processes: this one knows their form, and passes them on like any."""

from collections.abc import Callable
from typing import Any, final

import jax
from jax.sharding import AbstractMesh, Sharding

from braidax.program import trace


def absent(spec: Any, sharding: Sharding) -> jax.Array:
    """Returns an array of which nothing is here. **Arguments:** `sharding`: over devices of other processes."""
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, [], dtype=spec.dtype)


@final
class AbsentProgram:
    """What other processes run: of what it is given it makes absent arrays, of the form that theirs have.

    **Arguments:** `fn`: pure, called with arrays of one form only. `outs`: shardings of its result, or a prefix.
    `mesh`: under which it is traced.
    """

    def __init__(self, fn: Callable[..., Any], outs: Any, mesh: AbstractMesh) -> None:
        self._fn, self._outs, self._mesh, self._made = fn, outs, mesh, None

    def __call__(self, *args: Any) -> Any:
        """Returns the result, the same one each time."""
        if self._made is None:
            specs = trace(self._fn, *args, mesh=self._mesh).out_specs
            on = jax.tree.broadcast(self._outs, specs)
            self._made = jax.tree.map(absent, specs, on)
        return self._made
