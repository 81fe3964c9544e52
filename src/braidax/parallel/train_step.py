"""`TrainStep`: a whole single-device training step on a mesh, cut in two where its gradients are."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from braidax.errors import ArgumentError, StateError
from braidax.program import (
    Origin,
    compile_on,
    difference,
    gradients_kept,
    named_leaves,
    spec_of,
    specs_of,
    trace,
)

from .compute.in_flight import InFlight
from .compute.traced_step import TracedStep
from .given.arrays import adopt, place
from .given.calling import Calling, Taken
from .plan.batch import batch_axes, shard_batch
from .plan.plan import Plan, shardings_of
from .plan.strategy import Strategy
from .step import Lowered


@dataclass(frozen=True)
class _Form:
    """A step for one structure and one set of shapes of state and batch."""

    plan: Plan
    state_shardings: Any
    batch_shardings: Any
    run: Callable[[list[jax.Array], InFlight, Callable[[], object] | None], list[jax.Array]]
    lower: Callable[[], Lowered]
    donated: tuple[int, ...]
    out_tree: Any


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
    ) -> None:
        self.mesh = mesh
        self.strategies = dict(strategies)
        self._calling = Calling(fn, batch)
        self.__wrapped__ = fn
        self._newest: _Form | None = None
        self._forms: dict[Any, _Form] = {}
        self._in_flight = InFlight(mesh)

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
        or its arguments cannot be parallelized.
        """
        taken = self._calling.take(args)
        form = self._newest = self._form(taken)
        state_leaves = jax.tree.leaves(adopt(taken.state, form.state_shardings))
        seen: set[int] = set()
        for index in form.donated:
            if id(state_leaves[index]) in seen:
                state_leaves[index] = jnp.copy(state_leaves[index])
            seen.add(id(state_leaves[index]))
        batch_leaves = jax.tree.leaves(place(taken.batch, form.batch_shardings))
        outputs = form.run([*state_leaves, *batch_leaves], self._in_flight, before_apply)
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
        return self._form_at_hand().lower()

    def batch_shardings(self, batch: Any) -> Any:
        """Returns the PyTree of `NamedSharding` that batches like `batch` (arrays or specs) should come with."""
        return shard_batch(self.mesh, batch_axes(self.mesh, self.strategies), batch)

    def _form_at_hand(self) -> _Form:
        if self._newest is None:
            raise StateError(
                f"{self._calling.name} has no plan before it knows its state and batch: call prepare(state, batch) "
                f"with arrays or jax.ShapeDtypeStruct"
            )
        return self._newest

    def _form(self, taken: Taken) -> _Form:
        leaves, tree = jax.tree.flatten((taken.state, taken.batch))
        if not all(isinstance(leaf, jax.Array) for leaf in leaves):
            _check_leaves(taken.state, taken.batch)
            leaves = [leaf if isinstance(leaf, jax.Array) else spec_of(leaf) for leaf in leaves]
        key = (tree, tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves))
        if key not in self._forms:
            self._forms[key] = self._make_form(taken)
        return self._forms[key]

    def _make_form(self, taken: Taken) -> _Form:
        state = taken.state
        batch_shardings = self.batch_shardings(taken.batch)
        with gradients_kept():
            program = trace(taken.call, state, taken.batch)
        new_state, _ = program.out_specs
        if message := difference(specs_of(state), new_state, "state"):
            raise StateError(f"{self._calling.name} returned another state than it was given: {message}")
        traced = TracedStep(program)
        plan = traced.plan(self.mesh, self.strategies)
        state_shardings = shardings_of(plan, self.mesh, state)
        run, lower, donated = _two_jits(traced, self.mesh, plan, (state_shardings, batch_shardings))
        out_tree = jax.tree.structure(program.out_specs)
        return _Form(plan, state_shardings, batch_shardings, run, lower, donated, out_tree)


def _check_leaves(state: Any, batch: Any) -> None:
    for path, leaf in [*named_leaves(state, "state"), *named_leaves(batch, "batch")]:
        if not isinstance(leaf, float | int | complex) and not hasattr(leaf, "dtype"):
            raise ArgumentError(
                f"{path} is {leaf!r}, expected an array: keep what is not an array out of state and batch "
                f"(equinox: eqx.partition the model and eqx.combine it in the step)"
            )


def _two_jits(
    traced: TracedStep, mesh: Mesh, plan: Plan, shardings: tuple[Any, Any]
) -> tuple[Callable[..., list[jax.Array]], Callable[[], Lowered], tuple[int, ...]]:
    """Compiles a whole step as gradients and apply. **Arguments:** `shardings`: of the state and the batch.

    **Returns:** a function of the flat inputs, what is in flight and `before_apply` that gives the flat outputs; one
    that lowers both; and which inputs, all of them leaves of the state, they give up.
    """
    split = traced.split
    in_shardings, num_state = jax.tree.leaves(shardings), len(jax.tree.leaves(shardings[0]))
    first, second, first_out, second_out = traced.parts(mesh, plan)
    # A leaf of the old state gives its memory to the same leaf of the new one.
    donated = tuple(i for i in split.apply_inputs if i < num_state and _is_replaced(split.outputs, i))
    second_in = [in_shardings[i] for i in split.apply_inputs] + [first_out[i] for i in split.carried]
    gradients = _compile(mesh, first, [in_shardings[i] for i in split.gradient_inputs], first_out, donate=())
    apply = _compile(
        mesh, second, second_in, second_out,
        donate=tuple(at for at, i in enumerate(split.apply_inputs) if i in donated),
    )  # fmt: skip

    avals = split.gradients.closed.out_avals
    small = min(range(len(avals)), key=lambda at: math.prod(avals[at].shape), default=None)

    def run(inputs: list[jax.Array], in_flight: InFlight, before_apply: Callable[[], object] | None) -> list[jax.Array]:
        in_flight.make_room()
        first = gradients(*(inputs[i] for i in split.gradient_inputs))
        if small is not None:
            in_flight.add(first[small])
        if before_apply is not None:
            before_apply()
        carried = [first[i] for i in split.carried]
        second = apply(*(inputs[i] for i in split.apply_inputs), *carried)
        parts = {"input": inputs, "gradients": first, "apply": second}
        return [parts[origin.part][origin.at] for origin in split.outputs]

    def lower() -> Lowered:
        inputs = list(map(_spec_on, jax.tree.leaves(traced.program.in_specs), in_shardings))
        carried = [_spec_on(avals[at], first_out[at]) for at in split.carried]
        return Lowered(
            gradients.lower(*(inputs[i] for i in split.gradient_inputs)),
            apply.lower(*(inputs[i] for i in split.apply_inputs), *carried),
        )

    return run, lower, donated


def _spec_on(form: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    weak_type = getattr(form, "weak_type", False)
    return jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding, weak_type=weak_type)


def _is_replaced(outputs: Sequence[Origin], index: int) -> bool:
    kept = any(origin.part == "input" and origin.at == index for origin in outputs)
    return outputs[index].part == "apply" and not kept


def _compile(mesh: Mesh, part: Callable[..., Any], ins: list[Any], outs: list[Any], donate: tuple[int, ...]) -> Any:
    if not outs:
        return jax.jit(lambda *_: [])  # pyright: ignore
    return compile_on(mesh, part, in_shardings=tuple(ins), out_shardings=list(outs), donate=donate)
