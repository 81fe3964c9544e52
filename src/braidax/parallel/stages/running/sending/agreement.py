"""What the processes of a pipeline tell one another before it runs, on the host."""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import final

import jax
from jax.errors import JaxRuntimeError

from braidax.errors import ProcessFailed, WaitTimeout
from braidax.program.coordination import coordination_client

WAIT_SECONDS = 600.0
"""How long one process waits for another, which compiles and measures meanwhile."""

_SLICE_MILLISECONDS = 500  # of a wait inside JAX, which Ctrl-C cannot end
_NUMBERS = itertools.count()  # of agreements, which all processes make in the same order
_DONE, _FAILED = b"+", b"-"


@final
class Agreement:
    """Words that go over JAX's coordination service, each call being one that all processes make, in the same order.

    **Arguments:** `processes`: that take part, by index, this one among them.
    """

    def __init__(self, processes: Sequence[int], *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.processes, self._wait = sorted(processes), wait_seconds
        client = coordination_client()
        assert client is not None, "there are several processes"
        self._client, self._prefix = client, f"braidax/stages/{next(_NUMBERS)}"
        self._calls = itertools.count()

    def exchanged(self, words: str) -> dict[int, str]:
        """Returns what each process says. **Raises:** `WaitTimeout` naming one that does not come."""
        folder = f"{self._prefix}/{next(self._calls)}"
        self._client.key_value_set_bytes(f"{folder}/{jax.process_index()}", _DONE + words.encode())
        return {one: self._heard(f"{folder}/{one}", one) for one in self.processes}

    def first(self, say: Callable[[], str]) -> str:
        """Returns what the first process says, which alone is asked.

        **Raises:** what asking it raises; on other processes `ProcessFailed`, and `WaitTimeout` if nothing comes.
        """
        place, first = f"{self._prefix}/{next(self._calls)}", self.processes[0]
        if jax.process_index() != first:
            return self._heard(place, first)
        try:
            words = say()
        except Exception as error:
            self._client.key_value_set_bytes(place, _FAILED + str(error).encode())
            raise
        self._client.key_value_set_bytes(place, _DONE + words.encode())
        return words

    def _heard(self, place: str, process: int) -> str:
        deadline = time.monotonic() + self._wait
        while True:
            with contextlib.suppress(JaxRuntimeError):
                found = self._client.blocking_key_value_get_bytes(place, _SLICE_MILLISECONDS)
                if found[:1] == _FAILED:
                    raise ProcessFailed(f"process {process}: {found[1:].decode()}", process)
                return found[1:].decode()
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"process {process} has said nothing for {self._wait:.0f} s: call parallelize on all processes of "
                    f"the mesh, in the same order"
                )
