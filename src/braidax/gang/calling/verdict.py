"""What is said of a call that failed: by whom, and who came first."""

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from braidax.errors import CallFailed, PeerLost
from braidax.gang.calling.orders import Failure, LostRank
from braidax.gang.calling.parcels import Parcel
from braidax.gang.calling.ranks import Ended


@dataclass(frozen=True)
class Trouble:
    """What is raised for one rank, and what decides whether it is.

    **Fields:** `error`, `cause`: what is raised from what. `time_seconds`: when it happened. `is_consequence`: whether
    it only says that another rank failed. `lost`: the rank that it says is lost.
    """

    error: CallFailed | PeerLost
    cause: BaseException | None
    time_seconds: float
    is_consequence: bool = False
    lost: LostRank | None = None


def failed(rank: int, parcel: Parcel) -> Trouble:
    """Returns the trouble that the parcel of a `Failure` tells of."""
    try:
        failure: Failure = pickle.loads(parcel[0])
        told = CallFailed(f"{failure.where}: {failure.what}", rank, failure.host, failure.traceback)
        return Trouble(told, _cause(failure), failure.time_seconds, failure.is_consequence, failure.lost)
    except Exception as error:  # noqa: BLE001 (whatever else it sent)
        told = CallFailed(f"rank {rank} answered what cannot be read: {type(error).__name__}: {error}", rank)
        return Trouble(told, error, time.time())


def ended(rank: int, end: Ended) -> Trouble:
    """Returns the trouble of a rank whose process ended."""
    pid = "" if end.pid is None else f", pid {end.pid}"
    message = f"rank {rank} (host {end.host}{pid}) {end.how}"
    if end.log:
        message = "\n".join([f"{message}; the last lines that it wrote:", *end.log])
    return Trouble(PeerLost(message, rank, end.host), None, end.time_seconds)


def first(troubles: Mapping[int, Trouble], missing: Sequence[int]) -> Trouble:
    """Returns the trouble that came first, those that only tell of another rank's behind all others.

    Where that one tells of a rank that has no trouble of its own, this rank is what was lost: it says nothing, or it
    had answered well before that.

    **Arguments:** `missing`: ranks that have said nothing yet.
    """
    found = min(troubles.values(), key=lambda trouble: (trouble.is_consequence, trouble.time_seconds))
    lost = found.lost
    if not found.is_consequence or lost is None or lost.rank in troubles:
        return found
    how = "does not answer: it is frozen or cut off" if lost.rank in missing else "is lost, and had answered before"
    told = PeerLost(f"rank {lost.rank} {how}; {found.error}", *lost)
    return Trouble(told, found.cause, found.time_seconds, lost=lost)


def _cause(failure: Failure) -> BaseException | None:
    if failure.error is None:
        return None
    try:
        return pickle.loads(failure.error)
    except Exception:  # noqa: BLE001 (its class may be known to the rank only)
        return None
