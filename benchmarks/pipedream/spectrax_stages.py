"""SpectraX, in an environment of its own: one process, a thread and a core for each of its two devices.

It is run by what its description on PyPI and its docstrings tell, and nothing of it is in here.
"""

import importlib
import itertools
import time
from typing import Any

import jax
import numpy as np

from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import gpt
from benchmarks.pipedream.group import Place, Taken

SCHEDULES = {"GPipe": "GPipe", "1F1B": "Std1F1B", "ZB-H1": "ZeroBubbleH1"}


class SpectraX:
    """Its scheduled gradients, and SGD on what they give."""

    def __init__(self, gradients: Any, params: Any, batches: Any, rate: float) -> None:
        self._gradients, self._params, self._batches = gradients, params, itertools.cycle(batches)
        self._apply = jax.jit(lambda leaf, found: leaf - rate * found, donate_argnums=0)

    def step(self) -> Taken:
        """Takes the next step."""
        batch = next(self._batches)
        start = time.perf_counter()
        loss, (found,) = self._gradients(self._params, batch)
        self._params = jax.tree.map(self._apply, self._params, found)
        jax.block_until_ready((self._params, loss))
        return Taken(time.perf_counter() - start, float(loss))


def begin(place: Place, shape: Shape, schedule: str, microbatches: int, params: Any, batches: Any) -> SpectraX:
    """Makes the step. **Arguments:** `schedule`: one of `SCHEDULES`."""
    jax.config.update("jax_num_cpu_devices", 2)
    spx = importlib.import_module("spectrax")
    mpmd = importlib.import_module("spectrax.runtime.mpmd")
    schedules = importlib.import_module("spectrax.runtime.schedules")
    mesh = spx.create_mesh(axis_dims=(2, 1, 1, 1, 1, 1), mpmd_axis="pp")
    loss = gpt.loss(shape, mpmd.sxstage_iter)
    made = getattr(schedules, SCHEDULES[schedule])(microbatches=microbatches)
    run = mpmd.sxjit(loss, mesh=mesh, schedule=made, batch_argnums=1)
    given = [{"ids": np.asarray(one), "labels": np.asarray(one)} for one in batches]
    one, other = jax.devices()
    homes = {name: one if name in ("wte", "wpe") else other for name in params}
    layers = gpt.apart(params)["layers"]
    on: dict[str, Any] = {name: jax.device_put(leaf, homes[name]) for name, leaf in params.items() if name != "layers"}
    on["layers"] = tuple(jax.device_put(w, (one, other)[2 * at // len(layers)]) for at, w in enumerate(layers))
    return SpectraX(mpmd.sxvalue_and_grad(run), on, given, gpt.RATE)
