"""How a decorated function takes its state and its batch, and gives the state back."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from braidax.errors import ArgumentError, StateError
from braidax.program import call_watched, difference, named_leaves, specs_of

from .modules import Graph, holds_nnx, is_equinox


@jax.tree_util.register_static
@dataclass(frozen=True)
class Held:
    """A leaf that is no array, such as a function: part of the structure."""

    value: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class Slot:
    """Where a result is an argument: which one."""

    name: str


class Taken(NamedTuple):
    """Arguments, apart.

    **Fields:** `state`, `batch`: PyTrees of arrays. `call`: what is traced, `(state, batch) -> (state, shown)`, all
    PyTrees of arrays. `give`: makes of a new state and what is shown the result of the call.
    """

    state: Any
    batch: Any
    call: Callable[[Any, Any], tuple[Any, Any]]
    give: Callable[[Any, Any], Any]


class Calling:
    """A function that takes a training step, and which of its parameters are samples.

    **Arguments:** `fn`: `fn(state, batch) -> (state, metrics)`; with `batch`, names of parameters, the others are the
    state, and they come back in their order, before all metrics or behind them. Objects of Flax NNX change in place,
    and need not come back; the other parameters are samples.
    """

    def __init__(self, fn: Callable[..., Any], batch: Sequence[str] | None) -> None:
        self.fn = fn
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self._batch = None if batch is None else tuple(batch)
        try:
            self._names = [*inspect.signature(fn).parameters]
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{self.name} has no signature to read ({error}): wrap it in a def") from error
        if unknown := [name for name in self._batch or () if name not in self._names]:
            raise ArgumentError(
                f"batch names {unknown[0]!r}, and {self.name} has the parameters {', '.join(self._names)}: name those "
                f"that are samples"
            )

    def take(self, args: Sequence[Any]) -> Taken:
        """Takes arguments apart. **Raises:** `ArgumentError` when nothing says which are samples."""
        names = self._names[: len(args)] if len(args) <= len(self._names) else [f"{at}" for at in range(len(args))]
        given = dict(zip(names, args, strict=True))
        in_place = {name: one for name, one in given.items() if holds_nnx(one)}
        samples = self._batch or tuple(name for name in given if in_place and name not in in_place)
        if not samples and len(args) != 2:
            raise ArgumentError(
                f"{self.name} was called with {len(args)} arguments, expected (state, batch): say which are samples, "
                f"@bx.parallelize(mesh, strategies, batch=({names[-1]!r},))"
            )
        if not samples:
            return Taken(held(args[0]), args[1], self._plain, lambda state, metrics: (released(state), metrics))
        kept = {name: one for name, one in given.items() if name not in samples}
        batch = {name: one for name, one in given.items() if name in samples}
        if in_place:
            return self._of_objects(kept, batch, names)
        return Taken(
            held(kept),
            batch,
            lambda state, batch: self._named(names, state, batch),
            lambda state, shown: _filled(released(state), shown),
        )

    def take_to_read(self, fn: Callable[..., Any], args: Sequence[Any]) -> Taken:
        """Takes arguments apart of a function that reads states of this one.

        It is called as this one is, or with less: `fn(state, batch)`, `fn(state)`; by name, where `batch` names samples
        here; objects of Flax NNX are state. `call` gives `(None, what the function returns)`, and `give` that.

        **Raises:** `ArgumentError` when nothing says what the arguments are.
        """
        other = Calling(fn, None)
        names = other._names[: len(args)] if len(args) <= len(other._names) else [f"{at}" for at in range(len(args))]
        given = dict(zip(names, args, strict=True))
        if any(map(holds_nnx, args)):
            state = {name: one for name, one in given.items() if holds_nnx(one)}
        elif self._batch is not None:
            state = {name: one for name, one in given.items() if name in self._names and name not in self._batch}
        elif len(args) in (1, 2):
            first, *rest = args
            return Taken(held(first), tuple(rest), lambda state, batch: (None, fn(released(state), *batch)), _second)
        else:
            state = dict[str, Any]()
        if not state:
            raise ArgumentError(
                f"{other.name} was called with {len(args)} arguments ({', '.join(names)}), none of which is state of "
                f"{self.name}: expected (state, batch), or parameters with the names of its own"
            )
        batch = {name: one for name, one in given.items() if name not in state}
        if any(map(holds_nnx, args)):
            return Taken(Graph.of(state), batch, partial(_read_objects, other, names), _second)
        return Taken(
            held(state),
            batch,
            lambda state, batch: (None, fn(*({**released(state), **batch}[name] for name in names))),
            _second,
        )

    def _plain(self, state: Any, batch: Any) -> tuple[Any, Any]:
        def new_state(result: Any) -> Any:
            return result[0] if isinstance(result, tuple) else result  # pyright: ignore[reportUnknownVariableType]

        state = released(state)
        watched = {"state": state, "batch": batch}
        result = call_watched(lambda: self.fn(state, batch), self.name, watched, keeps=new_state)
        if not isinstance(result, tuple) or len(result) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise ArgumentError(f"{self.name} returned {type(result).__name__}, expected (state, metrics)")
        return held(result[0]), result[1]

    def _named(self, names: Sequence[str], state: Any, batch: Any) -> tuple[Any, Any]:
        given = {**released(state), **batch}
        result = call_watched(lambda: self.fn(*(given[name] for name in names)), self.name, given, keeps=lambda x: x)
        order = [name for name in names if name in state]
        results, count = list(result) if isinstance(result, tuple) else [result], len(order)
        unlike: list[str] = []
        for first in (0, len(results) - count):
            found = dict(zip(order, map(held, results[max(first, 0) :]), strict=False))
            message = difference(specs_of(state), specs_of(found), "state")
            if message is None:
                results[first : first + count] = map(Slot, order)
                return found, tuple(results)
            unlike.append(message)
        raise StateError(
            f"{self.name} returned {len(results)} results, and neither the first {count} nor the last are its state, "
            f"{', '.join(order)}, in this order: of the first {unlike[0]}; of the last {unlike[1]}"
        )

    def _of_objects(self, kept: dict[str, Any], batch: Any, names: Sequence[str]) -> Taken:
        def call(state: Graph, batch: Any) -> tuple[Any, Any]:
            objects = state.objects()
            known = {id(one): Slot(name) for name, one in objects.items()}
            given = {**objects, **batch}
            result = call_watched(lambda: self.fn(*(given[name] for name in names)), self.name, batch)
            shown = jax.tree.map(lambda one: known.get(id(one), one), result, is_leaf=lambda one: id(one) in known)
            return state.after(objects, self.name), shown

        def give(state: Graph, shown: Any) -> Any:
            state.update(kept)
            return _filled(kept, shown)

        return Taken(Graph.of(kept), batch, call, give)


def _read_objects(calling: Calling, names: Sequence[str], state: Graph, batch: Any) -> tuple[None, Any]:
    objects = state.objects()
    before = named_leaves(state, "state")
    result = calling.fn(*({**objects, **batch}[name] for name in names))
    after = dict(named_leaves(state.after(objects, calling.name), "state"))
    if changed := next((path for path, leaf in before if after.get(path) is not leaf), None):
        raise StateError(
            f"{changed} was changed by {calling.name}, which reads the state, and the change would be lost: call "
            f"model.eval() before, or do it in the step"
        )
    return None, result


def _second(_: Any, shown: Any) -> Any:
    return shown


def held(tree: Any) -> Any:
    """Makes functions, and what Equinox modules hold beside arrays, part of the structure of a PyTree."""
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
        return tree

    def hold(one: Any) -> Any:
        if is_equinox(one):
            return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else Held(leaf), one)
        return Held(one) if callable(one) and not hasattr(one, "dtype") else one

    return jax.tree.map(hold, tree, is_leaf=is_equinox)


def released(tree: Any) -> Any:
    """Undoes `held`."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, Held) else leaf, tree, is_leaf=lambda one: isinstance(one, Held)
    )


def _filled(state: Any, shown: Any) -> Any:
    return jax.tree.map(
        lambda one: state[one.name] if isinstance(one, Slot) else one, shown, is_leaf=lambda one: isinstance(one, Slot)
    )
