"""What a step computes, before it is compiled: a loss over passes and feeds, in the global view."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.parallel.dense.passes import dense_passes, last_behind, summed_once
from braidax.parallel.given.asking import Asking
from braidax.parallel.given.loss import Loss
from braidax.parallel.given.optimizer import applied
from braidax.parallel.plan.batch import along_batch
from braidax.parallel.plan.footprint import with_held
from braidax.parallel.plan.plan import Plan
from braidax.program import (
    Program,
    Turns,
    batch_dims_of_results,
    calls_host,
    difference,
    in_full,
    in_turn,
    kept_in_blocks,
    named_leaves,
    trace,
    with_leaves,
    with_sums_behind_loops,
)

from .accumulate import Runs, all_gradients_of, key_of_step, wide
from .feed import Check, Feed, Pulled, Reading, Update
from .metrics import BATCH, MetricDims
from .state_form import StateForm, load_tree, store_tree

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
        self.form = StateForm(optimizer, born, mesh, plan, feed)
        self.calls_host = calls_host(program)
        self._wants_norm, self._loss_spec = GRAD_NORM in metrics, program.out_specs[0]
        if self._wants_norm and GRAD_NORM in program.out_specs[1][0]:
            raise ArgumentError(
                f"metrics asks for {GRAD_NORM!r}, and loss_fn {loss.name} returns one: rename that in aux"
            )
        self._reading = None if feed is None else feed.reading(program, microbatches=plan.microbatches)
        self._program = self._passed(program, self._reading)
        self._in_parts = None
        laid = self._laid_out(self._program, self._reading)
        if plan.microbatches == 1:
            self._program = last_behind(*laid, frozen=self.form.still)
        elif found := summed_once(*laid, frozen=self.form.still):
            self._in_parts, self._program = found, found.program
        if mesh.size > 1:  # where devices sum gradients, those of weights in loops behind the loops
            self._program = with_sums_behind_loops(self._program, self._divided(self._reading))
        self._metric_dims = MetricDims(program, microbatches=plan.microbatches)
        others = [] if self._reading is None else self._reading.metrics
        others = [*others, *([GRAD_NORM] if self._wants_norm else [])]
        self.metric_shardings = self._metric_dims.shardings(mesh, plan.batch_axes, others)
        dense = self.form.moved(self.form.dense(self.form.shardings.params))
        self.gradient_shardings = dense if self._reading is None else (dense, self._reading.payload_shardings)
        self.plan = with_held(plan, list(self.form.held_bytes()))
        self._updated = self._traced_update(program.out_specs[0]) if feed is None else None

    @property
    def loss_spec(self) -> jax.ShapeDtypeStruct:
        """Of the loss."""
        return self._loss_spec

    @property
    def program(self) -> Program:
        """The loss in training, as it is differentiated: a feed's variables it is fed."""
        return self._program

    @property
    def wants_norm(self) -> bool:
        """Whether the global norm of all gradients is a metric."""
        return self._wants_norm

    @property
    def checks(self) -> Mapping[str, Check]:
        """Of metrics that are looked at some updates later, and shown to nobody, by name."""
        return {} if self._feed is None else self._feed.checks

    def held(self, opt_state: Any) -> Any:
        """Returns the part of an optimizer's state that gradients and evaluations read."""
        return () if self._feed is None else self._feed.held(opt_state["dense"], opt_state["rows"])

    @property
    def is_fed(self) -> bool:
        """Whether gradients read variables of a feed."""
        return self._reading is not None and bool(self._reading.names)

    @property
    def pulled_shardings(self) -> Any:
        """Of what `fetch` gives, where gradients are fed."""
        assert self._reading is not None, "there is a feed"
        return self._reading.pulled_shardings

    # An update

    def gradients(self, params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
        """Returns `(gradients, variables, metrics)`; `gradients` is for `apply` alone."""
        of_step = params, variables, key, step, batch
        if self._reading is None:
            gradients, _, variables, metrics = self._found(*of_step)
            gradients = store_tree(self.form.of_moved, gradients)
            return gradients, variables, {**metrics, **self._norm(gradients)}
        pulled = self.fetch(params, held, variables, key, step, batch)
        gradients, of_rows, variables, metrics = self._found(*of_step, pulled.rows)
        payload, gradients = self._reading.push(pulled.ticket, of_rows), store_tree(self.form.of_moved, gradients)
        metrics = {**metrics, **pulled.metrics, **self._norm(gradients, payload)}
        return (gradients, payload), variables, metrics

    def fetch(self, params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Pulled:
        """Fetches what a batch reads of the feed's variables."""
        assert self._reading is not None, "there is a feed"
        dense, stored = self.form.parted(params)
        dense, key = load_tree(self.form.of_params, dense), key_of_step(key, step)
        return self._reading.pull(dense, variables, key, batch, stored, held)

    def gradients_ahead(
        self, params: Any, opt_state: Any, variables: Any, key: Any, step: Any, batch: Any, pulled: Pulled, coming: Any
    ) -> Any:
        """Returns what `gradients` does of a batch that is fetched, and what is fetched for the coming one.

        The last products that gradients of rows do not need wait for these, so that messages have work to cross under.

        **Arguments:** `pulled`: of `batch`, without metrics. `coming`: the next batch; what it reads is fetched as
        `apply` will leave it.
        """
        feed, reading = self._feed, self._reading
        assert feed is not None, "there is a feed"
        assert reading is not None, "there is a feed"

        def found(params: Any, variables: Any, batch: Any, rows: Any) -> tuple[Any, Any]:
            gradients, of_rows, variables, metrics = self._found(params, variables, key, step, batch, rows)
            return (of_rows, variables, metrics), gradients

        whole, stored = self.form.parted(params)

        def fetch(routed: Any, payload: Any, gradients: Any, loss: Any) -> Turns:
            update = self._update_of(whole, opt_state, gradients, payload, loss)
            ready = feed.read_behind(update, reading, routed, stored, opt_state["rows"])
            fetched = yield ready, reading.send(routed, ready, stored)
            yield fetched, ()  # what is summed last crosses behind the last product
            return fetched

        def between(first: Any) -> Turns:
            of_rows, variables, metrics = first
            dense, key_of_coming = load_tree(self.form.of_params, whole), jax.random.fold_in(key, step + 1)
            routed = reading.route(dense, variables, key_of_coming, coming)
            payload = yield (of_rows, routed), reading.push(pulled.ticket, of_rows)
            if feed.waits_for_gradients:
                return payload, routed
            return payload, (yield from fetch(routed, payload, None, metrics["loss"]))

        given, num_turns = (params, variables, batch, pulled.rows), 1 if feed.waits_for_gradients else 3
        first, gradients, (payload, fetched) = in_turn(found, given, between, num_turns=num_turns)
        (_, variables, metrics), gradients = first, store_tree(self.form.of_moved, gradients)
        if feed.waits_for_gradients:
            fetched = in_full(fetch(fetched, payload, gradients, metrics["loss"]))
        return (gradients, payload), variables, {**metrics, **self._norm(gradients, payload)}, fetched

    def _found(self, params: Any, variables: Any, key: Any, step: Any, batch: Any, rows: Any = ()) -> Any:
        """Returns gradients as the loss has them, those of rows, new variables and metrics."""
        key, runs = key_of_step(key, step), Runs(self._in_parts, self.form.still)
        dense = load_tree(self.form.of_params, self.form.dense(params))
        program, dims = self._program, self._metric_dims
        return all_gradients_of(program, dense, variables, key, batch, rows, runs=runs, metric_dims=dims)

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
        whole, stored = self.form.parted(params)
        update = self._update_of(whole, opt_state, of_dense, payload, loss)
        moved, dense, stored, kept = self._feed.apply(update, self._reading, stored, opt_state["rows"])
        params = self.form.joined(with_leaves(store_tree(self.form.of_moved, moved), whole, self.form.frozen), stored)
        return step + 1, params, {"dense": store_tree(self.form.of_state, dense), "rows": kept}

    def _update_of(self, params: Any, opt_state: Any, gradients: Any, payload: Any, loss: Any) -> Update:
        """Returns what a feed is told of an update. **Arguments:** `params`, `gradients`: of what is dense."""
        of_moved = self.form.of_moved
        moved, dense = load_tree(of_moved, self.form.moved(params)), load_tree(self.form.of_state, opt_state["dense"])
        loaded = None if gradients is None else load_tree(of_moved, gradients)
        return Update(loaded, moved, dense, payload, loss)

    @property
    def feed(self) -> Feed | None:
        """What keeps some of the variables."""
        return self._feed

    @property
    def reading(self) -> Reading | None:
        """How the loss in training reads the variables of a feed."""
        return self._reading

    def evaluate(self, batch: Any) -> tuple[Evaluate, Any, Reading | None]:
        """Returns the function that gives the metrics of batches of that form, where these lie, and how it reads.

        **Arguments:** `batch`: specs.
        """
        born = self.form.born
        program = self._loss.trace(born.params, born.variables, born.key, batch, train=False, mesh=self.mesh)
        read, reading = self._read_by(program)

        def metrics(*args: Any) -> dict[str, Any]:
            (loss, (metrics, _)), checked = read(*args)
            return {"loss": loss, **metrics, **checked}

        return metrics, MetricDims(program).shardings(self.mesh, self.plan.batch_axes, self.checks), reading

    def wrapped(self, fn: Asking, batch: Any) -> tuple[Reads, Any, Reading | None]:
        """Returns a function on states and batches of that form, the shardings of what it gives, and how it reads.

        What descends from the batch is split as the batch is, everything else is on every device.

        **Arguments:** `batch`: specs.
        """
        born, axes = self.form.born, self.plan.batch_axes
        program = fn.trace(born.params, born.variables, born.key, batch, mesh=self.mesh)
        specs, structure = jax.tree.flatten(program.out_specs)
        pairs = zip(specs, batch_dims_of_results(program, {BATCH: 0}), strict=True)
        shardings = [along_batch(self.mesh, axes, spec.shape, dim) for spec, dim in pairs]
        read, reading = self._read_by(program)
        return read, structure.unflatten(shardings), reading

    def _read_by(self, program: Program) -> tuple[Reads, Reading | None]:
        """Returns the function that runs a program, of what a loss takes, on a state, and how it reads."""
        feed = self._feed
        reading = None if feed is None else feed.reading(program)
        passed = self._passed(program, reading)
        others = [] if feed is None or reading is None else [name for name in feed.names if name not in reading.names]
        places = {name: at for at, (name, _) in enumerate(named_leaves(passed.in_specs[0]))}
        run = kept_in_blocks(passed, {places[name]: self.form.layouts[name].axes_of(0) for name in others})

        def read(params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
            key = jax.random.fold_in(key, step)
            dense, stored = self.form.parted(params)
            dense = load_tree(self.form.of_params, dense)
            if feed is None or reading is None:
                return passed(dense, variables, key, batch), {}
            dense = self.form.joined(dense, {name: feed.whole(name, stored[name], held) for name in others})
            pulled = reading.pull(dense, variables, key, batch, stored, held)
            checked = {name: pulled.metrics[name] for name in feed.checks}
            return run(dense, variables, key, batch, pulled.rows), checked

        return read, reading

    def _passed(self, program: Program, reading: Reading | None) -> Program:
        """Returns what a program becomes where its weights lie as the plan says."""
        return dense_passes(*self._laid_out(program if reading is None else reading.program, reading))

    def _laid_out(self, program: Program, reading: Reading | None) -> Any:
        """Returns what passes are told of a program."""
        layouts = [self.form.layouts[name] for name, _ in named_leaves(program.in_specs[0])]
        return program, layouts, self.mesh, self.plan.batch_axes, self._divided(reading)

    def _divided(self, reading: Reading | None) -> dict[int, Any]:
        """Returns which dims of a program's arguments are divided among devices."""
        return {BATCH: 0} if reading is None else {BATCH: 0, _ROWS: reading.batch_dims}

    def _traced_update(self, loss: jax.ShapeDtypeStruct) -> Program:
        form, specs = self.form, self.form.specs

        def update(step: Any, params: Any, opt_state: Any, gradients: Any, loss: Any) -> Any:
            moved, gradients = (load_tree(form.of_moved, tree) for tree in (form.moved(params), gradients))
            moved, opt_state = applied(self._optimizer, moved, load_tree(form.of_state, opt_state), gradients, loss)
            params = with_leaves(store_tree(form.of_moved, moved), params, form.frozen)
            return step + 1, params, store_tree(form.of_state, opt_state)

        program = trace(update, specs.step, specs.params, specs.opt_state, self.form.moved(specs.params), loss)
        check_same_state((specs.step, specs.params, specs.opt_state), program.out_specs)
        return program


def check_same_state(expected: Any, got: Any) -> None:
    """Raises `ArgumentError` when an optimizer does not give back a state like the one that it was given."""
    if message := difference(expected, got, "state"):
        raise ArgumentError(f"optimizer.update returns another state than optimizer.init made: {message}")
