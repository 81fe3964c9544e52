"""Spans: what is recorded, what is kept, what is exported."""

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from braidax.errors import ArgumentError
from braidax.spans import LaneTotal, Span, Trace, span


def _span(lane: str = "read", start: float = 0.0, seconds: float = 1.0, num_bytes: int = 0, thread: str = "t") -> Span:
    return Span(lane, lane, thread, start, seconds, num_bytes)


def test_totals_add_up_per_lane() -> None:
    trace = Trace()
    trace.record(_span("read", seconds=1.5, num_bytes=10))
    trace.record(_span("read", seconds=0.5, num_bytes=32))
    trace.record(_span("step", seconds=2.0))
    assert trace.totals() == {"read": LaneTotal(2, 2.0, 42), "step": LaneTotal(1, 2.0, 0)}


def test_a_block_is_timed_for_one_trace_whichever_is_active() -> None:
    trace, active = Trace(), Trace()
    with active.active(), pytest.raises(ZeroDivisionError), trace.timed("comm", "send", num_bytes=7):
        raise ZeroDivisionError
    (timed,) = trace.spans
    assert (timed.lane, timed.name, timed.num_bytes, timed.thread) == ("comm", "send", 7, "MainThread")
    assert trace.totals() == {"comm": LaneTotal(1, timed.seconds, 7)}
    assert not active.spans


def test_the_latest_spans_are_kept_by_default_and_totals_of_all() -> None:
    trace = Trace()
    for number in range(20_100):
        trace.record(_span(start=float(number)))
    assert [span.start for span in trace.spans] == [float(number) for number in range(100, 20_100)]
    assert trace.totals()["read"].num_spans == 20_100


def test_the_latest_spans_are_kept_oldest_first() -> None:
    trace = Trace(max_spans=3)
    for start in range(10):
        trace.record(_span(start=float(start)))
    assert [kept.start for kept in trace.spans] == [7.0, 8.0, 9.0]
    assert trace.totals()["read"] == LaneTotal(10, 10.0, 0)


def test_span_measures_the_block_on_the_active_trace() -> None:
    trace = Trace(max_spans=8)
    with trace.active() as same, span("decode", "window 3", num_bytes=7):
        pass
    assert same is trace
    (recorded,) = trace.spans
    assert (recorded.lane, recorded.name, recorded.num_bytes) == ("decode", "window 3", 7)
    assert recorded.thread == threading.current_thread().name
    assert recorded.seconds >= 0


def test_a_span_without_a_name_is_called_like_its_lane() -> None:
    trace = Trace(max_spans=1)
    with trace.active(), span("step"):
        pass
    assert trace.spans[0].name == "step"


def test_a_span_is_recorded_when_the_block_raises() -> None:
    trace = Trace()
    with pytest.raises(KeyError), trace.active(), span("read"):
        raise KeyError
    assert trace.totals()["read"].num_spans == 1


def test_the_innermost_active_trace_records() -> None:
    outer, inner = Trace(), Trace()
    with outer.active():
        with inner.active(), span("read"):
            pass
        with span("step"):
            pass
    with span("checkpoint"):
        pass
    assert set(inner.totals()) == {"read"}
    assert set(outer.totals()) == {"step"}


def test_a_span_inside_another_counts_for_its_own_lane_only() -> None:
    trace = Trace(max_spans=8)
    with trace.active(), span("step"), span("wait"):
        with span("read"):
            pass
        with span("read"):
            pass
    seconds = {kept.lane: kept.seconds for kept in trace.spans}
    totals = trace.totals()
    assert sum(total.seconds for total in totals.values()) == pytest.approx(seconds["step"])
    assert totals["step"].seconds == pytest.approx(seconds["step"] - seconds["wait"])
    assert totals["read"].seconds == pytest.approx(sum(kept.seconds for kept in trace.spans if kept.lane == "read"))


def test_a_span_of_another_trace_takes_nothing_from_the_one_around_it() -> None:
    outer, inner = Trace(max_spans=1), Trace(max_spans=1)
    with outer.active(), span("step"), inner.active(), span("read"):
        pass
    assert outer.totals()["step"].seconds == outer.spans[0].seconds
    assert inner.totals()["read"].seconds == inner.spans[0].seconds


