"""What is predicted of two overlaps from steps with one of them, by hand."""

from collections.abc import Mapping

import pytest

from braidax.tune import LANES
from braidax.tune.study import Factor, Predicted, Spent, Use, predict_interactions

NOTHING = {"compute": 10.0}


def spent(lanes: Mapping[str, float], use: Use | None = None) -> Spent:
    """Returns a step of these seconds, with nothing in the other lanes."""
    return Spent({**dict.fromkeys(LANES, 0.0), **lanes}, use)


def predicted(nothing: Mapping[str, float], one: tuple[Factor, Spent], other: tuple[Factor, Spent]) -> Predicted:
    """Returns what is predicted of one pair; the lanes of its parts add up."""
    (found,) = predict_interactions(spent(nothing), dict([one, other])).values()
    assert sum(found.lanes.values()) == pytest.approx(found.seconds)
    return found


def test_every_pair_is_predicted_in_the_order_of_the_factors() -> None:
    alone: dict[Factor, Spent] = {"pipeline": spent(NOTHING), "sync": spent(NOTHING), "prefetch": spent(NOTHING)}
    assert list(predict_interactions(spent(NOTHING), alone)) == [
        ("prefetch", "sync"),
        ("prefetch", "pipeline"),
        ("sync", "pipeline"),
    ]


def test_what_nothing_speaks_for_is_no_interaction() -> None:
    found = predicted(NOTHING, ("prefetch", spent({"compute": 11.0})), ("sync", spent({"compute": 7.1})))
    assert (found.seconds, found.sign) == (0.0, "undecided")
    assert {*found.lanes.values()} == {0.0}


def test_a_wait_is_taken_away_once() -> None:
    waiting = {"compute": 10.0, "other": 3.0}
    found = predicted(waiting, ("sync", spent({"compute": 10.0})), ("pipeline", spent({"compute": 10.0, "other": 1.0})))
    assert (found.seconds, found.sign, found.lanes["other"]) == (2.0, "more", 2.0)  # 3 and 2 were taken off 3


def test_prefetch_takes_away_the_wait_that_is_beside_it() -> None:
    prefetch: tuple[Factor, Spent] = ("prefetch", spent({"compute": 10.0}))
    waiting = {"compute": 10.0, "data wait": 1.0}
    found = predicted(waiting, prefetch, ("pipeline", spent({"compute": 20.0, "data wait": 4.0})))
    assert (found.seconds, found.sign, found.lanes["data wait"]) == (-3.0, "less", -3.0)  # it saves 4, and alone 1
    found = predicted(waiting, prefetch, ("pipeline", spent({"compute": 20.0})))
    assert (found.seconds, found.sign) == (1.0, "more")  # it saves 0, and alone 1


def test_the_loop_is_exposed_once() -> None:
    checkpoint = spent({"compute": 10.0, "dispatch": 2.0, "data wait": 3.0})
    pipeline = spent({"compute": 20.0, "dispatch": 5.0, "data wait": 1.0})
    found = predicted(NOTHING, ("checkpoint", checkpoint), ("pipeline", pipeline))
    assert found.seconds == -3.0
    assert {lane: seconds for lane, seconds in found.lanes.items() if seconds} == {"dispatch": -2.0, "data wait": -1.0}


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (14.0, -4.0),  # the rest is 4 longer: the writer has that much more time
        (30.0, -6.0),  # by 20, but no more than 6 is waited for
        (7.0, 3.0),  # by 3 shorter: the loop waits for the writer instead
        (1.0, 6.0),  # by 9: more than it is waited for now is not known
    ],
)
def test_a_checkpoint_is_waited_for_by_what_the_rest_is_shorter(compute: float, expected: float) -> None:
    written = spent({"compute": 10.0, "snapshot stall": 8.0}, Use(10.0, 2.0, saving_seconds=8.0, waited_seconds=6.0))
    other = spent({"compute": compute})
    found = predicted(NOTHING, ("checkpoint", written), ("prefetch", other))
    assert (found.seconds, found.lanes["snapshot stall"]) == (expected, expected)
    found = predicted(NOTHING, ("checkpoint", Spent(written.lanes)), ("prefetch", other))
    assert found.seconds == 0.0  # of a run that was kept without, it is not known


def test_a_step_takes_at_least_what_its_checkpoint_does() -> None:
    written = spent({"compute": 10.0}, Use(10.0, 2.0, saving_seconds=9.0, waited_seconds=0.0))
    found = predicted(NOTHING, ("checkpoint", written), ("prefetch", spent({"compute": 7.0})))
    assert (found.seconds, found.lanes["snapshot stall"]) == (2.0, 2.0)  # 7 were left, and it is under way for 9
    found = predicted(NOTHING, ("checkpoint", written), ("prefetch", spent({"compute": 9.5})))
    assert found.seconds == 0.0


def test_reading_ahead_is_waited_for_by_what_the_rest_is_shorter() -> None:
    late: tuple[Factor, Spent] = ("prefetch", spent({"compute": 10.0, "data wait": 5.0}))
    found = predicted({"compute": 10.0, "data wait": 9.0}, late, ("sync", spent({"compute": 13.0, "data wait": 8.0})))
    assert found.seconds == -2.0  # 2 are left of 5, so that prefetch saves 6 and not 4
    found = predicted({"compute": 10.0, "data wait": 9.0}, late, ("sync", spent({"compute": 10.0, "data wait": 2.0})))
    assert found.seconds == 4.0  # there are 2 to wait for, of which it saves none


def test_stages_leave_nothing_to_sync() -> None:
    sync, pipeline = spent({"compute": 12.0}), spent({"compute": 20.0})
    found = predicted(NOTHING, ("sync", sync), ("pipeline", pipeline))
    assert (found.seconds, found.lanes["compute"]) == (-2.0, -2.0)


def test_cores_do_no_more_than_there_is() -> None:
    nothing = spent({"compute": 10.0, "data wait": 4.0}, Use(20.0, 2.0, 0.0, 0.0))
    alone: dict[Factor, Spent] = {
        "prefetch": spent({"compute": 10.0}, Use(20.0, 2.0, 0.0, 0.0)),
        "sync": spent({"compute": 7.0, "data wait": 4.0}, Use(18.0, 2.0, 0.0, 0.0)),
    }
    found = predict_interactions(nothing, alone)["prefetch", "sync"]
    assert (found.seconds, found.lanes["compute"]) == (2.0, 2.0)  # 7 were left, but 18 on 2 cores are 9
    alone["sync"] = Spent(alone["sync"].lanes)
    assert predict_interactions(nothing, alone)["prefetch", "sync"].seconds == 0.0
