"""A checkpoint that is under way: one copy of the state, which every place that takes it makes durable."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from braidax.checkpoint.background_job import outcome
from braidax.checkpoint.format.writing import checksums_of
from braidax.checkpoint.places.open_places import first_of
from braidax.checkpoint.places.place import OpenPlace, Order, Part
from braidax.checkpoint.snapshot.hold import Held, Snapshot
from braidax.errors import BraidaxError, CheckpointError, WaitTimeout
from braidax.spans import Trace, span

THREAD_NAME = "braidax-checkpoint"


@final
class UnderWay:
    """A checkpoint under way, on threads of its own, which live as long as it.

    **Arguments:** `order`: what it is. `held`: the state, which is let go of part by part. `places`: that take it.

    **Fields:** `order`, `places`; `owned`: the copy; `committed`: the folder of the checkpoint, once it is durable.
    """

    def __init__(self, order: Order, held: Held, places: tuple[OpenPlace, ...]) -> None:
        self.order = order
        self.places = places
        for place in places:
            place.begin(order)
        self._executor = ThreadPoolExecutor(2, thread_name_prefix=THREAD_NAME)
        self.owned = self._executor.submit(_take, held, order.trace)
        # While a program ends, nothing more can be submitted.
        owned = self.owned
        part = Part(owned, self._executor.submit(lambda: checksums_of(owned.result())))
        self.committed = self._executor.submit(_persist, part, order, places)
        self._executor.shutdown(wait=False)

    def copied(self, timeout_seconds: float, while_waiting: Callable[[], object] | None) -> BaseException | None:
        """Waits for the copy, and returns what went wrong with it. **Arguments, Raises:** as `settle`."""
        return self._outcome(self.owned, "copying", timeout_seconds, while_waiting)

    def settle(self, timeout_seconds: float, while_waiting: Callable[[], object] | None) -> Exception | None:
        """Waits until it is over, and returns what went wrong with it.

        **Arguments:** `while_waiting`: as of `outcome`.

        **Raises:** `WaitTimeout`; what `while_waiting` raises.
        """
        error = self._outcome(self.committed, "writing", timeout_seconds, while_waiting)
        self._executor.shutdown()
        assert error is None or isinstance(error, Exception)
        return error

    def _outcome(
        self, future: "Future[Any]", doing: str, timeout_seconds: float, while_waiting: Callable[[], object] | None
    ) -> BaseException | None:
        try:
            return outcome(future, timeout_seconds, while_waiting)
        except TimeoutError as error:
            where = ", ".join(place.where for place in self.places)
            raise WaitTimeout(
                f"{where}/step-{self.order.step:08d}: {doing} this checkpoint took longer than timeout_seconds="
                f"{timeout_seconds:g}: expected it to end; look at the disk, or raise the limit"
            ) from error


def _take(held: Held, trace: Trace) -> Snapshot:
    with trace.active(), span("checkpoint", "snapshot", num_bytes=held.num_bytes):
        return held.copy()


def _persist(part: Part, order: Order, places: tuple[OpenPlace, ...]) -> Path:
    """Makes a checkpoint durable in one place after the other, so that one writer at a time slows the steps.

    **Returns:** its folder in the last. **Raises:** what first went wrong, when all have had their turn.
    """
    num_bytes = 0 if part.owned.exception() is not None else part.owned.result().num_bytes
    paths: list[Path] = []
    failures: list[Exception] = []
    for place in places:
        try:
            with order.trace.active(), span("checkpoint", "persist", num_bytes=num_bytes):
                path = place.persist(part, order)
        except Exception as error:  # noqa: BLE001 - the others have their turn
            failures.append(_explained(error, place, order))
        else:
            paths += [] if path is None else [path]
    failure = first_of(failures)
    if failure is not None:
        raise failure
    return paths[-1]


def _explained(error: Exception, place: OpenPlace, order: Order) -> Exception:
    if isinstance(error, BraidaxError):
        return error
    failure = CheckpointError(
        f"{place.where}/step-{order.step:08d}: the checkpoint failed: {error!r}; expected arrays whose computation "
        "succeeded, and memory for a copy of them on the host. Earlier checkpoints are untouched"
    )
    failure.__cause__ = error
    return failure
