"""All that servers have of a run of workers, in its checkpoints."""

from collections.abc import Callable
from typing import Any, final

from braidax.errors import ArgumentError
from braidax.parallel.served.saved import ServedTables
from braidax.parallel.served.servers import Servers

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
