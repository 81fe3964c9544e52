"""`fit` and `evaluate` with a worker's step: servers have what is trained, and its checkpoints."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from braidax.checkpoint import Checkpointer, Every
from braidax.data import DataLoader
from braidax.data import open as open_source
from braidax.gang import LocalGang
from braidax.loop import evaluate, fit
from tests.support.parallel.workers.teams import BATCH, assert_close, batches, make_step


def test_a_run_goes_on_with_what_servers_had(gangs: dict[int, LocalGang], tmp_path: Path) -> None:
    (samples,) = batches(1, 3 * BATCH)
    source = open_source(samples)

    def trained(gang: LocalGang, folder: Path | None, epochs: int) -> tuple[int, Any, float]:
        with make_step(gang) as step:
            given = source, step.mesh, step.batch_shardings
            saver = None if folder is None else Checkpointer(folder, Every(100))
            with DataLoader(*given, batch_size=BATCH, seed=1, epochs=epochs) as loader:
                state = fit(step, step.init(jax.random.key(0)), loader, saver=saver)
            if saver is not None:
                saver.close()
            with DataLoader(*given, batch_size=BATCH, seed=None) as test:
                loss = evaluate(step, state, test)["loss"]
            return int(state.step), step.params(), loss

    num_updates, expected, loss = trained(gangs[1], None, 2)
    assert num_updates == 6
    assert trained(gangs[1], tmp_path, 1)[0] == 3
    num_updates, found, again = trained(gangs[1], tmp_path, 2)
    assert num_updates == 6
    assert_close(found, expected)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
