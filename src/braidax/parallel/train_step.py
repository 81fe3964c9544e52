"""`TrainStep`: a whole single-device training step on a mesh, cut in two where its gradients are."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError, StateError
from braidax.program import (
    LeafUses,
    Part,
    Program,
    call_watched,
    compile_on,
    difference,
    find_uses,
    named_leaves,
    spec_of,
    specs_of,
    split_at_marks,
    trace,
)

from .compute.in_flight import InFlight
from .given.arrays import adopt, place
from .plan.batch import batch_axes, shard_batch
from .plan.model import Model
from .plan.placements import Gathered
from .plan.plan import Plan, make_plan, shardings_of
from .plan.strategy import Strategy

_DECORATED = (
    "by rows in the gradients of a decorated step, whose optimizer moves it whole; give the loss and the optimizer to "
    "parallelize, and its rows are exchanged"
)


@dataclass(frozen=True)
class _Form:
    """A step for one structure and one set of shapes of state and batch."""

    state_shardings: Any
    batch_shardings: Any
    run: Callable[[list[jax.Array], InFlight, Callable[[], object] | None], list[jax.Array]]
    donated: tuple[int, ...]
    out_tree: Any


class TrainStep:
    """What `@parallelize(mesh, strategies)` makes of `train_step(state, batch) -> (state, metrics)`.

    Call it as the function it was made from. It is traced once for each structure and shapes of its arguments, and run
    as two jitted functions: all that the gradients depend on, then the rest, which takes over the memory of the old
    state.
    """

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, strategies: Mapping[str, Strategy]) -> None:
        self.mesh = mesh
        self.strategies = dict(strategies)
        self._fn = fn
        self._name: str = getattr(fn, "__name__", type(fn).__name__)
        self.__wrapped__ = fn
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._forms: dict[Any, _Form] = {}
        self._in_flight = InFlight(mesh)

    def __call__(self, state: Any, batch: Any, *, before_apply: Callable[[], object] | None = None) -> tuple[Any, Any]:
        """Takes one training step: the same as `update`."""
        return self.update(state, batch, before_apply=before_apply)

    def update(self, state: Any, batch: Any, *, before_apply: Callable[[], object] | None = None) -> tuple[Any, Any]:
        """Takes one training step. Returns at once; nothing waits for the devices.

        On CPU devices it stays at most `in_flight.MAX_IN_FLIGHT` updates ahead of them, lest XLA end the process.

        **Arguments:** `state`: PyTree of arrays, given up, use the new one. `batch`: PyTree of arrays `[batch, …]`,
        global or on the host. `before_apply`: called when the gradients are dispatched, before anything of the old
        state is overwritten.

        **Returns:** what the decorated function returns: the new state and the metrics.

        **Raises:** `ArgumentError`, `SpecError` or `StateError`, on the first call with such shapes, when the function
        or its arguments cannot be parallelized.
        """
        form = self._form(state, batch)
        state_leaves = jax.tree.leaves(adopt(state, form.state_shardings))
        seen: set[int] = set()
        for index in form.donated:
            if id(state_leaves[index]) in seen:
                state_leaves[index] = jnp.copy(state_leaves[index])
            seen.add(id(state_leaves[index]))
        batch_leaves = jax.tree.leaves(place(batch, form.batch_shardings))
        outputs = form.run([*state_leaves, *batch_leaves], self._in_flight, before_apply)
        return jax.tree.unflatten(form.out_tree, outputs)

    def plan(self, state: Any, batch: Any) -> Plan:
        """Returns the plan for a state and a batch, given as arrays or as `jax.ShapeDtypeStruct`."""
        self.batch_shardings(batch)
        state, batch = specs_of(state), specs_of(batch)
        return self._plan(state, trace(self._checked, state, batch))

    def batch_shardings(self, batch: Any) -> Any:
        """Returns the PyTree of `NamedSharding` that batches like `batch` (arrays or specs) should come with."""
        return shard_batch(self.mesh, batch_axes(self.mesh, self.strategies), batch)

    def _form(self, state: Any, batch: Any) -> _Form:
        leaves, tree = jax.tree.flatten((state, batch))
        if not all(isinstance(leaf, jax.Array) for leaf in leaves):
            _check_leaves(state, batch)
            leaves = [leaf if isinstance(leaf, jax.Array) else spec_of(leaf) for leaf in leaves]
        key = (tree, tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves))
        if key not in self._forms:
            self._forms[key] = self._make_form(state, batch)
        return self._forms[key]

    def _make_form(self, state: Any, batch: Any) -> _Form:
        batch_shardings = self.batch_shardings(batch)
        program = trace(self._checked, state, batch)
        state_shardings = shardings_of(self._plan(specs_of(state), program), self.mesh, state)
        new_state, metrics = program.out_specs
        if message := difference(specs_of(state), new_state, "state"):
            raise StateError(f"{self._name} returned another state than it was given: {message}")
        inputs = [*jax.tree.leaves(state_shardings), *jax.tree.leaves(batch_shardings)]
        outputs = [*jax.tree.leaves(state_shardings), *(self._replicated for _ in jax.tree.leaves(metrics))]
        run, donated = _two_jits(program, self.mesh, inputs, outputs, len(jax.tree.leaves(state)))
        return _Form(state_shardings, batch_shardings, run, donated, jax.tree.structure(program.out_specs))

    def _plan(self, state: Any, program: Program) -> Plan:
        variables = dict(named_leaves(state, "state"))
        num_parts = math.prod(self.mesh.shape[axis] for axis in batch_axes(self.mesh, self.strategies))
        model = Model(
            variables,
            num_parts,
            find_uses=lambda: dict(_uses(program, list(variables))),
            no_rows=lambda path: _DECORATED,
        )
        plan = make_plan(self.mesh, self.strategies, model)
        for variable in plan.variables:
            if any(isinstance(placement, Gathered) for placement in variable.placements):
                raise ArgumentError(
                    f"{variable.path} of {self._name} would be gathered where it is used, and a decorated step takes "
                    f"its gradients itself: give the loss and the optimizer to parallelize"
                )
        return plan

    def _checked(self, state: Any, batch: Any) -> Any:
        def new_state(result: Any) -> Any:
            return result[0] if isinstance(result, tuple) else result  # pyright: ignore[reportUnknownVariableType]

        watched = {"state": state, "batch": batch}
        result = call_watched(lambda: self._fn(state, batch), self._name, watched, keeps=new_state)
        if not isinstance(result, tuple) or len(result) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise ArgumentError(f"{self._name} returned {type(result).__name__}, expected (state, metrics)")
        return result


def _check_leaves(state: Any, batch: Any) -> None:
    for path, leaf in [*named_leaves(state, "state"), *named_leaves(batch, "batch")]:
        if not isinstance(leaf, float | int | complex) and not hasattr(leaf, "dtype"):
            raise ArgumentError(
                f"{path} is {leaf!r}, expected an array: keep what is not an array out of state and batch "
                f"(equinox: eqx.partition the model and eqx.combine it in the step)"
            )


def _uses(program: Program, paths: Sequence[str]) -> Iterator[tuple[str, LeafUses]]:
    """Yields how the gradients of a whole step use leaves of its state, those that they use.

    What is read by rows is still kept whole: its optimizer is part of the step, and moves all of it.
    """
    split = split_at_marks(program)
    specs = jax.tree.leaves(program.in_specs)
    needed = tuple(specs[i] for i in split.gradient_inputs)
    outputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in split.gradients.closed.out_avals]
    found = find_uses(Program(split.gradients.closed, (needed,), outputs))
    for at, uses in zip(split.gradient_inputs, found, strict=True):
        if at < len(paths):
            yield paths[at], uses


def _two_jits(
    program: Program, mesh: Mesh, in_shardings: list[Any], out_shardings: list[Any], num_state: int
) -> tuple[Callable[..., list[jax.Array]], tuple[int, ...]]:
    """Compiles a whole step as gradients and apply.

    **Returns:** a function of the flat inputs, what is in flight and `before_apply` that gives the flat outputs; and
    which inputs, all of them leaves of the state, it gives up.
    """
    split = split_at_marks(program)
    replicated = NamedSharding(mesh, PartitionSpec())
    first_out = [replicated] * split.gradients.num_outputs
    second_out = [replicated] * split.apply.num_outputs
    for origin, sharding in zip(split.outputs, out_shardings, strict=True):
        if origin.part == "gradients":
            first_out[origin.at] = sharding
        elif origin.part == "apply":
            second_out[origin.at] = sharding
    # A leaf of the old state gives its memory to the same leaf of the new one.
    donated = tuple(i for i in split.apply_inputs if i < num_state and _is_replaced(program, split.outputs, i))
    second_in = [in_shardings[i] for i in split.apply_inputs] + [first_out[i] for i in split.carried]
    gradients = _compile(mesh, split.gradients, [in_shardings[i] for i in split.gradient_inputs], first_out, donate=())
    apply = _compile(
        mesh, split.apply, second_in, second_out,
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

    return run, donated


def _is_replaced(program: Program, outputs: tuple[Any, ...], index: int) -> bool:
    kept = any(origin.part == "input" and origin.at == index for origin in outputs)
    return outputs[index].part == "apply" and not kept


def _compile(mesh: Mesh, part: Part, ins: list[Any], outs: list[Any], donate: tuple[int, ...]) -> Any:
    if not outs:
        return lambda *_: []  # pyright: ignore
    return compile_on(mesh, part, in_shardings=tuple(ins), out_shardings=list(outs), donate=donate)
