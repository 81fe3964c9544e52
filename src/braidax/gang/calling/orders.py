"""What a rank is told to do, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

DONE = b"done"
"""The first part of an answer that holds a result; what follows is its parcel."""

FAILED = b"failed"
"""The first part of an answer that holds a `Failure`."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet; those that call a function again under the same meeting keep their communicator.

    **Fields:** `job`, `generation`: as `connect` takes them. `ranks`: of the gang, in order: the communicator's rank is
    the place in here. `timeout_seconds`: how long they may take to meet.
    """

    job: str
    generation: int
    ranks: tuple[int, ...]
    timeout_seconds: float


@dataclass(frozen=True)
class Order:
    """What a rank is told with a call. It says all that the rank is to have: whatever else it has is given up.

    **Fields:** `number`: of the call. `meeting`: whose communicator the function gets; None gives it None. `meetings`:
    job and generation of the communicators that go on. `kept`: the names that go on, with the calls that made them.
    `keep`: the name under which the result is kept, rather than sent.
    """

    number: int
    meeting: Meeting | None
    meetings: frozenset[tuple[str, int]]
    kept: Mapping[str, int]
    keep: str | None


class LostRank(NamedTuple):
    """A rank that another one has lost. **Fields:** `rank`: of the gang. `host`: its own."""

    rank: int
    host: str


@dataclass(frozen=True)
class Failure:
    """What went wrong in a rank, in a form that travels.

    **Fields:** `host`: of the rank. `where`: the rank in words, with host and process. `what`: the type and message of
    what was raised. `traceback`: its text. `time_seconds`: when, by the rank's clock (`time.time`). `is_consequence`:
    whether it only says that another rank failed. `lost`: the rank that its communicator has lost. `error`: what was
    raised, pickled, if that can be done.
    """

    host: str
    where: str
    what: str
    traceback: str
    time_seconds: float
    is_consequence: bool
    lost: LostRank | None
    error: bytes | None
