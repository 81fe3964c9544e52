"""In a process that trains: runs of all settings, whose programs stay from one to the next."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from braidax.checkpoint import Checkpointer, Every
from braidax.data import Cursor, DataLoader, Knobs
from braidax.loop import fit
from braidax.parallel import DataParallel, Pipeline, parallelize
from braidax.report import Report
from braidax.spans import Span, Trace

from .case import Case
from .design import Length
from .factors import Setting

_NUM_STAGES = 2
_MAX_SPANS = 200_000
_WHOLE_BYTES = 1 << 40  # more than any gradients have
_EACH_APART = {"xla_disable_hlo_passes": "all-reduce-combiner"}
"""The compiler for CPUs puts all sums together that need not wait for one another, in a pass without a limit to set."""


@dataclass
class _Made:
    """A step that stays, with the state that its last run has left."""

    step: Any
    state: Any


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

    def run(self, setting: Setting, length: Length) -> list[Span]:
        """Trains so many steps; returns the spans of this process."""
        made = self._of(setting)
        trace = Trace(max_spans=_MAX_SPANS)
        folder = self._scratch / f"run-{os.getpid()}" if jax.process_count() == 1 else self._scratch / "run"
        saver = (
            None if setting.checkpoint_every is None else Checkpointer(folder, Every(setting.checkpoint_every), keep=1)
        )
        num_steps = length.num_warm + length.num_counted
        try:
            with self._loader(made.step, setting, num_steps) as loader:
                made.state = fit(made.step, made.state, loader, saver=saver, report=Report(show="nothing", trace=trace))
        finally:
            if saver is not None:
                saver.close()
                if jax.process_index() == 0:
                    shutil.rmtree(folder, ignore_errors=True)
        return trace.spans

    def _loader(self, step: Any, setting: Setting, num_steps: int) -> DataLoader:
        """Returns a loader that stands so many batches before the end of its epochs."""
        work = self._work
        size = work.batch_size
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
            mesh = Mesh(devices.reshape(_NUM_STAGES, -1), ("stage", "data"))
            pipeline = Pipeline("1F1B", mixes_samples=self._case.mixes_samples, clock="counted")
            strategies, pieces = {"stage": pipeline, "data": parallel}, setting.microbatches
        return parallelize(
            work.loss,
            work.optimizer,
            mesh,
            strategies,
            init=work.init,
            batch=work.source.batch_spec(work.batch_size),
            microbatches=pieces,
            compiler_options=apart,
        )
