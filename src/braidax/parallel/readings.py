"""The functions of a step that read a state: the metrics of a batch, and what users wrap."""

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from braidax.program import compile_on

from .compute import feed
from .compute.work import Work
from .given.asking import Asking
from .plan.batch import shard_batch


class Reading(NamedTuple):
    """What reads a state: a jitted function of that and a batch, and how the batch goes in and the result comes out.

    **Fields:** these, and `fed`: how it reads the variables of a feed, if there is one.
    """

    compiled: Any
    batch_shardings: Any
    out_shardings: Any
    fed: feed.Reading | None


@final
class Readings:
    """Functions that read a state, each compiled once for each form of a batch, at its first call.

    **Arguments:** `read`: the shardings of what is read of a state. `compiler_options`: as of `jax.jit`.
    """

    def __init__(self, work: Work, read: tuple[Any, ...], compiler_options: Mapping[str, Any]) -> None:
        self._work, self._read, self._compiler_options = work, read, compiler_options
        self._made: dict[Any, Reading] = {}

    def of(self, fn: Asking | None, specs: Any) -> Reading:
        """Returns what computes a function, or the metrics, on batches of a form. **Arguments:** `specs`: of those."""
        form = (fn, jax.tree.structure(specs), tuple((s.shape, s.dtype) for s in jax.tree.leaves(specs)))
        if form not in self._made:
            work = self._work
            batch_shardings = shard_batch(work.mesh, work.plan.batch_axes, specs)
            run, out, fed = work.evaluate(specs) if fn is None else work.wrapped(fn, specs)
            checked = NamedSharding(work.mesh, PartitionSpec())
            compiled = compile_on(
                work.mesh,
                run,
                in_shardings=(*self._read, batch_shardings),
                out_shardings=out if fn is None else (out, checked),
                compiler_options=self._compiler_options,
            )
            self._made[form] = Reading(compiled, batch_shardings, out, fed)
        return self._made[form]
