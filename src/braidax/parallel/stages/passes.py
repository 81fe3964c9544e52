"""A stage that is differentiated by itself: its forward pass, what that keeps, and its backward pass."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from braidax.program import Program, Stage, bytes_of, trace
from braidax.program.halving.halves import halves
from braidax.program.halving.turned_weights import TurnedWeight, suits_packing, with_turned_weights

from .products import AS_IS, PACKED


class Made(NamedTuple):
    """What a forward pass gives: what it sends, outputs of the loss, and what the backward pass needs besides."""

    outgoing: tuple[Any, ...]
    results: tuple[Any, ...]
    kept: list[Any]


@final
class Passes:
    """Pure functions of a stage: both halves of its traced value and gradient.

    What the forward pass keeps are the values of fewest bytes from which the backward pass is computed without another
    product; operations that cost little are repeated for that. It is neither one of the stage's inputs, which the
    backward pass is given again, nor made of parameters alone, such as their casts. With nothing kept the backward
    pass runs the stage again.

    **Arguments:** `params`: the number of the argument of the loss that is trained. `recompute`: whether nothing is
    kept. `turn_weights`: whether the passes are given weights that products take turned, as `turn` makes them, behind
    the arguments that they take; those of loops are not, and where such are left none is turned. `hold_values`:
    whether what several operations read is computed once, as of `held`. `mesh`: as of `trace`.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        params: int = 0,
        recompute: bool = False,
        turn_weights: bool = False,
        hold_values: bool = False,
        mesh: AbstractMesh | None = None,
    ) -> None:
        self.stage, self.params, self.recompute, self.holds_values = stage, params, recompute, hold_values
        *taken, incoming = stage.program.in_specs
        own = [leaf for leaf in stage.leaves if leaf.argument == params]
        self.trained = [at for at, leaf in enumerate(own) if not leaf.frozen]
        """Which of the leaves of its parameters have a gradient."""
        self._floats = [at for at, one in enumerate(incoming) if is_float(one)]
        self._outputs = [*stage.program.out_specs[0], *stage.program.out_specs[1]]
        self._pulled = [at for at, one in enumerate(self._outputs) if is_float(one)]
        gradients = tuple(self._outputs[at] for at in self._pulled)
        program = trace(self._both, tuple(taken), incoming, gradients, mesh=mesh)
        count = len(jax.tree.leaves(taken))
        self.turned: tuple[TurnedWeight, ...] = ()
        """What is turned, by the number of a leaf of all that the stage takes."""
        self.products: Mapping[str, str] = AS_IS
        """Options of the compiler for what the passes multiply."""
        if turn_weights:
            first = len(jax.tree.leaves(taken[:params]))
            closed, turned = with_turned_weights(program.closed, range(first, first + len(own)), before=count)
            if suits_packing(closed.jaxpr):
                program, self.turned = Program(closed, program.in_specs, program.out_specs), turned
                self.products = PACKED
        self._num_before, count = count, count + len(self.turned)
        late = range(count + len(incoming), count + len(incoming) + len(gradients))
        self._halves = halves(program, len(self._outputs), free=range(count), late=late)
        self._run = self._halves.held() if hold_values else self._halves
        self._read = [at - count for at in self._halves.second_inputs if count <= at < late.start]

    @property
    def taken(self) -> tuple[Any, ...]:
        """Specs of what the passes take of the arguments of the loss, and of turned weights."""
        *taken, _ = self.stage.program.in_specs
        return (*taken, jax.eval_shape(self.turn, taken))

    @property
    def forward_turns(self) -> bool:
        """Whether the forward pass, too, takes turned weights."""
        return any(0 <= at - self._num_before < len(self.turned) for at in self._halves.first_inputs)

    def turn(self, taken: Sequence[Any]) -> list[jax.Array]:
        """Returns the turned weights. **Arguments:** `taken`: what the stage has of the arguments of the loss."""
        leaves = jax.tree.leaves(taken)
        return [jnp.transpose(leaves[one.number], one.order) for one in self.turned]

    @property
    def kept(self) -> list[Any]:
        """Shapes and dtypes of what the forward pass keeps."""
        return [] if self.recompute else self._halves.handed

    @property
    def kept_bytes(self) -> int:
        """Of what is held from the forward to the backward pass of a microbatch: what comes in, and what is kept."""
        return sum(bytes_of(one) for one in (*(self.stage.incoming[at] for at in self.held), *self.kept))

    @property
    def held(self) -> list[int]:
        """Which incoming values the backward pass needs; what it is given in place of others counts for nothing."""
        return [*range(len(self.stage.incoming))] if self.recompute else self._read

    def forward(self, taken: Sequence[Any], incoming: Sequence[Any]) -> Made:
        """Runs the stage. **Arguments:** `taken`: what it has of the arguments of the loss."""
        made, kept = self._run.run_first([*jax.tree.leaves(taken), *incoming])
        count = len(self.stage.outgoing)
        return Made(tuple(made[:count]), tuple(made[count:]), [] if self.recompute else kept)

    def backward(
        self, taken: Sequence[Any], incoming: Sequence[Any], kept: Sequence[Any], outgoing: Sequence[Any], results: Any
    ) -> tuple[Any, list[Any]]:
        """Goes back through the stage.

        **Arguments:** `taken`, `incoming`: as of `forward`, and what that has `kept`. `outgoing`, `results`: gradients
        of what it gave, None for what has none.

        **Returns:** the gradients of its parameters, None for what is frozen, and of its incoming values, None for what
        is no float.
        """
        inputs = self._inputs(taken, incoming, (*outgoing, *results))
        if self.recompute:
            return self._gradients(taken, self._halves.run_both(inputs)[len(self._outputs) :])
        return self._gradients(taken, self._halves.run_second(inputs, kept))

    def forward_backward(
        self, taken: Sequence[Any], incoming: Sequence[Any], results: Any
    ) -> tuple[list[Any], Any, list[Any]]:
        """Runs a stage that sends nothing on, and goes back through it.

        **Arguments:** `taken`, `incoming`: as of `forward`. `results`: gradients of what it gives, None for what has
        none.

        **Returns:** what it gives, and what `backward` returns.
        """
        found, count = self._halves.run_both(self._inputs(taken, incoming, results)), len(self._outputs)
        return found[:count], *self._gradients(taken, found[count:])

    def _inputs(self, taken: Sequence[Any], incoming: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Returns what both passes take. **Arguments:** `given`: gradients of what the stage gives, or None."""
        pairs = [(self._outputs[at], given[at]) for at in self._pulled]
        gradients = [jnp.zeros(spec.shape, spec.dtype) if one is None else one for spec, one in pairs]
        return [*jax.tree.leaves(taken), *incoming, *gradients]

    def _gradients(self, taken: Sequence[Any], found: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns gradients as `backward` does. **Arguments:** `found`: of incoming floats and of what is trained."""
        sent, count = list[Any]([None] * len(self.stage.incoming)), len(self._floats)
        for at, one in zip(self._floats, found[:count], strict=True):
            sent[at] = one
        own = dict(zip(self.trained, found[count:], strict=True))
        structure = jax.tree.structure(taken[self.params])
        return structure.unflatten([own.get(at) for at in range(structure.num_leaves)]), sent

    def _both(self, taken: Sequence[Any], incoming: Sequence[Any], gradients: Sequence[Any]) -> Any:
        """Returns what the stage gives, and the gradients of incoming floats and of what is trained."""
        params, structure = jax.tree.flatten(taken[self.params])

        def run(own: Sequence[Any], moved: Sequence[Any]) -> Any:
            args, given, leaves = list(taken), list(incoming), list(params)
            for at, one in zip(self.trained, own, strict=True):
                leaves[at] = one
            for at, one in zip(self._floats, moved, strict=True):
                given[at] = one
            args[self.params] = structure.unflatten(leaves)
            outgoing, results = self.stage.program(*args, tuple(given))
            outputs = [*outgoing, *results]
            return [outputs[at] for at in self._pulled], outputs

        own, moved = [params[at] for at in self.trained], [incoming[at] for at in self._floats]
        _, pull, outputs = jax.vjp(run, own, moved, has_aux=True)
        of_own, of_moved = pull([*gradients])
        return outputs, of_moved, of_own


def is_float(value: Any) -> bool:
    """Whether something has a gradient."""
    return jnp.issubdtype(value.dtype, jnp.inexact)