def test_seconds_inside_are_taken_off_the_total_not_the_span() -> None:
    trace = Trace(max_spans=1)
    trace.record(_span("step", seconds=3.0), inner_seconds=1.0)
    assert trace.totals()["step"] == LaneTotal(1, 2.0, 0)
    assert trace.spans[0].seconds == 3.0


def test_a_trace_is_active_on_its_own_thread_only() -> None:
    trace = Trace()

    def work() -> None:
        with span("read"):
            pass

    with trace.active():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
    assert trace.totals() == {}


def test_threads_record_to_one_trace_without_loss() -> None:
    trace = Trace(max_spans=10)

    def work() -> None:
        with trace.active():
            for _ in range(500):
                with span("read", num_bytes=1):
                    pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert trace.totals()["read"].num_spans == 2000
    assert trace.totals()["read"].num_bytes == 2000
    assert len(trace.spans) == 10


def _saved(trace: Trace, folder: Path) -> list[dict[str, Any]]:
    path, compressed = folder / "trace.json", folder / "trace.json.gz"
    for one in (path, compressed):
        trace.save(one)
    assert gzip.decompress(compressed.read_bytes()) == path.read_bytes()
    return json.loads(path.read_text())["traceEvents"]


def test_a_saved_trace_has_a_track_per_lane_and_thread(tmp_path: Path) -> None:
    trace = Trace(max_spans=8)
    trace.record(_span("read", start=10.0, seconds=0.25, num_bytes=5, thread="a"))
    trace.record(_span("read", start=10.5, thread="b"))
    trace.record(_span("step", start=11.0, thread="a"))
    events = _saved(trace, tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert [names[track] for track in sorted(names, key=lambda track: order[track])] == [
        "step · a",
        "read · a",
        "read · b",
    ]
    read = next(event for event in events if event["ph"] == "X" and names[event["tid"]] == "read · a")
    assert (read["cat"], read["ts"], read["dur"], read["args"]) == ("read", 0.0, 250_000.0, {"bytes": 5})
    step = next(event for event in events if event["ph"] == "X" and event["cat"] == "step")
    assert step["ts"] == pytest.approx(1e6)


def test_an_empty_trace_is_not_saved_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an earlier one")
    with pytest.raises(ArgumentError, match=r"path='.*trace.json': .* no spans to write: nothing has recorded to it"):
        Trace().save(path)
    with pytest.raises(ArgumentError, match=r"max_spans=0 keeps none; make it with Trace\(\)"):
        Trace(max_spans=0).save(path)
    assert path.read_text() == "an earlier one"
    with pytest.raises(ArgumentError, match=r"max_spans=-1: expected"):
        Trace(max_spans=-1)


def test_notes_of_many_threads_are_counted_once_whoever_reads_meanwhile() -> None:
    trace = Trace(max_spans=10_000)
    begin = threading.Barrier(5)

    def note() -> None:
        begin.wait(10)
        for number in range(2000):
            trace.note("comm", "send", time.perf_counter(), number % 7)

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    begin.wait(10)
    counts = [trace.totals().get("comm", LaneTotal()).num_spans for _ in range(200)]
    for thread in threads:
        thread.join()
    assert counts == sorted(counts)
    total = trace.totals()["comm"]
    assert (total.num_spans, total.num_bytes) == (8000, 4 * sum(number % 7 for number in range(2000)))
    spans = trace.spans
    assert len(spans) == 8000
    assert total.seconds == pytest.approx(sum(span.seconds for span in spans))
    assert {span.thread for span in spans} == {thread.name for thread in threads}


def test_notes_keep_their_place_among_spans() -> None:
    trace = Trace(max_spans=3)
    for name in ("a", "b"):
        trace.note("comm", name, 0.0, 1)
    trace.record(Span("comm", "c", "main", 0.0, 1.0, 1))
    trace.note("comm", "d", 0.0, 1)
    assert [span.name for span in trace.spans] == ["b", "c", "d"]
    assert trace.totals()["comm"].num_spans == 4
