"""In which order a batch is dispatched."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import pytest

from braidax.parallel.stages.running.executor import Pipelined
from braidax.parallel.stages.running.sending.route import Route
from braidax.parallel.stages.schedules import Kind, Operation, one_forward_one_backward, zero_bubble_h1
from braidax.parallel.stages.schedules.dependencies import Dependencies
from tests.support.parallel.stages.running.cases import gradients_of, mlp, pipelined


@pytest.mark.parametrize("make", [one_forward_one_backward, zero_bubble_h1])
def test_sums_begin_where_a_device_stands_still(make: Any) -> None:
    """The first one before it has a gradient; the others until something comes."""
    run, case = pipelined(mlp(2), make(2, 4)), mlp(2)
    order = _noted(run, ("zeros", "forward", "backward", "weights"))
    gradients_of(run, case)
    first, second = ([name for name, stage in order if stage == at] for at in range(2))
    weights = "weights" if make is zero_bubble_h1 else "backward"
    assert first[:4] == ["forward", "forward", "zeros", weights]
    assert second[:2] == ["zeros", "forward"]
    assert [own.count("zeros") for own in (first, second)] == [1, 1]


def test_what_is_sent_is_on_its_way_before_somebody_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody looks at it behind the next computation, which may take over its memory."""
    run, case, events = pipelined(mlp(2), one_forward_one_backward(2, 4)), mlp(2), list[tuple[str, Any]]()
    ways, send = [way for pair in run._ways for way in (pair.forward, pair.backward)], Route.send

    def sent(route: Route, arrays: Any) -> Any:
        if route in ways:
            events.append(("sent", None))
        return send(route, arrays)

    def observed(operation: Operation, outputs: Any) -> Callable[[], None]:
        events.append(("dispatched", operation))
        return partial(look, operation, outputs)

    def look(operation: Operation, outputs: Any) -> None:
        assert not any(one.is_deleted() for one in jax.tree.leaves(outputs))
        events.append(("observed", operation))

    monkeypatch.setattr(Route, "send", sent)
    run.observe = observed
    gradients_of(run, case)
    sends = [one for one in run._order if one.kind in (Kind.SEND_F, Kind.SEND_B)]
    computed = [one for one in run._order if one not in sends and one.kind is not Kind.UPDATE]
    assert [what for name, what in events if name == "dispatched"] == computed
    assert sorted(what for name, what in events if name == "observed") == sorted(computed)
    places = [at for at, (name, _) in enumerate(events) if name == "sent"]
    assert len(places) == 8
    for place, (need,) in zip(places, map(Dependencies(run.schedule).of, sends), strict=True):
        assert place < events.index(("observed", need)), str(need)


def _noted(run: Pipelined, names: Sequence[str]) -> list[tuple[str, int]]:
    """Returns what is told of programs by these names, with the stage, when they are called."""
    order: list[tuple[str, int]] = []

    def noting(name: str, stage: int, made: Any) -> Any:
        def called(*args: Any) -> Any:
            order.append((name, stage))
            return made(*args)

        return called

    for stage, one in enumerate(run.stage_programs):
        for name in names:
            setattr(one, name, noting(name, stage, getattr(one, name)))
    return order
