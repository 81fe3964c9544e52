"""Weighted means of the metrics of many batches, which are added up where they are computed."""

import math
from collections.abc import Mapping
from typing import Any, final

import jax
import jax.numpy as jnp

NUM_TOKENS = "num_tokens"
"""The metric that says over how many tokens a batch takes its means."""

_PERPLEXITY = "perplexity"
_LOSS = "loss"
_IN_A_ROW = 64  # batches that devices add up; then it goes on in the host's 64 bits
_MOST = 700.0  # of what `exp` is taken


@final
class Totals:
    """Adds up metrics of batches, each as often as it has samples, or tokens where it says how many.

    Nothing waits for the devices but sums of batches before the latest ones.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._now: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._num_samples, self._num_batches = 0, 0
        self._counts_tokens = False

    def add(self, metrics: Mapping[str, Any], num_samples: int) -> None:
        """Adds the scalars among the metrics of a batch."""
        scalars = {name: one for name, one in metrics.items() if isinstance(one, jax.Array) and one.ndim == 0}
        num_tokens = scalars.pop(NUM_TOKENS, None)
        for name, metric in scalars.items():
            weighed = metric * num_samples
            if num_tokens is not None:
                weighed = jnp.where(num_tokens > 0, metric * num_tokens, 0)  # of none the mean may be no number
            self._now[name] = self._now.get(name, 0) + weighed
        if num_tokens is not None:
            self._counts_tokens = True
            self._now[NUM_TOKENS] = self._now.get(NUM_TOKENS, 0) + num_tokens
        self._num_samples += num_samples
        self._num_batches += 1
        if self._num_batches % _IN_A_ROW == 0:
            self._take(self._before)
            self._now, self._before = {}, self._now

    def means(self) -> dict[str, float]:
        """Returns the means, and with tokens their number and the perplexity."""
        self._take(self._before)
        self._take(self._now)
        self._now, self._before = {}, {}
        if not self._counts_tokens:
            return {name: total / self._num_samples for name, total in self._sums.items()}
        num_tokens = self._sums[NUM_TOKENS]
        means = {
            name: total / num_tokens if num_tokens else math.nan
            for name, total in self._sums.items()
            if name != NUM_TOKENS
        }
        more = {_PERPLEXITY: math.exp(min(means[_LOSS], _MOST))} if _LOSS in means and _PERPLEXITY not in means else {}
        return {**means, **more, NUM_TOKENS: num_tokens}

    def _take(self, sums: Mapping[str, Any]) -> None:
        for name, total in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(total)
