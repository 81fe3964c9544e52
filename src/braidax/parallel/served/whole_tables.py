"""Tables as they are kept elsewhere: rows one behind the other, which are on one server after the other."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
import numpy as np
from numpy.typing import NDArray

from .asking import Asking
from .programs import TableForm, TablePart

_BLOCK_BYTES = 16 << 20  # a message


@final
class WholeTables:
    """Reads and writes consecutive rows of tables. **Arguments:** `asking`: the servers. `forms`: of the tables."""

    def __init__(self, asking: Asking, forms: Mapping[str, TableForm]) -> None:
        self._asking, self._forms = asking, forms

    def values(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Returns rows of a table as they are now, `[n, D]`; servers bring none up. **Arguments:** as of `read`."""
        form = self._forms[name]
        values = np.zeros((last - first, form.width), jax.numpy.dtype(form.dtype))
        for start, stop in self._blocks(form, first, last):

            def asked(server: int, start: int = start, stop: int = stop) -> list[Any]:
                begin, end = self._ends(server, start, stop)
                told = {"table": name, "since": -1, "start": begin, "most": end - begin}
                return self._asking.packed("changed", server, told)

            for server, answer in enumerate(self._asking.ask_all(asked)):
                values[self._part(server, start, stop, first)] = answer.arrays["values"]
        return values

    def read(self, name: str, first: int, last: int) -> TablePart:
        """Returns rows of a table, none of which lags behind: servers bring them up, so that who goes on with what was
        read, and who goes on with what servers have, have the same numbers to the bit.

        **Arguments:** `last`: the row behind the last.
        """
        form = self._forms[name]
        values = np.zeros((last - first, form.width), jax.numpy.dtype(form.dtype))
        kept = [np.empty((last - first, *one.shape), jax.numpy.dtype(one.dtype)) for one in form.kept]
        shared: list[NDArray[Any]] = []
        of = "all" if form.programs.settle else "one"  # reading brings rows up, and so all copies of them, to the bit
        for start, stop in self._blocks(form, first, last):
            asked = functools.partial(self._asked, "read", name, start=start, stop=stop)
            answers = self._asking.ask_all(asked, of=of)
            for server, answer in enumerate(answers):
                part = self._part(server, start, stop, first)
                for at, leaf in enumerate((values, *kept)):
                    leaf[part] = answer.arrays["values" if at == 0 else f"kept/{at - 1}"]
            shared = [answers[0].arrays[f"shared/{at}"].copy() for at in range(form.num_shared)]
        return TablePart(first, values, kept, shared)

    def write(self, name: str, part: TablePart, step: int) -> None:
        """Puts rows in place of what servers have. **Arguments:** `step`: how many updates they have seen."""
        form, first = self._forms[name], part.first
        shared = {f"shared/{at}": number for at, number in enumerate(part.shared)}

        def block(server: int, start: int, stop: int) -> list[Any]:
            rows = self._part(server, start, stop, first)
            kept = {f"kept/{at}": leaf[rows] for at, leaf in enumerate(part.kept)}
            return self._asked("load", name, server, start, stop, {"values": part.values[rows], **kept, **shared}, step)

        for start, stop in self._blocks(form, first, first + len(part.values)):
            self._asking.ask_all(lambda server, rows=(start, stop): block(server, *rows), of="all")

    def _blocks(self, form: TableForm, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields the rows of a message after the other; one without rows where there are none."""
        rows = max(1, _BLOCK_BYTES // max(1, form.width * jax.numpy.dtype(form.dtype).itemsize))
        for start in range(first, max(last, first + 1), rows):
            yield start, min(start + rows, last)

    def _part(self, server: int, start: int, stop: int, first: int) -> slice:
        """Which of the rows from `first` on are a server's, of those from `start` to `stop`."""
        size = self._asking.layout.num_parts
        return slice(start + (server - start) % size - first, max(stop - first, 0), size)

    def _asked(
        self, kind: str, name: str, server: int, start: int, stop: int, arrays: Any = None, step: int = 0
    ) -> list[Any]:
        """Returns what a server is asked about its rows of some consecutive ones."""
        begin, end = self._ends(server, start, stop)
        fields = {"table": name, "start": begin, "stop": end, "step": step}
        return self._asking.packed(kind, server, fields, arrays)

    def _ends(self, server: int, start: int, stop: int) -> tuple[int, int]:
        """Returns which of a server's rows are some consecutive ones."""
        size = self._asking.layout.num_parts
        return -(-(start - server) // size), -(-(stop - server) // size)
