"""What a step computes, before it is compiled: the contract, and the form in which every variable is whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.program import Program, difference, trace, with_sums_behind_loops

from .accumulate import all_gradients_of
from .arrays import strong
from .initial import Born
from .loss import Loss
from .plan import Plan, follow, shardings_of
from .state import State

Evaluate = Callable[[Any, Any, Any, Any, Any, Any], dict[str, Any]]
"""`(params, held, variables, key, step, batch) -> metrics`."""

OUT_OF_RANGE = "row_ids_out_of_range"
"""The metric, int32 `[tables]`, that tells how many ids no row has; a step looks at it and keeps it to itself."""


@runtime_checkable
class Arithmetic(Protocol):
    """Pure functions, in the global view; run under the mesh whose shardings they were made with."""

    @property
    def initial(self) -> Program:
        """The traced `key -> State`."""
        ...

    @property
    def state_shardings(self) -> State:
        """Of every leaf of a state."""
        ...

    @property
    def gradient_shardings(self) -> Any:
        """Of what `gradients` gives first, or a prefix of it."""
        ...

    @property
    def watched(self) -> Sequence[tuple[str, int]]:
        """Names and rows of the tables whose ids out of range are counted in `OUT_OF_RANGE`; empty if none are."""
        ...

    def held(self, opt_state: Any) -> Any:
        """Returns the part of an optimizer's state that gradients and evaluations read."""
        ...

    def gradients(self, params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
        """Returns `(gradients, variables, metrics)`; `gradients` is for `apply` alone."""
        ...

    def apply(self, step: Any, params: Any, opt_state: Any, gradients: Any) -> Any:
        """Returns the next `(step, params, opt_state)`."""
        ...

    def evaluate(self, batch: Any) -> Evaluate:
        """Returns the function that gives the metrics of batches of that form. **Arguments:** `batch`: specs."""
        ...

    def settled(self, state: State) -> State:
        """Returns a state in which nothing is put off: each variable is what single-device training has."""
        ...

    @property
    def form(self) -> Mapping[str, tuple[str, ...]]:
        """Of variables that are stored by rows the mesh axes, by name."""
        ...

    def dense_specs(self) -> State:
        """Of a state in the form of single-device training. **Raises:** `ArgumentError` when there is none."""
        ...

    def to_dense(self, state: State) -> State:
        """Returns a state as single-device training has it."""
        ...

    def from_dense(self, state: State) -> State:
        """Undoes `to_dense`."""
        ...


@final
class Whole:
    """The arithmetic in which every variable, and its gradient, is one array.

    **Arguments:** `born`: traced `key -> Born`. `program`: the loss, as `traced_loss` gives it.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        born: Program,
        program: Program,
        mesh: Mesh,
        plan: Plan,
    ) -> None:
        self._loss, self._optimizer = loss, optimizer
        self._microbatches = plan.microbatches

        def make(key: Any) -> State:
            first: Born = born(key)
            opt_state = strong(optimizer.init(first.params))
            return State(jnp.zeros((), jnp.int32), first.params, opt_state, first.variables, first.key)

        self.initial = trace(make, *born.in_specs)
        self._specs: State = self.initial.out_specs
        replicated = NamedSharding(mesh, PartitionSpec())
        params = shardings_of(plan, mesh, self._specs.params)
        self.gradient_shardings = params
        self.state_shardings = State(
            step=replicated,
            params=params,
            opt_state=follow(self._specs.params, params, self._specs.opt_state, replicated),
            variables=jax.tree.map(lambda _: replicated, self._specs.variables),
            key=replicated,
        )
        self._program = summed_once(program, mesh)
        self._apply = self._traced_apply()

    @property
    def watched(self) -> Sequence[tuple[str, int]]:
        """None."""
        return ()

    def held(self, opt_state: Any) -> Any:
        """Returns nothing."""
        return ()

    def gradients(self, params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
        """Computes gradients like `params`."""
        key = jax.random.fold_in(key, step)
        gradients, _, *rest = all_gradients_of(
            self._program, params, variables, key, batch, microbatches=self._microbatches
        )
        return gradients, *rest

    def apply(self, step: Any, params: Any, opt_state: Any, gradients: Any) -> Any:
        """Updates everything by the optimizer."""
        return self._apply(step, params, opt_state, gradients)

    def evaluate(self, batch: Any) -> Evaluate:
        """Traces the loss with `train=False`."""
        specs = self._specs
        program = self._loss.trace(specs.params, specs.variables, specs.key, batch, train=False)

        def metrics(params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> dict[str, Any]:
            loss, (metrics, _) = program(params, variables, jax.random.fold_in(key, step), batch)
            return {"loss": loss, **metrics}

        return metrics

    def settled(self, state: State) -> State:
        """Returns the state as it is."""
        return state

    @property
    def form(self) -> Mapping[str, tuple[str, ...]]:
        """Nothing."""
        return {}

    def dense_specs(self) -> State:
        """Of every state."""
        return self._specs

    def to_dense(self, state: State) -> State:
        """Returns the state as it is."""
        return state

    def from_dense(self, state: State) -> State:
        """Returns the state as it is."""
        return state

    def _traced_apply(self) -> Program:
        specs = self._specs

        def apply(step: Any, params: Any, opt_state: Any, gradients: Any) -> Any:
            return step + 1, *applied(self._optimizer, params, opt_state, gradients)

        program = trace(apply, specs.step, specs.params, specs.opt_state, specs.params)
        check_same_state((specs.step, specs.params, specs.opt_state), program.out_specs)
        return program


def applied(optimizer: optax.GradientTransformation, params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
    """Returns the next parameters and optimizer state, with strong types."""
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return strong(optax.apply_updates(params, updates)), strong(opt_state)


def summed_once(program: Program, mesh: Mesh) -> Program:
    """Returns a loss to be differentiated: where devices sum gradients, those of weights in loops behind the loops."""
    return with_sums_behind_loops(program) if mesh.size > 1 else program


def check_same_state(expected: Any, got: Any) -> None:
    """Raises `ArgumentError` when an optimizer does not give back a state like the one that it was given."""
    if message := difference(expected, got, "state"):
        raise ArgumentError(f"optimizer.update returns another state than optimizer.init made: {message}")


def traced_loss(loss: Loss, born: Born, batch: Any, microbatches: int) -> Program:
    """Traces a loss for training on one microbatch. **Arguments:** `born`, `batch`: PyTrees of specs."""
    micro = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct((spec.shape[0] // microbatches, *spec.shape[1:]), spec.dtype), batch
    )
    return loss.trace(born.params, born.variables, born.key, micro, train=True)
