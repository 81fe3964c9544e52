"""The tables of a step in its checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from jax.numpy import dtype

from braidax.errors import ArgumentError
from braidax.host_shard import HostShard

from .programs import TableForm
from .servers import Servers, TablePart

_STEP, _TABLES = "step", "tables"


@final
class ServedTables:
    """Stands for the tables that servers have, in the tree of a checkpoint: `saver.update((state, step.tables))`.

    They are saved with the state, as of the same update, and restored with it, to any number of servers. Each process
    of a run brings an even part of their rows. It is an `Outside` of `braidax.checkpoint`.

    **Arguments:** `servers`, `forms`: of the tables, by name. `settle`: returns how many updates they have seen, when
    they have seen all. `adopt`: is told how many when they are restored.
    """

    def __init__(
        self,
        servers: Servers,
        forms: Mapping[str, TableForm],
        settle: Callable[[], int],
        adopt: Callable[[int], None],
    ) -> None:
        self._servers, self._forms, self._settle, self._adopt = servers, forms, settle, adopt

    def checkpoint_state(self) -> Any:
        """Returns the part of this process, read from the servers; all processes call it."""
        step, tables = self._settle(), dict[str, Any]()
        for name, form in self._forms.items():
            part = self._servers.read(name, *self._servers.own_rows(name))
            leaves = {"values": part.values.reshape(-1, *form.shape[1:])}
            leaves |= {f"kept/{one.name}": leaf for one, leaf in zip(form.kept, part.kept, strict=True)}
            tables[name] = {
                "rows": {called: self._of_whole(leaf, part.first, form) for called, leaf in leaves.items()},
                "shared": [np.asarray(one) for one in part.shared],
            }
        return {_STEP: step, _TABLES: tables}

    def restored(self, state: Any) -> "ServedTables":
        """Brings the part of this process to the servers; all processes call it. **Returns:** this."""
        step = int(state[_STEP])
        self._settle()
        for name, form in self._forms.items():
            found = state[_TABLES][name]
            rows = {called: leaf.value for called, leaf in found["rows"].items()}
            first, last = self._servers.own_rows(name)
            if len(rows["values"]) != last - first:
                raise ArgumentError(
                    f"{name} was restored with {len(rows['values'])} rows, expected the {last - first} of this process"
                )
            kept = [rows[f"kept/{one.name}"].astype(dtype(one.dtype)) for one in form.kept]
            shared = [np.asarray(one) for one in found["shared"]]
            part = TablePart(first, rows["values"].reshape(last - first, form.width), kept, shared)
            self._servers.write(name, part, step)
        self._servers.brought()
        self._adopt(step)
        return self

    def _of_whole(self, leaf: Any, first: int, form: TableForm) -> Any:
        """Returns rows as a part of an array that all processes have."""
        rest = leaf.shape[1:]
        return HostShard(leaf, (form.shape[0], *rest), (first, *(0 for _ in rest)))
