"""In a process that trains: runs of all settings, whose programs stay from one to the next."""

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from braidax.checkpoint import Checkpointer, Every
from braidax.data import Cursor, DataLoader, Knobs
from braidax.parallel import DataParallel, Pipeline, parallelize
from braidax.report import Report, RunLength
from braidax.spans import Trace

from .case import NUM_STAGES, Case
from .design import Length
from .factors import Setting

_MAX_SPANS = 200_000
_WHOLE_BYTES = 1 << 40  # more than any gradients have
_EACH_APART = {"xla_disable_hlo_passes": "all-reduce-combiner"}
"""The compiler for CPUs puts all sums together that need not wait for one another, in a pass without a limit to set."""


@dataclass
class _Made:
    """A step that stays, with the state that its last run has left."""

    step: Any
    state: Any


class Measured(NamedTuple):
    """A run in this process. **Fields:** `core_seconds`: of all cores, for a step that counts, on average."""

    trace: Trace
    core_seconds: float


class Bench:
    """Trains a workload by any setting, on the devices of all processes of JAX.

    **Arguments:** `case`: what is trained. `scratch`: a folder for checkpoints, which are removed behind each run.
    `seed`: of parameters and samples.
    """

    def __init__(self, case: Case, scratch: Path, *, seed: int = 0) -> None:
        self._case, self._work, self._scratch, self._seed = case, case.make(), scratch, seed
        self._made: dict[Setting, _Made] = {}

    def prepare(self, setting: Setting) -> None:
        """Makes and compiles all that runs of a setting need, by a short one."""
        every = setting.checkpoint_every
        self.run(setting, Length(2 if every is None else min(every, 2), 2))

    def run(self, setting: Setting, length: Length) -> Measured:
        """Trains so many steps; returns the trace of this process, and what it took of the cores."""
        made, trace = self._of(setting), Trace(max_spans=_MAX_SPANS)
        every, num_steps = setting.checkpoint_every, length.num_warm + length.num_counted
        folder = self._scratch / "run"
        with contextlib.ExitStack() as stack:
            saver = None
            if every is not None:
                if jax.process_index() == 0:
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                saver = stack.enter_context(Checkpointer(folder, Every(every), keep=1))
                saver.trace = trace
            loader = stack.enter_context(self._loader(made.step, setting, num_steps))
            loader.trace = trace
            if setting.microbatches is not None:
                made.step.trace = trace
            taken = self._train(made, loader, saver, Report(show="nothing", trace=trace), length)
        return Measured(trace, taken / length.num_counted)

    def _train(
        self, made: _Made, loader: DataLoader, saver: Checkpointer | None, report: Report, length: Length
    ) -> float:
        """Does as `fit` does, and counts steps from 1 in all processes, also those without the state's own count.

        Returns what the cores did for as many steps as count; the loop is as far ahead of them at both ends.
        """
        before_apply = None if saver is None else saver.wait
        num_steps, begun = length.num_warm + length.num_counted, time.process_time()
        with report.following(RunLength(num_steps, None, loader.batch_size), 0):
            batches = iter(loader)
            for number in range(num_steps):
                if number == length.num_warm:
                    begun = time.process_time()
                with report.waiting():
                    batch = next(batches)
                with report.updating(before_apply) as dispatched:
                    made.state, metrics = made.step.update(made.state, batch, before_apply=dispatched)
                report.update(metrics, epoch=0, state=made.state)
                if saver is not None:
                    with report.saving():
                        saver.update((made.state, loader.cursor))
            taken = time.process_time() - begun
            made.step.finish()
            next(batches, None)  # all processes come to the end of the epoch
        return taken

    def _loader(self, step: Any, setting: Setting, num_steps: int) -> DataLoader:
        """Returns a loader that stands so many batches before the end of its epochs."""
        work = self._work
        size = self._case.batch_size
        per_epoch = len(work.source) // size
        epochs = -(-num_steps // max(1, per_epoch))
        knobs = Knobs(prefetch=setting.prefetch)
        loader = DataLoader(
            work.source, step.mesh, step.batch_shardings, batch_size=size, seed=self._seed, epochs=epochs, knobs=knobs
        )
        loader.cursor = Cursor(self._seed, 0, (epochs * per_epoch - num_steps) * size)
        return loader

    def _of(self, setting: Setting) -> _Made:
        key = setting.program
        if key not in self._made:
            step = self._step(key)
            self._made[key] = _Made(step, step.init(jax.random.key(self._seed)))
        return self._made[key]

    def _step(self, setting: Setting) -> Any:
        work, devices = self._work, np.array(jax.devices())
        is_cpu = devices[0].platform == "cpu"
        apart = {"cpu": _EACH_APART} if setting.sync == "overlapped" else None
        parallel = DataParallel(combine_bytes=None if is_cpu or setting.sync == "overlapped" else _WHOLE_BYTES)
        if setting.microbatches is None:
            mesh, strategies, pieces = Mesh(devices, ("data",)), {"data": parallel}, 1
        else:
            mesh = Mesh(devices.reshape(NUM_STAGES, -1), ("stage", "data"))
            pipeline = Pipeline("1F1B", mixes_samples=self._case.mixes_samples, clock="counted")
            strategies, pieces = {"stage": pipeline, "data": parallel}, setting.microbatches
        return parallelize(
            work.loss,
            work.optimizer,
            mesh,
            strategies,
            init=work.init,
            batch=work.source.batch_spec(self._case.batch_size),
            microbatches=pieces,
            compiler_options=apart,
        )
