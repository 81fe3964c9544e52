"""Pictures of schedules: text and one page of HTML."""

import ast
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import braidax.parallel
from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules import (
    Costs,
    Live,
    interleaved,
    one_forward_one_backward,
    simulate,
    stacked_html,
    timeline,
    to_html,
    with_transfers,
    zero_bubble_h1,
)


def test_a_timeline_has_a_line_a_device() -> None:
    assert timeline(simulate(one_forward_one_backward(2, 2), Costs.even(2)), width=36) == (
        "1F1B: 2 stages, 2 microbatches, 9 s; a column is 0.25 s\n"
        "device 0 │F0──F1──········B0──────····B1──────│ idle  33%, at most 2 activations\n"
        "device 1 │····F0──B0──────F1──B1──────········│ idle  33%, at most 1 activations"
    )


def test_later_stages_of_a_device_are_written_small() -> None:
    drawn = timeline(simulate(interleaved(2, 2), Costs.even(4)), width=60).splitlines()[1]
    assert re.search(r"F0─+F1─+f0", drawn.replace("·", "─"))
    with pytest.raises(ArgumentError, match=r"^width=19 is below 20 columns$"):
        timeline(simulate(interleaved(2, 2), Costs.even(4)), width=19)


def test_a_page_needs_nothing_else_and_tells_each_operation() -> None:
    costs = Costs.even(2, transfer=0.5, activation=1_000)
    page = to_html(simulate(with_transfers(zero_bubble_h1(2, 2)), costs))
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    told = [title.text for title in svg.iter("title")]
    assert "forward of microbatch 1, stage 0: 1 s, from 1 s to 2 s; +1,000 bytes of activations" in told
    assert "send of activations of microbatch 0, stage 0: 0.5 s, from 1 s to 1.5 s" in told
    assert "device 0: at most 2,000 bytes in 2 activations" in told
    assert len(list(svg.iter("rect"))) == 12 + 8  # twice F, I, W on two devices; four transfers, at both ends
    assert len(list(svg.iter("path"))) == 2
    assert not re.search(r"https?:|<script|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def test_several_pictures_are_on_one_scale_of_time() -> None:
    """The second simulation takes twice as long as the first, so its boxes are twice as wide."""
    one, two = (
        simulate(zero_bubble_h1(2, 2), Costs.even(2, forward=unit, inputs=unit, weight=unit, transfer=0.5 * unit))
        for unit in (1.0, 2.0)
    )
    page = stacked_html({"first": one, "a <second>": two}, title="Both", sent_bytes=(4_096,))
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    boxes = [*svg.iter("rect")]
    told = [box.findtext("title", "") for box in boxes]
    assert len(told) == 2 * (12 + 4)  # F, I, W of two microbatches on two devices; four sends
    assert "forward of microbatch 1, stage 0: 1 s, from 1 s to 2 s; +1 bytes of activations" in told
    assert "send of gradients of microbatch 0, stage 1: 0.5 s, from 3.5 s to 4 s; 4,096 bytes" in told
    widths = sorted({round(float(box.attrib["width"]), 1) for box in boxes if "forward" in box.findtext("title", "")})
    assert len(widths) == 2
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-2)
    assert max(float(box.attrib["x"]) + float(box.attrib["width"]) for box in boxes) == pytest.approx(1190)
    texts = [text.text for text in svg.iter("text")]
    assert f"a <second>: {two.makespan_seconds:.4g} s" in texts
    assert len(list(svg.iter("path"))) == 4
    assert float(svg.attrib["height"]) > max(float(each.attrib["y"]) for each in svg.iter("text"))
    assert not re.search(r"https?:|<script|@import|url\(", page)


def test_the_curve_says_what_lives_when() -> None:
    costs = Costs((1.0,), (1.0,), (1.0,), (), (10,), kept_bytes=(4,))
    simulation = simulate(zero_bubble_h1(1, 1), costs)
    assert simulation.curve(0) == (Live(0.0, 0, 0), Live(0.0, 1, 10), Live(2.0, 1, 4), Live(3.0, 0, 0))
    assert (simulation.peak_live(0), simulation.peak_bytes(0), simulation.bubble(0)) == (1, 10, 0.0)


def test_transfers_that_block_hold_both_devices() -> None:
    schedule = with_transfers(one_forward_one_backward(2, 1))
    costs = Costs.even(2, transfer=2.0)
    for blocking in (False, True):
        simulation = simulate(schedule, costs, blocking=blocking)
        assert simulation.makespan_seconds == 1 + 2 + 1 + 2 + 2 + 2
    two = with_transfers(one_forward_one_backward(2, 2))
    assert simulate(two, costs).makespan_seconds < simulate(two, costs, blocking=True).makespan_seconds


def test_schedules_need_neither_jax_nor_numpy_and_parallel_does_not_load_them() -> None:
    parallel = Path(braidax.parallel.__file__).parent
    for path in (parallel / "stages" / "schedules").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not {name.partition(".")[0] for name in names} - {"braidax", *sys.stdlib_module_names}, path
            assert all(
                name.startswith(("braidax.errors", "braidax.parallel.stages")) for name in names if "braid" in name
            )
    for name in ("__init__.py", "parallelize.py"):  # at their first use only
        loaded = [one for one in ast.parse((parallel / name).read_text()).body if isinstance(one, ast.ImportFrom)]
        assert not [one for one in loaded if (one.module or "").startswith(("stages", "pipelined_step"))]
