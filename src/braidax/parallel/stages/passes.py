"""A stage that is differentiated by itself: its forward pass, what that keeps, and its backward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from braidax.program import Stage, bytes_of, inputs_of, trace


class Made(NamedTuple):
    """What a forward pass gives: what it sends, outputs of the loss, and what the backward pass needs besides."""

    outgoing: tuple[Any, ...]
    results: tuple[Any, ...]
    kept: list[Any]


@final
class Passes:
    """Pure functions of a stage.

    What the forward pass keeps is neither one of its inputs, which the backward pass is given again, nor made of
    parameters alone, such as their casts: these it makes again. With nothing kept it runs the stage again. Both are to
    be jitted: what is not needed is computed otherwise.

    **Arguments:** `params`: the number of the argument of the loss that is trained. `recompute`: whether nothing is
    kept. `mesh`: as of `trace`.
    """

    def __init__(
        self, stage: Stage, *, params: int = 0, recompute: bool = False, mesh: AbstractMesh | None = None
    ) -> None:
        self.stage, self.params, self.recompute = stage, params, recompute
        *taken, incoming = stage.program.in_specs
        own = [leaf for leaf in stage.leaves if leaf.argument == params]
        self.trained = [at for at, leaf in enumerate(own) if not leaf.frozen]
        """Which of the leaves of its parameters have a gradient."""
        self._floats = [at for at, one in enumerate(incoming) if is_float(one)]
        self._own: list[int] | None = None
        self._leaves: list[int] = []
        self._held: list[int] = []
        program = trace(lambda *given: self._traced(*given)[0], tuple(taken), incoming, mesh=mesh)
        made: Made = program.out_specs
        before, count = (len(jax.tree.leaves(one)) for one in (tuple(taken[:params]), taken[params]))
        trained, first = {*range(before, before + count)}, len(made.outgoing) + len(made.results)
        used = [inputs_of(program.closed, first + at) for at in range(len(made.kept))]
        kept = [at for at, inputs in enumerate(used) if not inputs <= trained]
        self._own = [self._leaves[at] for at in kept]
        self._made = made._replace(kept=[made.kept[at] for at in kept])

    @property
    def kept_bytes(self) -> int:
        """Of what is held from the forward to the backward pass of a microbatch: what comes in, and what is kept."""
        held = [self.stage.incoming[at] for at in self.held]
        return sum(bytes_of(one) for one in (*held, *([] if self.recompute else self._made.kept)))

    @property
    def held(self) -> list[int]:
        """Which incoming values the backward pass needs; what it is given in place of others counts for nothing."""
        return [*range(len(self.stage.incoming))] if self.recompute else self._held

    def forward(self, taken: Sequence[Any], incoming: Sequence[Any]) -> Made:
        """Runs the stage. **Arguments:** `taken`: what it has of the arguments of the loss."""
        made, _ = self._traced(taken, incoming)
        return made if not self.recompute else made._replace(kept=[])

    def backward(
        self, taken: Sequence[Any], incoming: Sequence[Any], kept: Sequence[Any], outgoing: Sequence[Any], results: Any
    ) -> tuple[Any, list[Any]]:
        """Goes back through the stage.

        **Arguments:** `taken`, `incoming`: as of `forward`, and what that has `kept`. `outgoing`, `results`: gradients
        of what it gave, None for what has none.

        **Returns:** the gradients of its parameters, None for what is frozen, and of its incoming values, None for what
        is no float.
        """
        _, pull = self._traced(taken, incoming, None if self.recompute else kept)
        specs = [one for one in (*self._made.outgoing, *self._made.results) if is_float(one)]
        pairs = zip((*self._made.outgoing, *self._made.results), (*outgoing, *results), strict=True)
        given = [one for spec, one in pairs if is_float(spec)]
        whole = [jnp.zeros(*_form(spec)) if one is None else one for spec, one in zip(specs, given, strict=True)]
        own, moved = pull(whole)
        sent: list[Any] = [None] * len(incoming)
        for at, one in zip(self._floats, moved, strict=True):
            sent[at] = one
        structure = jax.tree.structure(taken[self.params])
        return structure.unflatten([own.get(at) for at in range(structure.num_leaves)]), sent

    def _traced(self, taken: Sequence[Any], incoming: Sequence[Any], kept: Sequence[Any] | None = None) -> Any:
        """Returns `Made`, and the function that pulls gradients back: of this run, or of the one that has kept some."""

        params, structure = jax.tree.flatten(taken[self.params])

        def run(own: dict[int, Any], moved: Sequence[Any]) -> Any:
            args, given = list(taken), list(incoming)
            args[self.params] = structure.unflatten([own.get(at, leaf) for at, leaf in enumerate(params)])
            for at, one in zip(self._floats, moved, strict=True):
                given[at] = one
            outgoing, results = self.stage.program(*args, tuple(given))
            return [one for one in (*outgoing, *results) if is_float(one)], (outgoing, results)

        own, moved = {at: params[at] for at in self.trained}, [incoming[at] for at in self._floats]
        _, pull, (outgoing, results) = jax.vjp(run, own, moved, has_aux=True)
        inputs = {id(one) for one in jax.tree.leaves((taken, incoming))}
        leaves, structure = jax.tree.flatten(pull)
        saved = self._own
        if saved is None:
            saved = self._leaves = [at for at, leaf in enumerate(leaves) if id(leaf) not in inputs]
            self._held = [at for at, one in enumerate(incoming) if any(one is leaf for leaf in leaves)]
        if kept is not None:
            for at, one in zip(saved, kept, strict=True):
                leaves[at] = one
            pull = structure.unflatten(leaves)
        return Made(outgoing, results, [leaves[at] for at in saved]), pull


def is_float(value: Any) -> bool:
    """Whether something has a gradient."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _form(spec: Any) -> tuple[Any, Any]:
    return spec.shape, spec.dtype
