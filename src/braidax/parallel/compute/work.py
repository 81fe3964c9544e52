"""What a step computes, before it is compiled: a loss over passes and feeds, in the global view."""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.parallel.dense.passes import dense_passes, last_behind, summed_once
from braidax.parallel.given.arrays import strong
from braidax.parallel.given.asking import Asking
from braidax.parallel.given.initial import Born
from braidax.parallel.given.loss import Loss
from braidax.parallel.given.optimizer import applied
from braidax.parallel.plan.batch import along_batch
from braidax.parallel.plan.footprint import owners_of, shard_bytes, with_held
from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.plan import Plan, follow, layouts_of, shardings_of
from braidax.parallel.state import State
from braidax.program import (
    Program,
    batch_dims_of_results,
    difference,
    kept_in_blocks,
    named_leaves,
    trace,
    with_leaves,
    with_sums_behind_loops,
    without_leaves,
)

from .accumulate import Runs, all_gradients_of, wide
from .feed import Check, Feed, Reading
from .metrics import BATCH, MetricDims

Evaluate = Callable[[Any, Any, Any, Any, Any, Any], dict[str, Any]]
"""`(params, held, variables, key, step, batch) -> metrics`."""

Reads = Callable[[Any, Any, Any, Any, Any, Any], tuple[Any, dict[str, Any]]]
"""`(params, held, variables, key, step, batch) -> (result, metrics that are checked)`."""

GRAD_NORM = "grad_norm"
"""The metric that tells the global norm of all gradients, if it is asked for."""

_ROWS = BATCH + 1  # behind the arguments of a traced loss: what it is fed


