"""What gradients of rows lose on their way, kept for the next ones."""

from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.parallel.plan.placements import Wire
from braidax.parallel.served.programs import TableForm

from .lost import Lost, LostOfAll, LostOfSeen
from .travelling import packed_rows, unpacked_rows


@final
class Feedback:
    """Packs the gradients that one process pushes, with error feedback.

    What a row's gradient has lost is kept here, and is added to the next gradient that this process has for the row: so
    the sum of all that arrives differs from the sum of all gradients by no more than what the last one has lost (1-bit
    SGD, Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847). What is not finite leaves
    nothing to be added.

    What an update has lost counts when servers have taken its gradients (`keep`): one that they refuse is as if it had
    not been. Gradients that they drop, as their row is not admitted yet, leave nothing either.

    **Arguments:** `forms`: of the tables, by name. `wire`: as of `Served`; with None nothing is lost, and kept.
    `num_servers`: at most.

    **Raises:** `MemoryError` where a table is larger than what this process may address.
    """

    def __init__(self, forms: Mapping[str, TableForm], wire: Wire | None, num_servers: int) -> None:
        self._forms, self._num_servers = forms, num_servers
        self._wire: Wire | None = wire
        self._lost: dict[str, Lost] = {}
        self._packed: dict[str, tuple[NDArray[Any], NDArray[np.float32]]] = {}  # that servers have not taken yet
        self._step = 0  # of these
        self.forget()

    def forget(self) -> None:
        """Begins anew, with nothing to be added."""
        if self._wire is None:
            return
        self._lost.clear()
        self._packed.clear()
        for name, form in self._forms.items():
            if form.seen is not None:
                self._lost[name] = LostOfSeen(form.seen, form.width, self._num_servers)
                continue
            try:
                self._lost[name] = LostOfAll(form.shape[0], form.width)
            except MemoryError as error:
                raise MemoryError(
                    f"wire={self._wire!r} keeps what gradients of {name}, {form.dtype}{list(form.shape)}, lose, and "
                    f"this process has no memory for that: expected a host with as much as the table, or wire=None"
                ) from error

    def packed(
        self, ids: Mapping[str, NDArray[Any]], gradients: Mapping[str, NDArray[Any]], step: int
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """Returns gradients as the arrays of a message, by table; who calls sends them, and then calls `keep`.

        **Arguments:** by table `ids`: `[u]`, all different, and `gradients`: `[u, D]`. `step`: of their update.
        """
        self._packed.clear()
        self._step = step
        return {name: self._pack(name, one, gradients[name]) for name, one in ids.items()}

    def keep(self, dropped: Mapping[str, NDArray[np.bool_]]) -> None:
        """Keeps what the gradients have lost that were packed last. **Arguments:** `dropped`: by table which of them
        servers have dropped; those of others they have taken."""
        for name, (ids, lost) in self._packed.items():
            if name in dropped:
                ids, lost = ids[~dropped[name]], lost[~dropped[name]]
            self._lost[name].put(ids, lost, self._step)
        self._packed.clear()

    def _pack(self, name: str, ids: NDArray[Any], gradients: NDArray[Any]) -> dict[str, NDArray[Any]]:
        if self._wire is None:
            return packed_rows(gradients, "gradients", None)
        wanted = self._lost[name].take(ids, self._step)
        wanted += gradients
        found = packed_rows(wanted, "gradients", self._wire)
        with np.errstate(invalid="ignore"):
            wanted -= unpacked_rows(found, "gradients", self._wire, wanted, f"gradients of {name}")
        wanted[~np.isfinite(wanted)] = 0
        self._packed[name] = ids, wanted
        return found
