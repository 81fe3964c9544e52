"""A compiled stage that is timed whenever it is asked: its forward and its whole backward pass on one microbatch."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.parallel.stages.passes import Passes, is_float
from braidax.program import Stage


class TimedStage:
    """Both passes of a stage, compiled, and values drawn for them."""

    def __init__(self, stage: Stage) -> None:
        passes = Passes(stage)
        *taken, incoming = jax.tree.map(_drawn, stage.program.in_specs)
        self._forward = jax.jit(passes.forward)
        self._backward = jax.jit(passes.backward)
        self._given = taken, incoming
        made = self._forward(*self._given)
        ones = [
            [jnp.ones_like(one) if is_float(one) else None for one in each] for each in (made.outgoing, made.results)
        ]
        self._back = *self._given, made.kept, *ones
        self.seconds()

    def seconds(self) -> float:
        """Runs both, and returns how long that took."""
        start = time.perf_counter()
        jax.block_until_ready(self._forward(*self._given))
        jax.block_until_ready(self._backward(*self._back))
        return time.perf_counter() - start


def _drawn(spec: Any) -> Any:
    if is_float(spec):
        return jnp.asarray(np.random.default_rng(0).normal(size=spec.shape) * 0.1, spec.dtype)
    if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), spec.shape)
    return jnp.zeros(spec.shape, spec.dtype)
