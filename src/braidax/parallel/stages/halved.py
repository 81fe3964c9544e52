"""The backward pass of a stage in two halves: the gradient of what came in, and that of its parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from braidax.program import bytes_of, cost_of, trace
from braidax.program.halving.halves import halves

from .passes import Passes, is_float


class Left(NamedTuple):
    """What is needed for the second half besides what the first one hands on: which of what the whole pass is given."""

    incoming: tuple[int, ...]
    kept: tuple[int, ...]
    outgoing: tuple[int, ...]


@final
class Halved:
    """Pure functions of a stage: its backward pass, and the halves of that, `I` and `W` of zero-bubble schedules.

    Of a stage that sends nothing on, the forward pass may be part of both: what that computes is not computed again.

    After Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024). Both take no more products than the whole pass does.
    What the first one hands on are operands of the products that give gradients of parameters, or what these are made
    of by cheap operations.

    **Arguments:** `passes`: of the stage. `loss`: which output of the loss, by number, is differentiated.
    `with_forward`: whether the forward pass is part of the backward pass and its first half, which are given nothing
    that is kept. `mesh`: under which the stage is traced.

    **Fields:** `handed`: shapes and dtypes of what goes from one half to the other. `left`: what must be held besides.
    """

    def __init__(
        self, passes: Passes, *, loss: int = 0, with_forward: bool = False, mesh: AbstractMesh | None = None
    ) -> None:
        self._passes, stage = passes, passes.stage
        assert not (with_forward and stage.outgoing), "what is sent on comes back later"
        taken, incoming = passes.taken, stage.program.in_specs[-1]
        kept = [] if with_forward else passes.kept
        outgoing = tuple(one for one in stage.outgoing if is_float(one))
        is_loss = [number == loss for number in stage.results]
        self._floats = [at for at, one in enumerate(incoming) if is_float(one)]

        def back(taken: Any, incoming: Any, kept: Any, outgoing: Any) -> Any:
            received = iter(outgoing)
            given = [next(received) if is_float(spec) else None for spec in stage.outgoing]
            results = stage.program.out_specs[1]
            ones = [jnp.ones((), spec.dtype) if own else None for spec, own in zip(results, is_loss, strict=True)]
            made: Sequence[Any] = ()
            if with_forward:
                made, own, sent = passes.forward_backward(taken, incoming, ones)
            else:
                own, sent = passes.backward(taken, incoming, kept, given, ones)
            return [*made, *(sent[at] for at in self._floats)], own

        program = trace(back, taken, incoming, kept, outgoing, mesh=mesh)
        own = len(jax.tree.leaves(taken))
        self._num_results = len(stage.results) if with_forward else 0
        self._halves = halves(program, self._num_results + len(self._floats), free=range(own))
        self._run = self._halves.held() if passes.holds_values else self._halves
        self._structure = jax.tree.structure(program.out_specs[1])
        self.handed: tuple[Any, ...] = tuple(self._halves.handed)
        numbers = [at - own for at in self._halves.second_inputs if at >= own]
        held, bounds = list[tuple[int, ...]](), 0
        for part in (incoming, kept, outgoing):
            held.append(tuple(at - bounds for at in numbers if bounds <= at < bounds + len(part)))
            bounds += len(part)
        self.left = Left(*held)
        pairs = zip((incoming, kept, outgoing), held, strict=True)
        self._left_bytes = sum(bytes_of(part[at]) for part, places in pairs for at in places)

    @property
    def kept_bytes(self) -> int:
        """Of what is held of a microbatch between the halves."""
        return self._left_bytes + sum(bytes_of(one) for one in self.handed)

    @property
    def weights_share(self) -> float:
        """Which part of the operations of a backward pass are those of its second half."""
        first, second = (cost_of(one.jaxpr) for one in (self._halves.first, self._halves.second))
        both = first + second
        return (second.flops + second.transcendentals) / max(both.flops + both.transcendentals, 1.0)

    def backward(
        self, taken: Sequence[Any], incoming: Sequence[Any], kept: Sequence[Any], outgoing: Sequence[Any]
    ) -> tuple[list[Any], list[Any], Any]:
        """Goes back through the stage at once.

        **Arguments:** `taken`, `incoming`, `kept`: as of `Passes.backward`. `outgoing`: gradients of those values that
        it sends and that are floats.

        **Returns:** what its forward pass gives, if that is part of it; the gradients of incoming floats; and those of
        its parameters.
        """
        found = self._run.run_both(_flat(taken, incoming, kept, outgoing))
        made, found = found[: self._num_results], found[self._num_results :]
        count = len(self._floats)
        return made, found[:count], jax.tree.unflatten(self._structure, found[count:])

    def inputs(
        self, taken: Sequence[Any], incoming: Sequence[Any], kept: Sequence[Any], outgoing: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Goes back to what came in. **Arguments:** as of `backward`.

        **Returns:** what its forward pass gives, if that is part of it; the gradients of incoming floats; and what is
        handed to `weights`.
        """
        found, handed = self._run.run_first(_flat(taken, incoming, kept, outgoing))
        return found[: self._num_results], found[self._num_results :], handed

    def weights(
        self,
        taken: Sequence[Any],
        incoming: Sequence[Any],
        kept: Sequence[Any],
        outgoing: Sequence[Any],
        handed: Sequence[Any],
    ) -> Any:
        """Returns the gradients of the parameters.

        **Arguments:** as of `backward`, None in place of what is not `left`; `handed`: by that.
        """
        found = self._run.run_second(_flat(taken, incoming, kept, outgoing), handed)
        return jax.tree.unflatten(self._structure, found)


def _flat(taken: Sequence[Any], *parts: Sequence[Any]) -> list[Any]:
    return [*jax.tree.leaves(taken), *(one for part in parts for one in part)]
