"""When operations began that wait for other processes."""

import threading
import time
from typing import Any

import jax.numpy as jnp
import pytest

from braidax.parallel.stages.running.measuring import Measuring
from braidax.parallel.stages.schedules import Costs, Kind, Operation, one_forward_one_backward, with_transfers

ON_ITS_WAY = 7.0


def test_an_operation_begins_when_what_another_process_sent_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes themselves are done at once; what the first one received comes later."""
    sent, wait = threading.Event(), Measuring._wait

    def arriving(measuring: Measuring, tokens: list[Any]) -> float:
        assert float(tokens[0][0]) != ON_ITS_WAY or sent.wait(20)
        return wait(measuring, tokens)

    monkeypatch.setattr(Measuring, "_wait", arriving)
    measuring = Measuring(with_transfers(one_forward_one_backward(2, 1)), Costs.even(2))
    note = measuring.begin()
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
