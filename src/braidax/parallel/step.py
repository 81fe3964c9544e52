"""`Step`: a loss and an optimizer on a mesh, as two jitted functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.program import Program, compile_on, difference, specs_of, trace

from .accumulate import accumulated_gradients_of, gradients_of
from .arrays import adopt, place, strong
from .loss import Loss
from .plan import Plan, follow, shardings_of
from .state import State
from .strategies import shard_batch


class Lowered(NamedTuple):
    """The two programs of a step before compilation, as `jax.stages.Lowered`."""

    gradients: jax.stages.Lowered
    apply: jax.stages.Lowered


class Step:
    """A training step on a mesh; `parallelize` makes it.

    An update is two jitted functions, gradients and apply. The first gives nothing up, so that a snapshot of the
    state can be copied while it runs; the second takes over the memory of the old state.
    """

    def __init__(
        self, loss: Loss, optimizer: optax.GradientTransformation, initial: Program, mesh: Mesh, plan: Plan, batch: Any
    ) -> None:
        specs: State = initial.out_specs
        self.plan = plan
        self.mesh = mesh
        self._loss, self._optimizer = loss, optimizer
        self._state_specs, self._batch_specs = specs, batch
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.batch_shardings = shard_batch(mesh, plan.batch_axes, batch, microbatches=plan.microbatches)
        params = shardings_of(plan, mesh, specs.params)
        self.state_shardings = State(
            step=self._replicated,
            params=params,
            opt_state=follow(specs.params, params, specs.opt_state, self._replicated),
            variables=jax.tree.map(lambda _: self._replicated, specs.variables),
            key=self._replicated,
        )
        self._gradients = self._compile_gradients()
        self._apply = self._compile_apply()
        self._init = compile_on(mesh, initial, in_shardings=(self._replicated,), out_shardings=self.state_shardings)
        self._evaluations: dict[Any, tuple[Any, Any]] = {}

    def init(self, key: jax.Array) -> State:
        """Makes the first state, every leaf born on the devices that hold it.

        **Arguments:** `key`: from `jax.random.key`. It is split: one half goes to `init`, the other into the state.

        **Raises:** `ArgumentError` when `key` is no such key.
        """
        if difference(self._state_specs.key, key, "key"):
            raise ArgumentError(
                f"key is {getattr(key, 'dtype', type(key).__name__)}{list(getattr(key, 'shape', []))}, expected one "
                f"{self._state_specs.key.dtype}: make it with jax.random.key(seed)"
            )
        return self._init(place(key, self._replicated))

    def update(
        self, state: State, batch: Any, *, before_apply: Callable[[], object] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Takes one training step. Returns at once; nothing waits for the devices.

        **Arguments:** `state`: given up, use the new one. `batch`: PyTree as `parallelize` was told, of global arrays,
        or of host arrays that are copied. `before_apply`: called when the gradients are dispatched, before
        anything of the old state is overwritten (`saver.wait`).

        **Returns:** the new state and the metrics: `loss` and what the loss returns as aux.

        **Raises:** `ArgumentError` when state or batch are not like the ones the step was made for.
        """
        self._check_state(state)
        if message := difference(self._batch_specs, _canonical(batch), "batch"):
            raise ArgumentError(f"{message}: give parallelize the batch={{…}} that the loader yields")
        state, batch = adopt(state, self.state_shardings), place(batch, self.batch_shardings)
        gradients, variables, metrics = self._gradients(state.params, state.variables, state.key, state.step, batch)
        if before_apply is not None:
            before_apply()
        step, params, opt_state = self._apply(state.step, state.params, state.opt_state, gradients)
        return State(step, params, opt_state, variables, state.key), metrics

    def evaluate(self, state: State, batch: Any) -> dict[str, Any]:
        """Computes the metrics of a batch with `train=False`; the state is neither changed nor given up.

        **Arguments:** `batch`: like the one for training, or of another size or structure (a `mask`): each form is
        compiled once.

        **Returns:** the metrics: `loss` and what the loss returns as aux.
        """
        self._check_state(state)
        specs = _canonical(batch)
        form = (jax.tree.structure(specs), tuple((s.shape, s.dtype) for s in jax.tree.leaves(specs)))
        if form not in self._evaluations:
            shardings = shard_batch(self.mesh, self.plan.batch_axes, specs)
            self._evaluations[form] = (self._compile_evaluation(specs, shardings), shardings)
        evaluation, shardings = self._evaluations[form]
        state, batch = place(state, self.state_shardings), place(batch, shardings)
        return evaluation(state.params, state.variables, state.key, state.step, batch)

    def lower(self) -> Lowered:
        """Lowers both functions for inspection, from shapes alone.

        **Returns:** `Lowered(gradients, apply)`; `.compile().memory_analysis()` tells what each needs.
        """
        state = self._state_specs
        return Lowered(
            self._gradients.lower(state.params, state.variables, state.key, state.step, self._batch_specs),
            self._apply.lower(state.step, state.params, state.opt_state, state.params),
        )

    def _compile_gradients(self) -> Any:
        state, microbatches = self._state_specs, self.plan.microbatches
        micro = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct((spec.shape[0] // microbatches, *spec.shape[1:]), spec.dtype),
            self._batch_specs,
        )
        program = self._loss.trace(state.params, state.variables, state.key, micro, train=True)

        def gradients(params: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
            key = jax.random.fold_in(key, step)
            if microbatches == 1:
                return gradients_of(program, params, variables, key, batch)
            return accumulated_gradients_of(program, params, variables, key, batch, microbatches=microbatches)

        held = self.state_shardings
        return compile_on(
            self.mesh,
            gradients,
            in_shardings=(held.params, held.variables, held.key, held.step, self.batch_shardings),
            out_shardings=(held.params, held.variables, self._replicated),
        )

    def _compile_apply(self) -> Any:
        specs, held = self._state_specs, self.state_shardings

        def apply(step: Any, params: Any, opt_state: Any, gradients: Any) -> Any:
            updates, opt_state = self._optimizer.update(gradients, opt_state, params)
            return step + 1, strong(optax.apply_updates(params, updates)), strong(opt_state)

        program = trace(apply, specs.step, specs.params, specs.opt_state, specs.params)
        if message := difference((specs.step, specs.params, specs.opt_state), program.out_specs, "state"):
            raise ArgumentError(f"optimizer.update returns another state than optimizer.init made: {message}")
        # The gradients are not donated: the old state already gives its memory to every output.
        return compile_on(
            self.mesh,
            program,
            in_shardings=(held.step, held.params, held.opt_state, held.params),
            out_shardings=(held.step, held.params, held.opt_state),
            donate=(0, 1, 2),
        )

    def _compile_evaluation(self, batch: Any, shardings: Any) -> Any:
        state, held = self._state_specs, self.state_shardings
        program = self._loss.trace(state.params, state.variables, state.key, batch, train=False)

        def evaluate(params: Any, variables: Any, key: Any, step: Any, batch: Any) -> dict[str, Any]:
            loss, (metrics, _) = program(params, variables, jax.random.fold_in(key, step), batch)
            return {"loss": loss, **metrics}

        return compile_on(
            self.mesh,
            evaluate,
            in_shardings=(held.params, held.variables, held.key, held.step, shardings),
            out_shardings=self._replicated,
        )

    def _check_state(self, state: Any) -> None:
        if message := difference(self._state_specs, state, "state"):
            raise ArgumentError(f"{message}: pass a state that came from this step's init or update")
        if isinstance(state.step, jax.Array) and state.step.is_deleted():
            raise ArgumentError(
                "state was given up by an earlier update, and its memory is in use again: go on with the state that "
                "the update returned"
            )


def _canonical(batch: Any) -> Any:
    """The specs of a batch of device or host arrays, with the dtypes that JAX will give them."""
    return specs_of(batch) if any(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)) else batch
