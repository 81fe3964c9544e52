"""Results of Dask's tasks, handed to ranks on the same workers, and back: by tasks that run where the rank does."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidax.errors import GangError
from braidax.gang.dask_rank import DaskRank
from braidax.gang.dask_store import import_distributed

_LOOK_SECONDS = 0.5  # between looks at whether the scheduler still knows the workers


@dataclass(frozen=True)
class Places:
    """Where ranks are. **Fields:** `ranks`: of each the address of its worker, and the key of its actor."""

    client: Any = field(repr=False)
    ranks: tuple[tuple[str, str], ...]


def placed(client: Any, workers: Sequence[str], futures: Sequence[Any]) -> list[list[int]]:
    """Waits for results, and returns for each of these workers the numbers of those that it takes, in order.

    What lies on one of them is taken there; what does not, by the one that takes fewest.

    **Raises:** what the task of a result did; `GangError` for one that Dask has lost or given up.
    """
    while any(future.status == "pending" for future in futures):
        with contextlib.suppress(TimeoutError), client.as_current():
            import_distributed().wait(futures, timeout=_LOOK_SECONDS, return_when="FIRST_COMPLETED")
        if any(future.status in ("error", "lost", "cancelled") for future in futures):
            break
    for number, future in enumerate(futures):
        if future.status not in ("finished", "pending"):
            error = future.exception() if future.status == "error" else None
            raise error or GangError(f"partition {number} is {future.status}, says Dask: compute it again")
    held = client.who_has(futures)
    found: dict[str, list[int]] = {worker: [] for worker in workers}
    for number, future in enumerate(futures):
        here = [worker for worker in held.get(future.key, ()) if worker in found]
        min((found[worker] for worker in here or workers), key=len).append(number)
    return [found[worker] for worker in workers]


def hand(places: Places, token: str, futures: Sequence[Sequence[Any]]) -> None:
    """Gives each rank a list of results under a token. What lies on another worker, Dask brings from there.

    **Raises:** what the task of a result did; `GangError` when a worker has ended.
    """
    _done(places, [(_hand_here, key, token, list(own)) for (_, key), own in zip(places.ranks, futures, strict=True)])


def take_back(places: Places, token: str) -> None:
    """Gives up what ranks were given under a token, as far as they are there; does not wait."""
    with contextlib.suppress(OSError, RuntimeError):  # the client is closed, or the cluster is gone
        futures = [_begun(places, worker, _take_back_here, key, token) for worker, key in places.ranks]
        distributed = import_distributed()
        distributed.fire_and_forget(futures)


def results(places: Places, fn: Callable[[Any], Any], name: str) -> list[Any]:
    """Returns futures of a function of what ranks keep under a name, when all are done. **Raises:** as `hand`."""
    return _done(places, [(_call_here, key, name, fn) for _, key in places.ranks])


def _done(places: Places, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    futures = [_begun(places, worker, *call) for (worker, _), call in zip(places.ranks, calls, strict=True)]
    try:
        while any(future.status == "pending" for future in futures):
            with contextlib.suppress(TimeoutError), places.client.as_current():
                import_distributed().wait(futures, timeout=_LOOK_SECONDS, return_when="FIRST_COMPLETED")
            gone = {worker for worker, _ in places.ranks} - set(places.client.nthreads())
            if gone:  # a task for a worker that is gone waits for it to come back
                raise GangError(f"the Dask workers {', '.join(sorted(gone))} have ended meanwhile: call replace()")
        for future in futures:
            if future.status != "finished":
                error = future.exception() if future.status == "error" else None
                raise error or GangError(f"a task of Dask that hands over a partition is {future.status}")
    except BaseException:
        places.client.cancel(futures)
        raise
    return futures


def _begun(places: Places, worker: str, function: Callable[..., Any], *args: Any) -> Any:
    return places.client.submit(function, *args, workers=[worker], allow_other_workers=False, pure=False)


def _rank(key: str) -> DaskRank:
    """Returns the rank on the worker that this task runs on."""
    actors = import_distributed().get_worker().state.actors
    if key not in actors:
        raise GangError("the rank has left its worker: the gang was stopped meanwhile")
    return actors[key]


def _hand_here(key: str, token: str, values: list[Any]) -> None:
    _rank(key).hand(token, values)


def _take_back_here(key: str, token: str) -> None:
    _rank(key).take_back(token)


def _call_here(key: str, name: str, fn: Callable[[Any], Any]) -> Any:
    return fn(_rank(key).kept(name))
