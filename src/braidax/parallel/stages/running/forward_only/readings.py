"""The functions of a step of stages that read a state: the metrics of a batch, and what users wrap."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.parallel.given.asking import Asking
from braidax.parallel.given.loss import Loss
from braidax.parallel.plan.batch import shard_batch
from braidax.parallel.stages.running.feeding import Given
from braidax.parallel.stages.running.home import without_mesh
from braidax.parallel.stages.running.pipelined_work import PipelinedWork
from braidax.parallel.state import State

from .forward import Forward


class StagedReading(NamedTuple):
    """What reads a state, and how the batch goes in and the result comes out."""

    forward: Forward
    batch_shardings: Any
    out_shardings: Any


@final
class StagedReadings:
    """Functions that read a state in stages, each traced once for each form of a batch.

    **Arguments:** `mesh`: of all stages. `batch_axes`: over which samples are divided.
    """

    def __init__(self, work: PipelinedWork, loss: Loss, mesh: Mesh, batch_axes: tuple[str, ...]) -> None:
        self._work, self._loss, self._mesh, self._batch_axes = work, loss, mesh, batch_axes
        self._made: dict[Any, StagedReading] = {}

    def of(self, fn: Asking | None, specs: Any) -> StagedReading:
        """Returns what computes a function, or the metrics, on batches of a form. **Arguments:** `specs`: of those."""
        form = (fn, jax.tree.structure(specs), tuple((s.shape, s.dtype) for s in jax.tree.leaves(specs)))
        if form not in self._made:
            shard_batch(self._mesh, self._batch_axes, specs)
            run, born = self._work.run, self._work.born
            given = (born.params, born.variables, born.key, specs)
            program = self._loss.trace(*given, train=False) if fn is None else fn.trace(*given)
            with without_mesh():
                forward = Forward(program, run.homes, run.ownership, run.layouts, run.carried)
            whole = NamedSharding(self._mesh, PartitionSpec())
            pairs = zip(jax.tree.leaves(program.out_specs), forward.results_lie, strict=True)
            lie = [whole if spec.shape == () else on for spec, on in pairs]
            goes = [
                home.samples if spec.shape[0] % home.num_parts == 0 else home.all_samples
                for home, spec in zip(forward.batch_homes, jax.tree.leaves(specs), strict=True)
            ]
            self._made[form] = StagedReading(
                forward, jax.tree.unflatten(jax.tree.structure(specs), goes), forward.structure.unflatten(lie)
            )
        return self._made[form]

    def run(self, reading: StagedReading, state: State, batch: Sequence[Given]) -> Any:
        """Computes it. **Returns:** the result, of which what is one number is on all devices."""
        work, forward = self._work, reading.forward
        key, pieces = work.step_key(state.key, state.step), work.tree.pieces(state.params)
        found = forward(pieces, jax.tree.leaves(state.variables), key, batch)
        shown, _ = work.shown(found, forward.result_homes)
        return forward.structure.unflatten(shown)

    def metrics(self, reading: StagedReading, state: State, batch: Sequence[Given]) -> dict[str, Any]:
        """Computes the loss and its metrics."""
        loss, (metrics, _) = self.run(reading, state, batch)
        return {"loss": loss, **metrics}
