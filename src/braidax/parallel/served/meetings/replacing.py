"""Other servers in place of lost ones: how who trains asks for them, and where these wait until all meet once more.

Who owns the servers, and can start processes, answers by keys of the store where all have met.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Generator, Sequence
from typing import final

from braidax.comm import Store
from braidax.comm.stores.store import ScopedStore
from braidax.errors import BraidaxError, CommError, WaitTimeout

from .meeting import Meeting

_log = logging.getLogger("braidax")
_SLICE_SECONDS = 0.5  # of a wait
_KEYS_SECONDS = 3.0  # that a store may take which was there before
_NO_OWNER = (
    "nobody starts another server, as the place where all have met is gone: keep the context of open_meeting open, in "
    "the process that has the gang, as long as workers train"
)


@contextlib.contextmanager
def open_keys(meeting: Meeting) -> Generator[Store]:
    """Opens the keys of a run in the store where it meets. **Raises:** as `TcpStore`."""
    with meeting.store(_KEYS_SECONDS) as store:
        yield ScopedStore(store, job=f"{meeting.job} replaced", generation=0)


def value_of(keys: Store, key: str, timeout_seconds: float = 0.0) -> bytes | None:
    """Returns a value, or None where there is none in time."""
    try:
        return keys.get(key, timeout_seconds=timeout_seconds)
    except WaitTimeout:
        return None


def wanted_ranks(keys: Store, number: int) -> list[int] | None:
    """Returns which servers are to be replaced. **Arguments:** `number`: how often some were before."""
    told = value_of(keys, f"wanted/{number}")
    return None if told is None else [int(rank) for rank in json.loads(told)]


def not_started(keys: Store, number: int, why: str) -> None:
    """Tells who trains why no other process was started. **Arguments:** `number`: as of `wanted_ranks`."""
    keys.set(f"failed/{number}", why.encode())


def come(keys: Store, number: int, rank: int) -> None:
    """Tells who trains that another process is there in place of a lost server. **Arguments:** as of `wanted_ranks`."""
    keys.set(f"came/{number}/{rank}", b"")


def called(keys: Store, number: int, timeout_seconds: float = 0.0) -> int | None:
    """Returns under which generation all meet once more, when who trains calls those that have come."""
    generation = value_of(keys, f"called/{number}", timeout_seconds)
    return None if generation is None else int(generation)


def await_others(meeting: Meeting, number: int, rank: int) -> int | None:
    """Returns under which generation all meet once more, when the others do; None when the run is over.

    **Arguments:** as of `come`.
    """
    try:
        with open_keys(meeting) as keys:
            come(keys, number, rank)
            while True:
                if (found := called(keys, number, _SLICE_SECONDS)) is not None:
                    return found
    except (BraidaxError, OSError):  # the store ends with the run
        return None


@final
class Replacing:
    """Asks for other servers, and knows which have come; the first of those who train has one.

    **Arguments:** `meeting`: where all have met. `why_not`: why nobody can start any; empty where that is not known.

    **Fields:** `why_not`: the same, as far as it is known now.
    """

    def __init__(self, meeting: Meeting, why_not: str = "") -> None:
        self._meeting, self.why_not = meeting, why_not
        self._numbers: dict[int, int] = {}  # under which a server is wanted
        self._came: set[int] = set()
        self._num_asked = self._generation = 0
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def have_come(self, ranks: Sequence[int]) -> bool:
        """Returns whether others are there in place of lost servers. At first it asks for them."""
        new = [rank for rank in ranks if rank not in self._numbers]
        if new and self.why_not:
            self._numbers |= dict.fromkeys(new, -1)
            self._tell(new)
        elif new:
            self._numbers |= dict.fromkeys(new, self._num_asked)
            self._threads.append(
                threading.Thread(target=self._wait, args=(self._num_asked, new), name="braidax-replacing", daemon=True)
            )
            self._num_asked += 1
            self._threads[-1].start()
        return {*ranks} <= self._came

    def _wait(self, number: int, ranks: Sequence[int]) -> None:
        """Waits until all of some have come, or it is known why they will not."""
        left, why = [*ranks], ""
        try:
            with open_keys(self._meeting) as keys:
                keys.set(f"wanted/{number}", json.dumps(ranks).encode())
                while left and not why and not self._closed.is_set():
                    why = (value_of(keys, f"failed/{number}") or b"").decode()
                    if not why and value_of(keys, f"came/{number}/{left[0]}", _SLICE_SECONDS) is not None:
                        self._came.add(left.pop(0))
        except (BraidaxError, OSError) as error:
            why = f"{_NO_OWNER} ({error})"
        if why and not self._closed.is_set():
            self.why_not = why
            self._tell(ranks)

    def _tell(self, ranks: Sequence[int]) -> None:
        _log.warning("servers that are lost, %s, are not replaced: %s", ranks, self.why_not)

    def call(self, ranks: Sequence[int]) -> int:
        """Calls those that have come to meet all others.

        **Returns:** under which generation. **Raises:** `CommError` where one has not; as `TcpStore`.
        """
        if not {*ranks} <= self._came:
            raise CommError(f"not all of the servers {[*ranks]} have come: another one was lost meanwhile")
        self._generation += 1
        numbers = {self._numbers.pop(rank) for rank in ranks}
        self._came.difference_update(ranks)
        with open_keys(self._meeting) as keys:
            for number in numbers:
                keys.set(f"called/{number}", str(self._generation).encode())
        return self._generation

    def close(self) -> None:
        """Asks for nobody any more. A second call does nothing."""
        self._closed.set()
        for thread in self._threads:
            thread.join(_KEYS_SECONDS)
