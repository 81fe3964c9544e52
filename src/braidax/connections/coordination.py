"""JAX's coordination service, through which the processes of `jax.distributed` talk on the host: all that calls it.

Values lie there by key, seen by every process of the job, until the job ends. Nothing here touches JAX's internals:
the client is given, by `braidax.program.coordination` for all who may import that.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar, final, runtime_checkable

from jax.errors import JaxRuntimeError

from braidax.errors import CommError, WaitTimeout

ROOT = "braidax"
"""What all our keys begin with: a job may have others."""

_SLICE_SECONDS = 0.1  # of a wait inside JAX, which neither Ctrl-C nor another thread can end
_Result = TypeVar("_Result")


@runtime_checkable
class CoordinationClient(Protocol):
    """What is used of JAX's client of the service, which has no public name yet."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Sets a value; raises `JaxRuntimeError` with ALREADY_EXISTS."""
        ...

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """Returns a value, or raises `JaxRuntimeError` with NOT_FOUND."""
        ...

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """Returns the keys below a folder, and their values."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for a value; raises `JaxRuntimeError` with DEADLINE_EXCEEDED."""
        ...

    def key_value_increment(self, key: str, increment: int) -> int:
        """Adds to a counter, and returns the sum."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Forgets a key, and those below it."""
        ...


@final
class Coordination:
    """Values of this job under one prefix. Any thread may use them; each call raises `CommError` when the service ends.

    A key is of parts with `/` between them, none of them empty: `a/b` lies in the folder `a`.

    **Arguments:** `client`: of this process. `process`: its index, for messages. `prefix`: of all keys.
    """

    def __init__(self, client: CoordinationClient, process: int, *, prefix: str = ROOT) -> None:
        self.process = process
        self._client = client
        self._prefix = prefix
        self._numbers: Counter[str] = Counter()

    def under(self, name: str) -> "Coordination":
        """Returns the values that lie in a folder. **Arguments:** `name`: of the folder."""
        found = Coordination(self._client, self.process, prefix=self._path(name))
        found._numbers = self._numbers
        return found

    def numbered(self, name: str) -> "Coordination":
        """Returns the values in a new folder: of the first call with a name, of the second, and so on.

        Who meets there calls this in the same order in all its processes, which then have the same folder.
        """
        path = self._path(name)
        number, self._numbers[path] = self._numbers[path], self._numbers[path] + 1
        return self.under(f"{name}/{number}")

    def set(self, key: str, value: bytes, *, known: Literal["refuse", "keep", "replace"] = "refuse") -> None:
        """Sets a value, at once and whole.

        **Arguments:** `known`: what becomes of a value that the key has already: nobody sets it twice, so that this is
        an error, `CommError`; it stays; or it is replaced.
        """
        try:
            self._client.key_value_set_bytes(self._path(key), value, allow_overwrite=known == "replace")
        except JaxRuntimeError as error:
            if known != "keep" or not _is(error, "ALREADY_EXISTS"):
                raise self._lost(error) from error

    def find(
        self, key: str, *, timeout_seconds: float = 0.0, check: Callable[[], object] | None = None
    ) -> bytes | None:
        """Returns a value, None when it has not been set up to the limit; a limit of 0 asks once.

        **Arguments:** `check`: is called many times a second meanwhile; what it raises ends the wait.
        """
        path, deadline, left = self._path(key), time.monotonic() + timeout_seconds, timeout_seconds
        while True:
            try:
                if left <= 0:
                    return self._client.key_value_try_get_bytes(path)
                limit = math.ceil(1000 * min(left, _SLICE_SECONDS))
                return self._client.blocking_key_value_get_bytes(path, limit)
            except JaxRuntimeError as error:
                if not _is(error, "DEADLINE_EXCEEDED", "NOT_FOUND"):
                    raise self._lost(error) from error
            if check is not None:
                check()
            left = deadline - time.monotonic()
            if left <= 0:
                return None

    def get(
        self,
        key: str,
        *,
        meaning: str,
        remedy: str,
        timeout_seconds: float,
        check: Callable[[], object] | None = None,
    ) -> bytes:
        """Returns a value that another process sets.

        **Arguments:** `meaning`: of the value, naming that process; `remedy`: both for the error. `check`: as of
        `find`.

        **Raises:** `WaitTimeout` when it has not been set up to the limit.
        """
        found = self.find(key, timeout_seconds=timeout_seconds, check=check)
        if found is None:
            raise WaitTimeout(f"process {self.process} has waited {timeout_seconds:g} s for {meaning}: {remedy}")
        return found

    def below(self, folder: str = "") -> dict[str, bytes]:
        """Returns all values in a folder that are there now, by what is left of their keys."""
        path = f"{self._path(folder) if folder else self._prefix}/"
        return {key.removeprefix(path): value for key, value in self._asked(self._client.key_value_dir_get_bytes, path)}

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, which begins at 0, and returns the sum: no two callers get the same one."""
        return self._asked(self._client.key_value_increment, self._path(key), amount)

    def delete(self, key: str) -> None:
        """Forgets a value, or all that lies in a folder."""
        self._asked(self._client.key_value_delete, self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _asked(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        try:
            return call(*arguments)
        except JaxRuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> CommError:
        return CommError(
            f"process {self.process} cannot talk to JAX's coordination service any more ({_first_line(error)}): "
            "process 0, or another one, has ended, and its log says why; or jax.distributed.shutdown was called here"
        )


def _is(error: Exception, *kinds: str) -> bool:
    return str(error).startswith(kinds)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
