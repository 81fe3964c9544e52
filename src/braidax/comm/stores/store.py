"""The contract of stores: where ranks that do not know one another yet leave what the others need."""

import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import final

from braidax.errors import ArgumentError, WaitTimeout


class Store(ABC):
    """A few small values by key, seen by every rank of a job. All a rendezvous needs is `set`, `get` and `add`.

    Implementations are thread-safe, and never wait without a limit. What they raise when the place itself cannot be
    reached is `CommError`, naming the address and the remedy.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """A URL that `open_store` of another process opens; it holds no secret."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Sets the value of a key, at once and whole."""

    @abstractmethod
    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        """Waits until a key has a value, and returns it.

        **Raises:** `WaitTimeout` naming the key and the store when it has none in time; a limit of 0 asks once.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which begins at 0, and returns the sum: no two callers get the same one.

        A counter is no value: `get` of its key is not defined.
        """

    def derive_secret(self, seed: bytes) -> bytes:
        """Returns the secret that all who have opened this store share for a seed that lies in it.

        Where opening takes a secret, nobody else can tell it from the seed. Elsewhere it is the seed itself, and
        whoever can read the store knows it: this is what is done here, for stores that do not say otherwise.
        """
        return seed

    @abstractmethod
    def close(self) -> None:
        """Gives up what this process holds of the store; the values stay. A second call does nothing."""

    @final
    def __enter__(self) -> "Store":
        return self

    @final
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@final
class ScopedStore(Store):
    """The keys of one generation of one job, in a store that other jobs and generations use as well.

    **Arguments:** `store`: where the keys lie. It is not closed with this. `job`: a name without `/`.
    `generation`: counts the lives of the job, from 0.

    **Raises:** `ArgumentError` for a name that cannot be a part of a key.
    """

    def __init__(self, store: Store, *, job: str, generation: int) -> None:
        if not job or "/" in job:
            raise ArgumentError(f"job={job!r}: expected a name without '/', such as the name of the run")
        if generation < 0:
            raise ArgumentError(f"generation={generation!r}: expected a whole number >= 0")
        self._store = store
        self._prefix = f"{job}/{generation}/"

    @property
    def address(self) -> str:
        return self._store.address

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        return self._store.get(self._prefix + key, timeout_seconds=timeout_seconds)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def derive_secret(self, seed: bytes) -> bytes:
        return self._store.derive_secret(seed)

    def close(self) -> None:
        pass


def missing(key: str, store: str, seconds: float) -> WaitTimeout:
    """Returns the error of a key that got no value within a limit."""
    return WaitTimeout(
        f"{store}: the key {key!r} got no value within {seconds:g} s; expected another rank to set it: "
        "is it running, and does it use the same store, job and generation?"
    )


def backoff(deadline: float, pause_seconds: float) -> float | None:
    """Returns how long to pause before a store is asked again, or None when the deadline has passed.

    **Arguments:** `deadline`: `time.monotonic` seconds. `pause_seconds`: the pause that is wanted.
    """
    left = deadline - time.monotonic()
    return None if left <= 0 else min(pause_seconds, left)


def shown_url(url: str) -> str:
    """Returns a URL as messages show it, in quotes: without what may be a password or a secret, even if malformed."""
    scheme, colon, rest = url.partition(":")
    slashes = "//" if rest.startswith("//") else ""
    before, at, behind = rest.removeprefix(slashes).rpartition("@")
    place, asked, _ = behind.partition("?")
    return repr(f"{scheme}{colon}{slashes}{before and '…'}{at}{place}{asked and '?…'}")
