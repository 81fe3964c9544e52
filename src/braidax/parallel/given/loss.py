"""The user's loss, read by its signature and traced into one shape: `(loss, (metrics, variables))`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from braidax.errors import ArgumentError, StateError
from braidax.program import Program, difference, named_leaves, specs_of, trace_constrained

from .asking import Asking


class Loss:
    """A single-device loss and what it asks for by name.

    **Arguments:** `fn`: `loss_fn(params, batch) -> loss` or `(loss, aux)`, with any of the parameters `key`,
    `variables` and `train` behind. What aux holds by name are metrics; aux that is no dict is the metric "aux".

    **Raises:** `ArgumentError` when it asks for anything else.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._call = Asking(fn, "loss_fn")
        self.name, self.asks = self._call.name, self._call.asks

    def trace(
        self, params: Any, variables: Any, key: Any, batch: Any, *, train: bool, mesh: Mesh | None = None
    ) -> Program:
        """Traces `(params, variables, key, batch) -> (loss, (metrics, variables))`.

        **Arguments:** PyTrees of arrays or specs. `train`: what a loss that asks for `train` is told. `mesh`: on which
        it may constrain how values lie, if any is known.

        **Raises:** `ArgumentError` or `StateError` when the loss returns what it may not, or changes an argument.
        `SpecError` as `trace_constrained`.
        """

        def whole(params: Any, variables: Any, key: Any, batch: Any) -> Any:
            return self._checked(self._call(params, variables, key, batch, train=train), expected, train)

        expected = specs_of(variables)
        return trace_constrained(whole, params, variables, key, batch, mesh=mesh, told=f"loss_fn {self.name}")

    def _checked(self, result: Any, expected: Any, train: bool) -> Any:
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        aux = aux if isinstance(aux, Mapping) else {} if aux is None else {"aux": aux}
        if not _is_float_scalar(loss):
            found = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, jax.Array) else type(loss).__name__
            raise ArgumentError(
                f"loss_fn {self.name} returned a loss that is {found}, expected a floating-point scalar: take the mean "
                f"or the sum over the batch"
            )
        if "loss" in aux:
            raise ArgumentError(
                f"loss_fn {self.name} returned aux['loss'], which is where the loss itself goes: rename"
            )
        metrics = {name: value for name, value in aux.items() if name != "variables"}
        for path, leaf in named_leaves(metrics, "aux"):
            if not isinstance(leaf, float | int) and not hasattr(leaf, "dtype"):
                raise ArgumentError(f"loss_fn {self.name} returned {path} = {leaf!r}, expected an array or a number")
        return jnp.asarray(loss), (metrics, self._new_variables(aux, expected, train))

    def _new_variables(self, aux: Mapping[str, Any], expected: Any, train: bool) -> Any:
        if "variables" not in self.asks:
            if "variables" in aux:
                raise ArgumentError(
                    f"loss_fn {self.name} returned aux['variables'] and has no parameter `variables`: add it, so that "
                    f"they come back at the next step, or rename the metric"
                )
            return {}
        if not train:
            return {}
        if "variables" not in aux:
            raise StateError(
                f"loss_fn {self.name} asks for `variables` and does not return new ones: return "
                f"(loss, {{'variables': …}}), the old ones if nothing has changed"
            )
        if message := difference(expected, specs_of(aux["variables"]), "variables"):
            raise StateError(f"loss_fn {self.name} returned other variables than it was given: {message}")
        return jax.tree.unflatten(jax.tree.structure(expected), jax.tree.leaves(aux["variables"]))


def _is_float_scalar(value: Any) -> bool:
    if isinstance(value, float):
        return True
    return isinstance(value, jax.Array) and not value.shape and jnp.issubdtype(value.dtype, jnp.floating)
