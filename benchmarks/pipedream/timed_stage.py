"""A compiled stage that is timed whenever it is asked: its forward and its whole backward pass on one microbatch."""

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from braidax.parallel.compute.accumulate import wide_zeros
from braidax.parallel.stages.halved import Halved
from braidax.parallel.stages.passes import is_float
from braidax.parallel.stages.segments import added, drawn, passes_here
from braidax.program import Stage
from braidax.program.halving.loop_sums import adding_in_loops


class TimedStage:
    """Both passes of a stage, compiled as the executor compiles them, and values drawn for them."""

    def __init__(self, stage: Stage) -> None:
        halved = Halved(passes := passes_here(stage))
        *given, incoming = drawn(stage.program.in_specs)
        taken, options = [*given, passes.turn(given)], dict(passes.products)

        def backward(sums: list[Any], *given: Any) -> Any:
            _, sent, own = halved.backward(*given)
            return added(sums, own), sent

        self._forward = jax.jit(passes.forward, compiler_options=options)
        adding = adding_in_loops(backward, mesh=AbstractMesh((), ()))
        self._backward = jax.jit(adding, donate_argnums=0, compiler_options=options)
        self._given = taken, incoming
        made = self._forward(*self._given)
        self._back = *self._given, made.kept, [jnp.ones_like(one) for one in made.outgoing if is_float(one)]
        self._sums = [wide_zeros(one) for one in jax.tree.leaves(taken[0])]
        self.seconds()

    def seconds(self) -> float:
        """Runs both, and returns how long that took."""
        start = time.perf_counter()
        jax.block_until_ready(self._forward(*self._given))
        self._sums, _ = jax.block_until_ready(self._backward(self._sums, *self._back))
        return time.perf_counter() - start
