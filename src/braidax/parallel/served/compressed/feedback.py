"""What gradients of rows lose on their way, kept for the next ones."""

from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.parallel.plan.placements import Wire
from braidax.parallel.served.programs import TableForm
from braidax.parallel.served.row_memory import put_rows, take_rows

from .travelling import packed_rows, unpacked_rows


@final
class Feedback:
    """Packs the gradients that one process pushes, with error feedback.

    What a row's gradient has lost is kept here, and is added to the next gradient that this process has for the row: so
    the sum of all that arrives differs from the sum of all gradients by no more than what the last one has lost (1-bit
    SGD, Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847). What is not finite leaves
    nothing to be added.

    **Arguments:** `forms`: of the tables, by name. `wire`: as of `Served`; with None nothing is lost, and kept.

    **Raises:** `MemoryError` where a table is larger than what this process may address.
    """

    def __init__(self, forms: Mapping[str, TableForm], wire: Wire | None) -> None:
        self._forms = forms
        self._wire: Wire | None = wire
        self._lost: dict[str, NDArray[np.float32]] = {}
        self.forget()

    def forget(self) -> None:
        """Begins anew, with nothing to be added."""
        if self._wire is None:
            return
        self._lost.clear()
        for name, form in self._forms.items():
            try:  # of pages that nobody has written to there is none in memory
                self._lost[name] = np.zeros((form.shape[0], form.width), np.float32)
            except MemoryError as error:
                raise MemoryError(
                    f"wire={self._wire!r} keeps what gradients of {name}, {form.dtype}{list(form.shape)}, lose, and "
                    f"this process has no memory for that: expected a host with as much as the table, or wire=None"
                ) from error

    def packed(
        self, ids: Mapping[str, NDArray[Any]], gradients: Mapping[str, NDArray[Any]]
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """Returns gradients as the arrays of a message, by table; who calls sends them.

        **Arguments:** by table `ids`: `[u]`, all different, and `gradients`: `[u, D]`.
        """
        return {name: self._packed(name, one, gradients[name]) for name, one in ids.items()}

    def _packed(self, name: str, ids: NDArray[Any], gradients: NDArray[Any]) -> dict[str, NDArray[Any]]:
        if self._wire is None:
            return packed_rows(gradients, "gradients", None)
        wanted = np.empty(gradients.shape, np.float32)
        take_rows(self._lost[name], ids, wanted)
        wanted += gradients
        found = packed_rows(wanted, "gradients", self._wire)
        with np.errstate(invalid="ignore"):
            wanted -= unpacked_rows(found, "gradients", self._wire, wanted, f"gradients of {name}")
        wanted[~np.isfinite(wanted)] = 0
        put_rows(self._lost[name], ids, wanted)
        return found
