"""The user's loss, read by its signature and traced into one shape: `(loss, (metrics, variables))`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from braidax.errors import ArgumentError, StateError
from braidax.program import Program, call_watched, difference, named_leaves, specs_of, trace

ASKABLE = ("key", "variables", "train")


class Loss:
    """A single-device loss and what it asks for by name.

    **Arguments:** `fn`: `loss_fn(params, batch) -> loss` or `(loss, aux)`, with any of the parameters `key`,
    `variables` and `train` behind.

    **Raises:** `ArgumentError` when it asks for anything else.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self.asks = self._read_signature()

    def trace(self, params: Any, variables: Any, key: Any, batch: Any, *, train: bool) -> Program:
        """Traces `(params, variables, key, batch) -> (loss, (metrics, variables))`.

        **Arguments:** PyTrees of arrays or specs. `train`: what a loss that asks for `train` is told.

        **Raises:** `ArgumentError` or `StateError` when the loss returns what it may not, or changes an argument.
        """

        def whole(params: Any, variables: Any, key: Any, batch: Any) -> Any:
            answers = {"key": key, "variables": variables, "train": train}
            named = {name: answers[name] for name in ASKABLE if name in self.asks}
            watched = {"params": params, "batch": batch}
            result = call_watched(lambda: self.fn(params, batch, **named), self.name, watched)
            return self._checked(result, expected, train)

        expected = specs_of(variables)
        return trace(whole, params, variables, key, batch)

    def _read_signature(self) -> frozenset[str]:
        try:
            parameters = list(inspect.signature(self.fn).parameters.values())
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"loss_fn {self.name} has no signature to read ({error}): wrap it in a def") from error
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
        if len(positional) < 2 and not any(p.kind == p.VAR_POSITIONAL for p in positional):
            raise ArgumentError(
                f"loss_fn {self.name} takes {[p.name for p in parameters]}, expected loss_fn(params, batch) and "
                f"perhaps, by name, {', '.join(ASKABLE)}"
            )
        rest = parameters[2:]
        for parameter in rest:
            optional = parameter.default is not parameter.empty or parameter.kind in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if (parameter.name not in ASKABLE or parameter.kind == parameter.POSITIONAL_ONLY) and not optional:
                raise ArgumentError(
                    f"loss_fn {self.name} asks for the parameter {parameter.name!r}, expected any of "
                    f"{', '.join(ASKABLE)} by name: bind others before, with functools.partial or a closure"
                )
        return frozenset(p.name for p in rest if p.name in ASKABLE)

    def _checked(self, result: Any, expected: Any, train: bool) -> Any:
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(aux, Mapping):
            raise ArgumentError(f"loss_fn {self.name} returned aux of type {type(aux).__name__}, expected a dict")
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
