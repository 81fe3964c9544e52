"""All that servers have of a run of workers, in its checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.programs import TableForm
from braidax.parallel.served.saved import ServedTables
from braidax.parallel.served.servers import Servers
from braidax.program import named_leaves

_STEP, _TABLES, _WHOLE = "step", "tables", "whole"


@final
class ServedVariables:
    """Stands for what servers have, in the tree of a checkpoint of the first worker.

    It is read while nobody changes anything: each server has taken whole updates then, and where workers do not wait
    for each other one server may have taken one that is still on its way to another. It is an `Outside` of
    `braidax.checkpoint`.

    **Arguments:** `servers`. `tables`: those by rows. `settle`: waits for what this worker has pushed. `worker`: which
    this is.
    """

    def __init__(self, servers: Servers, tables: ServedTables, settle: Callable[[], object], worker: int) -> None:
        self._servers, self._tables, self._settle, self._worker = servers, tables, settle, worker

    def checkpoint_state(self) -> Any:
        """Returns what servers have. **Raises:** `ArgumentError` in any worker but the first."""
        self._check()
        self._settle()  # before nobody else may push any more
        with self._servers.held():
            tables = self._tables.checkpoint_state()
            step, whole = self._servers.read_whole()
        return {_STEP: step, _TABLES: tables, _WHOLE: whole}

    def restored(self, state: Any) -> "ServedVariables":
        """Brings it to the servers; all workers go on by `step.meet(state)` behind that. **Returns:** this."""
        self._check()
        self._tables.restored(state[_TABLES])
        self._servers.write_whole(state[_WHOLE], int(state[_STEP]))
        return self

    def _check(self) -> None:
        if self._worker > 0:
            raise ArgumentError(
                f"worker {self._worker} has step.variables in a checkpoint: expected the first worker alone to save "
                f"and restore them, and all to call step.meet(state) behind restore"
            )


def params_of(servers: Servers, forms: Mapping[str, TableForm], whole: Mapping[str, NDArray[Any]], like: Any) -> Any:
    """Returns all variables on the host. **Arguments:** `forms`: of tables, which are read. `whole`: all else, by name.
    `like`: a PyTree of all."""
    found = dict(whole)
    for name, form in forms.items():
        found[name] = servers.whole.values(name, 0, form.shape[0]).reshape(form.shape)
    return jax.tree.structure(like).unflatten([np.array(found[name]) for name, _ in named_leaves(like)])
