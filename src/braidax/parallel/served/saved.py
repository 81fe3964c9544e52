"""The tables of a step in its checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np
from jax.numpy import dtype
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.host_shard import HostShard
from braidax.parallel.served.on_servers.growing.seen_shard import Which

from .programs import TableForm, TablePart
from .seen_rows import list_rows, put_rows
from .servers import Servers

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
            if form.seen is not None:
                tables[name] = self._listed(form)
                continue
            part = self._servers.whole.read(name, *self._servers.own_rows(name))
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
        self._servers.brought()  # others may read what was there before
        self._servers.forget()
        for name, form in self._forms.items():
            found = state[_TABLES][name]
            if form.seen is not None:
                self._put_list(form, found, step)
                continue
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
        if any(form.seen is not None for form in self._forms.values()):
            self._servers.first_tells("resume", {"step": step}, {})
        self._adopt(step)
        return self

    def _listed(self, form: TableForm) -> Any:
        """Returns what this process brings of a table that grows: the rows and counts of its part of all ids."""
        (first, last), lists = self._servers.own_rows(form.name), dict[str, Any]()
        listed = None
        for which in _lists(form):
            ends = (first, last) if which != "changes" else (0, form.shape[0] if self._servers.worker == 0 else 0)
            listed = list_rows(self._servers, form, which, *ends)
            lists[which] = {name: self._of_list(leaf) for name, leaf in _named(form, listed.arrays).items()}
        assert listed is not None, "there are two lists"
        key = listed.key if len(listed.key) else np.zeros_like(np.asarray(jax.random.key_data(jax.random.key(0))))
        return {**lists, "shared": listed.shared, "key": key}

    def _of_list(self, leaf: NDArray[Any]) -> HostShard:
        """Returns what this process has of a list, and others have the rest of."""
        counts = self._servers.all_counts(len(leaf))
        before, rest = sum(counts[: self._servers.worker]), leaf.shape[1:]
        place = (sum(counts), *rest), (before, *(0 for _ in rest))
        return HostShard(leaf, *place, share=(self._servers.worker, len(counts)))

    def _put_list(self, form: TableForm, found: Any, step: int) -> None:
        shared = {f"shared/{at}": np.asarray(one) for at, one in enumerate(found["shared"])}
        told = {"table": form.name, "step": step}
        self._servers.first_tells("restart", told, {**shared, "key": np.asarray(found["key"])})
        for which in _lists(form):
            arrays = {name: leaf.value for name, leaf in found[which].items()}
            turns = len(self._servers.all_counts(0)) if which == "changes" else 1  # these come in their order
            for turn in range(turns):
                if turns == 1 or turn == self._servers.worker:
                    put_rows(self._servers, form, which, _unnamed(form, arrays))
                if turns > 1:
                    self._servers.brought()

    def _of_whole(self, leaf: Any, first: int, form: TableForm) -> Any:
        """Returns rows as a part of an array that all processes have."""
        rest = leaf.shape[1:]
        return HostShard(leaf, (form.shape[0], *rest), (first, *(0 for _ in rest)))


def _lists(form: TableForm) -> tuple[Which, ...]:
    """Returns what a checkpoint has of a table that grows."""
    return ("rows", "counts", "changes") if form.programs.settle else ("rows", "counts")


def _named(form: TableForm, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Returns what is kept of rows by its names, and rows in their shape."""
    names = {f"kept/{at}": f"kept/{one.name}" for at, one in enumerate(form.kept)}
    found = {names.get(name, name): leaf for name, leaf in arrays.items()}
    return found | {name: found[name].reshape(-1, *form.shape[1:]) for name in ("values",) if name in found}


def _unnamed(form: TableForm, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Undoes `_named`."""
    names = {f"kept/{one.name}": f"kept/{at}" for at, one in enumerate(form.kept)}
    found = {names.get(name, name): leaf for name, leaf in arrays.items()}
    return found | {name: found[name].reshape(-1, form.width) for name in ("values",) if name in found}
