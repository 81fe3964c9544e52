"""Pictures: a treemap's areas, and pages that need nothing else."""

import pytest

from braidax.errors import ArgumentError
from braidax.pictures.page import cut
from braidax.pictures.treemap import Place, treemap
from braidax.spans import Span, Trace
from tests.support.pictures import Parsed, needs_nothing_else


@pytest.mark.parametrize("weights", [[1.0], [6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], [1000.0] + [0.5] * 40])
def test_areas_of_a_treemap_are_as_weights_and_fill_the_plane(weights: list[float]) -> None:
    within = Place(3.0, 5.0, 60.0, 40.0)
    places = treemap(weights, within)
    assert [one.width * one.height for one in places] == pytest.approx([2400 * w / sum(weights) for w in weights])
    for one in places:
        assert one.x >= 3 - 1e-6
        assert one.y >= 5 - 1e-6
        assert one.x + one.width <= 63 + 1e-6
        assert one.y + one.height <= 45 + 1e-6
    for at, one in enumerate(places):
        for other in places[:at]:
            wide = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            high = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(wide, high) <= 1e-6


def test_a_treemap_is_squarish() -> None:
    # The example of the paper: no rectangle is longer than 25/9 of its other side.
    places = treemap([6, 6, 4, 3, 2, 2, 1], Place(0, 0, 6, 4))
    assert max(max(one.width / one.height, one.height / one.width) for one in places) <= 25 / 9 + 1e-9
    assert {(one.width, one.height) for one in treemap([1.0] * 24, Place(0, 0, 6, 4))} == {(1.0, 1.0)}
    assert treemap([], Place(0, 0, 6, 4)) == []


def test_a_long_name_keeps_its_end() -> None:
    assert cut("params/kernel", 1000, 11) == "params/kernel"
    assert cut("params/blocks/kernel", 60, 11) == "…s/kernel"
    assert cut("params/kernel", 20, 11) == ""


def loop_of_two(process: str = "") -> list[Span]:
    """Step 1 compiles for 9 s; step 2 waits for data for 1 s, after 1 s more beside step 1, and computes for 3 s."""
    spans = [
        Span("loop", "begin", "main", 0.0, 0.0, 0, process),
        Span("devices", "gradients", "devices", 1.0, 8.0, 0, process),
        Span("step", "step 1", "devices", 1.0, 8.0, 0, process),
        Span("loop", "data wait", "main", 8.0, 2.0, 0, process),
        Span("read", "a & b", "reader", 8.5, 1.0, 7, process),
        Span("read", "a & b", "reader 2", 9.0, 1.0, 7, process),
        Span("loop", "dispatch", "main", 10.0, 0.5, 0, process),
        Span("devices", "gradients", "devices", 10.0, 2.0, 0, process),
        Span("devices", "apply", "devices", 12.0, 1.0, 0, process),
        Span("step", "step 2", "devices", 10.0, 3.0, 0, process),
        Span("loop", "evaluation", "main", 13.0, 4.0, 0, process),
        Span("devices", "gradients", "devices", 17.0, 4.0, 0, process),
        Span("step", "step 3", "devices", 17.0, 4.0, 0, process),
    ]
    return [*spans[:3], *reversed(spans[3:])]


def traced(*spans: Span) -> Trace:
    trace = Trace()
    for one in spans:
        trace.record(one)
    return trace


def test_the_waterfall_says_what_held_up_each_step() -> None:
    page = traced(*loop_of_two()).to_html()
    assert needs_nothing_else(page)
    parsed = Parsed(page)
    assert {"step 1", "step 2", "step 3"} <= set(parsed.words)
    assert "9 s, compiles" in parsed.words
    assert "4 s, waits 1 s" in parsed.words
    assert "4 s" in parsed.words  # the evaluation before step 3 is none of it
    assert any("4 s each on average; devices waited for data for 12.5 % of the time" in each for each in parsed.words)
    drawn = [(role, tip) for role, _, _, tip in parsed.boxes if tip]
    assert ("f-data_wait", "data wait: 1 s, 0 ms into the step") in drawn
    assert ("f-other", "read: 1 s, 0 ms into the step") in drawn  # two threads at once are one
    assert ("f-less", "apply: 1 s, 3 s into the step") in drawn


def test_a_step_that_is_longer_than_the_scale_is_cut_at_the_edge() -> None:
    parsed = Parsed(traced(*loop_of_two()).to_html())
    assert max(x + width for role, x, width, tip in parsed.boxes if tip) == pytest.approx(880 - 150, abs=0.1)


def test_the_latest_steps_of_each_process_are_drawn() -> None:
    page = traced(*loop_of_two("rank 0 · <host>"), *loop_of_two("rank 1 · b")).to_html(num_steps=1)
    words = Parsed(page).words
    assert [word for word in words if word.startswith("step ")] == ["step 3", "step 3"]
    assert "Steps of rank 0 · <host>" in words
    assert any("The latest 1 of 3 steps" in word for word in words)


def test_a_trace_without_steps_is_not_drawn() -> None:
    with pytest.raises(ArgumentError, match=r"this trace has no step to draw: expected the trace of a Report"):
        traced(Span("read", "read", "main", 0.0, 1.0, 0)).to_html()
    with pytest.raises(ArgumentError, match=r"num_steps=0: expected how many"):
        traced(*loop_of_two()).to_html(num_steps=0)
