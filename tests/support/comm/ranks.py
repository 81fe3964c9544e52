"""Ranks that are threads of the test's process."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from braidax.comm import Communicator, Hub, InProcessTransport, MemoryStore, Store, Tuning, connect
from braidax.comm.transports.transport import Transport
from braidax.comm.watch import OnLoss
from tests.support.comm.transports.tcps import transport_of

LIMIT_SECONDS = 60.0


def in_turns(cases: Iterable[Any], others: Iterable[Any], *, every: int) -> list[Any]:
    """Returns all pairs of a case and one of the others, for pytest. **Arguments:** `every`: how many are slow but one.

    Each case comes with `len(others) / every` of them by default, in turns, and each of them with as many cases.
    """
    return [
        pytest.param(case, other, marks=() if (index + place) % every == 0 else pytest.mark.slow)
        for index, case in enumerate(cases)
        for place, other in enumerate(others)
    ]


def by_day(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Returns all cases, for pytest: all but the quick ones run by night."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def transports(name: str, size: int) -> list[str | Transport]:
    """Returns what each rank gives to `connect`. **Arguments:** `name`: see `transport_of`."""
    if name == "in-process":
        hub = Hub()
        return [InProcessTransport(hub) for _ in range(size)]
    return [transport_of(name, rank) for rank in range(size)]


def outcomes(
    size: int,
    call: Callable[[Communicator], Any],
    *,
    transport: str = "in-process",
    store: Callable[[], Store] | None = None,
    tunings: Sequence[Tuning] | None = None,
    timeout_seconds: float = LIMIT_SECONDS,
    job: str = "test",
    main_rank: int | None = None,
    on_loss: OnLoss = "generation",
) -> list[Any]:
    """Runs a function on every rank, and returns what each returned or raised.

    **Arguments:** `store`: opens the store of one rank; all share a `MemoryStore` by default. `main_rank`: runs on the
    caller's thread, so that a signal can reach it. `on_loss`: with `peer` the ranks do not meet in the end.
    """
    shared = MemoryStore()
    chosen = transports(transport, size)
    found: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            opened = shared if store is None else store()
            with (
                opened,
                connect(
                    opened,
                    rank=rank,
                    size=size,
                    transport=chosen[rank],
                    job=job,
                    on_loss=on_loss,
                    timeout_seconds=timeout_seconds,
                    tuning=Tuning() if tunings is None else tunings[rank],
                ) as comm,
            ):
                found[rank] = call(comm)
                if on_loss == "generation":
                    comm.barrier()
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            found[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    if main_rank is not None:
        del threads[main_rank]
    for thread in threads:
        thread.start()
    if main_rank is not None:
        rank_main(main_rank)
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return found


def results(size: int, call: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    """The same, for functions that raise on no rank."""
    found = outcomes(size, call, **options)
    for rank, outcome in enumerate(found):
        if isinstance(outcome, BaseException):
            raise AssertionError(f"rank {rank} of {size} raised") from outcome
    return found
