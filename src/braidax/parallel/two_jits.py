"""The two programs of a decorated step on a mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.program import Origin, compile_on

from .compiler_options import CompilerOptions
from .compute.in_flight import InFlight
from .compute.traced_step import TracedStep, sharding_of
from .plan.plan import Plan, layouts_of
from .rows.options import OutOfRange


@final
class TwoJits:
    """A whole step, compiled as gradients and apply, which takes over the memory of the old state.

    **Arguments:** `batch_shardings`: PyTree. `out_of_range`: whether ids that no row has are counted.
    """

    def __init__(
        self,
        traced: TracedStep,
        mesh: Mesh,
        plan: Plan,
        batch_shardings: Any,
        options: CompilerOptions,
        out_of_range: OutOfRange,
    ) -> None:
        self._traced, self.plan, split = traced, plan, traced.split
        layouts = layouts_of(plan)
        self.state_shardings = [sharding_of(layout, mesh) for layout in layouts]
        self._in_shardings: list[Any] = [*self.state_shardings, *jax.tree.leaves(batch_shardings)]
        first, second, first_out, second_out, tables = traced.parts(mesh, plan, out_of_range=out_of_range)
        self.tables = self.told(tables) if out_of_range == "raise" else ()
        """The tables whose ids are checked, in words."""
        self._carried = [first_out[i] for i in split.carried]
        # A leaf of the old state gives its memory to the same leaf of the new one.
        num_state = len(self.state_shardings)
        self.donated = tuple(i for i in split.apply_inputs if i < num_state and _is_replaced(split.outputs, i))
        """Which inputs, all of them leaves of the state, are given up."""
        counts = [NamedSharding(mesh, PartitionSpec())] if self.tables else []
        self._gradients = _compile(
            mesh, first, [self._in_shardings[i] for i in split.gradient_inputs], [*first_out, *counts], (),
            options.gradients,
        )  # fmt: skip
        self._apply = _compile(
            mesh, second, [*(self._in_shardings[i] for i in split.apply_inputs), *self._carried], second_out,
            tuple(at for at, i in enumerate(split.apply_inputs) if i in self.donated), options.apply,
        )  # fmt: skip
        avals = split.gradients.closed.out_avals
        self._small = min(range(len(avals)), key=lambda at: math.prod(avals[at].shape), default=None)

    def run(
        self, inputs: list[jax.Array], in_flight: InFlight, before_apply: Callable[[], object] | None
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """Takes a step. **Returns:** the flat outputs; and where there are `tables`, how many ids no row has."""
        split = self._traced.split
        in_flight.make_room()
        first = self._gradients(*(inputs[i] for i in split.gradient_inputs))
        if self._small is not None:
            in_flight.add(first[self._small])
        if before_apply is not None:
            before_apply()
        second = self._apply(*(inputs[i] for i in split.apply_inputs), *(first[i] for i in split.carried))
        parts = {"input": inputs, "gradients": first, "apply": second}
        wrong = first[-1] if self.tables else None
        return [parts[origin.part][origin.at] for origin in split.outputs], wrong

    def told(self, leaves: Sequence[int]) -> tuple[str, ...]:
        """Returns tables in words."""
        variables = [self.plan.variables[leaf] for leaf in leaves]
        return tuple(f"{one.path} of {one.shape[0]} rows" for one in variables)

    def lower(self) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """Lowers gradients and apply, from shapes alone."""
        split, inputs = self._traced.split, self._inputs
        avals = split.gradients.closed.out_avals
        carried = [spec_on(avals[at], on) for at, on in zip(split.carried, self._carried, strict=True)]
        return (
            self._gradients.lower(*(inputs[i] for i in split.gradient_inputs)),
            self._apply.lower(*(inputs[i] for i in split.apply_inputs), *carried),
        )

    def needed(self) -> Mapping[str, Any]:
        """Returns what `compile_step` wants to know of arrays, as specs with shardings."""
        split, inputs = self._traced.split, self._inputs
        num_state = len(self.state_shardings)
        held: dict[str, list[Any]] = {"parameters": [], "followers": [], "others": []}
        for kind, one in zip(self._traced.kinds, inputs, strict=False):
            held[kind].append(one)
        return {
            "held": {**held, "batch": inputs[num_state:]},
            "read": [inputs[at] for at in split.gradient_inputs],
            "moved": [inputs[at] for at in split.apply_inputs],
        }

    @property
    def _inputs(self) -> list[jax.ShapeDtypeStruct]:
        return list(map(spec_on, jax.tree.leaves(self._traced.program.in_specs), self._in_shardings))


def spec_on(form: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Returns the spec of an array, or of another spec, that lies so."""
    weak_type = getattr(form, "weak_type", False)
    return jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding, weak_type=weak_type)


def _is_replaced(outputs: Sequence[Origin], index: int) -> bool:
    kept = any(origin.part == "input" and origin.at == index for origin in outputs)
    return outputs[index].part == "apply" and not kept


def _compile(
    mesh: Mesh, part: Callable[..., Any], ins: list[Any], outs: list[Any], donate: tuple[int, ...], options: Any
) -> Any:
    if not outs:
        return jax.jit(lambda *_: [])  # pyright: ignore
    return compile_on(
        mesh, part, in_shardings=tuple(ins), out_shardings=list(outs), donate=donate, compiler_options=options
    )
