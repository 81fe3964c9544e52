"""Whatever is said to fit without being compiled needs no more memory than that when it is compiled."""

from collections.abc import Callable, Iterator

import pytest

import braidax as bx
from benchmarks.harness import models
from braidax.parallel import Link
from braidax.tasks.bert_model import Sizes
from braidax.tune import Cluster, Found
from braidax.tune.search.ranking import HEADROOM

DEVICES = 8
TINY = Sizes(1000, 32, width=32, num_layers=2, num_heads=2, dropout=0.0)
LOSSES = {
    "words in tables": lambda: models.lm1b(2_000, 32, 16),
    "more words": lambda: models.lm1b(20_000, 16, 64),
    "a recommender": lambda: models.dlrm(1_000, 64),
    "attention": lambda: models.bert(16, TINY),
    "images": lambda: models.resnet((1, 1, 1, 1), 32, 8),
}


def _compiled(make: Callable[[], models.Model], most: int) -> Found:
    model = make()
    cluster = Cluster(DEVICES, 1e10, Link(1e9, 1e-5))
    return bx.plan(
        model.loss, model.optimizer, init=model.init, batch=model.spec, cluster=cluster, target="here", measure=most
    )


def _wrong(found: Found) -> Iterator[str]:
    """Yields the candidates that would be said to fit into one byte less than they were compiled to."""
    for one in found.tried:
        predicted = float(found.ranked.predicted.memory_bytes[one.at])
        if one.memory_bytes is not None and predicted * (1 + HEADROOM) <= one.memory_bytes - 1:
            yield f"{found.ranked.name(one.at)}: {predicted:,.0f} predicted, {one.memory_bytes:,} compiled"


def test_nothing_is_said_to_fit_that_does_not() -> None:
    found = _compiled(LOSSES["words in tables"], 2)
    assert sum(one.memory_bytes is not None for one in found.tried) == 2
    assert list(_wrong(found)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_of_two_hundred_is_said_to_fit_that_does_not() -> None:
    num_compiled = 0
    for name, make in LOSSES.items():
        found = _compiled(make, 48)
        num_compiled += sum(one.memory_bytes is not None for one in found.tried)
        assert list(_wrong(found)) == [], name
    assert num_compiled >= 200
