"""The programs of a step whose tables are on servers."""

from typing import Any, NamedTuple, final

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from braidax.parallel.compiler_options import CompilerOptions
from braidax.parallel.compute.accumulate import key_of_step
from braidax.parallel.compute.work import GRAD_NORM, Work
from braidax.parallel.readings import Readings
from braidax.program import compile_on

from .feed import ServedFeed, ServedReading
from .programs import numbers_to_send


class Evaluation(NamedTuple):
    """What computes the metrics of batches of a form.

    **Fields:** `reading`: how it reads tables. `ids`: their program. `run`: of the metrics. `batch_shardings`.
    """

    reading: ServedReading
    ids: Any
    run: Any
    batch_shardings: Any


@final
class ServedPrograms:
    """Jitted functions, each compiled at its first call.

    **Arguments:** `work`, whose feed is `feed`. `batch_shardings`: in training. `gradients`: in place of those of
    `work`.

    **Fields:** `reading`: in training. `whole`: the sharding of what is on every device. `init`: `key -> state`. `ids`:
    `(variables, key, step, batch) -> ids`, of each device by table. `gradients`: `(params, fed, variables, key, step,
    batch) -> ((gradients, those of rows), variables, metrics)`. `apply`: `(step, params, opt_state, (gradients, sums
    over rows), loss) -> (step, params, opt_state, numbers)`, which gives up the first three; the numbers, by table, are
    those of the new state once more, since that is given up before all servers may have them.
    """

    def __init__(
        self, work: Work, feed: ServedFeed, batch_shardings: Any, options: CompilerOptions, gradients: Any = None
    ) -> None:
        reading = work.reading
        assert isinstance(reading, ServedReading), "its feed is a served one"
        self._work, self._feed, self.reading = work, feed, reading
        self.whole, held = NamedSharding(work.mesh, PartitionSpec()), work.form.shardings
        self.init = compile_on(work.mesh, work.form.initial, in_shardings=(self.whole,), out_shardings=held)
        self.ids = self._compiled_ids(reading, batch_shardings)
        read = (held.params, reading.fed_shardings, held.variables, held.key, held.step)
        self.gradients = compiled_gradients(work, read, batch_shardings, options, gradients)
        of_dense, _ = work.gradient_shardings
        self.apply = compile_on(
            work.mesh,
            self._applied,
            in_shardings=(held.step, held.params, held.opt_state, (of_dense, self.whole), self.whole),
            out_shardings=(held.step, held.params, held.opt_state, self.whole),
            donate=(0, 1, 2),
            compiler_options=options.apply,
        )
        self._readings, self._ids = Readings(work, read, options.apply), dict[ServedReading, Any]()

    def evaluation(self, specs: Any) -> Evaluation:
        """Returns what evaluates batches of a form. **Arguments:** `specs`: of such a batch."""
        made = self._readings.of(None, specs)
        reading = made.fed
        assert isinstance(reading, ServedReading), "the feed is a served one"
        if reading not in self._ids:
            self._ids[reading] = self._compiled_ids(reading, made.batch_shardings)
        return Evaluation(reading, self._ids[reading], made.compiled, made.batch_shardings)

    def _applied(self, *given: Any) -> Any:
        step, params, opt_state = self._work.apply(*given)
        numbers = {name: numbers_to_send(kept) if kept else [] for name, kept in opt_state["rows"].items()}
        return step, params, opt_state, numbers

    def _compiled_ids(self, reading: ServedReading, batch_shardings: Any) -> Any:
        held = self._work.form.shardings

        def ids(variables: Any, key: Any, step: Any, batch: Any) -> dict[str, jax.Array]:
            return reading.ids(variables, key_of_step(key, step), batch)

        return compile_on(
            self._work.mesh,
            ids,
            in_shardings=(held.variables, held.key, held.step, batch_shardings),
            out_shardings=dict.fromkeys(self._feed.tables, reading.on_parts),
        )


def compiled_gradients(
    work: Work, read: tuple[Any, ...], batch_shardings: Any, options: CompilerOptions, gradients: Any = None
) -> Any:
    """Returns the jitted gradients of work. **Arguments:** `read`: shardings of all that they take but the batch.
    `gradients`: a function of the same in place of `work.gradients`."""
    return compile_on(
        work.mesh,
        work.gradients if gradients is None else gradients,
        in_shardings=(*read, batch_shardings),
        out_shardings=(work.gradient_shardings, work.form.shardings.variables, work.metric_shardings),
        compiler_options=options.gradients,
    )


def with_squares(metrics: dict[str, Any], squares: np.float32) -> dict[str, Any]:
    """Adds the squares of the gradients of rows to the norm, where that is a metric."""
    if GRAD_NORM not in metrics:
        return metrics
    return {**metrics, GRAD_NORM: jax.numpy.sqrt(jax.numpy.square(metrics[GRAD_NORM]) + squares)}
