"""What the processes of a pipeline tell one another before it runs, on the host."""

import itertools
from collections.abc import Callable, Sequence
from typing import final

import jax

from braidax.connections.raised import Raised
from braidax.program.coordination import coordination

WAIT_SECONDS = 600.0
"""How long one process waits for another, which compiles and measures meanwhile."""

_DONE, _FAILED = b"+", b"-"


@final
class Agreement:
    """Words that go over JAX's coordination service, each call being one that all processes make, in the same order.

    **Arguments:** `processes`: that take part, by index, this one among them.
    """

    def __init__(self, processes: Sequence[int], *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.processes, self._wait = sorted(processes), wait_seconds
        service = coordination()
        assert service is not None, "there are several processes"
        self._words = service.numbered("stages")
        self._calls = itertools.count()

    def exchanged(self, words: str) -> dict[int, str]:
        """Returns what each process says.

        **Raises:** `WaitTimeout` naming one that does not come; `CommError` when the service has ended.
        """
        call = next(self._calls)
        self._words.set(f"{call}/{jax.process_index()}", _DONE + words.encode())
        return {one: self._heard(f"{call}/{one}", one) for one in self.processes}

    def first(self, say: Callable[[], str]) -> str:
        """Returns what the first process says, which alone is asked.

        **Raises:** what asking it raises; on other processes `CallFailed`, and as `exchanged` if nothing comes.
        """
        place, first = str(next(self._calls)), self.processes[0]
        if jax.process_index() != first:
            return self._heard(place, first)
        try:
            words = say()
        except Exception as error:
            self._words.set(place, _FAILED + Raised.of(error).to_text().encode())
            raise
        self._words.set(place, _DONE + words.encode())
        return words

    def _heard(self, place: str, process: int) -> str:
        found = self._words.get(
            place,
            meaning=f"what process {process} says of the stages",
            remedy="call parallelize on all processes of the mesh, in the same order",
            timeout_seconds=self._wait,
        )
        if found[:1] == _FAILED:
            raised = Raised.from_text(found[1:].decode())
            raise raised.error(f"process {process} has failed: {raised.words}", process)
        return found[1:].decode()
