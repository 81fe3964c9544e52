"""The metrics of a state on all batches of a loader."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax

from braidax.data import DataLoader
from braidax.errors import ArgumentError
from braidax.parallel import TrainStep

if TYPE_CHECKING:
    from braidax.loop.steps import AnyStep

TestMetrics = Callable[[Any, Any], Mapping[str, Any]]
"""Gives the metrics of a state on a batch."""


@runtime_checkable
class Evaluating(Protocol):
    """A step that gives the metrics of a state on a batch: a `Step`, or one of stages."""

    def evaluate(self, state: Any, batch: Any) -> Mapping[str, Any]:
        """Computes them."""
        ...

    def finish(self) -> None:
        """Waits for all so far."""
        ...


def evaluate(step: Evaluating | TestMetrics, state: Any, loader: DataLoader) -> dict[str, float]:
    """Returns the mean of each scalar metric over one pass through a loader.

    Each batch weighs as much as it has valid samples, so the result is exact if `loader` was made with
    `remainder="pad"` and the loss takes means over the samples that `batch["mask"]` marks.

    **Arguments:** `step`: its `evaluate` gives the metrics of a batch; or a function of state and batch that does, such
    as `step.wrap(fn)` of a decorated one. `state`: is not changed. `loader`: with `epochs=1`, at the start of an epoch;
    `seed=None` reads in file order.
    """
    if loader.epochs != 1 or loader.cursor.position != 0:
        raise ArgumentError(
            f"loader has epochs={loader.epochs} and stands at {loader.cursor}; evaluate takes a loader with epochs=1 "
            f"that stands at position=0"
        )
    metrics_of = step.evaluate if isinstance(step, Evaluating) else step
    totals: dict[str, jax.Array] = {}
    num_samples = 0
    for batch in loader:
        valid = min(loader.batch_size, loader.num_samples - num_samples)
        num_samples += valid
        for name, metric in checked(metrics_of(state, batch), "test_metrics").items():
            if isinstance(metric, jax.Array) and metric.ndim == 0:
                totals[name] = totals.get(name, 0) + metric * valid
    if isinstance(step, Evaluating):
        step.finish()
    return {name: float(total) / num_samples for name, total in totals.items()}


def tested_by(step: "AnyStep", test: DataLoader | None, test_metrics: TestMetrics | None) -> Evaluating | TestMetrics:
    """Returns what `evaluate` takes."""
    if test is not None and test_metrics is None and isinstance(step, TrainStep):
        raise ArgumentError(
            "test is given, and a decorated step has no evaluate: give test_metrics=step.wrap(fn) as well, where "
            "fn(state, batch) returns a dict of metrics"
        )
    if test is None and test_metrics is not None:
        raise ArgumentError("test_metrics is given, and test is None: give the loader of what is evaluated, too")
    return step if test_metrics is None else test_metrics


def checked(metrics: Any, what: str) -> Mapping[str, Any]:
    """Returns metrics. **Arguments:** `what`: gave them. **Raises:** `ArgumentError` where they are no dict by name."""
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"{what} returned metrics of type {type(metrics).__name__}, expected a dict by name, such as "
            f'{{"loss": loss}}'
        )
    return metrics  # pyright: ignore[reportUnknownVariableType]