@final
class Work:
    """Pure functions, in the global view; run under the mesh whose shardings they were made with.

    Variables that no feed has lie as the plan says, and the optimizer moves them. With a feed `opt_state` is a dict:
    `"dense"`, the optimizer's state without what the feed keeps, and `"rows"`, that.

    **Arguments:** `born`: traced `key -> Born`. `program`: the loss, from `given.initial.traced_loss`. `feed`: keeps
    some of the variables. `metrics`: that are wanted besides those of the loss: `GRAD_NORM`.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        born: Program,
        program: Program,
        mesh: Mesh,
        plan: Plan,
        feed: Feed | None = None,
        *,
        metrics: Collection[str] = (),
    ) -> None:
        self._loss, self._optimizer, self._feed = loss, optimizer, feed
        self.mesh, self.plan = mesh, plan
        self._born: Born = born.out_specs
        self._wants_norm = GRAD_NORM in metrics
        if self._wants_norm and GRAD_NORM in program.out_specs[1][0]:
            raise ArgumentError(
                f"metrics asks for {GRAD_NORM!r}, and loss_fn {loss.name} returns one: rename that in aux"
            )
        self._replicated = NamedSharding(mesh, PartitionSpec())
        names = [name for name, _ in named_leaves(self._born.params)]
        self.layouts: Mapping[str, Layout] = dict(zip(names, layouts_of(plan), strict=True))
        self._frozen = {name for name, one in zip(names, plan.variables, strict=True) if one.frozen}
        self._of_params = self._dense(jax.tree.unflatten(jax.tree.structure(self._born.params), self.layouts.values()))
        self._of_moved = self._moved(self._of_params)
        self._make, self.initial = born, trace(lambda key: self._first(born(key)), *born.in_specs)
        self._specs: State = self.initial.out_specs
        self._reading = None if feed is None else feed.reading(program, microbatches=plan.microbatches)
        self._program = self._passed(program, self._reading)
        self._in_parts = None
        laid = self._laid_out(self._program, self._reading)
        if plan.microbatches == 1:
            self._program = last_behind(*laid, frozen=self._still)
        elif found := summed_once(*laid, frozen=self._still):
            self._in_parts, self._program = found, found.program
        if mesh.size > 1:  # where devices sum gradients, those of weights in loops behind the loops
            self._program = with_sums_behind_loops(self._program, self._divided(self._reading))
        self._metric_dims = MetricDims(program, microbatches=plan.microbatches)
        others = [] if self._reading is None else self._reading.metrics
        others = [*others, *([GRAD_NORM] if self._wants_norm else [])]
        self.metric_shardings = self._metric_dims.shardings(mesh, plan.batch_axes, others)
        self.state_shardings = self._shardings()
        dense = self._moved(self._dense(self.state_shardings.params))
        self.gradient_shardings = dense if self._reading is None else (dense, self._reading.payload_shardings)
        self.plan = with_held(plan, list(self._held_bytes()))
        self._updated = self._traced_update(program.out_specs[0]) if feed is None else None

    @property
    def checks(self) -> Mapping[str, Check]:
        """Of metrics that are looked at some updates later, and shown to nobody, by name."""
        return {} if self._feed is None else self._feed.checks

    def held(self, opt_state: Any) -> Any:
        """Returns the part of an optimizer's state that gradients and evaluations read."""
        return () if self._feed is None else self._feed.held(opt_state["dense"], opt_state["rows"])

    # An update

    def gradients(self, params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
        """Returns `(gradients, variables, metrics)`; `gradients` is for `apply` alone."""
        key = jax.random.fold_in(key, step)
        dense, stored = self._parted(params)
        dense = _loaded(self._of_params, dense)
        found = functools.partial(
            all_gradients_of, runs=Runs(self._in_parts, self._still), metric_dims=self._metric_dims
        )
        if self._reading is None:
            gradients, _, variables, metrics = found(self._program, dense, variables, key, batch)
            gradients = _stored(self._of_moved, gradients)
            return gradients, variables, {**metrics, **self._norm(gradients)}
        pulled = self._reading.pull(dense, variables, key, batch, stored, held)
        gradients, of_rows, variables, metrics = found(self._program, dense, variables, key, batch, pulled.rows)
        payload, gradients = self._reading.push(pulled.ticket, of_rows), _stored(self._of_moved, gradients)
        metrics = {**metrics, **pulled.metrics, **self._norm(gradients, payload)}
        return (gradients, payload), variables, metrics

    def _norm(self, dense: Any, payload: Any = None) -> dict[str, jax.Array]:
        """Returns the global norm of all gradients, where it is wanted."""
        if not self._wants_norm:
            return {}
        squares = [jnp.sum(jnp.square(wide(leaf))) for leaf in jax.tree.leaves(dense)]
        if self._reading is not None:
            squares.append(self._reading.sum_of_squares(payload))
        return {GRAD_NORM: jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))}

    def apply(self, step: Any, params: Any, opt_state: Any, gradients: Any, loss: Any) -> Any:
        """Returns the next `(step, params, opt_state)`. **Arguments:** `gradients`, `loss`: of `gradients`."""
        if self._feed is None or self._reading is None:
            assert self._updated is not None, "it is traced where there is no feed"
            return self._updated(step, params, opt_state, gradients, loss)
        of_dense, payload = gradients
        whole, stored = self._parted(params)
        moved, dense, stored, kept = self._feed.apply(
            _loaded(self._of_moved, of_dense),
            _loaded(self._of_moved, self._moved(whole)),
            _loaded(self._of_state, opt_state["dense"]),
            payload,
            self._reading,
            stored,
            opt_state["rows"],
            loss,
        )
        params = self._joined(with_leaves(_stored(self._of_moved, moved), whole, self._frozen), stored)
        return step + 1, params, {"dense": _stored(self._of_state, dense), "rows": kept}

    def evaluate(self, batch: Any) -> tuple[Evaluate, Any]:
        """Returns the function that gives the metrics of batches of that form, and where these lie.

        **Arguments:** `batch`: specs.
        """
        born = self._born
        program = self._loss.trace(born.params, born.variables, born.key, batch, train=False, mesh=self.mesh)
        read = self._read_by(program)

        def metrics(*args: Any) -> dict[str, Any]:
            (loss, (metrics, _)), checked = read(*args)
            return {"loss": loss, **metrics, **checked}

        return metrics, MetricDims(program).shardings(self.mesh, self.plan.batch_axes, self.checks)

    def wrapped(self, fn: Asking, batch: Any) -> tuple[Reads, Any]:
        """Returns a function on states and batches of that form, and the shardings of what it gives.

        What descends from the batch is split as the batch is, everything else is on every device.

        **Arguments:** `batch`: specs.
        """
        born, axes = self._born, self.plan.batch_axes
        program = fn.trace(born.params, born.variables, born.key, batch, mesh=self.mesh)
        specs, structure = jax.tree.flatten(program.out_specs)
        pairs = zip(specs, batch_dims_of_results(program, {BATCH: 0}), strict=True)
        shardings = [along_batch(self.mesh, axes, spec.shape, dim) for spec, dim in pairs]
        return self._read_by(program), structure.unflatten(shardings)

    def _read_by(self, program: Program) -> Reads:
        """Returns the function that runs a program, of what a loss takes, on a state."""
        feed = self._feed
        reading = None if feed is None else feed.reading(program)
        passed = self._passed(program, reading)
        others = [] if feed is None or reading is None else [name for name in feed.names if name not in reading.names]
        places = {name: at for at, (name, _) in enumerate(named_leaves(passed.in_specs[0]))}
        run = kept_in_blocks(passed, {places[name]: self.layouts[name].axes_of(0) for name in others})

        def read(params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
            key = jax.random.fold_in(key, step)
            dense, stored = self._parted(params)
            dense = _loaded(self._of_params, dense)
            if feed is None or reading is None:
                return passed(dense, variables, key, batch), {}
            dense = self._joined(dense, {name: feed.whole(name, stored[name], held) for name in others})
            pulled = reading.pull(dense, variables, key, batch, stored, held)
            checked = {name: pulled.metrics[name] for name in feed.checks}
            return run(dense, variables, key, batch, pulled.rows), checked

        return read

    # Other forms of a state

    def settled(self, state: State) -> State:
        """Returns a state in which nothing is put off: each variable is what single-device training has."""
        if self._feed is None:
            return state
        dense, stored = self._parted(state.params)
        stored, kept = self._feed.settled(
            stored, _loaded(self._of_state, state.opt_state["dense"]), state.opt_state["rows"]
        )
        return replace(state, params=self._joined(dense, stored), opt_state={**state.opt_state, "rows": kept})

    def dense_specs(self) -> State:
        """Of a state in the form of single-device training. **Raises:** `ArgumentError` when there is none."""
        opt_state = self._optimizer_specs if self._feed is None else self._feed.dense_state()
        return replace(self._specs, params=self._born.params, opt_state=opt_state, padded=(), shapes=())

    def to_dense(self, state: State) -> State:
        """Returns a state as single-device training has it."""
        state = self.settled(state)
        params = self._whole(state.params)
        if self._feed is None:
            opt_state = _loaded(self._of_state, state.opt_state)
        else:
            of_dense = _loaded(self._of_state, state.opt_state["dense"])
            opt_state = self._feed.joined(of_dense, state.opt_state["rows"])
        return replace(state, params=params, opt_state=opt_state, padded=(), shapes=())

    def _whole(self, params: Any) -> Any:
        """Returns the parameters of a state as single-device training has them."""
        dense, stored = self._parted(params)
        dense = _loaded(self._of_params, dense)
        if self._feed is None:
            return dense
        return self._joined(dense, {name: self._feed.load(name, value) for name, value in stored.items()})

    def from_dense(self, state: State) -> State:
        """Undoes `to_dense`."""
        dense, taken = self._parted(state.params)
        dense = _stored(self._of_params, dense)
        if self._feed is None:
            opt_state = _stored(self._of_state, state.opt_state)
            return replace(state, params=dense, opt_state=opt_state, **self._told)
        stored, of_dense, kept = self._feed.parted(state.opt_state, taken)
        opt_state = {"dense": _stored(self._of_state, of_dense), "rows": kept}
        return replace(state, params=self._joined(dense, stored), opt_state=opt_state, **self._told)

    # How a state is made, and where it lies

    def begun(self, key: Any, params: Any) -> State:
        """Returns a first state, as `initial`, with parameters as a state has them in place of those of `init`."""
        return self._first(self._make(key)._replace(params=self._whole(params)))

    def _first(self, born: Born) -> State:
        step = jnp.zeros((), jnp.int32)
        if self._feed is None:
            opt_state = _stored(self._of_state, strong(self._optimizer.init(self._moved(born.params))))
            return State(step, _stored(self._of_params, born.params), opt_state, born.variables, born.key, **self._told)
        dense, taken = self._parted(born.params)
        stored, of_dense, kept = self._feed.begin(self._moved(born.params), taken)
        opt_state = {"dense": _stored(self._of_state, of_dense), "rows": kept}
        params = self._joined(_stored(self._of_params, dense), stored)
        return State(step, params, opt_state, born.variables, born.key, **self._told)

    @functools.cached_property
    def _told(self) -> Mapping[str, Any]:
        """What a state tells of its leaves: the rows of tables, and the shapes of what is padded otherwise."""
        dense = {"params": self._of_params, "opt_state" if self._feed is None else "opt_state/dense": self._of_state}
        layouts = [one for prefix, tree in dense.items() for one in named_leaves(tree, prefix)]
        shapes = tuple((path, layout.shape) for path, layout in layouts if any(layout.padding))
        return {"padded": () if self._feed is None else tuple(self._feed.padded), "shapes": shapes}

    @functools.cached_property
    def _optimizer_specs(self) -> Any:
        return jax.eval_shape(lambda params: strong(self._optimizer.init(params)), self._moved(self._born.params))

    @functools.cached_property
    def _of_state(self) -> Any:
        """The layouts of what of the optimizer's state is dense."""
        specs = self._optimizer_specs
        if self._feed is not None:
            specs = jax.eval_shape(
                lambda params: self._feed.begin(self._moved(params), self._parted(params)[1])[1],  # pyright: ignore[reportOptionalMemberAccess]
                self._born.params,
            )
        moved = self._moved(self._dense(self._born.params))
        return follow(moved, self._of_moved, specs, lambda spec: Layout.whole(spec.shape))

    def _shardings(self) -> State:
        specs, on = self._specs, functools.partial(jax.tree.map, lambda layout: layout.sharding(self.mesh))
        params = shardings_of(self.plan, self.mesh, self._born.params)
        opt_state = on(self._of_state)
        if self._feed is not None:
            opt_state = {"dense": opt_state, "rows": self._feed.shardings(specs.opt_state["rows"])}
        variables = jax.tree.map(lambda _: self._replicated, specs.variables)
        return State(self._replicated, params, opt_state, variables, self._replicated, **self._told)

    def _held_bytes(self) -> Iterator[tuple[int, int, int]]:
        """Yields for each variable the bytes that a device holds: of it, its gradient, and what the optimizer keeps."""
        shardings, by_rows = self.state_shardings, () if self._feed is None else self._feed.names
        states = named_leaves(self._specs.opt_state)
        kept: Counter[str] = Counter()
        owners = owners_of([path for path, _ in states], self.layouts)
        for owner, (_, spec), sharding in zip(owners, states, jax.tree.leaves(shardings.opt_state), strict=True):
            kept[owner] += shard_bytes(spec, sharding)
        params = jax.tree.leaves(self._specs.params)
        for name, spec, sharding in zip(self.layouts, params, jax.tree.leaves(shardings.params), strict=True):
            own = shard_bytes(spec, sharding)
            yield own, 0 if name in self._frozen or name in by_rows else own, kept[name]

    def _passed(self, program: Program, reading: Reading | None) -> Program:
        """Returns what a program becomes where its weights lie as the plan says."""
        return dense_passes(*self._laid_out(program if reading is None else reading.program, reading))

    def _laid_out(self, program: Program, reading: Reading | None) -> Any:
        """Returns what passes are told of a program."""
        layouts = [self.layouts[name] for name, _ in named_leaves(program.in_specs[0])]
        return program, layouts, self.mesh, self.plan.batch_axes, self._divided(reading)

    def _divided(self, reading: Reading | None) -> dict[int, Any]:
        """Returns which dims of a program's arguments are divided among devices."""
        return {BATCH: 0} if reading is None else {BATCH: 0, _ROWS: reading.batch_dims}

    def _traced_update(self, loss: jax.ShapeDtypeStruct) -> Program:
        specs = self._specs

        def update(step: Any, params: Any, opt_state: Any, gradients: Any, loss: Any) -> Any:
            moved, gradients = (_loaded(self._of_moved, tree) for tree in (self._moved(params), gradients))
            moved, opt_state = applied(self._optimizer, moved, _loaded(self._of_state, opt_state), gradients, loss)
            params = with_leaves(_stored(self._of_moved, moved), params, self._frozen)
            return step + 1, params, _stored(self._of_state, opt_state)

        program = trace(update, specs.step, specs.params, specs.opt_state, self._moved(specs.params), loss)
        check_same_state((specs.step, specs.params, specs.opt_state), program.out_specs)
        return program

    def _moved(self, params: Any) -> Any:
        """Returns the PyTree with None in place of what is frozen."""
        return without_leaves(params, self._frozen) if self._frozen else params

    @property
    def _still(self) -> frozenset[int]:
        """Which leaves, of those that are dense, are frozen."""
        names = [name for name, _ in named_leaves(self._dense(self._born.params))]
        return frozenset(at for at, name in enumerate(names) if name in self._frozen)

    def _dense(self, params: Any) -> Any:
        return self._parted(params)[0]

    def _parted(self, params: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the PyTree with None in place of the feed's variables, and these by name."""
        if self._feed is None:
            return params, {}
        leaves, structure = jax.tree.flatten(params)
        taken = {name: leaf for name, leaf in zip(self.layouts, leaves, strict=True) if name in self._feed.names}
        dense = [None if name in taken else leaf for name, leaf in zip(self.layouts, leaves, strict=True)]
        return jax.tree.unflatten(structure, dense), taken

    def _joined(self, dense: Any, taken: Mapping[str, Any]) -> Any:
        """Undoes `_parted`; variables of the feed that are not given stay away."""
        if self._feed is None:
            return dense
        leaves = iter(jax.tree.leaves(dense))
        values = [taken.get(name) if name in self._feed.names else next(leaves) for name in self.layouts]
        return jax.tree.unflatten(jax.tree.structure(self._born.params), values)


def _loaded(layouts: Any, tree: Any) -> Any:
    return jax.tree.map(lambda layout, leaf: layout.load(leaf), layouts, tree)


def _stored(layouts: Any, tree: Any) -> Any:
    return jax.tree.map(lambda layout, leaf: layout.store(leaf), layouts, tree)


def check_same_state(expected: Any, got: Any) -> None:
    """Raises `ArgumentError` when an optimizer does not give back a state like the one that it was given."""
    if message := difference(expected, got, "state"):
        raise ArgumentError(f"optimizer.update returns another state than optimizer.init made: {message}")
