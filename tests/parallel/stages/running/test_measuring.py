"""When operations began that wait for other processes."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from braidax.parallel.stages.running.measuring import Measuring
from braidax.parallel.stages.schedules import Costs, Kind, Operation, one_forward_one_backward, with_transfers

ON_ITS_WAY = 7.0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Arrays of `ON_ITS_WAY` have not arrived until this is set."""
    event, wait = threading.Event(), Measuring._wait

    def arriving(measuring: Measuring, tokens: list[Any]) -> float:
        assert float(tokens[0][0]) != ON_ITS_WAY or event.wait(20)
        return wait(measuring, tokens)

    monkeypatch.setattr(Measuring, "_wait", arriving)
    return event


def _noting(measuring: Measuring) -> Callable[[Operation, Any], None]:
    """Looks at once at what an operation gives."""
    observe = measuring.begin()

    def note(operation: Operation, outputs: Any) -> None:
        look = observe(operation, outputs)
        assert look is not None
        look()

    return note


def test_an_operation_begins_when_what_another_process_sent_is_there(sent: threading.Event) -> None:
    """The passes themselves are done at once; what the first one received comes later."""
    measuring = Measuring(with_transfers(one_forward_one_backward(2, 1)), Costs.even(2))
    note = _noting(measuring)
    note(Operation(Kind.RECV_F, 1, 0), (jnp.full(2, ON_ITS_WAY),))
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        note(Operation(kind, 1, 0), (jnp.zeros(2),))
    arrived = time.perf_counter() - measuring.begun
    sent.set()
    measuring.wait()
    none, (forward, backward) = measuring.timed().timed
    assert none == ()
    assert [forward.operation.kind, backward.operation.kind] == [Kind.FORWARD, Kind.BACKWARD]
    assert arrived <= forward.start <= forward.end <= backward.start


def test_what_needs_an_operation_begins_behind_it_where_that_is_put_off(sent: threading.Event) -> None:
    """What the second stage received is noted late, when passes of both stages have ended."""
    measuring = Measuring(with_transfers(one_forward_one_backward(2, 1)), Costs.even(2))
    note = _noting(measuring)
    note(Operation(Kind.FORWARD, 0, 0), (jnp.zeros(2),))
    note(Operation(Kind.RECV_F, 1, 0), (jnp.full(2, ON_ITS_WAY),))
    for kind, stage in ((Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.BACKWARD, 0)):
        note(Operation(kind, stage, 0), (jnp.zeros(2),))
    arrived = time.perf_counter() - measuring.begun
    sent.set()
    measuring.wait()
    (_, first), (_, second) = measuring.timed().timed
    assert [first.operation, second.operation] == [Operation(Kind.BACKWARD, stage, 0) for stage in range(2)]
    assert arrived <= second.start <= second.end <= first.start
