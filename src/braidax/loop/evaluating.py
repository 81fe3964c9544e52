"""The metrics of a state on all batches of a loader."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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

    A loss over tokens returns `num_tokens` among its metrics: how many it takes its means over. Each batch then weighs
    as much as that; `num_tokens` of the result is their sum, and `perplexity` is `exp(loss)`, of the mean over all
    tokens.

    **Arguments:** `step`: its `evaluate` gives the metrics of a batch; or a function of state and batch that does, such
    as `step.wrap(fn)` of a decorated one. `state`: is not changed. `loader`: all of the epoch that its cursor is in is
    read, and the cursor stays; `seed=None` reads in file order.

    **Raises:** `ArgumentError` for a loader that would drop the last samples.
    """
    from braidax.loop.totals import Totals

    _check_keeps_all(loader)
    metrics_of = step.evaluate if isinstance(step, Evaluating) else step
    totals = Totals()
    num_samples = 0
    for batch in loader.epoch():
        valid = min(loader.batch_size, loader.num_samples - num_samples)
        num_samples += valid
        totals.add(checked(metrics_of(state, batch), "test_metrics"), valid)
    if isinstance(step, Evaluating):
        step.finish()
    return totals.means()


def tested_by(step: "AnyStep", test: DataLoader | None, test_metrics: TestMetrics | None) -> Evaluating | TestMetrics:
    """Returns what `evaluate` takes."""
    if test is not None and test_metrics is None and isinstance(step, TrainStep):
        raise ArgumentError(
            "test is given, and a decorated step has no evaluate: give test_metrics=step.wrap(fn) as well, where "
            "fn(state, batch) returns a dict of metrics"
        )
    if test is None and test_metrics is not None:
        raise ArgumentError("test_metrics is given, and test is None: give the loader of what is evaluated, too")
    if test is not None:
        _check_keeps_all(test)
    return step if test_metrics is None else test_metrics


def _check_keeps_all(loader: DataLoader) -> None:
    """Raises `ArgumentError` for a loader that drops samples, which an evaluation would not see."""
    num_dropped = loader.num_samples - loader.batches_per_epoch * loader.batch_size
    if num_dropped > 0:
        raise ArgumentError(
            f"the loader of an evaluation would drop the last {num_dropped} of its {loader.num_samples:,} samples, "
            f"which fill no batch of batch_size={loader.batch_size}; make it with remainder='pad', and let the loss "
            "take means over the samples that batch['mask'] marks, or with a batch_size that divides them"
        )


def checked(metrics: Any, what: str) -> Mapping[str, Any]:
    """Returns metrics. **Arguments:** `what`: gave them. **Raises:** `ArgumentError` where they are no dict by name."""
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"{what} returned metrics of type {type(metrics).__name__}, expected a dict by name, such as "
            f'{{"loss": loss}}'
        )
    return metrics  # pyright: ignore[reportUnknownVariableType]
