"""`TrainStep`: a whole single-device training step on a mesh, cut in two where its gradients are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from braidax.errors import ArgumentError, BraidaxError, StateError
from braidax.program import (
    Program,
    calls_host,
    compile_on,
    difference,
    gradients_kept,
    named_leaves,
    spec_of,
    specs_of,
    trace,
)

from .compiled_step import CompiledStep, compile_step, target_mesh
from .compiler_options import compiler_options, options_of_plan
from .compute.feed import Check
from .compute.in_flight import InFlight
from .compute.late_checks import LateChecks
from .compute.reading_state import reading_state
from .compute.traced_step import TracedStep
from .given.arrays import adopt, place
from .given.calling import Calling, Taken
from .given.dim_names import Rules
from .named_dims import named_strategies
from .plan.batch import batch_axes, shard_batch
from .plan.plan import Plan
from .plan.strategies import Hybrid
from .plan.strategy import Strategy
from .rows.options import OutOfRange, out_of_range_told
from .step import Lowered
from .two_jits import TwoJits, spec_on
from .wrapped import WrappedCall


@dataclass(frozen=True)
class _Form:
    """A step for one structure and one set of shapes of state and batch.

    **Fields:** `made`: its two programs. `out_tree`: of what it gives. `elsewhere`: makes them on another mesh.
    """

    plan: Plan
    state_shardings: Any
    batch_shardings: Any
    made: TwoJits
    out_tree: Any
    elsewhere: Callable[[Mesh], TwoJits]


class _Reading(NamedTuple):
    """What reads a state.

    **Fields:** `name`: of the function. `shardings`: of state and batch. `tables`: whose ids are checked, in words.
    """

    name: str
    compiled: Any
    shardings: tuple[Any, Any]
    out_tree: Any
    tables: Sequence[str]


class TrainStep:
    """What `@parallelize(mesh, strategies)` makes of a function that takes a whole training step.

    That is `train_step(state, batch) -> (state, metrics)`, or one with more parameters, of which `batch` names the
    samples: the new state comes back first, or last. Modules of Flax NNX change in place, as under `nnx.jit`.

    Call it as the function it was made from. It is traced once for each structure and shapes of its arguments, and run
    as two jitted functions: all that the gradients depend on, then the rest, which takes over the memory of the old
    state.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        strategies: Mapping[str, Strategy],
        batch: Sequence[str] | None = None,
        *,
        microbatches: int = 1,
        compiler_options: Mapping[str, Any] | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.mesh = mesh
        self.strategies = dict(strategies)
        self._calling = Calling(fn, batch)
        self.__wrapped__ = fn
        self._microbatches, self._compiler_options, self._rules = microbatches, compiler_options, rules
        self._newest: _Form | None = None
        self._forms: dict[Any, _Form] = {}
        self._readings: dict[Any, _Reading] = {}
        self._in_flight = InFlight(mesh)
        self._out_of_range: OutOfRange = _out_of_range(strategies)
        self._checks: dict[str, Check] = {}
        self._late = LateChecks(self._checks)
        self._num_updates = 0

    def __call__(self, *args: Any, before_apply: Callable[[], object] | None = None) -> Any:
        """Takes one training step: the same as `update`."""
        return self.update(*args, before_apply=before_apply)

    def update(self, *args: Any, before_apply: Callable[[], object] | None = None) -> Any:
        """Takes one training step. Returns at once; nothing waits for the devices.

        On CPU devices it stays at most `in_flight.MAX_IN_FLIGHT` updates ahead of them, lest XLA end the process.

        **Arguments:** `args`: as of the decorated function. The state is PyTrees of arrays, given up, use the new ones;
        modules and optimizers of Flax NNX have them when this returns. Samples are PyTrees of arrays `[batch, …]`,
        global or on the host. `before_apply`: called when the gradients are dispatched, before anything of the old
        state is overwritten.

        **Returns:** what the decorated function returns: the new state and the metrics.

        **Raises:** `ArgumentError`, `SpecError` or `StateError`, on the first call with such shapes, when the function
        or its arguments cannot be parallelized. `DataError` when an earlier batch had ids out of range, with
        `Hybrid(out_of_range="raise")`; the state given is then still valid.
        """
        taken = self._calling.take(args)
        self._late.check()
        form = self._newest = self._form(taken)
        state_leaves = jax.tree.leaves(adopt(taken.state, form.state_shardings))
        seen: set[int] = set()
        for index in form.made.donated:
            if id(state_leaves[index]) in seen:
                state_leaves[index] = jnp.copy(state_leaves[index])
            seen.add(id(state_leaves[index]))
        batch_leaves = jax.tree.leaves(place(taken.batch, form.batch_shardings))
        outputs, wrong = form.made.run([*state_leaves, *batch_leaves], self._in_flight, before_apply)
        self._num_updates += 1
        checked = self._checked(form.made.tables, wrong)
        self._late.take(checked, f"the batch of update {self._num_updates} of {self._calling.name}")
        return taken.give(*jax.tree.unflatten(form.out_tree, outputs))

    @property
    def plan(self) -> Plan:
        """The plan for the newest form of state and batch that it was prepared for or called with.

        **Raises:** `StateError` before there is one.
        """
        return self._form_at_hand().plan

    def prepare(self, *args: Any) -> Plan:
        """Traces the step for arguments as of the function, arrays or `jax.ShapeDtypeStruct`, and computes nothing.

        **Returns:** the plan, from then on `plan`, too. **Raises:** as `update`.
        """
        self._newest = self._form(self._calling.take(args))
        return self._newest.plan

    @property
    def state_shardings(self) -> Any:
        """Where each leaf of the state lies by `plan`: a PyTree of `NamedSharding`, such as `jax.jit` takes.

        **Raises:** as `plan`.
        """
        return self._form_at_hand().state_shardings

    def lower(self) -> Lowered:
        """Lowers both functions of the newest form for inspection, from shapes alone. **Raises:** as `plan`."""
        return Lowered(*self._form_at_hand().made.lower())

    def compile_for(self, target: str) -> CompiledStep:
        """Compiles the newest form for a machine that need not be here, as `Step.compile_for` does.

        **Raises:** as `plan`; `ArgumentError` for other targets, and where the compiler refuses what is too large;
        `MissingExtra`.
        """
        form = self._form_at_hand()
        found, mesh = target_mesh(target, self.mesh)
        made = form.made if mesh is self.mesh else form.elsewhere(mesh)
        return compile_step(Lowered(*made.lower()), found, made.plan.compiler_options, **made.needed())

    def wrap(self, fn: Callable[..., Any]) -> WrappedCall:
        """Makes of a function that reads the state one that runs on states as they lie: predictions, an evaluation.

        No state is made whole: weights are gathered where `fn` uses them, also those that follow others (an average),
        and rows of tables are fetched.

        **Arguments:** `fn`: for one device and the whole batch; called as the decorated function is, or with less of it
        (`fn(state, batch)`, `fn(state)`): parameters are state that have the names of its own, or hold objects of
        Flax NNX. It returns any PyTree of arrays.

        **Returns:** the function; what descends from the batch comes split as that is, the rest on every device.
        """
        return WrappedCall(lambda *args: self._read(fn, args), lambda *args: self._lowered_reading(fn, args))

    def finish(self) -> None:
        """Waits for all updates so far, and looks at what is otherwise looked at some updates later. `fit` does.

        **Raises:** `DataError` when a batch had ids out of range, with `Hybrid(out_of_range="raise")`.
        """
        self._late.check(late=1)

    def batch_shardings(self, batch: Any) -> Any:
        """Returns the PyTree of `NamedSharding` that batches like `batch` (arrays or specs) should come with."""
        axes = batch_axes(self.mesh, self.strategies)
        return shard_batch(self.mesh, axes, batch, microbatches=self._microbatches)

    def _form_at_hand(self) -> _Form:
        if self._newest is None:
            raise StateError(
                f"{self._calling.name} has no plan before it knows its state and batch: call prepare(state, batch) "
                f"with arrays or jax.ShapeDtypeStruct"
            )
        return self._newest

    def _form(self, taken: Taken) -> _Form:
        key = _key(taken)
        if key not in self._forms:
            self._forms[key] = self._make_form(taken)
        return self._forms[key]

    def _make_form(self, taken: Taken) -> _Form:
        state, microbatches = taken.state, self._microbatches
        batch_shardings = self.batch_shardings(taken.batch)
        with gradients_kept():
            program = trace(taken.call, state, taken.batch)
            one = None if microbatches == 1 else self._traced_piece(taken)
        new_state, _ = program.out_specs
        if message := difference(specs_of(state), new_state, "state"):
            raise StateError(f"{self._calling.name} returned another state than it was given: {message}")
        traced = TracedStep(program, one, microbatches=microbatches)
        strategies = named_strategies(self.strategies, state, self._rules, self.mesh, prefix="state")
        plan = traced.plan(self.mesh, strategies)

        def made_on(mesh: Mesh) -> TwoJits:
            pairs = zip(plan.variables, traced.kinds, strict=True)
            weights = replace(plan, variables=tuple(one for one, kind in pairs if kind == "parameters"))
            hidden = options_of_plan(weights, mesh, traced.model(mesh, plan.batch_axes))
            on_mesh = replace(plan, compiler_options=hidden)
            options = compiler_options(mesh, on_mesh, self.strategies, self._compiler_options)
            shardings = shard_batch(mesh, plan.batch_axes, taken.batch, microbatches=microbatches)
            return TwoJits(traced, mesh, on_mesh, shardings, options, self._out_of_range)

        made = made_on(self.mesh)
        self._in_flight.calls_host |= calls_host(program)
        state_shardings = jax.tree.unflatten(jax.tree.structure(state), made.state_shardings)
        return _Form(made.plan, state_shardings, batch_shardings, made, jax.tree.structure(program.out_specs), made_on)

    def _traced_piece(self, taken: Taken) -> Program:
        """The step on one microbatch, for its losses."""

        def piece(leaf: Any) -> jax.ShapeDtypeStruct:
            spec = spec_of(leaf)
            return jax.ShapeDtypeStruct((spec.shape[0] // self._microbatches, *spec.shape[1:]), spec.dtype)

        try:
            return trace(taken.call, taken.state, jax.tree.map(piece, taken.batch))
        except BraidaxError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"microbatches is {self._microbatches}, and {self._calling.name} cannot be traced for one of them "
                f"({type(error).__name__}: {error}): what it does must not depend on the number of samples"
            ) from error

    def _checked(self, tables: Sequence[str], counts: Any) -> dict[str, Any]:
        """What is looked at later: how many ids no row has of each table."""
        if not tables:
            return {}
        self._checks.setdefault("; ".join(tables), partial(_told, tables))
        return {"; ".join(tables): counts}

    # Functions that read the state

    def _read(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        self._late.check()
        taken = self._calling.take_to_read(fn, args)
        made = self._reading(fn, taken)
        state, batch = place(taken.state, made.shardings[0]), place(taken.batch, made.shardings[1])
        self._in_flight.make_room()
        result, wrong = made.compiled(jax.tree.leaves(state), jax.tree.leaves(batch))
        self._in_flight.add(min(result, key=lambda leaf: leaf.size))
        what = f"the batch of {made.name} behind update {self._num_updates} of {self._calling.name}"
        self._late.take(self._checked(made.tables, wrong), what)
        return taken.give(*jax.tree.unflatten(made.out_tree, result))

    def _lowered_reading(self, fn: Callable[..., Any], args: Sequence[Any]) -> jax.stages.Lowered:
        taken = self._calling.take_to_read(fn, args)
        made = self._reading(fn, taken)
        pairs = zip((taken.state, taken.batch), made.shardings, strict=True)
        return made.compiled.lower(*(list(map(spec_on, *map(jax.tree.leaves, pair))) for pair in pairs))

    def _reading(self, fn: Callable[..., Any], taken: Taken) -> _Reading:
        form, name = self._form_at_hand(), getattr(fn, "__name__", type(fn).__name__)
        key = (fn, form.plan, _key(taken))
        if key in self._readings:
            return self._readings[key]
        known = {variable.path: at for at, variable in enumerate(form.plan.variables)}
        leaves: dict[int, int] = {}
        for at, (path, leaf) in enumerate(named_leaves(taken.state, "state")):
            if path not in known or form.plan.variables[known[path]].shape != leaf.shape:
                raise ArgumentError(
                    f"{path} {list(leaf.shape)} was given to {name}, and the state of {self._calling.name} has no such "
                    f"leaf: pass a state that came from it, or parts of one under the same names"
                )
            leaves[at] = known[path]
        program = trace(taken.call, taken.state, taken.batch)
        if not program.closed.jaxpr.outvars:
            raise ArgumentError(f"fn {name} returned nothing, expected a PyTree of arrays")
        made = reading_state(program, leaves, self.mesh, form.plan, out_of_range=self._out_of_range)
        axes = form.plan.batch_axes
        batch = shard_batch(self.mesh, axes, taken.batch) if jax.tree.leaves(taken.batch) else taken.batch
        of_state = [form.made.state_shardings[leaves[at]] for at in range(len(leaves))]
        inputs = (of_state, jax.tree.leaves(batch))
        compiled = compile_on(self.mesh, made.run, in_shardings=inputs, out_shardings=made.shardings)
        raising = self._out_of_range == "raise"
        tables = form.made.told(made.tables) if raising else ()
        shardings = (jax.tree.unflatten(jax.tree.structure(taken.state), of_state), batch)
        reading = _Reading(name, compiled, shardings, jax.tree.structure(program.out_specs), tables)
        self._readings[key] = reading
        return reading


def _told(tables: Sequence[str], counts: Any) -> str:
    pairs = zip(tables, counts.tolist(), strict=True)
    return out_of_range_told(", ".join(f"{count} for {table}" for table, count in pairs if count))


def _key(taken: Taken) -> Any:
    """What tells arguments of one form from those of another."""
    leaves, tree = jax.tree.flatten((taken.state, taken.batch))
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        _check_leaves(taken.state, taken.batch)
        leaves = [leaf if isinstance(leaf, jax.Array) else spec_of(leaf) for leaf in leaves]
    return tree, tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves)


def _out_of_range(strategies: Mapping[str, Strategy]) -> OutOfRange:
    """What strategies ask for. **Raises:** `ArgumentError` for what a decorated step cannot do."""
    hybrids = {axis: strategy for axis, strategy in strategies.items() if isinstance(strategy, Hybrid)}
    for axis, strategy in hybrids.items():
        if strategy.row_optimizers:
            raise ArgumentError(
                f"strategies[{axis!r}] has row_optimizers for {[*strategy.row_optimizers]}, and a decorated step moves "
                f"its tables itself: leave them out, or give the loss and the optimizer to parallelize"
            )
    return "raise" if any(strategy.out_of_range == "raise" for strategy in hybrids.values()) else "as jax"


def _check_leaves(state: Any, batch: Any) -> None:
    for path, leaf in [*named_leaves(state, "state"), *named_leaves(batch, "batch")]:
        if not isinstance(leaf, float | int | complex) and not hasattr(leaf, "dtype"):
            raise ArgumentError(
                f"{path} is {leaf!r}, expected an array: keep what is not an array out of state and batch "
                f"(equinox: eqx.partition the model and eqx.combine it in the step)"
            )
