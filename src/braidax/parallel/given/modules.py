"""Objects of Flax NNX and of Equinox in a state. The only place that knows these libraries, and it imports neither:
who has objects of them has imported them."""

import sys
from collections.abc import Mapping
from typing import Any

import jax

from braidax.errors import StateError


def holds_nnx(tree: Any) -> bool:
    """Whether a PyTree holds objects of Flax NNX, which change in place."""
    kinds = _kinds()
    leaves = jax.tree.leaves(tree, is_leaf=lambda one: isinstance(one, kinds)) if kinds else []
    return any(isinstance(leaf, kinds) for leaf in leaves)


def is_equinox(one: Any) -> bool:
    """Whether something is a module of Equinox, which may have leaves that are no arrays."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(one, equinox.Module)


@jax.tree_util.register_pytree_with_keys_class
class Graph:
    """Objects of NNX taken apart: their arrays by the name of the argument, and the `graph` that they stand in."""

    def __init__(self, graph: Any, states: Mapping[str, Any]) -> None:
        self.graph, self.states = graph, dict(states)

    @classmethod
    def of(cls, objects: Mapping[str, Any]) -> "Graph":
        """Takes objects apart, what several arguments share once."""
        graph, states = sys.modules["flax.nnx"].split(dict(objects))
        return cls(graph, {name: states[name] for name in sorted(objects) if name in states})

    def objects(self) -> dict[str, Any]:
        """Puts new objects together."""
        nnx = sys.modules["flax.nnx"]
        return nnx.merge(self.graph, nnx.State(self.states))

    def update(self, objects: Mapping[str, Any]) -> None:
        """Gives the arrays to objects, in place."""
        nnx = sys.modules["flax.nnx"]
        nnx.update(dict(objects), nnx.State(self.states))

    def after(self, objects: Mapping[str, Any], caller: str) -> "Graph":
        """Takes objects apart that a step has changed. **Raises:** `StateError` when not only arrays have changed."""
        found = Graph.of(objects)
        if found.graph != self.graph:
            raise StateError(
                f"{caller} changed more of {', '.join(objects)} than arrays: what a module consists of stays as it is "
                f"from step to step; make variables before the first step"
            )
        return found

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """For JAX."""
        keyed = [(jax.tree_util.DictKey(name), state) for name, state in self.states.items()]
        return keyed, (self.graph, tuple(self.states))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Graph":
        """For JAX."""
        graph, names = aux
        return cls(graph, dict(zip(names, children, strict=True)))


def _kinds() -> tuple[type, ...]:
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Module, nnx.Optimizer, nnx.Rngs, nnx.Metric)
