"""A function of parameters and a batch, and what else it asks for by name."""

import inspect
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.program import Program, call_watched, named_leaves, trace_constrained

ASKABLE = ("key", "variables", "train")


class Asking:
    """A single-device function `fn(params, batch)` with any of the parameters `key`, `variables` and `train` behind.

    **Arguments:** `role`: the name of the parameter by which it was given.

    **Raises:** `ArgumentError` when it asks for anything else.
    """

    def __init__(self, fn: Callable[..., Any], role: str) -> None:
        self._fn, self._role = fn, role
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self.asks = self._read_signature()

    def __call__(self, params: Any, variables: Any, key: Any, batch: Any, *, train: bool) -> Any:
        """Calls it. **Raises:** `StateError` when it changes an argument in place."""
        answers = {"key": key, "variables": variables, "train": train}
        named = {name: answers[name] for name in ASKABLE if name in self.asks}
        return call_watched(lambda: self._fn(params, batch, **named), self.name, {"params": params, "batch": batch})

    def trace(self, params: Any, variables: Any, key: Any, batch: Any, *, mesh: Mesh | None = None) -> Program:
        """Traces `(params, variables, key, batch) -> result`, with `train=False`.

        **Arguments:** `mesh`: as of `Loss.trace`.

        **Raises:** `ArgumentError` when it returns what is no array, or nothing. `SpecError` as `trace_constrained`.
        """

        def whole(params: Any, variables: Any, key: Any, batch: Any) -> Any:
            result = self(params, variables, key, batch, train=False)
            leaves = named_leaves(result, "result")
            if not leaves:
                raise ArgumentError(f"{self._role} {self.name} returned {result!r}, expected a PyTree of arrays")
            for path, leaf in leaves:
                if not isinstance(leaf, float | int | complex) and not hasattr(leaf, "dtype"):
                    raise ArgumentError(f"{self._role} {self.name} returned {path} = {leaf!r}, expected an array")
            return result

        return trace_constrained(whole, params, variables, key, batch, mesh=mesh, told=f"{self._role} {self.name}")

    def _read_signature(self) -> frozenset[str]:
        role = self._role
        try:
            parameters = list(inspect.signature(self._fn).parameters.values())
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{role} {self.name} has no signature to read ({error}): wrap it in a def") from error
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
        if len(positional) < 2 and not any(p.kind == p.VAR_POSITIONAL for p in positional):
            raise ArgumentError(
                f"{role} {self.name} takes {[p.name for p in parameters]}, expected {role}(params, batch) and "
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
                    f"{role} {self.name} asks for the parameter {parameter.name!r}, expected any of "
                    f"{', '.join(ASKABLE)} by name: bind others before, with functools.partial or a closure"
                )
        return frozenset(p.name for p in rest if p.name in ASKABLE)
