"""How a step stores a state: what lies where, in which form, and how it becomes that of single-device training."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.parallel.given.arrays import strong
from braidax.parallel.given.initial import Born
from braidax.parallel.plan.footprint import owners_of, shard_bytes
from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.plan import Plan, follow, layouts_of, shardings_of
from braidax.parallel.state import State
from braidax.program import Program, named_leaves, trace, without_leaves

from .feed import Feed


@final
class StateForm:
    """The form of a step's states, as pure functions in the global view.

    Variables that no feed has lie as the plan says. With a feed `opt_state` is a dict: `"dense"`, the optimizer's state
    without what the feed keeps, and `"rows"`, that.

    **Arguments:** `born`: traced `key -> Born`. `feed`: keeps some of the variables.
    """

    def __init__(
        self, optimizer: optax.GradientTransformation, born: Program, mesh: Mesh, plan: Plan, feed: Feed | None
    ) -> None:
        self._optimizer, self._feed, self._mesh, self._plan = optimizer, feed, mesh, plan
        self.born: Born = born.out_specs
        names = [name for name, _ in named_leaves(self.born.params)]
        self.layouts: Mapping[str, Layout] = dict(zip(names, layouts_of(plan), strict=True))
        self.frozen = {name for name, one in zip(names, plan.variables, strict=True) if one.frozen}
        self.of_params = self.dense(jax.tree.unflatten(jax.tree.structure(self.born.params), self.layouts.values()))
        self.of_moved = self.moved(self.of_params)
        self._make, self.initial = born, trace(lambda key: self._first(born(key)), *born.in_specs)
        self.specs: State = self.initial.out_specs
        self.shardings = self._find_shardings()

    def moved(self, params: Any) -> Any:
        """Returns the PyTree with None in place of what is frozen."""
        return without_leaves(params, self.frozen) if self.frozen else params

    @property
    def still(self) -> frozenset[int]:
        """Which leaves, of those that are dense, are frozen."""
        names = [name for name, _ in named_leaves(self.dense(self.born.params))]
        return frozenset(at for at, name in enumerate(names) if name in self.frozen)

    def dense(self, params: Any) -> Any:
        """Returns the PyTree with None in place of the feed's variables."""
        return self.parted(params)[0]

    def parted(self, params: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the PyTree with None in place of the feed's variables, and these by name, as far as it has them."""
        if self._feed is None:
            return params, {}
        structure = jax.tree.structure(self.born.params)
        leaves = structure.flatten_up_to(params)
        pairs, own = [*zip(self.layouts, leaves, strict=True)], self._feed.names
        taken = {name: leaf for name, leaf in pairs if name in own and leaf is not None}
        return jax.tree.unflatten(structure, [None if name in own else leaf for name, leaf in pairs]), taken

    def joined(self, dense: Any, taken: Mapping[str, Any]) -> Any:
        """Undoes `parted`; variables of the feed that are not given stay away."""
        if self._feed is None:
            return dense
        leaves = iter(jax.tree.leaves(dense))
        values = [taken.get(name) if name in self._feed.names else next(leaves) for name in self.layouts]
        return jax.tree.unflatten(jax.tree.structure(self.born.params), values)

    # Other forms of a state

    def settled(self, state: State) -> State:
        """Returns a state in which nothing is put off: each variable is what single-device training has."""
        if self._feed is None:
            return state
        dense, stored = self.parted(state.params)
        stored, kept = self._feed.settled(
            stored, load_tree(self.of_state, state.opt_state["dense"]), state.opt_state["rows"]
        )
        return replace(state, params=self.joined(dense, stored), opt_state={**state.opt_state, "rows": kept})

    def dense_specs(self) -> State:
        """Of a state in the form of single-device training. **Raises:** `ArgumentError` when there is none."""
        opt_state = self.optimizer_specs if self._feed is None else self._feed.dense_state()
        return replace(self.specs, params=self.born.params, opt_state=opt_state, padded=(), shapes=())

    def to_dense(self, state: State) -> State:
        """Returns a state as single-device training has it."""
        state = self.settled(state)
        params = self._whole(state.params)
        if self._feed is None:
            opt_state = load_tree(self.of_state, state.opt_state)
        else:
            of_dense = load_tree(self.of_state, state.opt_state["dense"])
            opt_state = self._feed.joined(of_dense, state.opt_state["rows"])
        return replace(state, params=params, opt_state=opt_state, padded=(), shapes=())

    def _whole(self, params: Any) -> Any:
        """Returns the parameters of a state as single-device training has them."""
        dense, stored = self.parted(params)
        dense = load_tree(self.of_params, dense)
        if self._feed is None:
            return dense
        return self.joined(dense, {name: self._feed.load(name, value) for name, value in stored.items()})

    def from_dense(self, state: State) -> State:
        """Undoes `to_dense`."""
        dense, taken = self.parted(state.params)
        dense = store_tree(self.of_params, dense)
        if self._feed is None:
            opt_state = store_tree(self.of_state, state.opt_state)
            return replace(state, params=dense, opt_state=opt_state, **self._told)
        stored, of_dense, kept = self._feed.parted(state.opt_state, taken)
        opt_state = {"dense": store_tree(self.of_state, of_dense), "rows": kept}
        return replace(state, params=self.joined(dense, stored), opt_state=opt_state, **self._told)

    # How a state is made, and where it lies

    def begun(self, key: Any, params: Any) -> State:
        """Returns a first state, as `initial`, with parameters as a state has them in place of those of `init`."""
        return self._first(self._make(key)._replace(params=self._whole(params)))

    def _first(self, born: Born) -> State:
        step = jnp.zeros((), jnp.int32)
        if self._feed is None:
            opt_state = store_tree(self.of_state, strong(self._optimizer.init(self.moved(born.params))))
            return State(
                step, store_tree(self.of_params, born.params), opt_state, born.variables, born.key, **self._told
            )
        dense, taken = self.parted(born.params)
        stored, of_dense, kept = self._feed.begin(self.moved(born.params), taken)
        opt_state = {"dense": store_tree(self.of_state, of_dense), "rows": kept}
        params = self.joined(store_tree(self.of_params, dense), stored)
        return State(step, params, opt_state, born.variables, born.key, **self._told)

    @functools.cached_property
    def _told(self) -> Mapping[str, Any]:
        """What a state tells of its leaves: the rows of tables, and the shapes of what is padded otherwise."""
        dense = {"params": self.of_params, "opt_state" if self._feed is None else "opt_state/dense": self.of_state}
        layouts = [one for prefix, tree in dense.items() for one in named_leaves(tree, prefix)]
        shapes = tuple((path, layout.shape) for path, layout in layouts if any(layout.padding))
        return {"padded": () if self._feed is None else tuple(self._feed.padded), "shapes": shapes}

    @functools.cached_property
    def optimizer_specs(self) -> Any:
        """Of the optimizer's state in single-device training."""
        return jax.eval_shape(lambda params: strong(self._optimizer.init(params)), self.moved(self.born.params))

    @functools.cached_property
    def of_state(self) -> Any:
        """The layouts of what of the optimizer's state is dense."""
        specs = self.optimizer_specs
        if self._feed is not None:
            specs = jax.eval_shape(
                lambda params: self._feed.begin(self.moved(params), self.parted(params)[1])[1],  # pyright: ignore[reportOptionalMemberAccess]
                self.born.params,
            )
        moved = self.moved(self.dense(self.born.params))
        return follow(moved, self.of_moved, specs, lambda spec: Layout.whole(spec.shape))

    def _find_shardings(self) -> State:
        specs, replicated = self.specs, NamedSharding(self._mesh, PartitionSpec())
        on = functools.partial(jax.tree.map, lambda layout: layout.sharding(self._mesh))
        params = shardings_of(self._plan, self._mesh, self.born.params)
        if len(jax.tree.leaves(specs.params)) < len(self.layouts):  # a feed has its variables elsewhere
            params = self.dense(params)
        opt_state = on(self.of_state)
        if self._feed is not None:
            opt_state = {"dense": opt_state, "rows": self._feed.shardings(specs.opt_state["rows"])}
        variables = jax.tree.map(lambda _: replicated, specs.variables)
        return State(replicated, params, opt_state, variables, replicated, **self._told)

    def held_bytes(self) -> Iterator[tuple[int, int, int]]:
        """Yields for each variable the bytes that a device holds: of it, its gradient, and what the optimizer keeps."""
        shardings, by_rows = self.shardings, () if self._feed is None else self._feed.names
        states = named_leaves(self.specs.opt_state)
        kept: Counter[str] = Counter()
        owners = owners_of([path for path, _ in states], self.layouts)
        for owner, (_, spec), sharding in zip(owners, states, jax.tree.leaves(shardings.opt_state), strict=True):
            kept[owner] += shard_bytes(spec, sharding)
        params = dict(named_leaves(self.specs.params))
        lies = dict(zip(params, jax.tree.leaves(shardings.params), strict=True))
        for name in self.layouts:
            own = shard_bytes(params[name], lies[name]) if name in params else 0
            yield own, 0 if name in self.frozen or name in by_rows else own, kept[name]


def load_tree(layouts: Any, tree: Any) -> Any:
    """Returns leaves as a loss has them. **Arguments:** `layouts`: PyTree of `Layout`."""
    return jax.tree.map(lambda layout, leaf: layout.load(leaf), layouts, tree)


def store_tree(layouts: Any, tree: Any) -> Any:
    """Returns leaves as a state has them. **Arguments:** `layouts`: PyTree of `Layout`."""
    return jax.tree.map(lambda layout, leaf: layout.store(leaf), layouts, tree)
